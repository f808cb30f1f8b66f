package reef.spark;

import org.apache.spark.unsafe.Platform;

/**
 * Columns of equal length as Arrow buffers: u32 rows, u32 columns, per column u16 number, u16 buffers
 * and u32 lengths, then the buffers, each padded to 8 bytes. Every length is checked before it is used.
 */
final class ColumnSet {
  static final int ABSENT = -1;
  private static final long ABSENT_LENGTH = 0xffffffffL;

  final byte[] data;
  final int length;
  final int rows;
  final String object;
  final long offset;
  private final int[] numbers;
  private final int[][] starts;
  private final int[][] lengths;

  ColumnSet(byte[] data, int start, int length, String object, long offset) {
    this.data = data;
    this.object = object;
    this.offset = offset;
    this.length = length;
    int end = start + length;
    if (length < 8) throw damaged("a column set of " + length + " bytes");
    long rowCount = Block.u32(data, start);
    long columns = Block.u32(data, start + 4);
    if (rowCount > Integer.MAX_VALUE / 16 || columns > 65_535) throw damaged(rowCount + " rows of " + columns + " columns");
    if (4 * columns > length) throw damaged("column set ends early");
    rows = (int) rowCount;
    numbers = new int[(int) columns];
    starts = new int[numbers.length][];
    lengths = new int[numbers.length][];
    int position = start + 8;
    for (int i = 0; i < columns; i++) {
      if (position + 4 > end) throw damaged("column set ends early");
      numbers[i] = u16(position);
      int buffers = u16(position + 2);
      position += 4;
      if (position + 4L * buffers > end) throw damaged("column set ends early");
      int[] of = new int[buffers];
      for (int b = 0; b < buffers; b++, position += 4) {
        long size = Block.u32(data, position);
        if (size != ABSENT_LENGTH && size > length) throw damaged("a buffer of " + size + " bytes");
        of[b] = size == ABSENT_LENGTH ? ABSENT : (int) size;
      }
      lengths[i] = of;
    }
    position = start + (position - start + 7 & ~7);
    for (int i = 0; i < numbers.length; i++) {
      int[] of = lengths[i];
      int[] at = new int[of.length];
      for (int b = 0; b < of.length; b++) {
        at[b] = ABSENT;
        if (of[b] == ABSENT) continue;
        at[b] = position;
        position += of[b] + 7 & ~7;
        if (position > end) throw damaged("a buffer of " + of[b] + " bytes ends past the column set");
      }
      starts[i] = at;
    }
    if (position != end) throw damaged((end - position) + " bytes too many");
  }

  boolean has(int number) {
    return find(number) >= 0;
  }

  Buffers buffers(int number) {
    int found = find(number);
    if (found < 0) throw damaged("column " + number + " is missing");
    return new Buffers(starts[found], lengths[found]);
  }

  private int find(int number) {
    for (int i = 0; i < numbers.length; i++) if (numbers[i] == number) return i;
    return -1;
  }

  /** Start of a column of plain numbers without nulls. */
  int numbers(int number, int bytes) {
    Buffers buffers = buffers(number);
    buffers.next(0, true);
    return buffers.next((long) rows * bytes, false);
  }

  CorruptObjectException damaged(String problem) {
    return new CorruptObjectException(object, offset, problem);
  }

  private int u16(int at) {
    return Platform.getShort(data, Platform.BYTE_ARRAY_OFFSET + at) & 0xffff;
  }

  /** The buffers of one column, taken in order. */
  final class Buffers {
    private final int[] at;
    private final int[] sizes;
    private int next;

    Buffers(int[] at, int[] sizes) {
      this.at = at;
      this.sizes = sizes;
    }

    /** Returns where the next buffer starts, or ABSENT if it is optional and not stored. */
    int next(long least, boolean optional) {
      if (next == at.length) throw damaged("a buffer is missing");
      int current = next++;
      if (at[current] == ABSENT) {
        if (!optional) throw damaged("a required buffer is absent");
        return ABSENT;
      }
      if (sizes[current] < least) throw damaged("a buffer has " + sizes[current] + " bytes, " + least + " are needed");
      return at[current];
    }

    /**
     * Returns where the offsets of {@code count} values start, after checking that they ascend from 0; ABSENT if they
     * are not stored, because all values have the same length.
     */
    int offsets(int count) {
      int start = next(4L * (count + 1L), true);
      if (start == ABSENT) return ABSENT;
      long base = Platform.BYTE_ARRAY_OFFSET + start;
      int before = Platform.getInt(data, base);
      boolean ascending = before == 0;
      for (int i = 1; i <= count; i++) {
        int offset = Platform.getInt(data, base + 4L * i);
        ascending &= offset >= before;
        before = offset;
      }
      if (!ascending) throw damaged("offsets do not ascend from 0");
      return start;
    }

    /** Returns the length that all {@code count} values of the next buffer have. */
    int width(int count) {
      int size = next < at.length && at[next] != ABSENT ? sizes[next] : 0;
      if (count == 0 || size == 0 || size % count != 0) throw damaged(size + " bytes are not " + count + " values of the same length");
      return size / count;
    }
  }
}
