package reef.spark;

import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import org.apache.spark.sql.vectorized.ColumnVector;
import org.apache.spark.sql.vectorized.ColumnarBatch;

/**
 * The rows of one batch: runs of consecutive rows of pages. The bytes of the pages stay where they are. A batch is
 * valid until the next one is begun, as Spark's own readers have it.
 */
final class RowBatch {
  private static final int ROWS = 4096;
  /** Pages of large values end a batch early. */
  private static final long BYTES = 4 << 20;

  private final ReadColumns columns;
  private final RunVector[] vectors;
  private final List<Patch> patches = new ArrayList<>();
  private final ComputedVector[] computed;
  private Page[] pages = new Page[64];
  private int pageCount;
  private long number;
  private int rows;
  private long bytes;

  int runs;
  final int[] runPages = new int[ROWS];
  final int[] runFirsts = new int[ROWS];
  final int[] runEnds = new int[ROWS];

  /** In place of a page: the value is one that merges have computed. */
  private static final int COMPUTED = -1;

  /** Column {@code column} of a row comes from another page. */
  private record Patch(int row, int column, int page, int place) {}

  RowBatch(ReadColumns columns) {
    this.columns = columns;
    vectors = new RunVector[columns.size()];
    computed = new ComputedVector[columns.size()];
    for (int column = 0; column < vectors.length; column++) vectors[column] = new RunVector(columns.types()[column].spark(), this, column);
  }

  void begin() {
    number++;
    Arrays.fill(pages, 0, pageCount, null);
    patches.clear();
    Arrays.fill(computed, null);
    pageCount = 0;
    runs = 0;
    rows = 0;
    bytes = 0;
  }

  int rows() {
    return rows;
  }

  boolean isFull() {
    return rows >= ROWS || bytes >= BYTES;
  }

  ColumnVector vector(int run, int column) {
    return pages[runPages[run]].vectors[column];
  }

  boolean hasNull(int column) {
    for (int page = 0; page < pageCount; page++) if (pages[page].vectors[column].hasNull()) return true;
    return false;
  }

  /** Appends rows [first, first + count) of a page. */
  void append(Page page, int first, int count) {
    int slot = slot(page);
    if (runs > 0 && runPages[runs - 1] == slot && endOfLastRun() == first) {
      runEnds[runs - 1] += count;
    } else {
      runPages[runs] = slot;
      runFirsts[runs] = first;
      runEnds[runs++] = rows + count;
    }
    rows += count;
  }

  private int endOfLastRun() {
    int start = runs == 1 ? 0 : runEnds[runs - 2];
    return runFirsts[runs - 1] + runEnds[runs - 1] - start;
  }

  private int slot(Page page) {
    if (page.batch == number) return page.slot;
    if (pageCount == pages.length) pages = Arrays.copyOf(pages, 2 * pageCount);
    page.batch = number;
    page.slot = pageCount;
    bytes += page.bytes;
    pages[pageCount] = page;
    return pageCount++;
  }

  /** Changes the columns of the last row as a patch or merge does; a merge also decides when the row expires. */
  void change(Page page, int place) {
    for (int column = 0; column < vectors.length; column++) {
      int field = columns.fields()[column];
      int operator = field > ReadColumns.KEY ? page.keys.operator(field, place) : Operators.NONE;
      if (field == ReadColumns.EXPIRES_AT && page.keys.kind(place) == KeyBlock.MERGE) operator = Operators.SET;
      if (operator == Operators.SET) patches.add(new Patch(rows - 1, column, slot(page), place));
      else if (operator != Operators.NONE) compute(operator, column, page.vectors[column], place);
    }
  }

  private void compute(int operator, int column, ColumnVector operands, int place) {
    ReefType type = columns.types()[column];
    Object value = Operators.apply(operator, type, current(column), Operators.value(operands, place, type));
    if (value == null) return;
    if (computed[column] == null) computed[column] = new ComputedVector(type);
    patches.add(new Patch(rows - 1, column, COMPUTED, computed[column].add(value)));
  }

  /** The value of a column in the last row, after all changes so far. */
  private Object current(int column) {
    for (int i = patches.size() - 1; i >= 0 && patches.get(i).row == rows - 1; i--) {
      Patch patch = patches.get(i);
      if (patch.column != column) continue;
      if (patch.page == COMPUTED) return computed[column].value(patch.place);
      return Operators.value(pages[patch.page].vectors[column], patch.place, columns.types()[column]);
    }
    return Operators.value(vector(runs - 1, column), endOfLastRun() - 1, columns.types()[column]);
  }

  ColumnarBatch build(long rowsMax) {
    ColumnVector[] built = new ColumnVector[vectors.length];
    for (int column = 0; column < built.length; column++) {
      vectors[column].rewind();
      built[column] = vectors[column];
    }
    boolean[] patched = new boolean[built.length];
    for (Patch patch : patches) patched[patch.column] = true;
    for (int column = 0; column < built.length; column++) if (patched[column]) built[column] = gathered(column);
    return new ColumnarBatch(built, (int) Math.min(rows, rowsMax));
  }

  /** A column that patches or merges have changed has a page and a place for each row. */
  private ColumnVector gathered(int column) {
    ColumnVector[] sources = new ColumnVector[pageCount + 1];
    sources[pageCount] = computed[column];
    for (int page = 0; page < pageCount; page++) sources[page] = pages[page].vectors[column];
    int[] from = new int[rows];
    int[] places = new int[rows];
    for (int run = 0, row = 0; run < runs; run++) {
      for (int place = runFirsts[run]; row < runEnds[run]; row++, place++) {
        from[row] = runPages[run];
        places[row] = place;
      }
    }
    for (Patch patch : patches) {
      if (patch.column != column) continue;
      from[patch.row] = patch.page == COMPUTED ? pageCount : patch.page;
      places[patch.row] = patch.place;
    }
    return new Vectors.GatherVector(columns.types()[column].spark(), sources, from, places);
  }
}
