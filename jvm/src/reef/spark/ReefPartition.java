package reef.spark;

import java.util.List;
import org.apache.spark.sql.catalyst.InternalRow;
import org.apache.spark.sql.catalyst.expressions.GenericInternalRow;
import org.apache.spark.sql.connector.read.HasPartitionKey;

/** One task of a scan: a key range with its value, and the pages of every segment that overlap it. */
record ReefPartition(byte[] start, byte[] end, Object value, List<PageRange> sources, List<RangeTombstone> tombstones)
    implements HasPartitionKey {
  @Override
  public InternalRow partitionKey() {
    return new GenericInternalRow(new Object[] {value});
  }
}
