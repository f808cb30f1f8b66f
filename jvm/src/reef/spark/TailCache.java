package reef.spark;

import java.util.LinkedHashMap;
import java.util.Map;
import java.util.function.Supplier;

/**
 * Tails of segments by URL, up to a number of stored bytes; the least recently used go first. The rows of an unfolded log,
 * which have no URL, are not kept.
 */
final class TailCache {
  private record Entry(SegmentTail tail, long bytes) {}

  private final long bytesMax;
  private final Map<String, Entry> entries = new LinkedHashMap<>(16, 0.75f, true);
  private long bytes;

  TailCache(long bytesMax) {
    this.bytesMax = bytesMax;
  }

  SegmentTail get(ReadPlan.Segment segment, Supplier<SegmentTail> read) {
    if (segment.location().inline != null) return read.get();
    String key = segment.location().size + " " + segment.location().url.split("\\?", 2)[0]; // without its signature
    synchronized (this) {
      Entry known = entries.get(key);
      if (known != null) return known.tail;
    }
    SegmentTail tail = read.get();
    put(key, new Entry(tail, segment.tailBytes()));
    return tail;
  }

  private synchronized void put(String key, Entry entry) {
    Entry before = entries.put(key, entry);
    bytes += entry.bytes - (before == null ? 0 : before.bytes);
    for (var oldest = entries.entrySet().iterator(); bytes > bytesMax && oldest.hasNext(); ) {
      bytes -= oldest.next().getValue().bytes;
      oldest.remove();
    }
  }
}
