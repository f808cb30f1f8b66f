package reef.spark;

import java.util.Arrays;
import org.apache.spark.sql.types.DataType;
import org.apache.spark.sql.types.Decimal;
import org.apache.spark.sql.types.StructField;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.sql.vectorized.ColumnVector;
import org.apache.spark.sql.vectorized.ColumnarArray;
import org.apache.spark.sql.vectorized.ColumnarMap;
import org.apache.spark.unsafe.types.UTF8String;

/**
 * One column of a {@link RowBatch}. Spark reads rows in order, so the run of the last row is kept, and most accesses
 * cost two comparisons; any other order works too.
 */
final class RunVector extends Vectors.Base {
  private final RowBatch batch;
  private final int column;
  private final int[] path;
  private final RunVector[] children;
  private boolean hasNull;
  private ColumnVector current;
  private int run;
  private int start;
  private int end;
  private int shift;

  RunVector(DataType type, RowBatch batch, int column) {
    this(type, batch, column, new int[0]);
  }

  /** A field of a column of structs; the path has the places of the fields from the outermost struct inwards. */
  private RunVector(DataType type, RowBatch batch, int column, int[] path) {
    super(type);
    this.batch = batch;
    this.column = column;
    this.path = path;
    StructField[] fields = type instanceof StructType struct ? struct.fields() : new StructField[0];
    children = new RunVector[fields.length];
    for (int i = 0; i < fields.length; i++) {
      int[] inner = Arrays.copyOf(path, path.length + 1);
      inner[path.length] = i;
      children[i] = new RunVector(fields[i].dataType(), batch, column, inner);
    }
  }

  void rewind() {
    hasNull = path.length > 0 || batch.hasNull(column);
    run = -1;
    start = 0;
    end = 0;
    for (RunVector child : children) child.rewind();
  }

  private int at(int row) {
    if (row < start || row >= end) seek(row);
    return row - shift;
  }

  private void seek(int row) {
    if (row < start) run = -1;
    do {
      start = ++run == 0 ? 0 : batch.runEnds[run - 1];
      end = batch.runEnds[run];
    } while (row >= end);
    shift = start - batch.runFirsts[run];
    current = batch.vector(run, column);
    for (int place : path) current = current.getChild(place);
  }

  @Override public boolean hasNull() { return hasNull; }

  @Override
  public boolean isNullAt(int row) {
    if (!hasNull) return false;
    int at = at(row);
    return current.isNullAt(at);
  }

  @Override
  public boolean getBoolean(int row) {
    int at = at(row);
    return current.getBoolean(at);
  }

  @Override
  public byte getByte(int row) {
    int at = at(row);
    return current.getByte(at);
  }

  @Override
  public short getShort(int row) {
    int at = at(row);
    return current.getShort(at);
  }

  @Override
  public int getInt(int row) {
    int at = at(row);
    return current.getInt(at);
  }

  @Override
  public long getLong(int row) {
    int at = at(row);
    return current.getLong(at);
  }

  @Override
  public float getFloat(int row) {
    int at = at(row);
    return current.getFloat(at);
  }

  @Override
  public double getDouble(int row) {
    int at = at(row);
    return current.getDouble(at);
  }

  @Override
  public ColumnarArray getArray(int row) {
    int at = at(row);
    return current.getArray(at);
  }

  @Override
  public ColumnarMap getMap(int row) {
    int at = at(row);
    return current.getMap(at);
  }

  @Override public ColumnVector getChild(int ordinal) { return children[ordinal]; }

  @Override
  public UTF8String getUTF8String(int row) {
    int at = at(row);
    return current.getUTF8String(at);
  }

  @Override
  public byte[] getBinary(int row) {
    int at = at(row);
    return current.getBinary(at);
  }

  @Override
  public Decimal getDecimal(int row, int precision, int scale) {
    int at = at(row);
    return current.getDecimal(at, precision, scale);
  }
}
