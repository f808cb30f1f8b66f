package reef.spark;

import java.io.IOException;
import java.lang.ref.SoftReference;
import java.nio.charset.StandardCharsets;
import java.util.Arrays;
import java.util.List;
import java.util.Map;
import java.util.TreeMap;
import java.util.zip.CRC32C;
import org.apache.spark.sql.vectorized.ColumnVector;
import org.apache.spark.unsafe.Platform;

/**
 * The end of a segment, decoded: schema, pages, column bounds and range tombstones. Plans every read of the segment.
 *
 * <p>Pages are numbered through all groups. A segment of version 1 has no page block; each of its groups is one page.
 */
final class SegmentTail {
  private static final byte[] MAGIC = "RFSEG1\0\0".getBytes(StandardCharsets.US_ASCII);
  private static final int END_BYTES = 16;
  private static final int HEAD_BYTES = 16;
  private static final int VERSION_MAX = 3;
  private static final int FIRST_SHARED = 0;
  private static final int ROWS = 4;
  private static final int KEY_BLOCK = 7;
  private static final int PAGE_COUNT = 8;
  private static final int PAGE_ROWS = 0;
  private static final int PAGE_KEY = 1;
  private static final int PAGE_DISTINCT = 2;
  private static final int LENGTHS = 0x10;
  private static final int SMALLEST = 0x4010;
  private static final int LARGEST = 0x8010;
  private static final ReefType BINARY = ReefType.parse("binary");
  private static final long KEYS_GROWTH_MAX = 64;
  private static final long KEYS_SLACK_BYTES = 1 << 20;

  final String name;
  final Map<Integer, ReefType> types = new TreeMap<>();
  final int pages;
  /** Keys of a page are in [firstKeys, lastKeys]; the bounds need not be keys. */
  final byte[][] firstKeys;
  final byte[][] lastKeys;
  final int[] rows;
  /** How many different keys a page has; null if not known. */
  final int[] distinct;
  final int[] groupOf;
  final long[] keyStarts;
  final int[] keyLengths;
  /** By field number, where a column has blocks at all; a length of 0 means that all values of the page are null. */
  final Map<Integer, long[]> columnStarts = new TreeMap<>();
  final Map<Integer, int[]> columnLengths = new TreeMap<>();
  /** By field number and group. */
  final Map<Integer, ColumnVector> smallest = new TreeMap<>();
  final Map<Integer, ColumnVector> largest = new TreeMap<>();
  final List<RangeTombstone> tombstones;
  /** The filter block as it is stored, and where. It has twelve bits of each key: it goes where memory is short. */
  private final SoftReference<byte[]> filterData;
  private final long filterOffset;
  private SoftReference<KeyFilter> filter = new SoftReference<>(null);
  private final boolean expires;
  private final boolean hasMerges;

  /** Reads the tail with one request. */
  static SegmentTail read(ObjectReader reader, long size, int tailBytes) throws IOException {
    int length = (int) Math.min(size, tailBytes);
    byte[] tail = reader.read(size - length, length);
    try {
      return new SegmentTail(reader.name, tail, size);
    } catch (ClassCastException | NullPointerException | IndexOutOfBoundsException | IllegalArgumentException | ArithmeticException error) {
      throw new CorruptObjectException(reader.name, size - length, "the footer has no structure of a segment: " + error);
    }
  }

  private SegmentTail(String name, byte[] tail, long size) {
    this.name = name;
    long base = size - tail.length;
    Map<String, Object> footer = footer(tail, base);
    for (Object field : (List<?>) ((Map<?, ?>) footer.get("schema")).get("fields")) {
      List<?> parts = (List<?>) field;
      types.put(((Long) parts.get(0)).intValue(), ReefType.parse((String) parts.get(2)));
    }
    ColumnSet groups = columns(tail, base, footer, "index", Block.INDEX);
    if (groups.rows > 0) groups.numbers(FIRST_SHARED, 2); // there are as many as it says, before anything is allocated
    byte[][] groupFirst = new byte[groups.rows][];
    byte[][] groupLast = new byte[groups.rows][];
    decodeKeys(groups, groupFirst, groupLast);
    for (var type : types.entrySet()) {
      int number = type.getKey();
      if (groups.has(SMALLEST + number) && groups.has(LARGEST + number)) {
        smallest.put(number, Vectors.of(groups, SMALLEST + number, type.getValue(), type.getValue()));
        largest.put(number, Vectors.of(groups, LARGEST + number, type.getValue(), type.getValue()));
      }
    }
    expires = !Long.valueOf(0).equals(footer.get("expiring")); // older segments do not say
    hasMerges = footer.get("merges") instanceof Long merges && merges > 0;
    boolean paged = footer.get("pages") != null;
    ColumnSet table = paged ? columns(tail, base, footer, "pages", Block.PAGES) : groups;
    pages = table.rows;
    int[] counts = paged && groups.rows > 0 ? ints(groups, PAGE_COUNT) : ones(groups.rows);
    rows = ints(table, paged ? PAGE_ROWS : ROWS);
    groupOf = groupOf(counts, table);
    distinct = paged ? ints(table, PAGE_DISTINCT) : null;
    keyLengths = ints(table, KEY_BLOCK);
    keyStarts = new long[pages];
    for (int number : types.keySet()) {
      if (!table.has(LENGTHS + number)) continue;
      columnLengths.put(number, ints(table, LENGTHS + number));
      columnStarts.put(number, new long[pages]);
    }
    long end = place(counts);
    if (end > base) throw new CorruptObjectException(name, base, "pages end at " + end + ", in the tail");
    firstKeys = new byte[pages][];
    lastKeys = new byte[pages][];
    bound(table, paged, groupFirst, groupLast);
    tombstones = footer.get("range_tombstones") == null
        ? List.of()
        : RangeTombstone.decode(block(tail, base, footer, "range_tombstones", Block.RANGE_TOMBSTONES), name, base);
    int[] place = place(tail, base, footer, "filter");
    filterData = new SoftReference<>(Arrays.copyOfRange(tail, place[0], place[0] + place[1]));
    filterOffset = base + place[0];
  }

  /** Returns the keys of a list that the segment may have, in the same order; all of them if its filter has gone. */
  byte[][] mayHave(byte[][] keys) {
    KeyFilter known = filter();
    return known == null ? keys : known.among(keys);
  }

  /** The filter of the keys, checked when it is first used: only lists of keys need it. */
  private synchronized KeyFilter filter() {
    KeyFilter known = filter.get();
    byte[] stored = filterData.get();
    if (known != null || stored == null) return known;
    known = new KeyFilter(Block.decode(stored, 0, stored.length, Block.FILTER, name, filterOffset), name, filterOffset);
    filter = new SoftReference<>(known);
    return known;
  }

  /** Whether each row is the only version of its key, and never expires; deletes and patches are counted elsewhere. */
  boolean areAllRowsVisible() {
    return !expires && !hasMerges && tombstones.isEmpty() && distinct != null && Arrays.equals(distinct, rows);
  }

  /** Stored bytes of a page: of all columns, or of some fields; the key is always among them. */
  long pageBytes(int page, int[] fields) {
    long bytes = keyLengths[page];
    if (fields == null) {
      for (int[] lengths : columnLengths.values()) bytes += lengths[page];
      return bytes;
    }
    for (int field : fields) {
      int[] lengths = columnLengths.get(field);
      if (lengths != null) bytes += lengths[page];
    }
    return bytes;
  }

  /** Computes where blocks start: in each group all key blocks, then all blocks of each column. Returns where the last ends. */
  private long place(int[] counts) {
    long at = HEAD_BYTES;
    for (int group = 0, first = 0; group < counts.length; first += counts[group++]) {
      int last = first + counts[group];
      for (int page = first; page < last; page++) {
        keyStarts[page] = at;
        at += keyLengths[page];
      }
      for (int number : columnLengths.keySet()) {
        for (int page = first; page < last; page++) {
          columnStarts.get(number)[page] = at;
          at += columnLengths.get(number)[page];
        }
      }
    }
    return at;
  }

  /** A page ends where the next one of its group begins, or with its group. */
  private void bound(ColumnSet table, boolean paged, byte[][] groupFirst, byte[][] groupLast) {
    ColumnVector keys = paged ? Vectors.of(table, PAGE_KEY, BINARY, BINARY) : null;
    for (int page = 0; page < pages; page++) {
      firstKeys[page] = keys == null ? groupFirst[groupOf[page]] : keys.getBinary(page);
      boolean isLast = page + 1 == pages || groupOf[page + 1] != groupOf[page];
      lastKeys[page] = isLast ? groupLast[groupOf[page]] : keys.getBinary(page + 1);
      if (Arrays.compareUnsigned(lastKeys[page], firstKeys[page]) < 0 || page > 0 && Arrays.compareUnsigned(firstKeys[page], firstKeys[page - 1]) < 0) {
        throw table.damaged("keys of the pages are out of order");
      }
    }
  }

  private static int[] groupOf(int[] counts, ColumnSet table) {
    int[] of = new int[table.rows];
    int page = 0;
    for (int group = 0; group < counts.length; group++) {
      if (counts[group] > of.length - page) throw table.damaged("groups have more pages than there are");
      Arrays.fill(of, page, page += counts[group], group);
    }
    if (page != of.length) throw table.damaged((of.length - page) + " pages belong to no group");
    return of;
  }

  private static int[] ones(int count) {
    int[] ones = new int[count];
    Arrays.fill(ones, 1);
    return ones;
  }

  private Map<String, Object> footer(byte[] tail, long base) {
    int end = tail.length;
    if (end < END_BYTES) throw new CorruptObjectException(name, base, end + " bytes are too few for a segment");
    if (!Arrays.equals(tail, end - 8, end, MAGIC, 0, 8)) throw new CorruptObjectException(name, base + end - 8, "magic does not match");
    long length = Block.u32(tail, end - END_BYTES);
    if (length > end - END_BYTES) throw new CorruptObjectException(name, base, "a footer of " + length + " bytes does not fit");
    int start = end - END_BYTES - (int) length;
    CRC32C sum = new CRC32C();
    sum.update(tail, start, (int) length);
    if (sum.getValue() != Block.u32(tail, end - END_BYTES + 4)) {
      throw new CorruptObjectException(name, base + start, "checksum of the footer does not match");
    }
    Map<String, Object> footer = MessagePack.decodeMap(tail, start, (int) length, name, base + start);
    if (!(footer.get("version") instanceof Long version) || version > VERSION_MAX) {
      throw new UnsupportedOperationException("segment " + name + " has format " + footer.get("version") + ", this jar reads up to " + VERSION_MAX);
    }
    return footer;
  }

  private ColumnSet columns(byte[] tail, long base, Map<String, Object> footer, String part, int kind) {
    Block block = block(tail, base, footer, part, kind);
    return new ColumnSet(block.data(), block.start(), block.length(), name, (Long) ((List<?>) footer.get(part)).get(0));
  }

  private Block block(byte[] tail, long base, Map<String, Object> footer, String part, int kind) {
    int[] place = place(tail, base, footer, part);
    return Block.decode(tail, place[0], place[1], kind, name, base + place[0]);
  }

  /** Returns where a block starts in the tail, and its length. */
  private int[] place(byte[] tail, long base, Map<String, Object> footer, String part) {
    List<?> place = (List<?>) footer.get(part);
    long offset = (Long) place.get(0);
    long length = (Long) place.get(1);
    if (offset < base || length < 0 || offset + length > base + tail.length) {
      throw new CorruptObjectException(name, offset, part + " is outside of the tail");
    }
    return new int[] {(int) (offset - base), (int) length};
  }

  /** Key bounds of groups are delta-encoded: bytes shared with the key before, then the rest. */
  private static void decodeKeys(ColumnSet columns, byte[][] firstKeys, byte[][] lastKeys) {
    if (columns.rows == 0) return;
    int firstShared = columns.numbers(FIRST_SHARED, 2);
    int lastShared = columns.numbers(2, 2);
    ColumnVector firstRest = Vectors.of(columns, 1, BINARY, BINARY);
    ColumnVector lastRest = Vectors.of(columns, 3, BINARY, BINARY);
    byte[] before = new byte[0];
    long bytes = 0;
    for (int group = 0; group < columns.rows; group++) {
      firstKeys[group] = joined(columns, before, u16(columns, firstShared, group), firstRest.getBinary(group));
      lastKeys[group] = joined(columns, firstKeys[group], u16(columns, lastShared, group), lastRest.getBinary(group));
      if (Arrays.compareUnsigned(firstKeys[group], before) < 0 || Arrays.compareUnsigned(lastKeys[group], firstKeys[group]) < 0) {
        throw columns.damaged("keys of the index are out of order");
      }
      before = lastKeys[group];
      bytes += firstKeys[group].length + before.length;
      if (bytes > KEYS_GROWTH_MAX * columns.length + KEYS_SLACK_BYTES) throw columns.damaged("keys of the index take " + bytes + " bytes");
    }
  }

  private static byte[] joined(ColumnSet columns, byte[] before, int shared, byte[] rest) {
    if (shared > before.length) throw columns.damaged("a key shares " + shared + " of " + before.length + " bytes");
    byte[] key = Arrays.copyOf(before, shared + rest.length);
    System.arraycopy(rest, 0, key, shared, rest.length);
    return key;
  }

  private static int u16(ColumnSet columns, int start, int row) {
    return Platform.getShort(columns.data, Platform.BYTE_ARRAY_OFFSET + start + 2L * row) & 0xffff;
  }

  private static int[] ints(ColumnSet columns, int number) {
    int start = columns.numbers(number, 4);
    int[] values = new int[columns.rows];
    for (int row = 0; row < values.length; row++) {
      values[row] = Platform.getInt(columns.data, Platform.BYTE_ARRAY_OFFSET + start + 4L * row);
      if (values[row] < 0) throw columns.damaged("a length of 2 GiB or more");
    }
    return values;
  }
}
