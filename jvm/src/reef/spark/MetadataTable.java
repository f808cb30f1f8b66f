package reef.spark;

import com.fasterxml.jackson.databind.JsonNode;
import java.util.Arrays;
import java.util.EnumSet;
import java.util.Map;
import java.util.Set;
import org.apache.spark.sql.catalyst.InternalRow;
import org.apache.spark.sql.catalyst.expressions.GenericInternalRow;
import org.apache.spark.sql.connector.catalog.Column;
import org.apache.spark.sql.connector.catalog.SupportsRead;
import org.apache.spark.sql.connector.catalog.Table;
import org.apache.spark.sql.connector.catalog.TableCapability;
import org.apache.spark.sql.connector.read.LocalScan;
import org.apache.spark.sql.connector.read.ScanBuilder;
import org.apache.spark.sql.types.DataType;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.sql.util.CaseInsensitiveStringMap;
import org.apache.spark.unsafe.types.UTF8String;

/** A small read-only table about a namespace: its segments, generations or snapshots. */
record MetadataTable(String name, StructType rowType, InternalRow[] rows) implements Table, SupportsRead {
  static MetadataTable load(String name, String kind, Map<String, String> options) {
    JsonNode response = Planner.call(options, Planner.request("metadata").put("table", kind));
    StructType type = (StructType) DataType.fromJson(response.get("schema").toString());
    InternalRow[] rows = new InternalRow[response.get("rows").size()];
    for (int row = 0; row < rows.length; row++) rows[row] = row(response.get("rows").get(row), type);
    return new MetadataTable(name, type, rows);
  }

  private static InternalRow row(JsonNode values, StructType type) {
    Object[] converted = new Object[type.size()];
    for (int i = 0; i < converted.length; i++) converted[i] = value(values.get(i), type.fields()[i].dataType());
    return new GenericInternalRow(converted);
  }

  private static Object value(JsonNode value, DataType type) {
    if (value.isNull()) return null;
    return switch (type.typeName()) {
      case "long", "timestamp" -> value.asLong();
      case "integer" -> value.asInt();
      case "boolean" -> value.asBoolean();
      case "binary" -> java.util.Base64.getDecoder().decode(value.asText());
      default -> UTF8String.fromString(value.asText());
    };
  }

  @Override
  public Column[] columns() {
    return Arrays.stream(rowType.fields()).map(field -> Column.create(field.name(), field.dataType(), field.nullable())).toArray(Column[]::new);
  }

  @Override
  public Set<TableCapability> capabilities() {
    return EnumSet.of(TableCapability.BATCH_READ);
  }

  @Override
  public ScanBuilder newScanBuilder(CaseInsensitiveStringMap options) {
    return () -> new LocalScan() {
      @Override public InternalRow[] rows() { return rows; }
      @Override public StructType readSchema() { return rowType; }
    };
  }
}
