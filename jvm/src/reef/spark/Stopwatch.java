package reef.spark;

/** Time since it was started, by the larger of two clocks: one stops while the machine sleeps, the other may be set. */
record Stopwatch(long startNanos, long startMs) {
  Stopwatch() {
    this(System.nanoTime(), System.currentTimeMillis());
  }

  long elapsedMs() {
    return Math.max((System.nanoTime() - startNanos) / 1_000_000, System.currentTimeMillis() - startMs);
  }
}
