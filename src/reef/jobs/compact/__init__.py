"""Compaction: merge segments into levels."""
