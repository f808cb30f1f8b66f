package reef.spark;

import com.fasterxml.jackson.databind.JsonNode;
import java.util.LinkedHashMap;
import java.util.Locale;
import java.util.Map;
import org.apache.spark.sql.types.DataTypes;
import org.apache.spark.sql.types.StructField;
import org.apache.spark.sql.types.StructType;

/** Columns of a namespace by name: field numbers and types. The key column has number 0. */
final class ReefSchema {
  record Field(int number, String name, ReefType type) {}

  private static final Field EXPIRES_AT = new Field(ReadColumns.EXPIRES_AT, "_expires_at", ReefType.parse("timestamp[ms, UTC]"));

  final Field key;
  private final Map<String, Field> fields = new LinkedHashMap<>();

  ReefSchema(JsonNode json) {
    key = field(json.get("key"));
    fields.put(key.name(), key);
    for (JsonNode node : json.get("fields")) {
      Field field = field(node);
      fields.put(field.name(), field);
    }
  }

  private static Field field(JsonNode node) {
    return new Field(node.get(0).asInt(), node.get(1).asText(), ReefType.parse(node.get(2).asText()));
  }

  /** The expiry is not a column of the schema, but can be selected like one. */
  Field field(String name) {
    return name.equals(EXPIRES_AT.name()) ? EXPIRES_AT : fields.get(name);
  }

  /** Whether Spark, which ignores case by default, finds every column by its name. */
  boolean areNamesUnambiguous() {
    return fields.keySet().stream().map(name -> name.toLowerCase(Locale.ROOT)).distinct().count() == fields.size();
  }

  StructType spark() {
    return new StructType(
        fields.values().stream()
            .map(field -> DataTypes.createStructField(field.name(), field.type().spark(), field.number() != 0))
            .toArray(StructField[]::new));
  }

  /** Returns the columns that Spark reads; no column at all reads the keys only, to count them. */
  ReadColumns columns(StructType required) {
    int[] numbers = new int[required.size()];
    ReefType[] types = new ReefType[required.size()];
    for (int place = 0; place < numbers.length; place++) {
      Field field = field(required.fields()[place].name());
      if (field == null) throw new IllegalArgumentException("column " + required.fields()[place].name() + " is not in the table");
      numbers[place] = field.number();
      types[place] = field.type();
    }
    return new ReadColumns(required, numbers, types);
  }
}
