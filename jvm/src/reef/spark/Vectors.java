package reef.spark;

import java.math.BigDecimal;
import java.math.BigInteger;
import org.apache.spark.sql.types.DataType;
import org.apache.spark.sql.types.Decimal;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.sql.vectorized.ColumnVector;
import org.apache.spark.sql.vectorized.ColumnarArray;
import org.apache.spark.sql.vectorized.ColumnarMap;
import org.apache.spark.unsafe.Platform;
import org.apache.spark.unsafe.types.UTF8String;

/** Spark column vectors over the bytes of decoded blocks; nothing is copied before a value is asked for. */
final class Vectors {
  private Vectors() {}

  /** Returns a column of a block, stored as {@code stored} and shown to Spark as {@code table}. */
  static ColumnVector of(ColumnSet set, int number, ReefType stored, ReefType table) {
    return build(set, set.buffers(number), set.rows, stored, table);
  }

  private static ColumnVector build(ColumnSet set, ColumnSet.Buffers buffers, int rows, ReefType stored, ReefType table) {
    DataType type = table.spark();
    int validity = buffers.next((rows + 7L) / 8, true);
    switch (stored.kind()) {
      case STRING, BINARY: {
        int offsets = buffers.offsets(rows);
        if (offsets == ColumnSet.ABSENT) {
          int width = buffers.width(rows);
          return new BytesVector(type, set.data, validity, offsets, buffers.next((long) width * rows, false), width);
        }
        return new BytesVector(type, set.data, validity, offsets, buffers.next(end(set, offsets, rows), false), 0);
      }
      case LIST: {
        int offsets = buffers.offsets(rows);
        if (offsets == ColumnSet.ABSENT) throw set.damaged("the offsets of a list are absent");
        int count = end(set, offsets, rows);
        return new ListVector(type, set.data, validity, offsets, 0, build(set, buffers, count, stored.element(), table.element()));
      }
      case VECTOR: {
        long count = (long) rows * stored.size();
        if (count > Integer.MAX_VALUE) throw set.damaged(rows + " vectors of " + stored.size() + " values");
        return new ListVector(type, set.data, validity, 0, stored.size(), build(set, buffers, (int) count, stored.element(), table.element()));
      }
      case MAP: {
        int offsets = buffers.offsets(rows);
        if (offsets == ColumnSet.ABSENT) throw set.damaged("the offsets of a map are absent");
        int count = end(set, offsets, rows);
        buffers.next((count + 7L) / 8, true); // the validity of the pairs, none of which is null
        ColumnVector keys = part(set, buffers, count, stored, table, 0);
        return new MapVector(type, set.data, validity, offsets, keys, part(set, buffers, count, stored, table, 1));
      }
      case STRUCT: {
        ColumnVector[] children = new ColumnVector[stored.parts().size()];
        for (int i = 0; i < children.length; i++) children[i] = part(set, buffers, rows, stored, table, i);
        return new StructVector(type, set.data, validity, children);
      }
      case BOOL:
        return new BooleanVector(type, set.data, validity, buffers.next((rows + 7L) / 8, false));
      case DECIMAL:
        return new DecimalVector(type, set.data, validity, buffers.next(16L * rows, false), table);
      default:
        return new NumberVector(type, set.data, validity, buffers.next((long) rows * stored.bits() / 8, false), stored);
    }
  }

  private static ColumnVector part(ColumnSet set, ColumnSet.Buffers buffers, int rows, ReefType stored, ReefType table, int place) {
    return build(set, buffers, rows, stored.parts().get(place).type(), table.parts().get(place).type());
  }

  private static int end(ColumnSet set, int offsets, int rows) {
    return Platform.getInt(set.data, Platform.BYTE_ARRAY_OFFSET + offsets + 4L * rows);
  }

  /** Defaults: getters that a type does not have fail. */
  abstract static class Base extends ColumnVector {
    Base(DataType type) {
      super(type);
    }

    private UnsupportedOperationException unsupported() {
      return new UnsupportedOperationException(getClass().getSimpleName() + " of " + dataType());
    }

    @Override public void close() {}
    @Override public int numNulls() { return hasNull() ? 1 : 0; }
    @Override public boolean getBoolean(int row) { throw unsupported(); }
    @Override public byte getByte(int row) { throw unsupported(); }
    @Override public short getShort(int row) { throw unsupported(); }
    @Override public int getInt(int row) { throw unsupported(); }
    @Override public long getLong(int row) { throw unsupported(); }
    @Override public float getFloat(int row) { throw unsupported(); }
    @Override public double getDouble(int row) { throw unsupported(); }
    @Override public ColumnarArray getArray(int row) { throw unsupported(); }
    @Override public ColumnarMap getMap(int row) { throw unsupported(); }
    @Override public Decimal getDecimal(int row, int precision, int scale) { throw unsupported(); }
    @Override public UTF8String getUTF8String(int row) { throw unsupported(); }
    @Override public byte[] getBinary(int row) { throw unsupported(); }
    @Override public ColumnVector getChild(int ordinal) { throw unsupported(); }
  }

  /** A column whose validity is a bitmap in {@code data}. */
  abstract static class Stored extends Base {
    final byte[] data;
    private final int validity;

    Stored(DataType type, byte[] data, int validity) {
      super(type);
      this.data = data;
      this.validity = validity;
    }

    @Override public boolean hasNull() { return validity != ColumnSet.ABSENT; }

    @Override
    public boolean isNullAt(int row) {
      return validity != ColumnSet.ABSENT && (data[validity + (row >> 3)] >> (row & 7) & 1) == 0;
    }
  }

  /** A column that a segment was written without. */
  static final class NullVector extends Base {
    NullVector(DataType type) {
      super(type);
    }

    @Override public boolean hasNull() { return true; }
    @Override public boolean isNullAt(int row) { return true; }
    @Override public ColumnVector getChild(int ordinal) { return new NullVector(((StructType) dataType()).fields()[ordinal].dataType()); }
  }

  /** Texts or bytes by offsets, or of one width. */
  static final class BytesVector extends Stored {
    private final long offsets;
    private final int start;
    private final int width;

    BytesVector(DataType type, byte[] data, int validity, int offsets, int start, int width) {
      super(type, data, validity);
      this.offsets = Platform.BYTE_ARRAY_OFFSET + offsets;
      this.start = start;
      this.width = width;
    }

    private int from(int row) {
      return width > 0 ? row * width : Platform.getInt(data, offsets + 4L * row);
    }

    private int length(int row, int from) {
      return width > 0 ? width : Platform.getInt(data, offsets + 4L * row + 4) - from;
    }

    @Override
    public byte[] getBinary(int row) {
      int from = from(row);
      byte[] value = new byte[length(row, from)];
      System.arraycopy(data, start + from, value, 0, value.length);
      return value;
    }

    @Override
    public UTF8String getUTF8String(int row) {
      int from = from(row);
      return UTF8String.fromBytes(data, start + from, length(row, from));
    }
  }

  /** Lists by offsets, or vectors of a fixed size. */
  private static final class ListVector extends Stored {
    private final long offsets;
    private final int size;
    private final ColumnVector child;

    ListVector(DataType type, byte[] data, int validity, int offsets, int size, ColumnVector child) {
      super(type, data, validity);
      this.offsets = Platform.BYTE_ARRAY_OFFSET + offsets;
      this.size = size;
      this.child = child;
    }

    @Override
    public ColumnarArray getArray(int row) {
      if (size > 0) return new ColumnarArray(child, row * size, size);
      int from = Platform.getInt(data, offsets + 4L * row);
      return new ColumnarArray(child, from, Platform.getInt(data, offsets + 4L * row + 4) - from);
    }

    @Override public ColumnVector getChild(int ordinal) { return child; }
  }

  /** Maps by offsets into their keys and items. */
  private static final class MapVector extends Stored {
    private final long offsets;
    private final ColumnVector keys;
    private final ColumnVector items;

    MapVector(DataType type, byte[] data, int validity, int offsets, ColumnVector keys, ColumnVector items) {
      super(type, data, validity);
      this.offsets = Platform.BYTE_ARRAY_OFFSET + offsets;
      this.keys = keys;
      this.items = items;
    }

    @Override
    public ColumnarMap getMap(int row) {
      int from = Platform.getInt(data, offsets + 4L * row);
      return new ColumnarMap(keys, items, from, Platform.getInt(data, offsets + 4L * row + 4) - from);
    }
  }

  private static final class StructVector extends Stored {
    private final ColumnVector[] children;

    StructVector(DataType type, byte[] data, int validity, ColumnVector[] children) {
      super(type, data, validity);
      this.children = children;
    }

    @Override public ColumnVector getChild(int ordinal) { return children[ordinal]; }
  }

  private static final class BooleanVector extends Stored {
    private final int start;

    BooleanVector(DataType type, byte[] data, int validity, int start) {
      super(type, data, validity);
      this.start = start;
    }

    @Override
    public boolean getBoolean(int row) {
      return (data[start + (row >> 3)] >> (row & 7) & 1) != 0;
    }
  }

  /** Integers, floats, dates and timestamps, widened from the type they were stored with. */
  private static final class NumberVector extends Stored {
    private final long start;
    private final ReefType stored;

    NumberVector(DataType type, byte[] data, int validity, int start, ReefType stored) {
      super(type, data, validity);
      this.start = Platform.BYTE_ARRAY_OFFSET + start;
      this.stored = stored;
    }

    private long integer(int row) {
      boolean unsigned = stored.kind() == ReefType.Kind.UINT;
      switch (stored.bits()) {
        case 8: {
          byte value = Platform.getByte(data, start + row);
          return unsigned ? value & 0xff : value;
        }
        case 16: {
          short value = Platform.getShort(data, start + 2L * row);
          return unsigned ? value & 0xffff : value;
        }
        case 32: {
          int value = Platform.getInt(data, start + 4L * row);
          return unsigned ? value & 0xffffffffL : value;
        }
        default:
          return Platform.getLong(data, start + 8L * row);
      }
    }

    @Override public byte getByte(int row) { return (byte) integer(row); }
    @Override public short getShort(int row) { return (short) integer(row); }
    @Override public int getInt(int row) { return (int) integer(row); }

    @Override
    public long getLong(int row) {
      long value = integer(row);
      return switch (stored.kind()) {
        case SECONDS -> Math.multiplyExact(value, 1_000_000L);
        case MILLIS -> Math.multiplyExact(value, 1_000L);
        case NANOS -> Math.floorDiv(value, 1_000L);
        case CLOCK -> clock(value); // Spark counts nanoseconds, and shows microseconds
        default -> value;
      };
    }

    private long clock(long value) {
      return switch (stored.scale()) {
        case 9 -> value * 1_000_000_000L;
        case 6 -> value * 1_000_000L;
        case 3 -> value * 1_000L;
        default -> value - value % 1_000L;
      };
    }

    @Override
    public float getFloat(int row) {
      return stored.kind() == ReefType.Kind.FLOAT ? Platform.getFloat(data, start + 4L * row) : integer(row);
    }

    @Override
    public double getDouble(int row) {
      if (stored.kind() != ReefType.Kind.FLOAT) return integer(row);
      return stored.bits() == 32 ? Platform.getFloat(data, start + 4L * row) : Platform.getDouble(data, start + 8L * row);
    }

    @Override
    public Decimal getDecimal(int row, int precision, int scale) {
      long value = integer(row);
      if (value >= 0 || stored.bits() < 64) return Decimal.apply(new BigDecimal(value), precision, scale);
      return Decimal.apply(new BigDecimal(new BigInteger(Long.toUnsignedString(value))), precision, scale);
    }
  }

  /** Decimals of 16 bytes, little-endian. */
  private static final class DecimalVector extends Stored {
    private final int start;
    private final ReefType table;

    DecimalVector(DataType type, byte[] data, int validity, int start, ReefType table) {
      super(type, data, validity);
      this.start = start;
      this.table = table;
    }

    @Override
    public Decimal getDecimal(int row, int precision, int scale) {
      long base = Platform.BYTE_ARRAY_OFFSET + start + 16L * row;
      long low = Platform.getLong(data, base);
      long high = Platform.getLong(data, base + 8);
      if (precision <= Decimal.MAX_LONG_DIGITS() && high == low >> 63) return Decimal.createUnsafe(low, precision, scale);
      byte[] reversed = new byte[16];
      for (int i = 0; i < 16; i++) reversed[i] = data[start + 16 * row + 15 - i];
      return Decimal.apply(new BigDecimal(new BigInteger(reversed), table.scale()), precision, scale);
    }
  }

  /** Rows of several vectors of one column, in any order: what a merge has picked. */
  static final class GatherVector extends Base {
    private final ColumnVector[] vectors;
    private final int[] sources;
    private final int[] rows;

    GatherVector(DataType type, ColumnVector[] vectors, int[] sources, int[] rows) {
      super(type);
      this.vectors = vectors;
      this.sources = sources;
      this.rows = rows;
    }

    @Override public boolean hasNull() { return true; }
    @Override public boolean isNullAt(int row) { return vectors[sources[row]].isNullAt(rows[row]); }
    @Override public boolean getBoolean(int row) { return vectors[sources[row]].getBoolean(rows[row]); }
    @Override public byte getByte(int row) { return vectors[sources[row]].getByte(rows[row]); }
    @Override public short getShort(int row) { return vectors[sources[row]].getShort(rows[row]); }
    @Override public int getInt(int row) { return vectors[sources[row]].getInt(rows[row]); }
    @Override public long getLong(int row) { return vectors[sources[row]].getLong(rows[row]); }
    @Override public float getFloat(int row) { return vectors[sources[row]].getFloat(rows[row]); }
    @Override public double getDouble(int row) { return vectors[sources[row]].getDouble(rows[row]); }
    @Override public ColumnarArray getArray(int row) { return vectors[sources[row]].getArray(rows[row]); }
    @Override public ColumnarMap getMap(int row) { return vectors[sources[row]].getMap(rows[row]); }
    @Override public UTF8String getUTF8String(int row) { return vectors[sources[row]].getUTF8String(rows[row]); }
    @Override public byte[] getBinary(int row) { return vectors[sources[row]].getBinary(rows[row]); }

    @Override
    public Decimal getDecimal(int row, int precision, int scale) {
      return vectors[sources[row]].getDecimal(rows[row], precision, scale);
    }

    /** Returns a field of structs: the same rows of the same field of each vector. */
    @Override
    public ColumnVector getChild(int ordinal) {
      ColumnVector[] children = new ColumnVector[vectors.length];
      for (int i = 0; i < children.length; i++) {
        if (vectors[i] != null) children[i] = vectors[i].getChild(ordinal);
      }
      return new GatherVector(((StructType) dataType()).fields()[ordinal].dataType(), children, sources, rows);
    }
  }
}
