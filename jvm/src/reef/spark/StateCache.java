package reef.spark;

import java.util.HashMap;
import java.util.LinkedHashMap;
import java.util.Map;

/**
 * The newest states that queries of this driver have pinned, by the options of their tables. A later query reads the
 * same state again, under the same lease, if a probe shows that there is no newer one. A state that no query has asked
 * for in a while, or that was superseded, is let go.
 */
final class StateCache {
  private static final int STATES_MAX = 16;
  private static final long IDLE_MS = 60_000;
  private static final long LOG_BYTES_MAX = 4L << 20;
  private static final Map<Map<String, String>, Entry> ENTRIES = new LinkedHashMap<>(16, 0.75f, true);

  private static final class Entry {
    final PinnedState state;
    Stopwatch used = new Stopwatch();

    Entry(PinnedState state) {
      this.state = state;
    }
  }

  private StateCache() {}

  /** Plans a read of the newest state, or of the past one that the options name. */
  static ReadPlan plan(Map<String, String> options) {
    ReadPlan known = newest(options);
    if (known != null) return known;
    Stopwatch asked = new Stopwatch();
    PinnedState state = new PinnedState(Planner.call(options, Planner.request("plan")), options, asked);
    ReadPlan plan = ReadPlan.on(state);
    if (state.canBeReused(LOG_BYTES_MAX)) keep(options, state);
    return plan;
  }

  /** Returns a plan on the state that an earlier query has pinned, if it is still the newest; null if it is not known. */
  static ReadPlan newest(Map<String, String> options) {
    PinnedState state = find(options);
    if (state == null) return null;
    if (state.isNewest()) return ReadPlan.on(state);
    remove(options, state);
    return null;
  }

  private static PinnedState find(Map<String, String> options) {
    synchronized (ENTRIES) {
      Entry entry = ENTRIES.get(options);
      if (entry == null) return null;
      entry.used = new Stopwatch();
      return entry.state;
    }
  }

  private static void keep(Map<String, String> options, PinnedState state) {
    Entry before;
    Entry oldest = null;
    state.hold();
    synchronized (ENTRIES) {
      before = ENTRIES.put(new HashMap<>(options), new Entry(state));
      if (ENTRIES.size() > STATES_MAX) oldest = ENTRIES.remove(ENTRIES.keySet().iterator().next());
    }
    if (before != null) before.state.drop();
    if (oldest != null) oldest.state.drop();
    PinnedState.later(() -> removeIfIdle(options, state), IDLE_MS);
  }

  private static void remove(Map<String, String> options, PinnedState state) {
    synchronized (ENTRIES) {
      Entry entry = ENTRIES.get(options);
      if (entry == null || entry.state != state) return;
      ENTRIES.remove(options);
    }
    state.drop();
  }

  private static void removeIfIdle(Map<String, String> options, PinnedState state) {
    long idleMs;
    synchronized (ENTRIES) {
      Entry entry = ENTRIES.get(options);
      if (entry == null || entry.state != state) return;
      idleMs = entry.used.elapsedMs();
    }
    if (idleMs >= IDLE_MS) remove(options, state);
    else PinnedState.later(() -> removeIfIdle(options, state), IDLE_MS - idleMs);
  }
}
