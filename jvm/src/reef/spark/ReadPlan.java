package reef.spark;

import java.lang.ref.Cleaner;
import java.util.Arrays;
import java.util.List;

/** What one statement or DataFrame reads: a pinned state, held while this object is reachable, and the time that decides expiry. */
final class ReadPlan {
  record Segment(ObjectLocation location, int tailBytes, byte[] minKey, byte[] maxKey, long rows, long tombstones, long patches, long rowsLsn) {
    boolean overlaps(byte[] start, byte[] end) {
      return Arrays.compareUnsigned(maxKey, start) >= 0 && (end == null || Arrays.compareUnsigned(minKey, end) < 0);
    }
  }

  private static final Cleaner CLEANER = Cleaner.create();

  final ReefSchema schema;
  final long generation;
  final long lsn;
  final List<Segment> segments;
  final long nowMs = System.currentTimeMillis();
  private final PinnedState state;

  /** Returns a plan on a state; null if its lease was released meanwhile. */
  static ReadPlan on(PinnedState state) {
    return state.hold() ? new ReadPlan(state) : null;
  }

  private ReadPlan(PinnedState state) {
    this.state = state;
    schema = state.schema;
    generation = state.generation;
    lsn = state.lsn;
    segments = state.segments;
    CLEANER.register(this, state::drop);
  }

  SegmentTail tail(Segment segment) {
    return state.tail(segment);
  }
}
