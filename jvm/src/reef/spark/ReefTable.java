package reef.spark;

import com.fasterxml.jackson.databind.JsonNode;
import java.util.Arrays;
import java.util.EnumSet;
import java.util.HashMap;
import java.util.Locale;
import java.util.Map;
import java.util.Set;
import org.apache.spark.sql.connector.catalog.Column;
import org.apache.spark.sql.connector.catalog.MetadataColumn;
import org.apache.spark.sql.connector.catalog.SupportsMetadataColumns;
import org.apache.spark.sql.connector.catalog.SupportsRead;
import org.apache.spark.sql.connector.catalog.SupportsRowLevelOperations;
import org.apache.spark.sql.connector.catalog.SupportsWrite;
import org.apache.spark.sql.connector.catalog.Table;
import org.apache.spark.sql.connector.catalog.TableCapability;
import org.apache.spark.sql.connector.catalog.TruncatableTable;
import org.apache.spark.sql.connector.expressions.Transform;
import org.apache.spark.sql.connector.metric.CustomMetric;
import org.apache.spark.sql.connector.read.ScanBuilder;
import org.apache.spark.sql.connector.write.BatchWrite;
import org.apache.spark.sql.connector.write.LogicalWriteInfo;
import org.apache.spark.sql.connector.write.RowLevelOperationBuilder;
import org.apache.spark.sql.connector.write.RowLevelOperationInfo;
import org.apache.spark.sql.connector.write.SupportsTruncate;
import org.apache.spark.sql.connector.write.Write;
import org.apache.spark.sql.connector.write.WriteBuilder;
import org.apache.spark.sql.connector.write.streaming.StreamingWrite;
import org.apache.spark.sql.internal.connector.SupportsStreamingUpdateAsAppend;
import org.apache.spark.sql.types.DataType;
import org.apache.spark.sql.types.DataTypes;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.sql.util.CaseInsensitiveStringMap;

/**
 * A namespace as a table. Loading it reads the schema only; the first scan pins a state of the namespace, and all later
 * scans of this table, such as those of one SQL statement, read the same. Writes go through the Python sink.
 */
final class ReefTable implements Table, SupportsMetadataColumns, SupportsRead, SupportsWrite, SupportsRowLevelOperations, TruncatableTable {
  private static final long SPLIT_BYTES = 128L << 20;
  private static final Set<String> PAST = Set.of("generation", "snapshot", "asoftime");
  /** Options of the native reader, and Spark's own for time travel, which the Python source does not know. */
  private static final Set<String> NOT_FOR_PYTHON = Set.of("engine", "splitbytes", "versionasof", "timestampasof", ReefSource.SAVE);

  private final String name;
  private final Map<String, String> options;
  private final StructType schema;
  private final Map<String, String> properties;
  private final boolean isWritable;
  private boolean isInCatalog;
  private ReadPlan plan;
  /** What a statement on this table depends on: a catalog loads a table for each statement. */
  final Dependency dependency = new Dependency(this);

  ReefTable(String name, Map<String, String> options, StructType schema, Map<String, String> properties, boolean isWritable) {
    this.name = name;
    this.isWritable = isWritable;
    this.options = options;
    this.schema = schema;
    this.properties = properties;
  }

  /** Loads a table of a catalog. */
  static ReefTable load(String name, Map<String, String> options) {
    Description described = describe(options);
    ReefSchema schema = described.schema;
    Map<String, String> properties = new HashMap<>();
    properties.put("provider", "reef");
    properties.put("key", schema.key.name());
    properties.put("generation", String.valueOf(described.generation));
    properties.put("location", options.getOrDefault("path", ""));
    ReefTable table = new ReefTable(name, options, schema.spark(), properties, !isPast(options));
    table.isInCatalog = true;
    return table;
  }

  record Description(ReefSchema schema, long generation) {}

  /** Reads the schema, without pinning anything. */
  static Description describe(Map<String, String> options) {
    Map<String, String> own = forPython(options);
    ReadPlan known = StateCache.newest(own);
    if (known != null) return new Description(known.schema, known.generation);
    JsonNode response = Planner.call(own, Planner.request("describe"));
    return new Description(new ReefSchema(response.get("schema")), response.get("generation").asLong());
  }

  /** Checks that a schema, which the user may have given, names columns with the types they have. */
  private void check(ReefSchema known) {
    for (var field : schema.fields()) {
      ReefSchema.Field column = known.field(field.name());
      if (column == null) throw new IllegalArgumentException("column " + field.name() + " is not in " + name);
      if (!column.type().spark().asNullable().equals(field.dataType().asNullable())) {
        throw new IllegalArgumentException(
            "column " + field.name() + " is " + column.type().spark().simpleString() + ", the given schema says " + field.dataType().simpleString());
      }
    }
  }

  @Override public String name() { return name; }
  @Override public Map<String, String> properties() { return properties; }

  @Override
  public Column[] columns() {
    return columns(schema);
  }

  /** When a row expires: a column that is there if it is asked for. */
  @Override
  public MetadataColumn[] metadataColumns() {
    long names = Arrays.stream(schema.fieldNames()).map(name -> name.toLowerCase(Locale.ROOT)).distinct().count();
    return names < schema.size() ? new MetadataColumn[0] : new MetadataColumn[] {new ExpiryColumn()};
  }

  private record ExpiryColumn() implements MetadataColumn {
    @Override public String name() { return "_expires_at"; }
    @Override public DataType dataType() { return DataTypes.TimestampType; }
  }

  static Column[] columns(StructType schema) {
    return Arrays.stream(schema.fields()).map(field -> Column.create(field.name(), field.dataType(), field.nullable())).toArray(Column[]::new);
  }

  @Override
  @SuppressWarnings("deprecation") // Spark 4.1 still calls it
  public StructType schema() {
    return schema;
  }

  @Override
  public Set<TableCapability> capabilities() {
    if (!isWritable) return EnumSet.of(TableCapability.BATCH_READ, TableCapability.STREAMING_WRITE);
    return EnumSet.of(
        TableCapability.BATCH_READ, TableCapability.BATCH_WRITE, TableCapability.TRUNCATE, TableCapability.MICRO_BATCH_READ, TableCapability.STREAMING_WRITE);
  }

  private static boolean isPast(Map<String, String> options) {
    return options.keySet().stream().anyMatch(option -> PAST.contains(option.toLowerCase(Locale.ROOT)));
  }

  @Override
  public ScanBuilder newScanBuilder(CaseInsensitiveStringMap scanOptions) {
    CaseInsensitiveStringMap all = new CaseInsensitiveStringMap(with(scanOptions));
    if (!Engine.of(all).isNative()) {
      dependency.addAll();
      Table python = Planner.python().getTable(schema, new Transform[0], Map.of());
      return ((SupportsRead) python).newScanBuilder(new CaseInsensitiveStringMap(forPython(with(scanOptions))));
    }
    return nativeScan(scanOptions);
  }

  /** A scan in the JVM: of a query, or of the rows that a statement changes. */
  ReefScanBuilder nativeScan(CaseInsensitiveStringMap scanOptions) {
    CaseInsensitiveStringMap all = new CaseInsensitiveStringMap(with(scanOptions));
    check(plan().schema);
    ReefScanBuilder builder = new ReefScanBuilder(name, schema, plan(), all.getLong("splitBytes", SPLIT_BYTES));
    builder.reportsPartitioning = isInCatalog;
    dependency.add(builder);
    return builder;
  }

  boolean isInCatalog() {
    return isInCatalog;
  }

  @Override
  public WriteBuilder newWriteBuilder(LogicalWriteInfo info) {
    Map<String, String> options = forPython(with(info.options()));
    WriteBuilder sink = sink(info.queryId(), info.schema(), options);
    return isInCatalog ? new SelfReadingSink(info, options, sink) : sink;
  }

  /**
   * The sink of a statement that may read its own table: a MERGE with inserts alone, which Spark makes an append. If it
   * does, its commit is conditional. That is known when it runs. An INSERT loads the table that it reads a second time, so
   * it never is.
   */
  private final class SelfReadingSink implements WriteBuilder, SupportsTruncate, SupportsStreamingUpdateAsAppend {
    private final LogicalWriteInfo info;
    private final Map<String, String> options;
    private final WriteBuilder unconditional;
    private boolean truncates;

    SelfReadingSink(LogicalWriteInfo info, Map<String, String> options, WriteBuilder unconditional) {
      this.info = info;
      this.options = options;
      this.unconditional = unconditional;
    }

    @Override
    public WriteBuilder truncate() {
      truncates = true;
      ((SupportsTruncate) unconditional).truncate();
      return this;
    }

    @Override
    public Write build() {
      Write write = unconditional.build();
      return new Write() {
        @Override public String description() { return write.description(); }
        @Override public StreamingWrite toStreaming() { return write.toStreaming(); }
        @Override public CustomMetric[] supportedCustomMetrics() { return write.supportedCustomMetrics(); }
        @Override public BatchWrite toBatch() { return dependency.isEmpty() ? write.toBatch() : conditional(); }
      };
    }

    private BatchWrite conditional() {
      return dependency.conditional(options, all -> {
        WriteBuilder sink = sink(info.queryId(), info.schema(), all);
        return (truncates ? ((SupportsTruncate) sink).truncate() : sink).build().toBatch();
      });
    }
  }

  /** The Python sink for rows of a schema. */
  static WriteBuilder sink(String queryId, StructType rows, Map<String, String> options) {
    Table python = Planner.python().getTable(rows, new Transform[0], Map.of());
    return new Sink(((SupportsWrite) python).newWriteBuilder(new WriteInfo(queryId, rows, new CaseInsensitiveStringMap(options))));
  }

  @Override
  public RowLevelOperationBuilder newRowLevelOperationBuilder(RowLevelOperationInfo info) {
    return () -> new RowLevelStatement(this, info);
  }

  @Override
  public boolean truncateTable() {
    Planner.call(forPython(options), Planner.request("truncate"));
    return true;
  }

  /** The pinned state that every scan of this table reads. */
  synchronized ReadPlan plan() {
    if (plan == null) plan = StateCache.plan(forPython(options));
    return plan;
  }

  Map<String, String> with(CaseInsensitiveStringMap more) {
    Map<String, String> all = new HashMap<>(options);
    all.putAll(more.asCaseSensitiveMap());
    return all;
  }

  static Map<String, String> forPython(Map<String, String> options) {
    Map<String, String> own = new HashMap<>(options);
    own.keySet().removeIf(option -> NOT_FOR_PYTHON.contains(option.toLowerCase(Locale.ROOT)));
    return own;
  }

  /** The Python sink. Rows of a stream in update mode are upserts, as those in append mode are. */
  private record Sink(WriteBuilder python) implements WriteBuilder, SupportsTruncate, SupportsStreamingUpdateAsAppend {
    @Override
    public Write build() {
      return new SinkWrite(python.build());
    }

    @Override
    public WriteBuilder truncate() {
      ((SupportsTruncate) python).truncate();
      return this;
    }
  }

  private record WriteInfo(String queryId, StructType schema, CaseInsensitiveStringMap options) implements LogicalWriteInfo {}
}
