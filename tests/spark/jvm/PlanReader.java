package reef.spark;

import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.ObjectMapper;
import java.io.BufferedWriter;
import java.io.IOException;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.HexFormat;
import java.util.List;
import java.util.Map;
import java.util.TreeMap;
import org.apache.spark.sql.catalyst.InternalRow;
import org.apache.spark.sql.catalyst.expressions.SpecializedGetters;
import org.apache.spark.sql.catalyst.util.ArrayData;
import org.apache.spark.sql.connector.expressions.Expression;
import org.apache.spark.sql.connector.expressions.Expressions;
import org.apache.spark.sql.connector.expressions.LiteralValue;
import org.apache.spark.sql.connector.expressions.filter.Predicate;
import org.apache.spark.sql.connector.metric.CustomTaskMetric;
import org.apache.spark.sql.connector.read.InputPartition;
import org.apache.spark.sql.types.ArrayType;
import org.apache.spark.sql.types.DataType;
import org.apache.spark.sql.types.MapType;
import org.apache.spark.sql.types.StructField;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.sql.vectorized.ColumnarBatch;
import org.apache.spark.unsafe.types.UTF8String;

/**
 * Reads planned namespaces as the tasks of a scan do, without a session: {@code PlanReader IN OUT}. Each line of IN is JSON with
 * a plan, a split size, columns, predicates, a limit for each task, and predicates that arrive when the scan is planned. Its line
 * of OUT has the rows, with values as text, and the sums of the tasks' metrics.
 */
final class PlanReader {
  private static final ObjectMapper JSON = new ObjectMapper();

  private record Result(List<List<String>> rows, Map<String, Long> metrics) {}

  public static void main(String[] args) throws IOException {
    try (BufferedWriter out = Files.newBufferedWriter(Path.of(args[1]))) {
      for (String line : Files.readAllLines(Path.of(args[0]))) out.write(JSON.writeValueAsString(read(JSON.readTree(line))) + "\n");
    }
    System.exit(0); // the thread of the leases is idle
  }

  private static Result read(JsonNode request) throws IOException {
    ReadPlan plan = ReadPlan.on(new PinnedState(request.get("plan"), Map.of(), new Stopwatch()));
    StructType all = plan.schema.spark();
    StructType schema = request.has("columns") ? new StructType() : all;
    for (JsonNode name : request.path("columns")) schema = schema.add(all.apply(name.asText()));
    long limit = request.path("limit").asLong(Long.MAX_VALUE);
    ReefScan scan = new ReefScan("t", plan, schema, predicates(request.path("predicates"), all), limit, request.path("split_bytes").asLong(1 << 30));
    scan.filter(predicates(request.path("runtime"), all).toArray(new Predicate[0]));
    ReadColumns columns = plan.schema.columns(schema);
    Result result = new Result(new ArrayList<>(), new TreeMap<>());
    for (InputPartition partition : scan.planInputPartitions()) {
      try (MergeReader reader = new MergeReader((ReefPartition) partition, columns, plan.nowMs, limit)) {
        while (reader.next()) addRows(reader.get(), schema, result.rows);
        for (CustomTaskMetric metric : reader.currentMetricsValues()) result.metrics.merge(metric.name(), metric.value(), Long::sum);
      }
    }
    return result;
  }

  private static List<Predicate> predicates(JsonNode nodes, StructType schema) {
    List<Predicate> predicates = new ArrayList<>();
    for (JsonNode node : nodes) predicates.add(predicate(node, schema));
    return predicates;
  }

  private static Predicate predicate(JsonNode node, StructType schema) {
    DataType type = schema.apply(node.get(1).asText()).dataType();
    List<Expression> children = new ArrayList<>(List.of(Expressions.column(node.get(1).asText())));
    for (JsonNode value : node.get(2).isArray() ? node.get(2) : List.of(node.get(2))) children.add(literal(value, type));
    return new Predicate(node.get(0).asText(), children.toArray(new Expression[0]));
  }

  private static Expression literal(JsonNode node, DataType type) {
    Object value =
        switch (type.typeName()) {
          case "string" -> UTF8String.fromString(node.asText());
          case "integer" -> node.asInt();
          case "long" -> node.asLong();
          case "float" -> (float) node.asDouble();
          default -> node.asDouble();
        };
    return new LiteralValue<>(value, type);
  }

  private static void addRows(ColumnarBatch batch, StructType schema, List<List<String>> rows) {
    for (int row = 0; row < batch.numRows(); row++) {
      InternalRow values = batch.getRow(row);
      List<String> texts = new ArrayList<>();
      for (int column = 0; column < schema.size(); column++) {
        texts.add(values.isNullAt(column) ? null : text(values, column, schema.fields()[column].dataType()));
      }
      rows.add(texts);
    }
  }

  static String text(SpecializedGetters from, int at, DataType type) {
    if (from.isNullAt(at)) return "null";
    if (type instanceof ArrayType array) return texts(from.getArray(at), array.elementType()).toString();
    if (type instanceof MapType map) {
      return texts(from.getMap(at).keyArray(), map.keyType()) + ": " + texts(from.getMap(at).valueArray(), map.valueType());
    }
    if (type instanceof StructType struct) {
      List<String> texts = new ArrayList<>();
      for (int i = 0; i < struct.size(); i++) texts.add(text(from.getStruct(at, struct.size()), i, struct.fields()[i].dataType()));
      return "{" + String.join(", ", texts) + "}";
    }
    if (type.typeName().startsWith("time(")) return Long.toString(from.getLong(at));
    Object value = from.get(at, type);
    if (value instanceof UTF8String string) return HexFormat.of().formatHex(string.getBytes());
    if (value instanceof byte[] bytes) return HexFormat.of().formatHex(bytes);
    if (value instanceof Float number) return bits(number);
    if (value instanceof Double number) return bits(number);
    if (value instanceof org.apache.spark.sql.types.Decimal decimal) return decimal.toJavaBigDecimal().toPlainString();
    return value.toString();
  }

  private static List<String> texts(ArrayData array, DataType element) {
    List<String> texts = new ArrayList<>();
    for (int i = 0; i < array.numElements(); i++) texts.add(text(array, i, element));
    return texts;
  }

  private static String bits(double number) {
    return String.format("%016x", Double.doubleToRawLongBits(number));
  }
}
