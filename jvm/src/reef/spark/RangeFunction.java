package reef.spark;

import java.io.Serializable;
import java.util.Arrays;
import java.util.Collections;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import org.apache.spark.sql.catalyst.InternalRow;
import org.apache.spark.sql.connector.catalog.functions.BoundFunction;
import org.apache.spark.sql.connector.catalog.functions.ScalarFunction;
import org.apache.spark.sql.connector.catalog.functions.UnboundFunction;
import org.apache.spark.sql.types.DataType;
import org.apache.spark.sql.types.StringType;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.unsafe.types.UTF8String;

/**
 * Maps a key to the lower bound of the key range that it is in. Scans report it as their partitioning, so that Spark
 * groups and joins by key without a shuffle. Its name is made from the cuts: two scans are partitioned alike if and only
 * if they report the same function, whatever their tables are.
 */
record RangeFunction(String name, byte[][] cuts, DataType type) implements ScalarFunction<Object>, UnboundFunction, Serializable {
  static final String PREFIX = "reef_range_";
  private static final int KNOWN_MAX = 1000;
  private static final Map<String, RangeFunction> KNOWN =
      Collections.synchronizedMap(
          new LinkedHashMap<>(16, 0.75f, true) {
            @Override
            protected boolean removeEldestEntry(Map.Entry<String, RangeFunction> eldest) {
              return size() > KNOWN_MAX;
            }
          });

  /** Registers the function of some cuts; the catalog finds it by its name. */
  static RangeFunction of(List<byte[]> cuts, DataType type) {
    String name = PREFIX + type.typeName() + "_" + digest(cuts);
    RangeFunction function = new RangeFunction(name, cuts.toArray(new byte[0][]), type);
    KNOWN.put(name, function);
    return function;
  }

  static RangeFunction find(String name) {
    return KNOWN.get(name);
  }

  private static String digest(List<byte[]> cuts) {
    try {
      var digest = java.security.MessageDigest.getInstance("SHA-256");
      for (byte[] cut : cuts) {
        digest.update((cut.length + ":").getBytes(java.nio.charset.StandardCharsets.US_ASCII));
        digest.update(cut);
      }
      return java.util.HexFormat.of().formatHex(digest.digest(), 0, 16);
    } catch (java.security.NoSuchAlgorithmException error) {
      throw new IllegalStateException(error);
    }
  }

  /** The partition's value: the lower bound of its range. */
  Object value(byte[] start) {
    return type instanceof StringType ? UTF8String.fromBytes(start) : start;
  }

  @Override
  public Object produceResult(InternalRow input) {
    byte[] key = type instanceof StringType ? input.getUTF8String(0).getBytes() : input.getBinary(0);
    int found = Arrays.binarySearch(cuts, key, Arrays::compareUnsigned);
    int range = found >= 0 ? found : -found - 2;
    return value(range < 0 ? new byte[0] : cuts[range]);
  }

  @Override public BoundFunction bind(StructType input) { return this; }
  @Override public String description() { return name + ": key ranges of a Reef scan"; }
  @Override public DataType[] inputTypes() { return new DataType[] {type}; }
  @Override public DataType resultType() { return type; }
  @Override public boolean isResultNullable() { return false; }
  @Override public String canonicalName() { return "reef." + name; }
  @Override public boolean equals(Object other) { return other instanceof RangeFunction function && function.name.equals(name); }
  @Override public int hashCode() { return name.hashCode(); }
}
