package reef.spark;

import java.io.IOException;
import java.io.ObjectOutputStream;
import java.io.Serializable;
import java.util.Arrays;
import java.util.Comparator;
import java.util.List;
import java.util.TreeSet;
import org.apache.spark.sql.api.java.UDF1;
import org.apache.spark.util.AccumulatorV2;

/**
 * The keys of the rows that the source of a MERGE has, collected by the tasks that compute it. Bounded: of more keys than
 * a list's worth it keeps the lowest and the highest, and means all between them.
 */
final class SourceKeys extends AccumulatorV2<byte[], List<byte[]>> {
  static final int KEYS_MAX = 100_000;
  private static final long BYTES_MAX = 4 << 20;

  private final TreeSet<byte[]> keys = new TreeSet<>((Comparator<byte[]> & Serializable) Arrays::compareUnsigned);
  private long bytes;
  /** Whether the keys are the two ends of a range. */
  private boolean isRange;

  @Override
  public synchronized boolean isZero() {
    return keys.isEmpty();
  }

  @Override
  public synchronized AccumulatorV2<byte[], List<byte[]>> copy() {
    SourceKeys copy = new SourceKeys();
    copy.merge(this);
    return copy;
  }

  @Override
  public synchronized void reset() {
    keys.clear();
    bytes = 0;
    isRange = false;
  }

  @Override
  public synchronized void add(byte[] key) {
    if (keys.add(key)) bytes += key.length;
    isRange |= keys.size() > KEYS_MAX || bytes > BYTES_MAX;
    if (isRange && keys.size() > 2) keepEnds();
  }

  private void keepEnds() {
    List<byte[]> ends = List.of(keys.first(), keys.last());
    keys.clear();
    keys.addAll(ends);
  }

  @Override
  public synchronized void merge(AccumulatorV2<byte[], List<byte[]>> other) {
    SourceKeys theirs = (SourceKeys) other;
    isRange |= theirs.isRange;
    theirs.keys.forEach(this::add);
  }

  @Override
  public synchronized List<byte[]> value() {
    return List.copyOf(keys);
  }

  /** Spark sends a task's keys with its heartbeats too, from another thread. */
  private synchronized void writeObject(ObjectOutputStream out) throws IOException {
    out.defaultWriteObject();
  }

  /** The ranges that have exactly these keys; all between the lowest and the highest, if there were too many. */
  synchronized KeyRanges ranges() {
    if (isRange) return KeyRanges.between(keys.first(), keys.last());
    return new KeyRanges(keys.stream().map(KeyRanges::only).toList());
  }

  /** Records a key, and keeps its row. */
  record Recorder(SourceKeys keys) implements UDF1<byte[], Boolean> {
    @Override
    public Boolean call(byte[] key) {
      if (key != null) keys.add(key);
      return true;
    }
  }
}
