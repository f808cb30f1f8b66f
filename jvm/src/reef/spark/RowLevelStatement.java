package reef.spark;

import java.util.Map;
import org.apache.spark.sql.connector.expressions.Expressions;
import org.apache.spark.sql.connector.expressions.NamedReference;
import org.apache.spark.sql.connector.read.ScanBuilder;
import org.apache.spark.sql.connector.write.BatchWrite;
import org.apache.spark.sql.connector.write.DeltaBatchWrite;
import org.apache.spark.sql.connector.write.DeltaWrite;
import org.apache.spark.sql.connector.write.DeltaWriteBuilder;
import org.apache.spark.sql.connector.write.DeltaWriterFactory;
import org.apache.spark.sql.connector.write.LogicalWriteInfo;
import org.apache.spark.sql.connector.write.PhysicalWriteInfo;
import org.apache.spark.sql.connector.write.RowLevelOperationInfo;
import org.apache.spark.sql.connector.write.RowLevelOperation.Command;
import org.apache.spark.sql.connector.write.SupportsDelta;
import org.apache.spark.sql.connector.write.WriterCommitMessage;
import org.apache.spark.sql.types.DataTypes;
import org.apache.spark.sql.types.StructField;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.sql.util.CaseInsensitiveStringMap;

/**
 * DELETE, UPDATE or MERGE: changed rows by key, each with its operation in the column {@code _op}, committed as one
 * ingest by the Python sink. The commit is conditional: it fails if keys that the statement depends on were written since
 * the LSN that it has read, so no update of another writer is lost. Which keys these are is in {@link Dependency}.
 */
final class RowLevelStatement implements SupportsDelta {
  private final ReefTable table;
  private final RowLevelOperationInfo info;

  RowLevelStatement(ReefTable table, RowLevelOperationInfo info) {
    this.table = table;
    this.info = info;
  }

  @Override public Command command() { return info.command(); }
  @Override public String description() { return "Reef " + info.command() + " of " + table.name(); }
  @Override public NamedReference[] rowId() { return new NamedReference[] {Expressions.column(table.plan().schema.key.name())}; }

  @Override
  public ScanBuilder newScanBuilder(CaseInsensitiveStringMap options) {
    ReefScanBuilder scan = table.nativeScan(options);
    scan.takesRuntimeFilters = false;
    return scan;
  }

  @Override
  public DeltaWriteBuilder newWriteBuilder(LogicalWriteInfo write) {
    StructType rows = write.schema().isEmpty() ? write.rowIdSchema().get() : write.schema();
    StructType changes = new StructType();
    for (StructField field : rows.fields()) changes = changes.add(field.name(), field.dataType(), true);
    StructType sent = changes.add("_op", DataTypes.StringType, false);
    ChangeWriter.Layout layout = ChangeWriter.Layout.of(rows, table.plan().schema.key.name());
    return new DeltaWriteBuilder() {
      @Override public DeltaWrite build() { return new Delta(write, sent, layout); }
    };
  }

  private BatchWrite sink(LogicalWriteInfo write, StructType changes) {
    Map<String, String> options = ReefTable.forPython(table.with(write.options()));
    return table.dependency.conditional(options, all -> ReefTable.sink(write.queryId(), changes, all).build().toBatch());
  }

  /** The write. Its condition depends on all scans, so the sink is made when the statement runs. */
  private final class Delta implements DeltaWrite, DeltaBatchWrite {
    private final LogicalWriteInfo write;
    private final StructType changes;
    private final ChangeWriter.Layout layout;
    private BatchWrite sink;

    Delta(LogicalWriteInfo write, StructType changes, ChangeWriter.Layout layout) {
      this.write = write;
      this.changes = changes;
      this.layout = layout;
    }

    private BatchWrite sink() {
      if (sink == null) sink = RowLevelStatement.this.sink(write, changes);
      return sink;
    }

    @Override public DeltaBatchWrite toBatch() { return this; }
    @Override public boolean useCommitCoordinator() { return sink().useCommitCoordinator(); }
    @Override public void abort(WriterCommitMessage[] messages) { sink().abort(messages); }
    @Override public void commit(WriterCommitMessage[] messages) { sink().commit(messages); }

    @Override
    public DeltaWriterFactory createBatchWriterFactory(PhysicalWriteInfo info) {
      return new ChangeWriter.Factory(sink().createBatchWriterFactory(info), layout);
    }
  }
}
