package reef.spark;

import java.util.EnumSet;
import java.util.HashMap;
import java.util.Map;
import java.util.Set;
import org.apache.spark.sql.catalyst.analysis.TableAlreadyExistsException;
import org.apache.spark.sql.connector.catalog.Column;
import org.apache.spark.sql.connector.catalog.Identifier;
import org.apache.spark.sql.connector.catalog.StagedTable;
import org.apache.spark.sql.connector.catalog.SupportsWrite;
import org.apache.spark.sql.connector.catalog.TableCapability;
import org.apache.spark.sql.connector.write.LogicalWriteInfo;
import org.apache.spark.sql.connector.write.SupportsTruncate;
import org.apache.spark.sql.connector.write.WriteBuilder;
import org.apache.spark.sql.types.StructType;

/**
 * A table that a statement creates or replaces, such as CREATE OR REPLACE TABLE … AS SELECT. Nothing is dropped: the rows
 * of the query replace those of the existing namespace in the one commit of the sink, so the query may read the table
 * that it replaces, and a statement that fails leaves it as it was. A new namespace is created by the sink, which
 * drops it again if the write fails.
 */
final class StagedReefTable implements StagedTable, SupportsWrite {
  private final Identifier identifier;
  private final Map<String, String> options;
  private final StructType schema;
  /** As Python has checked it: the key, the vectors, and the columns that the existing namespace lacks. */
  private final Definition definition;
  private boolean isWritten;

  record Definition(boolean exists, String key, String vectors, StructType added) {}

  StagedReefTable(Identifier identifier, Map<String, String> options, StructType schema, Definition definition) {
    this.identifier = identifier;
    this.options = options;
    this.schema = schema;
    this.definition = definition;
  }

  boolean exists() {
    return definition.exists;
  }

  @Override public String name() { return identifier.toString(); }
  @Override public Map<String, String> properties() { return Map.of("provider", "reef", "key", definition.key); }
  @Override public Set<TableCapability> capabilities() { return EnumSet.of(TableCapability.BATCH_WRITE, TableCapability.TRUNCATE); }
  @Override public Column[] columns() { return ReefTable.columns(schema); }

  @Override
  @SuppressWarnings("deprecation") // Spark 4.1 still calls it
  public StructType schema() {
    return schema;
  }

  @Override
  public WriteBuilder newWriteBuilder(LogicalWriteInfo info) {
    Map<String, String> all = new HashMap<>(options);
    info.options().asCaseSensitiveMap().forEach(all::put);
    all.keySet().removeIf(option -> option.equalsIgnoreCase("key") || option.equalsIgnoreCase("vectors"));
    isWritten = true;
    if (!definition.exists) {
      all.put("key", definition.key);
      all.put("createOnly", "true");
      if (!definition.vectors.isEmpty()) all.put("vectors", definition.vectors);
      return ReefTable.sink(info.queryId(), info.schema(), ReefTable.forPython(all));
    }
    addColumns();
    WriteBuilder sink = ReefTable.sink(info.queryId(), info.schema(), ReefTable.forPython(all));
    return ((SupportsTruncate) sink).truncate();
  }

  private void addColumns() {
    if (definition.added.size() == 0) return;
    Planner.call(options, Planner.request("add_columns").put("schema", definition.added.json()).put("vectors", definition.vectors));
  }

  /** The rows are there since the commit of the sink; without a query, the table is empty. */
  @Override
  public void commitStagedChanges() {
    if (isWritten) return;
    if (definition.exists) {
      addColumns();
      Planner.call(options, Planner.request("truncate"));
    } else {
      create(identifier, options, schema, definition);
    }
  }

  static void create(Identifier identifier, Map<String, String> options, StructType schema, Definition definition) {
    var request = Planner.request("create").put("schema", schema.json()).put("key", definition.key).put("vectors", definition.vectors);
    boolean isCreated = Planner.call(options, request).get("created").asBoolean();
    if (!isCreated) throw ReefException.<RuntimeException>sneaky(new TableAlreadyExistsException(identifier));
  }

  /** The sink has aborted its job. */
  @Override public void abortStagedChanges() {}
}
