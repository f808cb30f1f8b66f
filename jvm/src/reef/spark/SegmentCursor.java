package reef.spark;

import java.io.Closeable;
import java.io.IOException;
import java.io.UncheckedIOException;
import java.util.ArrayList;
import java.util.Comparator;
import java.util.List;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.CompletionException;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import java.util.concurrent.atomic.AtomicInteger;
import org.apache.spark.sql.vectorized.ColumnVector;

/**
 * Steps through the pages of a segment. Several pages are fetched with one read, whose ranges are coalesced where
 * the gap costs less than another request; over HTTP the next read is under way while this one is decoded.
 */
final class SegmentCursor implements Closeable {
  private static final long READ_BYTES_MIN = 256 << 10;
  private static final long HTTP_READ_BYTES_MAX = 8 << 20;
  /** The system reads files ahead; more than this would only allocate arrays that the garbage collector treats as huge. */
  private static final long FILE_READ_BYTES_MAX = 512 << 10;
  private static final long FILE_GAP_BYTES = 16 << 10;
  private static final long HTTP_GAP_BYTES = 256 << 10;
  private static final AtomicInteger THREADS = new AtomicInteger();
  private static final ExecutorService FETCHERS = Executors.newCachedThreadPool(SegmentCursor::thread);

  /** Current page, its keys, the row at which the merge is with the head of its key, and the end of the rows to read. */
  Page page;
  KeyBlock keys;
  int row;
  long head;
  int stop;
  long pagesRead;

  final ObjectReader reader;
  private final PageRange range;
  private final ReadColumns columns;
  private final byte[] startKey;
  private final byte[] endKey;
  private final boolean prefetches;
  private int number = -1;
  private long readBytes = READ_BYTES_MIN;
  private long decodedBytes;
  private Read current;
  private CompletableFuture<Read> next;

  /** Reads the rows of a segment with keys in [startKey, endKey). */
  SegmentCursor(PageRange range, ReadColumns columns, byte[] startKey, byte[] endKey) {
    this.range = range;
    this.columns = columns;
    this.startKey = startKey;
    this.endKey = endKey;
    reader = ObjectReader.open(range.location);
    prefetches = range.location.url.startsWith("http");
  }

  /** A key that is not above any row. */
  byte[] firstKey() {
    return range.firstKey;
  }

  /** Moves to the first row; false if there is none. */
  boolean open() throws IOException {
    if (!nextPage()) return false;
    while (startKey.length > 0) {
      int first = keys.lowerBound(0, keys.rows, startKey);
      if (first < keys.rows) return moveTo(first);
      if (!nextPage()) return false;
    }
    return moveTo(0);
  }

  /** Moves to a row of this page, or on to the next one; false at the end. */
  boolean moveTo(int to) throws IOException {
    if (to >= stop) return stop == keys.rows && nextPage() && moveTo(0) || end();
    row = to;
    head = keys.head(to);
    return true;
  }

  private boolean end() {
    page = null;
    keys = null;
    return false;
  }

  int compare(SegmentCursor other) {
    int order = Long.compareUnsigned(head, other.head);
    return order != 0 ? order : keys.compareRest(row, other.keys, other.row);
  }

  private boolean nextPage() throws IOException {
    do {
      if (++number == range.pages()) return end();
      if (current == null || number >= current.end) advance();
      page = decodePage();
      keys = page.keys;
      pagesRead++;
    } while (keys.rows == 0);
    boolean isInside = endKey == null || keys.compare(keys.rows - 1, endKey) < 0;
    stop = isInside ? keys.rows : keys.lowerBound(0, keys.rows, endKey);
    return true;
  }

  /** Starts to read over HTTP, so that the first page is there when the merge arrives. */
  void prefetch() {
    if (prefetches && number < 0 && next == null) fetchAhead(0);
  }

  private void advance() throws IOException {
    try {
      current = next == null ? fetch(number, readBytes) : next.join();
    } catch (CompletionException error) {
      if (error.getCause() instanceof UncheckedIOException wrapped) throw wrapped.getCause();
      throw error;
    }
    next = null;
    readBytes = Math.min(2 * readBytes, prefetches ? HTTP_READ_BYTES_MAX : FILE_READ_BYTES_MAX);
    if (prefetches && current.end < range.pages()) fetchAhead(current.end);
  }

  private void fetchAhead(int from) {
    long bytes = readBytes;
    next = CompletableFuture.supplyAsync(() -> fetchUnchecked(from, bytes), FETCHERS);
  }

  private Read fetchUnchecked(int from, long bytesMax) {
    try {
      return fetch(from, bytesMax);
    } catch (IOException error) {
      throw new UncheckedIOException(error);
    }
  }

  private Read fetch(int from, long bytesMax) throws IOException {
    List<long[]> blocks = new ArrayList<>();
    long bytes = 0;
    int end = from;
    while (end < range.pages() && (end == from || bytes + range.bytes(end) <= bytesMax)) {
      bytes += range.bytes(end);
      addBlocks(end++, blocks);
    }
    blocks.sort(Comparator.comparingLong(block -> block[0]));
    Read read = new Read(end);
    long gap = prefetches ? HTTP_GAP_BYTES : FILE_GAP_BYTES;
    for (int i = 0; i < blocks.size(); ) {
      long start = blocks.get(i)[0];
      long stop = start + blocks.get(i)[1];
      for (i++; i < blocks.size() && blocks.get(i)[0] - stop <= gap; i++) stop = Math.max(stop, blocks.get(i)[0] + blocks.get(i)[1]);
      read.add(start, reader.read(start, Math.toIntExact(stop - start)));
    }
    return read;
  }

  private void addBlocks(int page, List<long[]> blocks) {
    blocks.add(new long[] {range.keyStarts[page], range.keyLengths[page]});
    for (int place = 0; place < range.types.length; place++) {
      if (range.types[place] != null && range.columnLengths[place][page] > 0) {
        blocks.add(new long[] {range.columnStarts[place][page], range.columnLengths[place][page]});
      }
    }
  }

  private Page decodePage() {
    KeyBlock decoded = decodeKeys();
    ColumnVector[] vectors = new ColumnVector[columns.size()];
    for (int place = 0; place < vectors.length; place++) vectors[place] = decodeColumn(place, decoded);
    return new Page(decoded, vectors, range.distinct[number], decodedBytes);
  }

  private KeyBlock decodeKeys() {
    decodedBytes = 0;
    long start = range.keyStarts[number];
    int length = range.keyLengths[number];
    KeyBlock decoded = new KeyBlock(block(start, length, Block.KEYS), length, range.rowsLsn, reader.name, start);
    if (decoded.rows != range.rows[number]) {
      throw new CorruptObjectException(reader.name, start, decoded.rows + " rows, " + range.rows[number] + " in the index");
    }
    return decoded;
  }

  private ColumnVector decodeColumn(int place, KeyBlock of) {
    int field = columns.fields()[place];
    if (field == ReadColumns.KEY) return of.vector(columns.types()[place].spark());
    if (field == ReadColumns.EXPIRES_AT) return of.expiryVector();
    if (range.types[place] == null || range.columnLengths[place][number] == 0) {
      return new Vectors.NullVector(columns.types()[place].spark());
    }
    long start = range.columnStarts[place][number];
    Block block = block(start, range.columnLengths[place][number], Block.COLUMN);
    ColumnSet set = new ColumnSet(block.data(), block.start(), block.length(), reader.name, start);
    if (set.rows != of.rows) throw set.damaged("column has " + set.rows + " rows, its keys " + of.rows);
    return Vectors.of(set, field, range.types[place], columns.types()[place]);
  }

  private Block block(long start, int length, int kind) {
    int part = current.part(start);
    Block block = Block.decode(current.data.get(part), (int) (start - current.starts.get(part)), length, kind, reader.name, start);
    decodedBytes += block.length();
    return block;
  }

  @Override
  public void close() throws IOException {
    if (next != null) next.cancel(true);
    reader.close();
  }

  private static Thread thread(Runnable task) {
    Thread thread = new Thread(task, "reef-prefetch-" + THREADS.incrementAndGet());
    thread.setDaemon(true);
    return thread;
  }

  /** Bytes of some pages, in parts that were fetched with one request each. */
  private static final class Read {
    final int end;
    final List<Long> starts = new ArrayList<>();
    final List<byte[]> data = new ArrayList<>();

    Read(int end) {
      this.end = end;
    }

    void add(long start, byte[] bytes) {
      starts.add(start);
      data.add(bytes);
    }

    int part(long offset) {
      int low = 0;
      for (int high = starts.size() - 1; low < high; ) {
        int middle = low + high + 1 >>> 1;
        if (starts.get(middle) <= offset) low = middle;
        else high = middle - 1;
      }
      return low;
    }
  }
}
