package reef.spark;

import com.fasterxml.jackson.core.JsonProcessingException;
import com.fasterxml.jackson.databind.ObjectMapper;
import java.io.Serializable;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.regex.Matcher;
import java.util.regex.Pattern;
import org.apache.spark.sql.types.DataType;
import org.apache.spark.sql.types.DataTypes;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.sql.types.TimeType;

/** A column type of Reef, by the name that schemas store (docs/format/manifest.md). */
record ReefType(Kind kind, int bits, int precision, int scale, boolean zoned, List<Part> parts) implements Serializable {
  enum Kind { BOOL, INT, UINT, FLOAT, STRING, BINARY, DATE, CLOCK, SECONDS, MILLIS, MICROS, NANOS, DECIMAL, VECTOR, LIST, MAP, STRUCT }

  /** A field of a struct, the element of a list, or the key or the item of a map. */
  record Part(String name, ReefType type) implements Serializable {}

  private static final Pattern INTEGER = Pattern.compile("(u?)int(8|16|32|64)");
  private static final Pattern TIMESTAMP = Pattern.compile("timestamp\\[(s|ms|us|ns)(?:, (.+))?\\]");
  private static final Pattern DECIMAL = Pattern.compile("decimal\\((\\d+), (\\d+)\\)");
  private static final Pattern VECTOR = Pattern.compile("vector<(float32|float64), (\\d+)>");
  private static final Pattern CLOCK = Pattern.compile("time\\[(s|ms|us|ns)\\]");
  private static final Pattern NESTED = Pattern.compile("(list|map|struct)<(.*)>", Pattern.DOTALL);
  private static final Pattern PIECE = Pattern.compile("\"(?:[^\"\\\\]|\\\\.)*\"|[<(\\[]|[>)\\]]|, |[^\"<>()\\[\\],]+|.", Pattern.DOTALL);
  private static final ObjectMapper JSON = new ObjectMapper();
  private static final Map<String, Kind> UNITS =
      Map.of("s", Kind.SECONDS, "ms", Kind.MILLIS, "us", Kind.MICROS, "ns", Kind.NANOS);
  private static final int NESTING_MAX = 16;

  static ReefType parse(String name) {
    return parse(name, 0);
  }

  private static ReefType parse(String name, int depth) {
    if (depth > NESTING_MAX) throw unsupported(name);
    switch (name) {
      case "bool": return simple(Kind.BOOL, 1);
      case "float32": return simple(Kind.FLOAT, 32);
      case "float64": return simple(Kind.FLOAT, 64);
      case "string": return simple(Kind.STRING, 0);
      case "binary": return simple(Kind.BINARY, 0);
      case "date": return simple(Kind.DATE, 32);
      default:
    }
    Matcher match = INTEGER.matcher(name);
    if (match.matches()) return simple(match.group(1).isEmpty() ? Kind.INT : Kind.UINT, Integer.parseInt(match.group(2)));
    match = TIMESTAMP.matcher(name);
    if (match.matches()) return new ReefType(UNITS.get(match.group(1)), 64, 0, 0, match.group(2) != null, List.of());
    match = CLOCK.matcher(name);
    if (match.matches()) return clock(match.group(1));
    match = DECIMAL.matcher(name);
    if (match.matches()) {
      return new ReefType(Kind.DECIMAL, 128, Integer.parseInt(match.group(1)), Integer.parseInt(match.group(2)), false, List.of());
    }
    match = VECTOR.matcher(name);
    if (match.matches()) {
      List<Part> parts = List.of(new Part("element", parse(match.group(1), depth + 1)));
      return new ReefType(Kind.VECTOR, 0, Integer.parseInt(match.group(2)), 0, false, parts);
    }
    match = NESTED.matcher(name);
    if (match.matches()) return nested(name, match.group(1), split(match.group(2)), depth + 1);
    throw unsupported(name);
  }

  private static ReefType nested(String name, String kind, List<String> parts, int depth) {
    if (kind.equals("list") && parts.size() == 1) {
      return new ReefType(Kind.LIST, 0, 0, 0, false, List.of(new Part("element", parse(parts.get(0), depth))));
    }
    if (kind.equals("map") && parts.size() == 2) {
      Part key = new Part("key", parse(parts.get(0), depth));
      return new ReefType(Kind.MAP, 0, 0, 0, false, List.of(key, new Part("value", parse(parts.get(1), depth))));
    }
    if (!kind.equals("struct")) throw unsupported(name);
    List<Part> fields = new ArrayList<>();
    for (String part : parts) fields.add(field(name, part, depth));
    return new ReefType(Kind.STRUCT, 0, 0, 0, false, List.copyOf(fields));
  }

  /** Parses a field of a struct: a name as a JSON string, a colon, a type. */
  private static Part field(String name, String part, int depth) {
    Matcher quoted = PIECE.matcher(part);
    if (!quoted.lookingAt() || !part.startsWith("\"") || !part.startsWith(": ", quoted.end())) throw unsupported(name);
    try {
      return new Part(JSON.readValue(quoted.group(), String.class), parse(part.substring(quoted.end() + 2), depth));
    } catch (JsonProcessingException error) {
      throw unsupported(name);
    }
  }

  /** Returns the parts between commas that are not within brackets or quotes. */
  private static List<String> split(String text) {
    List<String> parts = new ArrayList<>();
    StringBuilder part = new StringBuilder();
    int depth = 0;
    for (Matcher piece = PIECE.matcher(text); piece.find(); ) {
      String found = piece.group();
      if ("<([".contains(found)) depth++;
      if (">)]".contains(found)) depth--;
      if (found.equals(", ") && depth == 0) {
        parts.add(part.toString());
        part.setLength(0);
      } else {
        part.append(found);
      }
    }
    parts.add(part.toString());
    return parts;
  }

  /** A time of day; the scale is the number of nanoseconds of its unit, as a power of ten. */
  private static ReefType clock(String unit) {
    int power = Map.of("s", 9, "ms", 6, "us", 3, "ns", 0).get(unit);
    return new ReefType(Kind.CLOCK, power >= 6 ? 32 : 64, 0, power, false, List.of());
  }

  ReefType element() {
    return parts.get(0).type();
  }

  private static ReefType simple(Kind kind, int bits) {
    return new ReefType(kind, bits, 0, 0, false, List.of());
  }

  private static UnsupportedOperationException unsupported(String name) {
    return new UnsupportedOperationException("column type " + name + " is not known to this release of the reef jar");
  }

  /** Values per row of a vector column. */
  int size() {
    return precision;
  }

  /** The type that Spark shows, as reef.spark.types maps it. */
  DataType spark() {
    return switch (kind) {
      case BOOL -> DataTypes.BooleanType;
      case INT -> signed(bits);
      case UINT -> bits == 64 ? DataTypes.createDecimalType(20, 0) : signed(2 * bits);
      case FLOAT -> bits == 32 ? DataTypes.FloatType : DataTypes.DoubleType;
      case STRING -> DataTypes.StringType;
      case BINARY -> DataTypes.BinaryType;
      case DATE -> DataTypes.DateType;
      case SECONDS, MILLIS, MICROS, NANOS -> zoned ? DataTypes.TimestampType : DataTypes.TimestampNTZType;
      case DECIMAL -> DataTypes.createDecimalType(precision, scale);
      case VECTOR -> DataTypes.createArrayType(element().spark(), false);
      case LIST -> DataTypes.createArrayType(element().spark(), true);
      case MAP -> DataTypes.createMapType(element().spark(), parts.get(1).type().spark(), true);
      case STRUCT -> struct();
      case CLOCK -> new TimeType(6);
    };
  }

  private DataType struct() {
    StructType struct = new StructType();
    for (Part part : parts) struct = struct.add(part.name(), part.type().spark(), true);
    return struct;
  }

  private static DataType signed(int bits) {
    return switch (bits) {
      case 8 -> DataTypes.ByteType;
      case 16 -> DataTypes.ShortType;
      case 32 -> DataTypes.IntegerType;
      default -> DataTypes.LongType;
    };
  }
}
