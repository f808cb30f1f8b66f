package reef.spark;

import java.io.Serializable;
import java.util.List;

/**
 * The pages of one segment that a task reads: where their key blocks and the blocks of the scan's columns are.
 * Columns are addressed by their place in {@link ReadColumns}.
 */
final class PageRange implements Serializable {
  final ObjectLocation location;
  final long rowsLsn;
  /** Stored types by place; null for the key and for columns that the segment does not have. */
  final ReefType[] types;
  final int[] rows;
  /** Whether all keys of a page are known to differ. */
  final boolean[] distinct;
  /** At or below the first key. */
  final byte[] firstKey;
  final long[] keyStarts;
  final int[] keyLengths;
  final long[][] columnStarts;
  final int[][] columnLengths;

  private PageRange(ObjectLocation location, long rowsLsn, ReefType[] types, byte[] firstKey, int pages) {
    this.location = location;
    this.rowsLsn = rowsLsn;
    this.types = types;
    this.firstKey = firstKey;
    rows = new int[pages];
    distinct = new boolean[pages];
    keyStarts = new long[pages];
    keyLengths = new int[pages];
    columnStarts = new long[types.length][];
    columnLengths = new int[types.length][];
  }

  static PageRange of(SegmentTail tail, ObjectLocation location, long rowsLsn, List<Integer> pages, ReadColumns columns) {
    ReefType[] types = new ReefType[columns.size()];
    for (int place = 0; place < types.length; place++) {
      int field = columns.fields()[place];
      if (field > ReadColumns.KEY && tail.columnLengths.containsKey(field)) types[place] = tail.types.get(field);
    }
    PageRange range = new PageRange(location, rowsLsn, types, tail.firstKeys[pages.get(0)], pages.size());
    for (int i = 0; i < pages.size(); i++) {
      int page = pages.get(i);
      range.rows[i] = tail.rows[page];
      range.distinct[i] = tail.distinct != null && tail.distinct[page] == tail.rows[page];
      range.keyStarts[i] = tail.keyStarts[page];
      range.keyLengths[i] = tail.keyLengths[page];
    }
    for (int place = 0; place < types.length; place++) {
      if (types[place] != null) range.addColumn(place, columns.fields()[place], tail, pages);
    }
    return range;
  }

  private void addColumn(int place, int field, SegmentTail tail, List<Integer> pages) {
    columnStarts[place] = new long[pages.size()];
    columnLengths[place] = new int[pages.size()];
    for (int i = 0; i < pages.size(); i++) {
      columnStarts[place][i] = tail.columnStarts.get(field)[pages.get(i)];
      columnLengths[place][i] = tail.columnLengths.get(field)[pages.get(i)];
    }
  }

  int pages() {
    return rows.length;
  }

  /** Stored bytes that reading a page takes. */
  long bytes(int page) {
    long bytes = keyLengths[page];
    for (int[] lengths : columnLengths) if (lengths != null) bytes += lengths[page];
    return bytes;
  }
}
