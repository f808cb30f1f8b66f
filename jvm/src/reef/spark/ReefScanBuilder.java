package reef.spark;

import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import org.apache.spark.sql.connector.expressions.filter.Predicate;
import org.apache.spark.sql.connector.read.Scan;
import org.apache.spark.sql.connector.read.ScanBuilder;
import org.apache.spark.sql.connector.expressions.aggregate.Aggregation;
import org.apache.spark.sql.connector.read.SupportsPushDownAggregates;
import org.apache.spark.sql.connector.read.SupportsPushDownLimit;
import org.apache.spark.sql.connector.read.SupportsPushDownRequiredColumns;
import org.apache.spark.sql.connector.read.SupportsPushDownV2Filters;
import org.apache.spark.sql.types.StructType;

/** Collects what Spark pushes down: columns, predicates that exclude pages, a limit, and aggregates of the whole table. */
final class ReefScanBuilder
    implements ScanBuilder, SupportsPushDownRequiredColumns, SupportsPushDownV2Filters, SupportsPushDownLimit, SupportsPushDownAggregates {
  private final String description;
  private final ReadPlan plan;
  private final ReefSchema schema;
  private final long splitBytes;
  private StructType required;
  private Predicate[] pushed = new Predicate[0];
  private boolean filters;
  private long limit = Long.MAX_VALUE;
  private ExactAggregates aggregates;
  boolean takesRuntimeFilters = true;
  /** Whether the table is one of a catalog, which resolves the function of its partitioning. */
  boolean reportsPartitioning;

  ReefScanBuilder(String description, StructType all, ReadPlan plan, long splitBytes) {
    this.description = description;
    this.plan = plan;
    schema = plan.schema;
    this.splitBytes = splitBytes;
    required = all;
  }

  /** Spark finds columns by names without case; where that is ambiguous, all columns are read. */
  @Override
  public void pruneColumns(StructType columns) {
    if (schema.areNamesUnambiguous()) required = columns;
  }

  /** Predicates are used to skip pages, and returned to Spark, which evaluates them on the rows. */
  @Override
  public Predicate[] pushPredicates(Predicate[] predicates) {
    Pruner pruner = new Pruner(schema);
    List<Predicate> understood = new ArrayList<>();
    for (Predicate predicate : predicates) if (pruner.understands(predicate)) understood.add(predicate);
    pushed = understood.toArray(new Predicate[0]);
    filters = predicates.length > 0;
    return predicates;
  }

  @Override
  public Predicate[] pushedPredicates() {
    return pushed;
  }

  @Override
  public boolean pushLimit(int limit) {
    if (filters) return false;
    this.limit = limit;
    return true;
  }

  @Override
  public boolean isPartiallyPushed() {
    return true; // each task stops there; Spark takes the limit of all of them
  }

  @Override
  public boolean supportCompletePushDown(Aggregation aggregation) {
    return pushAggregation(aggregation);
  }

  @Override
  public boolean pushAggregation(Aggregation aggregation) {
    if (!filters && limit == Long.MAX_VALUE && schema.areNamesUnambiguous()) aggregates = ExactAggregates.of(aggregation, plan, description);
    return aggregates != null;
  }

  @Override
  public Scan build() {
    if (aggregates != null) return aggregates;
    ReefScan scan = new ReefScan(description, plan, required, Arrays.asList(pushed), limit, splitBytes);
    scan.takesRuntimeFilters = takesRuntimeFilters;
    scan.reportsPartitioning = reportsPartitioning;
    return scan;
  }
}
