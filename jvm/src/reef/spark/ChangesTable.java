package reef.spark;

import java.util.Arrays;
import java.util.ArrayList;
import java.util.EnumSet;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Set;
import org.apache.spark.sql.connector.catalog.Column;
import org.apache.spark.sql.connector.catalog.SupportsRead;
import org.apache.spark.sql.connector.catalog.Table;
import org.apache.spark.sql.connector.catalog.TableCapability;
import org.apache.spark.sql.connector.expressions.Literal;
import org.apache.spark.sql.connector.expressions.NamedReference;
import org.apache.spark.sql.connector.expressions.Transform;
import org.apache.spark.sql.connector.expressions.filter.Predicate;
import org.apache.spark.sql.connector.read.Scan;
import org.apache.spark.sql.connector.read.ScanBuilder;
import org.apache.spark.sql.connector.read.SupportsPushDownV2Filters;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.sql.util.CaseInsensitiveStringMap;

/**
 * The metadata table {@code changes}: the operations in the log of a namespace, read by the Python source. Comparisons
 * of {@code _lsn} with numbers decide which part of the log is read.
 */
record ChangesTable(String name, StructType rowType, Map<String, String> options) implements Table, SupportsRead {
  private static final String LSN = "_lsn";

  static ChangesTable load(String name, Map<String, String> options) {
    Map<String, String> all = new HashMap<>(options);
    all.put("readChanges", "true");
    Planner.call(options, Planner.request("describe")); // an unknown table is an error of its own
    return new ChangesTable(name, Planner.python().inferSchema(new CaseInsensitiveStringMap(all)), all);
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
  public ScanBuilder newScanBuilder(CaseInsensitiveStringMap scanOptions) {
    return new Builder(scanOptions);
  }

  private final class Builder implements ScanBuilder, SupportsPushDownV2Filters {
    private final Map<String, String> all = new HashMap<>(options);
    private final List<Predicate> pushed = new ArrayList<>();
    private long after = 0;
    private long until = Long.MAX_VALUE;

    Builder(CaseInsensitiveStringMap scanOptions) {
      all.putAll(ReefTable.forPython(scanOptions.asCaseSensitiveMap()));
      CaseInsensitiveStringMap given = new CaseInsensitiveStringMap(all);
      after = given.getLong("afterLsn", after);
      until = given.getLong("untilLsn", until);
    }

    @Override
    public Predicate[] pushPredicates(Predicate[] predicates) {
      for (Predicate predicate : predicates) if (bounds(predicate)) pushed.add(predicate);
      return predicates; // evaluated again on the rows
    }

    @Override
    public Predicate[] pushedPredicates() {
      return pushed.toArray(new Predicate[0]);
    }

    private boolean bounds(Predicate predicate) {
      if (predicate.children().length != 2 || !(predicate.children()[0] instanceof NamedReference column)) return false;
      if (!Arrays.equals(column.fieldNames(), new String[] {LSN})) return false;
      if (!(predicate.children()[1] instanceof Literal<?> literal) || !(literal.value() instanceof Long lsn)) return false;
      switch (predicate.name()) {
        case "=" -> bound(lsn - 1, lsn);
        case ">" -> bound(lsn, until);
        case ">=" -> bound(lsn - 1, until);
        case "<" -> bound(after, lsn - 1);
        case "<=" -> bound(after, lsn);
        default -> {
          return false;
        }
      }
      return true;
    }

    private void bound(long least, long most) {
      after = Math.max(after, least);
      until = Math.min(until, most);
    }

    @Override
    public Scan build() {
      all.keySet().removeIf(option -> option.equalsIgnoreCase("afterLsn") || option.equalsIgnoreCase("untilLsn"));
      all.put("afterLsn", Long.toString(after));
      if (until != Long.MAX_VALUE) all.put("untilLsn", Long.toString(Math.max(0, until)));
      Table python = Planner.python().getTable(rowType, new Transform[0], Map.of());
      return ((SupportsRead) python).newScanBuilder(new CaseInsensitiveStringMap(all)).build();
    }
  }
}
