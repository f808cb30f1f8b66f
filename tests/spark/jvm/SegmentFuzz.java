package reef.spark;

import java.io.IOException;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import java.util.Map;
import java.util.Random;
import java.util.stream.IntStream;
import java.util.zip.CRC32C;
import org.apache.spark.sql.types.DataType;
import org.apache.spark.sql.types.DataTypes;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.sql.vectorized.ColumnarBatch;
import org.apache.spark.unsafe.Platform;

/**
 * Reads damaged copies of a segment: {@code SegmentFuzz FILE TAIL_BYTES KEY_TYPE SEED ROUNDS}. A copy whose checksums were not
 * repaired must be an error or read the same rows. A hostile one, with valid checksums, may hold other values, but
 * must not end in anything else than an error that names the object. Prints the number of copies of each outcome.
 */
final class SegmentFuzz {
  private static final String NAME = "fuzzed.seg";
  private final byte[] pristine;
  private final int tailBytes;
  private final ReefType keyType;
  private final SegmentTail tail;
  private final List<long[]> blocks = new ArrayList<>();
  private final long expected;

  private SegmentFuzz(byte[] pristine, int tailBytes, String keyType) throws IOException {
    this.pristine = pristine;
    this.tailBytes = tailBytes;
    this.keyType = ReefType.parse(keyType);
    tail = tail(pristine);
    for (int page = 0; page < tail.pages; page++) {
      blocks.add(new long[] {tail.keyStarts[page], tail.keyLengths[page]});
      for (int number : tail.columnLengths.keySet()) {
        if (tail.columnLengths.get(number)[page] > 0) blocks.add(new long[] {tail.columnStarts.get(number)[page], tail.columnLengths.get(number)[page]});
      }
    }
    Map<String, Object> footer = footer();
    for (String part : List.of("index", "pages", "range_tombstones", "filter")) {
      if (footer.get(part) instanceof List<?> place) blocks.add(new long[] {(Long) place.get(0), (Long) place.get(1)});
    }
    expected = hash(pristine);
  }

  public static void main(String[] args) throws IOException {
    SegmentFuzz fuzz = new SegmentFuzz(Files.readAllBytes(Path.of(args[0])), Integer.parseInt(args[1]), args[2]);
    Random random = new Random(Long.parseLong(args[3]));
    int[] outcomes = new int[3];
    for (int round = 0; round < Integer.parseInt(args[4]); round++) outcomes[fuzz.round(random, round)]++;
    System.out.println("errors " + outcomes[0] + ", same rows " + outcomes[1] + ", other rows " + outcomes[2]);
  }

  /** Returns 0 for an error, 1 for the same rows, 2 for other rows of a hostile copy. */
  private int round(Random random, int round) throws IOException {
    boolean isHostile = random.nextBoolean();
    byte[] copy = isHostile ? hostile(random) : damaged(random);
    try {
      if (hash(copy) == expected) return 1;
      if (!isHostile) throw new AssertionError("round " + round + ": a damaged segment reads other rows");
      return 2;
    } catch (CorruptObjectException error) {
      if (!error.getMessage().contains(NAME) || !error.getMessage().contains("offset")) throw error;
    } catch (UnsupportedOperationException | ArithmeticException error) {
      if (!isHostile) throw error; // a newer format, or a number outside of its type
    } catch (Throwable error) {
      throw new AssertionError("round " + round, error);
    }
    return 0;
  }

  private byte[] damaged(Random random) {
    if (random.nextInt(8) == 0) return Arrays.copyOf(pristine, random.nextInt(pristine.length));
    byte[] copy = pristine.clone();
    for (int i = random.nextInt(3); i >= 0; i--) copy[random.nextInt(copy.length)] ^= (byte) (1 << random.nextInt(8));
    return copy;
  }

  /** Changes numbers inside of a block, or of the footer, and repairs its checksum. */
  private byte[] hostile(Random random) {
    byte[] copy = pristine.clone();
    if (random.nextInt(6) == 0) {
      int end = copy.length - 16;
      int start = end - (int) Block.u32(copy, end);
      change(copy, start, end, random);
      Platform.putInt(copy, Platform.BYTE_ARRAY_OFFSET + end + 4, crc(copy, start, end));
      return copy;
    }
    long[] block = blocks.get(random.nextInt(blocks.size()));
    int start = (int) block[0];
    int end = start + (int) block[1];
    int headEnd = Math.min(end, start + Block.HEAD_BYTES + 96); // lengths are at the beginning
    change(copy, start + 8, random.nextBoolean() ? headEnd : end, random);
    Platform.putInt(copy, Platform.BYTE_ARRAY_OFFSET + start + 4, crc(copy, start + 8, end));
    return copy;
  }

  private static void change(byte[] copy, int start, int end, Random random) {
    int[] values = {0, 1, -1, 0x7fffffff, 0x80000000, 0xffff, 0x10000, 255, random.nextInt()};
    for (int i = random.nextInt(3); i >= 0; i--) {
      int at = start + random.nextInt(Math.max(1, end - start));
      if (random.nextBoolean()) copy[at] = (byte) random.nextInt();
      else if (at + 4 <= end) Platform.putInt(copy, Platform.BYTE_ARRAY_OFFSET + at, values[random.nextInt(values.length)]);
    }
  }

  private static int crc(byte[] data, int start, int end) {
    CRC32C sum = new CRC32C();
    sum.update(data, start, end - start);
    return (int) sum.getValue();
  }

  private Map<String, Object> footer() {
    int end = pristine.length - 16;
    int length = (int) Block.u32(pristine, end);
    return MessagePack.decodeMap(pristine, end - length, length, NAME, 0);
  }

  private SegmentTail tail(byte[] data) throws IOException {
    try (ObjectReader reader = ObjectReader.open(ObjectLocation.inline(NAME, data))) {
      return SegmentTail.read(reader, data.length, tailBytes);
    }
  }

  /** Reads every value of every row, and returns a hash of them. */
  private long hash(byte[] data) throws IOException {
    SegmentTail read = tail(data);
    ReadColumns columns = columns();
    List<Integer> pages = IntStream.range(0, read.pages).boxed().toList();
    if (pages.isEmpty()) return 0;
    read.mayHave(new byte[][] {read.firstKeys[0], "absent".getBytes()}); // of a hostile filter, any result
    PageRange range = PageRange.of(read, ObjectLocation.inline(NAME, data), 0, pages, columns);
    long hash = 1;
    ReefPartition partition = new ReefPartition(new byte[0], null, null, List.of(range), read.tombstones);
    try (MergeReader reader = new MergeReader(partition, columns, 0, Long.MAX_VALUE)) {
      while (reader.next()) hash = 31 * hash + hash(reader.get(), columns);
    }
    return hash;
  }

  private static long hash(ColumnarBatch batch, ReadColumns columns) {
    long hash = 1;
    for (int row = 0; row < batch.numRows(); row++) {
      for (int column = 0; column < columns.size(); column++) {
        DataType type = columns.schema().fields()[column].dataType();
        hash = 31 * hash + PlanReader.text(batch.getRow(row), column, type).hashCode();
      }
    }
    return hash;
  }

  private ReadColumns columns() {
    StructType schema = new StructType().add("key", keyType.spark());
    List<Integer> numbers = new ArrayList<>(List.of(ReadColumns.KEY));
    List<ReefType> types = new ArrayList<>(List.of(keyType));
    for (var entry : tail.types.entrySet()) {
      schema = schema.add("c" + entry.getKey(), entry.getValue().spark());
      numbers.add(entry.getKey());
      types.add(entry.getValue());
    }
    schema = schema.add("_expires_at", DataTypes.TimestampType);
    numbers.add(ReadColumns.EXPIRES_AT);
    types.add(ReefType.parse("timestamp[ms, UTC]"));
    return new ReadColumns(schema, numbers.stream().mapToInt(Integer::intValue).toArray(), types.toArray(new ReefType[0]));
  }
}
