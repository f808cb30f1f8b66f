"""Writing to the log: open a writer, queue, send, settle, complete, resync (protocols §2, §3)."""
