"""Reading: what is in memory, what is in segments, and how they are merged."""
