package reef.spark;

import com.fasterxml.jackson.databind.ObjectMapper;
import com.fasterxml.jackson.databind.node.ArrayNode;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import org.apache.spark.sql.connector.expressions.filter.And;
import org.apache.spark.sql.connector.expressions.filter.Or;
import org.apache.spark.sql.connector.expressions.filter.Predicate;

/**
 * The key ranges outside of which no row can match some predicates: the part of a table that a scan depends on, also
 * where it has no rows yet. Sorted, without overlap; the end is exclusive, and null without a bound.
 */
record KeyRanges(List<Range> ranges) {
  record Range(byte[] start, byte[] end) {}

  private static final int RANGES_MAX = 1000;
  private static final byte[] LOWEST = {};
  static final KeyRanges ALL = new KeyRanges(List.of(new Range(LOWEST, null)));
  private static final KeyRanges NONE = new KeyRanges(List.of());

  /** The ranges of the keys that may match all predicates. */
  static KeyRanges of(Pruner pruner, List<Predicate> predicates) {
    KeyRanges result = ALL;
    for (Predicate predicate : predicates) result = result.and(of(pruner, predicate));
    return result;
  }

  private static KeyRanges of(Pruner pruner, Predicate predicate) {
    if (predicate instanceof And and) return of(pruner, and.left()).and(of(pruner, and.right()));
    if (predicate instanceof Or or) return of(pruner, or.left()).or(of(pruner, or.right()));
    if (!pruner.isAboutKey(predicate) || !pruner.understands(predicate)) return ALL;
    if (predicate.name().equals("IS_NOT_NULL")) return ALL;
    KeyRanges result = NONE;
    for (Object literal : pruner.literals(predicate)) {
      if (literal != null) result = result.or(one(predicate.name(), Pruner.keyBytes(literal)));
    }
    return result;
  }

  static Range only(byte[] key) {
    return new Range(key, Arrays.copyOf(key, key.length + 1)); // up to the smallest key above it
  }

  static KeyRanges between(byte[] first, byte[] last) {
    return new KeyRanges(List.of(new Range(first, only(last).end)));
  }

  private static KeyRanges one(String operator, byte[] key) {
    byte[] next = Arrays.copyOf(key, key.length + 1); // the smallest key above it
    return new KeyRanges(List.of(switch (operator) {
      case "<" -> new Range(LOWEST, key);
      case "<=" -> new Range(LOWEST, next);
      case ">" -> new Range(next, null);
      case ">=" -> new Range(key, null);
      case "STARTS_WITH" -> new Range(key, above(key));
      default -> new Range(key, next);
    }));
  }

  /** The smallest key above all keys with a prefix; null if there is none. */
  static byte[] above(byte[] prefix) {
    for (int i = prefix.length - 1; i >= 0; i--) {
      if (prefix[i] == (byte) 0xff) continue;
      byte[] result = Arrays.copyOf(prefix, i + 1);
      result[i]++;
      return result;
    }
    return null;
  }

  private KeyRanges and(KeyRanges other) {
    List<Range> both = new ArrayList<>();
    for (Range a : ranges) {
      for (Range b : other.ranges) {
        byte[] start = Arrays.compareUnsigned(a.start, b.start) >= 0 ? a.start : b.start;
        byte[] end = compareEnds(a.end, b.end) <= 0 ? a.end : b.end;
        if (end == null || Arrays.compareUnsigned(start, end) < 0) both.add(new Range(start, end));
      }
    }
    return new KeyRanges(both).merged();
  }

  KeyRanges or(KeyRanges other) {
    List<Range> all = new ArrayList<>(ranges);
    all.addAll(other.ranges);
    return new KeyRanges(all).merged();
  }

  /** Sorts the ranges and joins those that touch; more than a list's worth become the one around them. */
  private KeyRanges merged() {
    List<Range> sorted = new ArrayList<>(ranges);
    sorted.sort((a, b) -> Arrays.compareUnsigned(a.start, b.start));
    List<Range> joined = new ArrayList<>();
    for (Range range : sorted) {
      Range last = joined.isEmpty() ? null : joined.get(joined.size() - 1);
      if (last == null || (last.end != null && Arrays.compareUnsigned(range.start, last.end) > 0)) joined.add(range);
      else joined.set(joined.size() - 1, new Range(last.start, compareEnds(last.end, range.end) >= 0 ? last.end : range.end));
    }
    if (joined.size() <= RANGES_MAX) return new KeyRanges(joined);
    return new KeyRanges(List.of(new Range(joined.get(0).start, joined.get(joined.size() - 1).end)));
  }

  private static int compareEnds(byte[] a, byte[] b) {
    if (a == null || b == null) return a == b ? 0 : a == null ? 1 : -1;
    return Arrays.compareUnsigned(a, b);
  }

  /** As the sink's option has them: a list of pairs in base64, with null for no end. */
  String json() {
    ArrayNode list = new ObjectMapper().createArrayNode();
    for (Range range : ranges) list.addArray().add(range.start).add(range.end);
    return list.toString();
  }
}
