package reef.spark;

import org.apache.spark.sql.vectorized.ColumnVector;

/** A decoded page: its keys, and the columns of the scan in their order. */
final class Page {
  final KeyBlock keys;
  final ColumnVector[] vectors;
  /** Whether every row is a put of its own key that never expires: rows can be taken without examining them. */
  final boolean isPlain;
  final long bytes;
  /** Where the page is in the batch that is being filled; maintained by {@link RowBatch}. */
  int slot;
  long batch;

  Page(KeyBlock keys, ColumnVector[] vectors, boolean isDistinct, long bytes) {
    this.keys = keys;
    this.vectors = vectors;
    this.bytes = bytes;
    isPlain = keys.plain() && (isDistinct || keys.areDistinct());
  }

  int rows() {
    return keys.rows;
  }
}
