package reef.spark;

import java.io.IOException;
import java.io.UncheckedIOException;
import java.nio.file.Files;
import java.nio.file.Path;
import java.nio.file.StandardCopyOption;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.function.Function;
import org.apache.spark.sql.catalyst.analysis.NamedRelation;
import org.apache.spark.sql.connector.catalog.Table;
import org.apache.spark.sql.connector.write.BatchWrite;
import org.apache.spark.sql.connector.write.DataWriterFactory;
import org.apache.spark.sql.connector.write.PhysicalWriteInfo;
import org.apache.spark.sql.connector.write.RowLevelOperationTable;
import org.apache.spark.sql.connector.write.WriterCommitMessage;
import org.apache.spark.sql.execution.datasources.v2.DataSourceV2Relation;

/**
 * The keys of its own table that a statement depends on: a commit after its snapshot that has written one of them is a
 * conflict. They are known step by step: all scans once they are planned, the keys of the source of a MERGE once it runs.
 */
final class Dependency {
  private static final int SCANS_MAX = 100;

  private final ReefTable table;
  private final List<ReefScanBuilder> scans = new ArrayList<>();
  private boolean isOnAll;
  /** The keys of the source, if the statement depends on no others; filled while it runs. */
  SourceKeys keys;

  Dependency(ReefTable table) {
    this.table = table;
  }

  /** The dependency of the statement that reads or writes a relation; null if it is none of a Reef catalog. */
  static Dependency of(NamedRelation named) {
    if (!(named instanceof DataSourceV2Relation relation)) return null;
    Table table = relation.table();
    if (table instanceof RowLevelOperationTable changed) table = (Table) changed.table();
    return table instanceof ReefTable reef && reef.isInCatalog() ? reef.dependency : null;
  }

  /** Adds a scan of the table by the statement: of the rows it changes, or in a subquery. */
  void add(ReefScanBuilder scan) {
    if (scans.size() == SCANS_MAX) addAll(); // a DataFrame that is queried again and again
    if (!isOnAll) scans.add(scan);
  }

  /** Adds a scan whose conditions are not known. */
  void addAll() {
    isOnAll = true;
    scans.clear();
  }

  boolean isEmpty() {
    return scans.isEmpty() && !isOnAll;
  }

  boolean hasOneScan() {
    return scans.size() == 1;
  }

  String keyName() {
    return table.plan().schema.key.name();
  }

  /** A write that fails if a key that the statement depends on was written since its snapshot. */
  BatchWrite conditional(Map<String, String> options, Function<Map<String, String>, BatchWrite> sink) {
    Map<String, String> all = new HashMap<>(options);
    all.put("unlessChangedSince", table.plan().generation + ":" + table.plan().lsn);
    all.put("unlessChangedIn", scanned().json());
    if (keys == null || !hasOneScan()) return sink.apply(all);
    Path file = newFile();
    all.put("unlessChangedInFile", file.toString());
    return new Keyed(sink.apply(all), keys, file);
  }

  /** A name of a file, which is there only once it is complete. */
  private static Path newFile() {
    try {
      Path file = Files.createTempFile("reef-keys-", ".json");
      Files.delete(file);
      return file;
    } catch (IOException error) {
      throw new UncheckedIOException(error);
    }
  }

  /** The key ranges that the pushed predicates of the scans leave. */
  private KeyRanges scanned() {
    if (scans.isEmpty()) return KeyRanges.ALL;
    KeyRanges all = new KeyRanges(List.of());
    for (ReefScanBuilder scan : scans) {
      all = all.or(KeyRanges.of(new Pruner(table.plan().schema), Arrays.asList(scan.pushedPredicates())));
    }
    return all;
  }

  /** A write that depends on keys which are known when all its tasks are done. Spark commits on the driver, as Python does. */
  private record Keyed(BatchWrite sink, SourceKeys keys, Path file) implements BatchWrite {
    @Override public DataWriterFactory createBatchWriterFactory(PhysicalWriteInfo info) { return sink.createBatchWriterFactory(info); }
    @Override public boolean useCommitCoordinator() { return sink.useCommitCoordinator(); }
    @Override public void onDataWriterCommit(WriterCommitMessage message) { sink.onDataWriterCommit(message); }
    @Override public void abort(WriterCommitMessage[] messages) { sink.abort(messages); }

    @Override
    public void commit(WriterCommitMessage[] messages) {
      try {
        Files.move(written(), file, StandardCopyOption.ATOMIC_MOVE);
        try {
          sink.commit(messages);
        } finally {
          Files.deleteIfExists(file);
        }
      } catch (IOException error) {
        throw new UncheckedIOException(error);
      }
    }

    /** The keys in a temporary file, which no other user can read. */
    private Path written() throws IOException {
      Path temporary = Files.createTempFile("reef-keys-", ".tmp");
      try {
        return Files.writeString(temporary, keys.ranges().json());
      } catch (IOException error) {
        Files.deleteIfExists(temporary);
        throw error;
      }
    }
  }
}
