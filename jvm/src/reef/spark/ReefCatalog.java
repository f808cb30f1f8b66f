package reef.spark;

import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.node.ObjectNode;
import java.time.Instant;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import org.apache.spark.sql.catalyst.analysis.NoSuchFunctionException;
import org.apache.spark.sql.catalyst.analysis.NoSuchNamespaceException;
import org.apache.spark.sql.catalyst.analysis.NoSuchTableException;
import org.apache.spark.sql.catalyst.analysis.TableAlreadyExistsException;
import org.apache.spark.sql.connector.catalog.Column;
import org.apache.spark.sql.connector.catalog.FunctionCatalog;
import org.apache.spark.sql.connector.catalog.Identifier;
import org.apache.spark.sql.connector.catalog.NamespaceChange;
import org.apache.spark.sql.connector.catalog.StagedTable;
import org.apache.spark.sql.connector.catalog.StagingTableCatalog;
import org.apache.spark.sql.connector.catalog.SupportsNamespaces;
import org.apache.spark.sql.connector.catalog.Table;
import org.apache.spark.sql.connector.catalog.TableChange;
import org.apache.spark.sql.connector.catalog.functions.UnboundFunction;
import org.apache.spark.sql.connector.expressions.Transform;
import org.apache.spark.sql.internal.SQLConf;
import org.apache.spark.sql.types.DataType;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.sql.util.CaseInsensitiveStringMap;

/**
 * The namespaces of one bucket as tables: {@code spark.sql.catalog.reef = reef.spark.ReefCatalog} with {@code .url}
 * and, for the store, {@code .store.*}. Tables are in the one Spark namespace {@code default}; behind a table's name
 * are its metadata tables, such as {@code reef.default.events.segments}.
 */
public final class ReefCatalog implements StagingTableCatalog, SupportsNamespaces, FunctionCatalog {
  private static final String[] DEFAULT = {"default"};

  private String name;
  private Map<String, String> bucket;

  @Override
  public void initialize(String name, CaseInsensitiveStringMap options) {
    this.name = name;
    if (options.get("url") == null) {
      throw new IllegalArgumentException("spark.sql.catalog." + name + ".url is missing: the URL of a bucket, such as s3://bucket/prefix");
    }
    bucket = new HashMap<>();
    bucket.put("path", options.get("url"));
    options.asCaseSensitiveMap().forEach((option, value) -> {
      if (option.startsWith("store.")) bucket.put(option, value);
    });
    SourceKeysRule.install();
  }

  @Override public String name() { return name; }
  @Override public String[] defaultNamespace() { return DEFAULT; }

  // Tables.

  @Override
  public Table loadTable(Identifier identifier) throws NoSuchTableException {
    return load(identifier, Map.of());
  }

  /** VERSION AS OF: a generation, or the name of a snapshot. */
  @Override
  public Table loadTable(Identifier identifier, String version) throws NoSuchTableException {
    return load(identifier, version(version));
  }

  static Map<String, String> version(String version) {
    return Map.of(version.chars().allMatch(Character::isDigit) ? "generation" : "snapshot", version);
  }

  @Override
  public Table loadTable(Identifier identifier, long micros) throws NoSuchTableException {
    Instant time = Instant.ofEpochSecond(Math.floorDiv(micros, 1_000_000L), Math.floorMod(micros, 1_000_000L) * 1_000L);
    return load(identifier, Map.of("asOfTime", time.toString()));
  }

  private Table load(Identifier identifier, Map<String, String> version) throws NoSuchTableException {
    String[] namespace = identifier.namespace();
    boolean metadata = namespace.length == 2 && namespace[0].equals(DEFAULT[0]);
    if (!metadata && !Arrays.equals(namespace, DEFAULT)) throw new NoSuchTableException(identifier);
    Map<String, String> options = new HashMap<>(options(metadata ? namespace[1] : identifier.name()));
    options.putAll(version);
    try {
      if (metadata && identifier.name().equals("changes")) return ChangesTable.load(name + "." + identifier, options);
      if (metadata) return MetadataTable.load(name + "." + identifier, identifier.name(), options);
      return ReefTable.load(name + "." + identifier, options);
    } catch (RuntimeException error) {
      throw error;
    } catch (Exception error) { // a ReefException is thrown unchecked
      boolean isMissing = error instanceof ReefException reef && reef.isNotFound();
      if (isMissing && (version.isEmpty() || !tableExists(identifier))) throw new NoSuchTableException(identifier);
      throw ((ReefException) error).unchecked();
    }
  }

  private Map<String, String> options(String table) {
    Map<String, String> options = new HashMap<>(bucket);
    options.put("namespace", table);
    return options;
  }

  @Override
  public Identifier[] listTables(String[] namespace) throws NoSuchNamespaceException {
    boolean isCatalog = namespace.length == 0; // SHOW TABLES IN reef
    if (!isCatalog && !namespaceExists(namespace)) throw new NoSuchNamespaceException(namespace);
    List<Identifier> tables = new ArrayList<>();
    for (JsonNode table : call("list", "any").get("names")) tables.add(Identifier.of(DEFAULT, table.asText()));
    return tables.toArray(new Identifier[0]);
  }

  @Override
  public Table createTable(Identifier identifier, Column[] columns, Transform[] partitions, Map<String, String> properties)
      throws TableAlreadyExistsException, NoSuchNamespaceException {
    if (!namespaceExists(identifier.namespace())) throw new NoSuchNamespaceException(identifier.namespace());
    StructType schema = schema(identifier, columns, partitions, properties);
    StagedReefTable.Definition definition = define("create", identifier, schema, properties);
    if (definition.exists()) throw new TableAlreadyExistsException(identifier);
    StagedReefTable.create(identifier, options(identifier.name()), schema, definition);
    try {
      return loadTable(identifier);
    } catch (NoSuchTableException error) {
      throw new IllegalStateException("table " + identifier + " was dropped while it was created", error);
    }
  }

  @Override
  public StagedTable stageCreate(Identifier identifier, Column[] columns, Transform[] partitions, Map<String, String> properties)
      throws TableAlreadyExistsException, NoSuchNamespaceException {
    StagedReefTable staged = stage("create", identifier, columns, partitions, properties);
    if (staged.exists()) throw new TableAlreadyExistsException(identifier);
    return staged;
  }

  @Override
  public StagedTable stageReplace(Identifier identifier, Column[] columns, Transform[] partitions, Map<String, String> properties)
      throws NoSuchNamespaceException, NoSuchTableException {
    StagedReefTable staged = stage("replace", identifier, columns, partitions, properties);
    if (!staged.exists()) throw new NoSuchTableException(identifier);
    return staged;
  }

  @Override
  public StagedTable stageCreateOrReplace(Identifier identifier, Column[] columns, Transform[] partitions, Map<String, String> properties)
      throws NoSuchNamespaceException {
    return stage("replace", identifier, columns, partitions, properties);
  }

  private StagedReefTable stage(String mode, Identifier identifier, Column[] columns, Transform[] partitions, Map<String, String> properties)
      throws NoSuchNamespaceException {
    if (!namespaceExists(identifier.namespace())) throw new NoSuchNamespaceException(identifier.namespace());
    StructType schema = schema(identifier, columns, partitions, properties);
    return new StagedReefTable(identifier, options(identifier.name()), schema, define(mode, identifier, schema, properties));
  }

  private static StructType schema(Identifier identifier, Column[] columns, Transform[] partitions, Map<String, String> properties) {
    if (partitions.length > 0) throw new UnsupportedOperationException("Reef tables are sorted by key and have no partitions; leave PARTITIONED BY away");
    boolean hasComments = properties.containsKey(StagingTableCatalog.PROP_COMMENT);
    StructType schema = new StructType();
    for (Column column : columns) {
      schema = schema.add(column.name(), column.dataType(), column.nullable());
      hasComments |= column.comment() != null;
    }
    if (hasComments) warnOfComments(identifier);
    return schema;
  }

  private static void warnOfComments(Identifier identifier) {
    org.slf4j.LoggerFactory.getLogger(ReefCatalog.class).warn("Reef keeps no comments: those of table {} are dropped", identifier);
  }

  /** Checks the definition of a table in Python, before anything is changed. */
  private StagedReefTable.Definition define(String mode, Identifier identifier, StructType schema, Map<String, String> properties) {
    ObjectNode request = Planner.request("define").put("mode", mode).put("schema", schema.json());
    request.put("default_provider", SQLConf.get().defaultDataSourceName());
    ObjectNode given = request.putObject("properties");
    properties.forEach(given::put);
    JsonNode response = Planner.call(options(identifier.name()), request);
    return new StagedReefTable.Definition(
        response.get("exists").asBoolean(),
        response.get("key").asText(),
        response.get("vectors").asText(),
        (StructType) DataType.fromJson(response.get("added").toString()));
  }

  @Override
  public Table alterTable(Identifier identifier, TableChange... changes) throws NoSuchTableException {
    StructType added = new StructType();
    for (TableChange change : changes) {
      if (!(change instanceof TableChange.AddColumn column) || column.fieldNames().length > 1) {
        throw new UnsupportedOperationException("Reef tables grow by ADD COLUMN only, not by " + change.getClass().getSimpleName());
      }
      if (!column.isNullable()) throw new UnsupportedOperationException("an added column is nullable: " + column.fieldNames()[0]);
      if (column.comment() != null) warnOfComments(identifier);
      added = added.add(column.fieldNames()[0], column.dataType(), true);
    }
    Planner.call(options(identifier.name()), Planner.request("add_columns").put("schema", added.json()));
    return loadTable(identifier);
  }

  @Override
  public boolean dropTable(Identifier identifier) {
    return Arrays.equals(identifier.namespace(), DEFAULT) && call("drop", identifier.name()).get("dropped").asBoolean();
  }

  @Override
  public void renameTable(Identifier from, Identifier to) throws NoSuchTableException, TableAlreadyExistsException {
    if (!Arrays.equals(from.namespace(), DEFAULT) || !tableExists(from)) throw new NoSuchTableException(from);
    boolean isQualified = Arrays.equals(to.namespace(), new String[] {name, DEFAULT[0]}); // Spark leaves the catalog in
    if (!isQualified && !Arrays.equals(to.namespace(), DEFAULT)) {
      throw new UnsupportedOperationException("a Reef table stays in its catalog and in the namespace default");
    }
    Identifier target = Identifier.of(DEFAULT, to.name());
    if (tableExists(target)) throw new TableAlreadyExistsException(target);
    Planner.call(options(from.name()), Planner.request("rename").put("to", to.name()));
  }

  private JsonNode call(String operation, String table) {
    return Planner.call(options(table), Planner.request(operation));
  }

  // Functions: the partitioning of scans.

  @Override public Identifier[] listFunctions(String[] namespace) { return new Identifier[0]; }

  @Override
  public UnboundFunction loadFunction(Identifier identifier) throws NoSuchFunctionException {
    UnboundFunction function = identifier.namespace().length == 0 ? RangeFunction.find(identifier.name()) : null;
    if (function == null) throw new NoSuchFunctionException(identifier);
    return function;
  }

  // The one Spark namespace.

  @Override public String[][] listNamespaces() { return new String[][] {DEFAULT}; }

  @Override
  public String[][] listNamespaces(String[] namespace) throws NoSuchNamespaceException {
    if (namespace.length == 0) return listNamespaces();
    if (!namespaceExists(namespace)) throw new NoSuchNamespaceException(namespace);
    return new String[0][];
  }

  @Override public boolean namespaceExists(String[] namespace) { return Arrays.equals(namespace, DEFAULT); }

  @Override
  public Map<String, String> loadNamespaceMetadata(String[] namespace) throws NoSuchNamespaceException {
    if (!namespaceExists(namespace)) throw new NoSuchNamespaceException(namespace);
    return Map.of("location", bucket.get("path"));
  }

  @Override
  public void createNamespace(String[] namespace, Map<String, String> metadata) {
    throw new UnsupportedOperationException("a Reef catalog is one bucket with the namespace default; add another catalog for another bucket");
  }

  @Override
  public void alterNamespace(String[] namespace, NamespaceChange... changes) {
    throw new UnsupportedOperationException("the namespace of a Reef catalog has no properties");
  }

  @Override
  public boolean dropNamespace(String[] namespace, boolean cascade) {
    throw new UnsupportedOperationException("the namespace of a Reef catalog cannot be dropped");
  }
}
