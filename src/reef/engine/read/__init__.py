"""The read path: memtable, segments, caches, merge, and the view that joins them."""
