package reef.spark;

import java.util.Arrays;
import java.util.IdentityHashMap;
import java.util.Map;
import java.util.Objects;
import java.util.Optional;
import org.apache.spark.sql.connector.expressions.Expression;
import org.apache.spark.sql.connector.expressions.Literal;
import org.apache.spark.sql.connector.expressions.NamedReference;
import org.apache.spark.sql.connector.expressions.filter.And;
import org.apache.spark.sql.connector.expressions.filter.Or;
import org.apache.spark.sql.connector.expressions.filter.Predicate;
import org.apache.spark.sql.types.BinaryType;
import org.apache.spark.sql.types.DataType;
import org.apache.spark.sql.types.Decimal;
import org.apache.spark.sql.types.DecimalType;
import org.apache.spark.sql.types.DoubleType;
import org.apache.spark.sql.types.FloatType;
import org.apache.spark.sql.types.StringType;
import org.apache.spark.sql.vectorized.ColumnVector;
import org.apache.spark.unsafe.types.UTF8String;

/**
 * Decides from key bounds and column bounds whether a page can have rows that match a predicate. Anything that it does
 * not understand may match: Spark evaluates every predicate again.
 */
final class Pruner {
  private final ReefSchema schema;
  private final Map<Predicate, Optional<byte[][]>> keyLists = new IdentityHashMap<>();
  /** For the tail that was asked about last: by predicate and group, and keys by list. */
  private final Map<Predicate, Boolean[]> groupMatches = new IdentityHashMap<>();
  private final Map<Predicate, byte[][]> listedKeys = new IdentityHashMap<>();
  private SegmentTail knownOf;
  private final Map<Predicate, Optional<ReefSchema.Field>> understoodFields = new IdentityHashMap<>();

  Pruner(ReefSchema schema) {
    this.schema = schema;
  }

  /** Whether this predicate can exclude pages at all. */
  boolean understands(Predicate predicate) {
    return switch (predicate.name()) {
      case "AND", "OR" -> understands((Predicate) predicate.children()[0]) && understands((Predicate) predicate.children()[1]);
      case "=", "<", "<=", ">", ">=", "IN", "STARTS_WITH" -> field(predicate) != null && literals(predicate) != null;
      case "<=>" -> field(predicate) != null && literals(predicate) != null && literals(predicate)[0] != null;
      case "IS_NOT_NULL" -> field(predicate) != null;
      default -> false;
    };
  }

  /** Whether it is about the key alone, so that all versions of a key match alike. */
  boolean isAboutKey(Predicate predicate) {
    for (NamedReference reference : predicate.references()) {
      if (reference.fieldNames().length != 1 || !reference.fieldNames()[0].equals(schema.key.name())) return false;
    }
    return predicate.references().length > 0;
  }

  boolean mayMatch(Predicate predicate, SegmentTail tail, int page) {
    if (predicate instanceof And and) return mayMatch(and.left(), tail, page) && mayMatch(and.right(), tail, page);
    if (predicate instanceof Or or) return mayMatch(or.left(), tail, page) || mayMatch(or.right(), tail, page);
    if (predicate.name().equals("IN") && sortedKeys(predicate) != null) {
      return hasKeyWithin(keysIn(predicate, tail), tail.firstKeys[page], tail.lastKeys[page]);
    }
    ReefSchema.Field field = understoodField(predicate);
    if (field == null) return true;
    if (field.number() == ReadColumns.KEY) return mayMatchKey(predicate, tail.firstKeys[page], tail.lastKeys[page]);
    int[] lengths = tail.columnLengths.get(field.number());
    if (lengths == null || lengths[page] == 0) return false; // all null: no comparison holds
    begin(tail);
    int group = tail.groupOf[page];
    Boolean[] known = groupMatches.computeIfAbsent(predicate, ignored -> new Boolean[tail.pages]);
    if (known[group] == null) known[group] = mayMatchGroup(predicate, field, tail, group);
    return known[group];
  }

  private void begin(SegmentTail tail) {
    if (knownOf == tail) return;
    groupMatches.clear();
    listedKeys.clear();
    knownOf = tail;
  }

  /** The keys of an IN that a segment may have, by its filter. */
  private byte[][] keysIn(Predicate in, SegmentTail tail) {
    begin(tail);
    return listedKeys.computeIfAbsent(in, ignored -> {
      byte[][] keys = sortedKeys(in);
      byte[] last = tail.lastKeys[tail.pages - 1];
      int from = place(keys, tail.firstKeys[0]);
      int to = place(keys, Arrays.copyOf(last, last.length + 1)); // the smallest key above it
      return tail.mayHave(Arrays.copyOfRange(keys, from, to));
    });
  }

  /** Returns how many of some sorted keys are below one. */
  private static int place(byte[][] keys, byte[] key) {
    int found = Arrays.binarySearch(keys, key, Arrays::compareUnsigned);
    return found >= 0 ? found : -found - 1;
  }

  private ReefSchema.Field understoodField(Predicate predicate) {
    return understoodFields.computeIfAbsent(predicate, given -> Optional.ofNullable(understands(given) ? field(given) : null)).orElse(null);
  }

  private boolean mayMatchGroup(Predicate predicate, ReefSchema.Field field, SegmentTail tail, int group) {
    ColumnVector low = tail.smallest.get(field.number());
    ColumnVector high = tail.largest.get(field.number());
    if (low == null || high == null || predicate.name().equals("IS_NOT_NULL")) return true;
    Object smallest = low.isNullAt(group) ? null : value(low, group, field.type().spark());
    Object largest = high.isNullAt(group) ? null : value(high, group, field.type().spark());
    for (Object literal : literals(predicate)) {
      if (literal != null && within(predicate.name(), literal, smallest, largest)) return true;
    }
    return false;
  }

  /** Whether a key in [first, last] may match. */
  boolean mayMatchKey(Predicate predicate, byte[] first, byte[] last) {
    if (predicate instanceof And and) return mayMatchKey(and.left(), first, last) && mayMatchKey(and.right(), first, last);
    if (predicate instanceof Or or) return mayMatchKey(or.left(), first, last) || mayMatchKey(or.right(), first, last);
    if (predicate.name().equals("IN") && sortedKeys(predicate) != null) return hasKeyWithin(sortedKeys(predicate), first, last);
    if (!understands(predicate) || field(predicate).number() != ReadColumns.KEY) return true;
    if (predicate.name().equals("IS_NOT_NULL")) return true;
    for (Object literal : literals(predicate)) {
      if (literal != null && within(predicate.name(), keyBytes(literal), first, last)) return true;
    }
    return false;
  }

  /** The keys of an IN, sorted once: a join may have a hundred thousand, and a table as many pages. Null for other columns. */
  private byte[][] sortedKeys(Predicate in) {
    return keyLists.computeIfAbsent(in, this::sortKeys).orElse(null);
  }

  private Optional<byte[][]> sortKeys(Predicate in) {
    if (!understands(in) || field(in).number() != ReadColumns.KEY) return Optional.empty();
    byte[][] keys = Arrays.stream(literals(in)).filter(Objects::nonNull).map(Pruner::keyBytes).toArray(byte[][]::new);
    Arrays.sort(keys, Arrays::compareUnsigned);
    return Optional.of(keys);
  }

  private static boolean hasKeyWithin(byte[][] keys, byte[] first, byte[] last) {
    int next = place(keys, first);
    return next < keys.length && Arrays.compareUnsigned(keys[next], last) <= 0;
  }

  private static boolean within(String operator, Object literal, Object smallest, Object largest) {
    return switch (operator) {
      case "<" -> smallest == null || compare(smallest, literal) < 0;
      case "<=" -> smallest == null || compare(smallest, literal) <= 0;
      case ">" -> largest == null || compare(largest, literal) > 0;
      case ">=" -> largest == null || compare(largest, literal) >= 0;
      case "STARTS_WITH" -> isBelow(smallest, successor(literal)) && (largest == null || compare(largest, literal) >= 0);
      default -> (smallest == null || compare(smallest, literal) <= 0) && (largest == null || compare(largest, literal) >= 0);
    };
  }

  /** A bound of null is one that is not known. */
  private static boolean isBelow(Object smallest, Object bound) {
    return smallest == null || bound == null || compare(smallest, bound) < 0;
  }

  private ReefSchema.Field field(Predicate predicate) {
    if (!(predicate.children()[0] instanceof NamedReference reference) || reference.fieldNames().length != 1) return null;
    ReefSchema.Field field = schema.field(reference.fieldNames()[0]);
    boolean isStored = field != null && field.number() >= ReadColumns.KEY; // bounds of the expiry are not
    return isStored && comparable(field.type().spark()) ? field : null;
  }

  private static boolean comparable(DataType type) {
    if (type instanceof StringType text) return text.isUTF8BinaryCollation();
    return !(type instanceof org.apache.spark.sql.types.ArrayType || type instanceof org.apache.spark.sql.types.BooleanType);
  }

  Object[] literals(Predicate predicate) {
    Expression[] children = predicate.children();
    Object[] values = new Object[children.length - 1];
    DataType type = field(predicate).type().spark();
    for (int i = 1; i < children.length; i++) {
      if (!(children[i] instanceof Literal<?> literal) || !literal.dataType().getClass().equals(type.getClass())) return null;
      values[i - 1] = normal(literal.value());
    }
    return values;
  }

  private static Object normal(Object value) {
    if (value instanceof Byte || value instanceof Short || value instanceof Integer) return ((Number) value).longValue();
    if (value instanceof Float number) return number.doubleValue();
    return value;
  }

  private static Object value(ColumnVector vector, int row, DataType type) {
    if (type instanceof StringType) return vector.getUTF8String(row);
    if (type instanceof BinaryType) return vector.getBinary(row);
    if (type instanceof DecimalType decimal) return vector.getDecimal(row, decimal.precision(), decimal.scale());
    if (type instanceof FloatType) return (double) vector.getFloat(row);
    if (type instanceof DoubleType) return vector.getDouble(row);
    return vector.getLong(row);
  }

  @SuppressWarnings({"unchecked", "rawtypes"})
  private static int compare(Object left, Object right) {
    if (left instanceof byte[] bytes) return Arrays.compareUnsigned(bytes, (byte[]) right);
    if (left instanceof UTF8String text) return text.binaryCompare((UTF8String) right);
    if (left instanceof Double number && number == 0.0 && (Double) right == 0.0) return 0; // -0.0 is equal to 0.0
    if (left instanceof Decimal decimal) return decimal.compareTo((Decimal) right);
    return ((Comparable) left).compareTo(right);
  }

  static byte[] keyBytes(Object literal) {
    return literal instanceof UTF8String text ? text.getBytes() : (byte[]) literal;
  }

  /** The smallest value above everything that starts with a prefix; null if there is none. */
  private static Object successor(Object prefix) {
    byte[] above = KeyRanges.above(keyBytes(prefix));
    return above == null || !(prefix instanceof UTF8String) ? above : UTF8String.fromBytes(above);
  }
}
