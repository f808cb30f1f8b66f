"""Writing to the log: open a writer, queue, send, prove, complete, resync (protocols §2, §3)."""
