package reef.spark;

import java.util.ArrayList;
import java.util.Arrays;
import java.util.Comparator;
import java.util.List;
import org.apache.spark.sql.catalyst.InternalRow;
import org.apache.spark.sql.catalyst.expressions.GenericInternalRow;
import org.apache.spark.sql.connector.expressions.Expression;
import org.apache.spark.sql.connector.expressions.NamedReference;
import org.apache.spark.sql.connector.expressions.aggregate.AggregateFunc;
import org.apache.spark.sql.connector.expressions.aggregate.Aggregation;
import org.apache.spark.sql.connector.expressions.aggregate.Count;
import org.apache.spark.sql.connector.expressions.aggregate.CountStar;
import org.apache.spark.sql.connector.expressions.aggregate.Max;
import org.apache.spark.sql.connector.expressions.aggregate.Min;
import org.apache.spark.sql.connector.read.LocalScan;
import org.apache.spark.sql.types.DataType;
import org.apache.spark.sql.types.DataTypes;
import org.apache.spark.sql.types.StringType;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.unsafe.types.UTF8String;

/**
 * {@code count(*)} and {@code min} and {@code max} of the key from metadata. They are exact if every row of every segment
 * is visible: no segment overlaps another, and none has deletes, patches, rows that expire, or two versions of a key.
 */
final class ExactAggregates implements LocalScan {
  private final StructType schema;
  private final InternalRow row;
  private final String description;

  private ExactAggregates(StructType schema, Object[] values, String description) {
    this.schema = schema;
    this.description = description;
    row = new GenericInternalRow(values);
  }

  @Override public InternalRow[] rows() { return new InternalRow[] {row}; }
  @Override public StructType readSchema() { return schema; }
  @Override public String description() { return description; }

  /** Returns the scan with the result; null if metadata does not have it. */
  static ExactAggregates of(Aggregation aggregation, ReadPlan plan, String table) {
    if (aggregation.groupByExpressions().length > 0) return null;
    AggregateFunc[] functions = aggregation.aggregateExpressions();
    for (AggregateFunc function : functions) if (!isKnown(function, plan.schema.key.name())) return null;
    if (!isExact(plan)) return null;
    StructType schema = new StructType();
    Object[] values = new Object[functions.length];
    DataType keyType = plan.schema.key.type().spark();
    for (int i = 0; i < functions.length; i++) {
      boolean isCount = functions[i] instanceof CountStar || functions[i] instanceof Count;
      schema = schema.add(functions[i].describe(), isCount ? DataTypes.LongType : keyType);
      values[i] = isCount ? (Object) count(plan) : bound(plan, functions[i] instanceof Min, keyType);
    }
    return new ExactAggregates(schema, values, "Reef " + table + " (native), from metadata: " + Arrays.toString(functions));
  }

  private static boolean isKnown(AggregateFunc function, String key) {
    if (function instanceof CountStar) return true;
    if (function instanceof Count count) return !count.isDistinct() && isKey(count.column(), key);
    return function instanceof Min min && isKey(min.column(), key) || function instanceof Max max && isKey(max.column(), key);
  }

  private static boolean isKey(Expression expression, String key) {
    return expression instanceof NamedReference column && Arrays.equals(column.fieldNames(), new String[] {key});
  }

  private static boolean isExact(ReadPlan plan) {
    List<ReadPlan.Segment> sorted = new ArrayList<>(plan.segments);
    sorted.sort(Comparator.comparing(ReadPlan.Segment::minKey, Arrays::compareUnsigned));
    for (int i = 0; i < sorted.size(); i++) {
      ReadPlan.Segment segment = sorted.get(i);
      if (segment.tombstones() > 0 || segment.patches() > 0) return false;
      if (i > 0 && Arrays.compareUnsigned(sorted.get(i - 1).maxKey(), segment.minKey()) >= 0) return false;
    }
    sorted.parallelStream().forEach(plan::tail);
    return sorted.stream().allMatch(segment -> plan.tail(segment).areAllRowsVisible());
  }

  private static long count(ReadPlan plan) {
    return plan.segments.stream().mapToLong(ReadPlan.Segment::rows).sum();
  }

  private static Object bound(ReadPlan plan, boolean isLowest, DataType type) {
    byte[] found = null;
    for (ReadPlan.Segment segment : plan.segments) {
      if (segment.rows() == 0) continue;
      byte[] key = isLowest ? segment.minKey() : segment.maxKey();
      if (found == null || (Arrays.compareUnsigned(key, found) < 0) == isLowest) found = key;
    }
    return found == null || !(type instanceof StringType) ? found : UTF8String.fromBytes(found);
  }
}
