"""Search: nearest vectors, ranked text and filters over one snapshot of a namespace."""
