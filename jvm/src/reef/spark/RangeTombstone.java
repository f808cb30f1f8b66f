package reef.spark;

import java.io.Serializable;
import java.util.ArrayList;
import java.util.List;
import org.apache.spark.sql.vectorized.ColumnVector;
import org.apache.spark.unsafe.Platform;

/** Deletes every version of the keys in [start, end) that is older than (lsn, seq). */
record RangeTombstone(byte[] start, byte[] end, long lsn, long seq) implements Serializable {
  private static final ReefType BINARY = ReefType.parse("binary");

  static List<RangeTombstone> decode(Block block, String object, long offset) {
    ColumnSet columns = new ColumnSet(block.data(), block.start(), block.length(), object, offset);
    ColumnVector starts = Vectors.of(columns, 0, BINARY, BINARY);
    ColumnVector ends = Vectors.of(columns, 1, BINARY, BINARY);
    long lsns = Platform.BYTE_ARRAY_OFFSET + columns.numbers(2, 8);
    long seqs = Platform.BYTE_ARRAY_OFFSET + columns.numbers(3, 4);
    List<RangeTombstone> tombstones = new ArrayList<>();
    for (int row = 0; row < columns.rows; row++) {
      long seq = Platform.getInt(columns.data, seqs + 4L * row) & 0xffffffffL;
      tombstones.add(new RangeTombstone(starts.getBinary(row), ends.getBinary(row), Platform.getLong(columns.data, lsns + 8L * row), seq));
    }
    return tombstones;
  }

  RangeTombstone at(long rowsLsn) {
    return rowsLsn == 0 ? this : new RangeTombstone(start, end, rowsLsn, seq);
  }
}
