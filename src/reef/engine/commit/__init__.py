"""Writing: opening with fences, group commit, sending, and what a lost slot leads to."""
