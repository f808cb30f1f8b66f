package reef.spark;

import java.util.Arrays;
import java.util.Comparator;
import java.util.TreeSet;
import org.apache.spark.sql.catalyst.expressions.SpecializedGetters;
import org.apache.spark.sql.types.Decimal;
import org.apache.spark.sql.vectorized.ColumnVector;
import org.apache.spark.sql.vectorized.ColumnarArray;
import org.apache.spark.unsafe.types.UTF8String;

/**
 * Operators of merges, with the results of reef.engine.read.operands: integers wrap around, floats are ordered with
 * -0.0 below 0.0 and NaN above all, and a union has the distinct elements in order, without nulls.
 */
final class Operators {
  static final int NONE = 0;
  static final int SET = 1;
  static final int ADD = 2;
  static final int MAX = 3;
  static final int MIN = 4;
  static final int UNION = 5;

  private Operators() {}

  /** Applies an operand to a value; null takes the operand. */
  static Object apply(int operator, ReefType type, Object value, Object operand) {
    if (operand == null) return value;
    if (operator == UNION) return union(type.element(), value, operand);
    if (value == null) return operand;
    switch (operator) {
      case ADD:
        if (type.kind() == ReefType.Kind.FLOAT) return (Double) value + (Double) operand;
        return (Long) value + (Long) operand;
      case MAX:
        return order(type).compare(operand, value) > 0 ? operand : value;
      case MIN:
        return order(type).compare(operand, value) < 0 ? operand : value;
      default:
        throw new IllegalStateException("merge operator " + operator);
    }
  }

  private static Object[] union(ReefType element, Object value, Object operand) {
    TreeSet<Object> distinct = new TreeSet<>(order(element));
    for (Object list : new Object[] {value, operand}) {
      if (list == null) continue;
      for (Object item : (Object[]) list) if (item != null) distinct.add(item);
    }
    return distinct.toArray();
  }

  private static Comparator<Object> order(ReefType type) {
    return switch (type.kind()) {
      case BOOL -> (a, b) -> Boolean.compare((Boolean) a, (Boolean) b);
      case UINT -> (a, b) -> Long.compareUnsigned((Long) a, (Long) b);
      case FLOAT -> (a, b) -> Double.compare((Double) a, (Double) b);
      case STRING -> (a, b) -> Arrays.compareUnsigned(((UTF8String) a).getBytes(), ((UTF8String) b).getBytes());
      case BINARY -> (a, b) -> Arrays.compareUnsigned((byte[]) a, (byte[]) b);
      case DECIMAL -> (a, b) -> ((Decimal) a).compare((Decimal) b);
      case LIST, VECTOR -> throw new IllegalStateException("lists have no order");
      default -> (a, b) -> Long.compare((Long) a, (Long) b);
    };
  }

  /** Returns a value of a column: a number as Long or Double, a list as Object[]. */
  static Object value(ColumnVector vector, int row, ReefType type) {
    return vector.isNullAt(row) ? null : value(new ColumnarArray(vector, row, 1), 0, type);
  }

  private static Object value(SpecializedGetters from, int at, ReefType type) {
    if (from.isNullAt(at)) return null;
    return switch (type.kind()) {
      case BOOL -> from.getBoolean(at);
      case FLOAT -> type.bits() == 32 ? (double) from.getFloat(at) : from.getDouble(at);
      case STRING -> from.getUTF8String(at);
      case BINARY -> from.getBinary(at);
      case DECIMAL -> from.getDecimal(at, type.precision(), type.scale());
      case LIST, VECTOR -> list(from, at, type.element());
      default -> from.getLong(at);
    };
  }

  private static Object[] list(SpecializedGetters from, int at, ReefType element) {
    var array = from.getArray(at);
    Object[] items = new Object[array.numElements()];
    for (int i = 0; i < items.length; i++) items[i] = value(array, i, element);
    return items;
  }
}
