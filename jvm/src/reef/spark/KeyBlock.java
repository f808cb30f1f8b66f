package reef.spark;

import java.util.Arrays;
import org.apache.spark.sql.types.DataType;
import org.apache.spark.sql.vectorized.ColumnVector;
import org.apache.spark.unsafe.Platform;
import org.apache.spark.unsafe.types.UTF8String;

/** Keys of a group with LSN, sequence, kind, expiry and the columns that patches and merges change. */
final class KeyBlock {
  static final int PUT = 0;
  static final int DELETE = 1;
  static final int PATCH = 3;
  static final int MERGE = 4;
  static final long NEVER = Long.MAX_VALUE;

  private static final int KEY_REST = 1;
  private static final int LSN = 2;
  private static final int SEQ = 3;
  private static final int KIND = 4;
  private static final int EXPIRES = 5;
  private static final int MERGED_AT = 6;
  private static final int TOUCHED = 16;
  private static final long GROWTH_MAX = 16;
  private static final long GROWTH_SLACK_BYTES = 1 << 20;
  private static final ReefType BOOL = ReefType.parse("bool");
  private static final ReefType MILLIS = ReefType.parse("timestamp[ms, UTC]");
  private static final ReefType LONG = ReefType.parse("int64");

  final int rows;
  private final ColumnSet columns;
  private final byte[] data;
  private final int prefixStart;
  private final int prefixLength;
  private final long offsets;
  private final int width;
  private final int keysStart;
  private final long lsns;
  private final long seqs;
  private final int kinds;
  private final ColumnVector expires;
  private final ColumnVector mergedAt;
  private final long rowsLsn;
  private final boolean onlyPuts;

  KeyBlock(Block block, int storedBytes, long rowsLsn, String object, long offset) {
    data = block.data();
    this.rowsLsn = rowsLsn;
    long prefix = block.length() < 4 ? Long.MAX_VALUE : Block.u32(data, block.start());
    if (prefix > block.length() - 4) throw new CorruptObjectException(object, offset, "a key prefix of " + prefix + " bytes");
    prefixStart = block.start() + 4;
    prefixLength = (int) prefix;
    int skipped = 4 + prefixLength + 7 & ~7;
    if (skipped > block.length()) throw new CorruptObjectException(object, offset, "a key prefix of " + prefix + " bytes");
    columns = new ColumnSet(data, block.start() + skipped, block.length() - skipped, object, offset);
    rows = columns.rows;
    if (prefix * rows > GROWTH_MAX * storedBytes + GROWTH_SLACK_BYTES) {
      throw new CorruptObjectException(object, offset, rows + " keys with a prefix of " + prefix + " bytes");
    }
    ColumnSet.Buffers keys = columns.buffers(KEY_REST);
    keys.next(0, true);
    int start = keys.offsets(rows);
    offsets = Platform.BYTE_ARRAY_OFFSET + start;
    width = start == ColumnSet.ABSENT ? keys.width(rows) : 0;
    keysStart = keys.next(from(rows), false);
    lsns = Platform.BYTE_ARRAY_OFFSET + columns.numbers(LSN, 8);
    seqs = Platform.BYTE_ARRAY_OFFSET + columns.numbers(SEQ, 4);
    kinds = columns.numbers(KIND, 1);
    expires = columns.has(EXPIRES) ? Vectors.of(columns, EXPIRES, LONG, LONG) : null;
    mergedAt = columns.has(MERGED_AT) ? Vectors.of(columns, MERGED_AT, LONG, LONG) : null;
    boolean puts = true;
    for (int row = 0; row < rows; row++) {
      int kind = data[kinds + row];
      boolean isMerge = kind == MERGE && mergedAt != null && !mergedAt.isNullAt(row);
      if (kind != PUT && kind != DELETE && kind != PATCH && !isMerge) throw columns.damaged("unknown kind of row " + kind);
      puts &= kind == PUT;
    }
    onlyPuts = puts;
  }

  /** Whether every row is a put that never expires. */
  boolean plain() {
    return onlyPuts && expires == null;
  }

  long lsn(int row) {
    return rowsLsn != 0 ? rowsLsn : Platform.getLong(data, lsns + 8L * row);
  }

  long seq(int row) {
    return Platform.getInt(data, seqs + 4L * row) & 0xffffffffL;
  }

  int kind(int row) {
    return data[kinds + row];
  }

  /** When a row expires, in milliseconds since 1970. */
  long expiresAtMs(int row) {
    return expires == null || expires.isNullAt(row) ? NEVER : expires.getLong(row);
  }

  /** When rows expire, as timestamps. */
  ColumnVector expiryVector() {
    return expires == null ? new Vectors.NullVector(MILLIS.spark()) : Vectors.of(columns, EXPIRES, MILLIS, MILLIS);
  }

  /** When a merge was written, by its writer's clock. */
  long mergedAtMs(int row) {
    return mergedAt.getLong(row);
  }

  /** How a patch or merge changes a column: one of {@link Operators}. Blocks without merges store flags. */
  int operator(int field, int row) {
    if (!columns.has(TOUCHED + field)) return Operators.NONE;
    if (mergedAt != null) return data[columns.numbers(TOUCHED + field, 1) + row];
    ColumnVector touched = Vectors.of(columns, TOUCHED + field, BOOL, BOOL);
    return !touched.isNullAt(row) && touched.getBoolean(row) ? Operators.SET : Operators.NONE;
  }

  private int from(int row) {
    return width > 0 ? row * width : Platform.getInt(data, offsets + 4L * row);
  }

  byte[] key(int row) {
    int from = from(row);
    int length = from(row + 1) - from;
    byte[] key = new byte[prefixLength + length];
    System.arraycopy(data, prefixStart, key, 0, prefixLength);
    System.arraycopy(data, keysStart + from, key, prefixLength, length);
    return key;
  }

  /** First eight bytes of a key as an unsigned number, zeros behind its end: decides most comparisons. */
  long head(int row) {
    int from = from(row);
    int length = from(row + 1) - from;
    if (prefixLength == 0 && length >= 8) return Long.reverseBytes(Platform.getLong(data, Platform.BYTE_ARRAY_OFFSET + keysStart + from));
    long head = 0;
    for (int i = 0; i < 8; i++) {
      int at = i - prefixLength;
      int value = at < 0 ? data[prefixStart + i] : at < length ? data[keysStart + from + at] : 0;
      head = head << 8 | value & 0xff;
    }
    return head;
  }

  int compare(int row, KeyBlock other, int otherRow) {
    int order = Long.compareUnsigned(head(row), other.head(otherRow));
    return order != 0 ? order : compareRest(row, other, otherRow);
  }

  /** Compares two keys with equal heads. */
  int compareRest(int row, KeyBlock other, int otherRow) {
    if (prefixLength > 0 || other.prefixLength > 0) return Arrays.compareUnsigned(key(row), other.key(otherRow));
    int from = keysStart + from(row);
    int otherFrom = other.keysStart + other.from(otherRow);
    return Arrays.compareUnsigned(
        data, from, keysStart + from(row + 1), other.data, otherFrom, other.keysStart + other.from(otherRow + 1));
  }

  int compare(int row, byte[] key) {
    int from = from(row);
    int shared = Math.min(prefixLength, key.length);
    int order = Arrays.compareUnsigned(data, prefixStart, prefixStart + shared, key, 0, shared);
    if (order != 0) return order;
    if (key.length < prefixLength) return 1;
    return Arrays.compareUnsigned(data, keysStart + from, keysStart + from(row + 1), key, prefixLength, key.length);
  }

  boolean sameKey(int row, int other) {
    int from = from(row);
    int otherFrom = from(other);
    return Arrays.equals(data, keysStart + from, keysStart + from(row + 1), data, keysStart + otherFrom, keysStart + from(other + 1));
  }

  /** Whether no two rows have the same key. */
  boolean areDistinct() {
    for (int row = 1; row < rows; row++) if (sameKey(row - 1, row)) return false;
    return true;
  }

  /** First row of [row, stop) whose key is at least {@code bound}, found by galloping; {@code stop} if there is none. */
  int lowerBound(int row, int stop, byte[] bound) {
    int low = row;
    int step = 1;
    for (; low + step <= stop && compare(low + step - 1, bound) < 0; step <<= 1) low += step;
    int high = Math.min(stop, low + step - 1);
    while (low < high) {
      int middle = low + high >>> 1;
      if (compare(middle, bound) < 0) low = middle + 1;
      else high = middle;
    }
    return low;
  }

  /** First row of [row, stop) whose key is at least the one at which another source is. */
  int lowerBound(int row, int stop, SegmentCursor other) {
    int low = row;
    int step = 1;
    for (; low + step <= stop && isBelow(low + step - 1, other); step <<= 1) low += step;
    int high = Math.min(stop, low + step - 1);
    while (low < high) {
      int middle = low + high >>> 1;
      if (isBelow(middle, other)) low = middle + 1;
      else high = middle;
    }
    return low;
  }

  private boolean isBelow(int row, SegmentCursor other) {
    int order = Long.compareUnsigned(head(row), other.head);
    return order != 0 ? order < 0 : compareRest(row, other.keys, other.row) < 0;
  }

  /** The key column as Spark reads it. */
  ColumnVector vector(DataType type) {
    int offsetsStart = (int) (offsets - Platform.BYTE_ARRAY_OFFSET);
    if (prefixLength == 0) return new Vectors.BytesVector(type, data, ColumnSet.ABSENT, offsetsStart, keysStart, width);
    return new PrefixedVector(type);
  }

  private final class PrefixedVector extends Vectors.Base {
    PrefixedVector(DataType type) {
      super(type);
    }

    @Override public boolean hasNull() { return false; }
    @Override public boolean isNullAt(int row) { return false; }
    @Override public byte[] getBinary(int row) { return key(row); }
    @Override public UTF8String getUTF8String(int row) { return UTF8String.fromBytes(key(row)); }
  }
}
