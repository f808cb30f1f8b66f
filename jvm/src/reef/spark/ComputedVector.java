package reef.spark;

import java.math.BigDecimal;
import java.math.BigInteger;
import java.util.ArrayList;
import java.util.List;
import org.apache.spark.sql.types.ArrayType;
import org.apache.spark.sql.types.Decimal;
import org.apache.spark.sql.vectorized.ColumnarArray;
import org.apache.spark.unsafe.types.UTF8String;

/** Values that merges have computed, in the form of {@link Operators}. */
final class ComputedVector extends Vectors.Base {
  private final ReefType type;
  private final List<Object> values = new ArrayList<>();
  private final List<Integer> starts = new ArrayList<>();
  private final ComputedVector elements;

  ComputedVector(ReefType type) {
    super(type.spark());
    this.type = type;
    elements = type.spark() instanceof ArrayType ? new ComputedVector(type.element()) : null;
  }

  /** Appends a value; returns its place. */
  int add(Object value) {
    if (elements != null) {
      starts.add(elements.values.size());
      for (Object item : (Object[]) value) elements.add(item);
    }
    values.add(value);
    return values.size() - 1;
  }

  Object value(int row) {
    return values.get(row);
  }

  private long integer(int row) {
    return (Long) values.get(row);
  }

  @Override public boolean hasNull() { return true; }
  @Override public boolean isNullAt(int row) { return values.get(row) == null; }
  @Override public boolean getBoolean(int row) { return (Boolean) values.get(row); }
  @Override public byte getByte(int row) { return (byte) integer(row); }
  @Override public short getShort(int row) { return (short) integer(row); }
  @Override public int getInt(int row) { return (int) integer(row); }
  @Override public long getLong(int row) { return integer(row); }
  @Override public float getFloat(int row) { return (float) getDouble(row); }
  @Override public double getDouble(int row) { return (Double) values.get(row); }
  @Override public UTF8String getUTF8String(int row) { return (UTF8String) values.get(row); }
  @Override public byte[] getBinary(int row) { return (byte[]) values.get(row); }

  @Override
  public ColumnarArray getArray(int row) {
    return new ColumnarArray(elements, starts.get(row), ((Object[]) values.get(row)).length);
  }

  @Override
  public Decimal getDecimal(int row, int precision, int scale) {
    if (type.kind() == ReefType.Kind.DECIMAL) return (Decimal) values.get(row);
    return Decimal.apply(new BigDecimal(new BigInteger(Long.toUnsignedString(integer(row)))), precision, scale);
  }
}
