package reef.spark;

import java.io.IOException;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import org.apache.spark.sql.connector.metric.CustomTaskMetric;
import org.apache.spark.sql.connector.read.PartitionReader;
import org.apache.spark.sql.vectorized.ColumnarBatch;

/**
 * Merges the sources of a partition by key. Of each key the newest version counts: a put is returned with the patches
 * and merges above it, a delete or a newer range tombstone hides everything older, an expired row is left out. A merge
 * that finds no row makes one.
 *
 * <p>Rows that only one source has, up to the next key of another, are taken in one step, and whole pages at a time
 * where no source overlaps. A source is opened when the merge reaches its first key.
 */
final class MergeReader implements PartitionReader<ColumnarBatch> {
  private static final int OPENED_AHEAD = 8;

  private final ReefPartition partition;
  private final ReadColumns columns;
  private final long nowMs;
  private final List<SegmentCursor> cursors = new ArrayList<>();
  private final List<SegmentCursor> active = new ArrayList<>();
  private final TombstoneFragments tombstones;
  private final RowBatch batch;
  private final Versions versions = new Versions();
  private int opened;
  private long left;
  private ColumnarBatch result;
  private long rowsRead;

  MergeReader(ReefPartition partition, ReadColumns columns, long nowMs, long limit) {
    this.partition = partition;
    this.columns = columns;
    this.nowMs = nowMs;
    left = limit;
    tombstones = new TombstoneFragments(partition.tombstones());
    batch = new RowBatch(columns);
    for (PageRange range : partition.sources()) cursors.add(new SegmentCursor(range, columns, partition.start(), partition.end()));
    cursors.sort((a, b) -> Arrays.compareUnsigned(a.firstKey(), b.firstKey()));
  }

  @Override
  public boolean next() throws IOException {
    batch.begin();
    while (!batch.isFull() && batch.rows() < left && openReached()) step();
    if (batch.rows() == 0) return false;
    result = batch.build(left);
    left -= result.numRows();
    rowsRead += result.numRows();
    return true;
  }

  /** Opens the sources that may have a key at or below the lowest one; false if there are no rows left. */
  private boolean openReached() throws IOException {
    while (opened < cursors.size() && (active.isEmpty() || isReached(cursors.get(opened)))) {
      for (int ahead = opened; ahead < Math.min(cursors.size(), opened + OPENED_AHEAD); ahead++) cursors.get(ahead).prefetch();
      SegmentCursor cursor = cursors.get(opened++);
      if (cursor.open()) active.add(cursor);
    }
    return !active.isEmpty();
  }

  private boolean isReached(SegmentCursor next) {
    for (SegmentCursor cursor : active) if (cursor.keys.compare(cursor.row, next.firstKey()) < 0) return false;
    return true;
  }

  /** Takes the rows up to the next key of another source, or one key that several have. */
  private void step() throws IOException {
    SegmentCursor first = active.get(0);
    SegmentCursor second = null;
    for (int i = 1; i < active.size(); i++) {
      SegmentCursor cursor = active.get(i);
      if (cursor.compare(first) < 0) {
        second = first;
        first = cursor;
      } else if (second == null || cursor.compare(second) < 0) {
        second = cursor;
      }
    }
    if (second != null && first.compare(second) == 0) {
      resolve(first.keys, first.row);
      return;
    }
    int stop = second == null ? first.stop : first.keys.lowerBound(first.row, first.stop, second);
    if (opened < cursors.size()) stop = first.keys.lowerBound(first.row, stop, cursors.get(opened).firstKey());
    takeRun(first, stop);
  }

  private void takeRun(SegmentCursor cursor, int stop) throws IOException {
    if (cursor.page.isPlain && tombstones.isEmpty()) {
      batch.append(cursor.page, cursor.row, stop - cursor.row);
      advance(cursor, stop);
      return;
    }
    Page page = cursor.page;
    int row = cursor.row;
    while (row < stop && !batch.isFull()) {
      versions.clear();
      do versions.add(page, row++);
      while (row < stop && page.keys.sameKey(row - 1, row));
      append(versions);
    }
    advance(cursor, row);
  }

  /** Collects the versions of a key from every source that has it. */
  private void resolve(KeyBlock keys, int row) throws IOException {
    versions.clear();
    long head = keys.head(row);
    for (int i = active.size() - 1; i >= 0; i--) {
      SegmentCursor cursor = active.get(i);
      while (cursor.page != null && cursor.head == head && cursor.keys.compare(cursor.row, keys, row) == 0) {
        versions.add(cursor.page, cursor.row);
        advance(cursor, cursor.row + 1);
      }
    }
    append(versions);
  }

  private void advance(SegmentCursor cursor, int row) throws IOException {
    if (!cursor.moveTo(row)) active.remove(cursor);
  }

  /** Appends the row that the versions of a key amount to; nothing if it is deleted or expired. */
  private void append(Versions versions) {
    versions.sort();
    int end = 0;
    while (end < versions.count && versions.kind(end) >= KeyBlock.PATCH && !isDeleted(end)) end++;
    boolean isRow = end < versions.count && versions.kind(end) == KeyBlock.PUT && !isDeleted(end);
    int base = isRow ? end : -1;
    long expiresAtMs = isRow ? versions.expiresAtMs(end) : Long.MIN_VALUE;
    for (int i = end - 1; i >= 0; i--) {
      if (versions.kind(i) != KeyBlock.MERGE) continue;
      if (expiresAtMs <= versions.mergedAtMs(i)) base = i; // it found no row, and makes one
      expiresAtMs = versions.expiresAtMs(i);
    }
    if (base < 0 || expiresAtMs <= nowMs) return;
    batch.append(versions.pages[base], versions.rows[base], 1);
    for (int i = base - 1; i >= 0; i--) batch.change(versions.pages[i], versions.rows[i]);
  }

  private boolean isDeleted(int version) {
    return !tombstones.isEmpty() && tombstones.deletes(versions.pages[version].keys, versions.rows[version]);
  }

  /** The versions of one key. */
  private static final class Versions {
    private Page[] pages = new Page[16];
    private int[] rows = new int[16];
    private int count;

    void clear() {
      count = 0;
    }

    int kind(int version) {
      return pages[version].keys.kind(rows[version]);
    }

    long expiresAtMs(int version) {
      return pages[version].keys.expiresAtMs(rows[version]);
    }

    long mergedAtMs(int version) {
      return pages[version].keys.mergedAtMs(rows[version]);
    }

    void add(Page page, int row) {
      if (count == rows.length) {
        pages = Arrays.copyOf(pages, 2 * count);
        rows = Arrays.copyOf(rows, 2 * count);
      }
      pages[count] = page;
      rows[count++] = row;
    }

    /**
     * Newest first; the versions of one source are in this order already. A row comes before a merge at its own LSN and
     * sequence, which is part of it: only a repair leaves both.
     */
    void sort() {
      for (int i = 1; i < count; i++) {
        Page page = pages[i];
        int row = rows[i];
        int at = i;
        for (; at > 0 && isNewer(page, row, pages[at - 1], rows[at - 1]); at--) {
          pages[at] = pages[at - 1];
          rows[at] = rows[at - 1];
        }
        pages[at] = page;
        rows[at] = row;
      }
    }

    private static boolean isNewer(Page page, int row, Page other, int otherRow) {
      long lsn = page.keys.lsn(row);
      long seq = page.keys.seq(row);
      if (lsn == other.keys.lsn(otherRow) && seq == other.keys.seq(otherRow)) return page.keys.kind(row) < other.keys.kind(otherRow);
      return TombstoneFragments.isNewer(lsn, seq, other.keys.lsn(otherRow), other.keys.seq(otherRow));
    }
  }

  @Override
  public ColumnarBatch get() {
    return result;
  }

  @Override
  public CustomTaskMetric[] currentMetricsValues() {
    long requests = 0;
    long bytes = 0;
    long pages = 0;
    for (SegmentCursor cursor : cursors) {
      requests += cursor.reader.requests.get();
      bytes += cursor.reader.bytes.get();
      pages += cursor.pagesRead;
    }
    return ScanMetrics.values(requests, bytes, pages, rowsRead);
  }

  @Override
  public void close() throws IOException {
    for (SegmentCursor cursor : cursors) cursor.close();
  }
}
