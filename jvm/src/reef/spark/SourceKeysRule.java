package reef.spark;

import static org.apache.spark.sql.functions.col;
import static org.apache.spark.sql.functions.lit;
import static org.apache.spark.sql.functions.udf;

import java.util.ArrayList;
import java.util.List;
import org.apache.spark.sql.Row;
import org.apache.spark.sql.catalyst.expressions.And;
import org.apache.spark.sql.catalyst.expressions.Attribute;
import org.apache.spark.sql.catalyst.expressions.AttributeReference;
import org.apache.spark.sql.catalyst.expressions.EqualTo;
import org.apache.spark.sql.catalyst.expressions.Expression;
import org.apache.spark.sql.catalyst.plans.Inner$;
import org.apache.spark.sql.catalyst.plans.JoinType;
import org.apache.spark.sql.catalyst.plans.LeftAnti$;
import org.apache.spark.sql.catalyst.plans.LeftOuter$;
import org.apache.spark.sql.catalyst.plans.LeftSemi$;
import org.apache.spark.sql.catalyst.plans.RightOuter$;
import org.apache.spark.sql.catalyst.plans.logical.Filter;
import org.apache.spark.sql.catalyst.plans.logical.Join;
import org.apache.spark.sql.catalyst.plans.logical.LogicalPlan;
import org.apache.spark.sql.catalyst.plans.logical.Project;
import org.apache.spark.sql.catalyst.plans.logical.RebalancePartitions;
import org.apache.spark.sql.catalyst.plans.logical.V2WriteCommand;
import org.apache.spark.sql.catalyst.rules.Rule;
import org.apache.spark.sql.classic.Dataset;
import org.apache.spark.sql.classic.SparkSession;
import org.apache.spark.sql.execution.datasources.v2.DataSourceV2ScanRelation;
import org.apache.spark.sql.types.DataType;
import org.apache.spark.sql.types.DataTypes;
import scala.Option;
import scala.PartialFunction;
import scala.jdk.javaapi.CollectionConverters;
import scala.runtime.AbstractPartialFunction;

/**
 * Records the keys of the source of a MERGE whose ON compares them with the key of the target, and of a DELETE or UPDATE
 * WHERE the key is IN a subquery: rows of the target with other keys have no effect on such a statement, so it depends on
 * these keys alone. Otherwise it depends on all that it has scanned, as in a MERGE with NOT MATCHED BY SOURCE, which
 * keeps the rows of the target that have no match.
 *
 * <p>The keys are recorded while the statement runs, by a filter that keeps every row: those of another evaluation could
 * be different ones. Above the filter is an exchange, so that all rows of the source pass it before the first one is
 * joined: a join may stop early. It is the exchange of a rebalance, since Spark leaves out the one of a repartition where
 * the source has that partitioning already, as after a GROUP BY. A join that Spark leaves out because one side is empty
 * finds nothing in the source either, and a statement that writes nothing depends on nothing.
 */
final class SourceKeysRule extends Rule<LogicalPlan> {
  /** Adds the rule to the session that uses a catalog. */
  static void install() {
    SparkSession session = SparkSession.active();
    List<Rule<LogicalPlan>> rules = new ArrayList<>(CollectionConverters.asJava(session.experimental().extraOptimizations()));
    if (rules.stream().anyMatch(SourceKeysRule.class::isInstance)) return;
    rules.add(new SourceKeysRule());
    session.experimental().extraOptimizations_$eq(CollectionConverters.asScala(rules).toSeq());
  }

  @Override
  public LogicalPlan apply(LogicalPlan plan) {
    if (!(plan instanceof V2WriteCommand command)) return plan;
    Dependency dependency = Dependency.of(command.table());
    if (dependency == null || !dependency.hasOneScan() || dependency.keys != null) return plan;
    LogicalPlan query = command.query().transformDown(joins(dependency));
    return dependency.keys == null ? plan : (LogicalPlan) command.withNewQuery(query);
  }

  private static PartialFunction<LogicalPlan, LogicalPlan> joins(Dependency dependency) {
    return new AbstractPartialFunction<>() {
      @Override
      public boolean isDefinedAt(LogicalPlan plan) {
        return plan instanceof Join && dependency.keys == null;
      }

      @Override
      public <A extends LogicalPlan, B> B applyOrElse(A plan, scala.Function1<A, B> otherwise) {
        @SuppressWarnings("unchecked")
        B found = isDefinedAt(plan) ? (B) recorded((Join) plan, dependency) : otherwise.apply(plan);
        return found;
      }
    };
  }

  /** The join with a recorded source, if it is one of the target with its source by key. */
  private static LogicalPlan recorded(Join join, Dependency dependency) {
    JoinType type = join.joinType();
    Attribute key = keyOf(join.left(), dependency);
    if (key != null && (type == Inner$.MODULE$ || type == LeftSemi$.MODULE$ || type == RightOuter$.MODULE$)) {
      Expression compared = comparedWith(key, join.condition(), join.right());
      return compared == null ? join : with(join, join.left(), record(join.right(), compared, dependency));
    }
    key = keyOf(join.right(), dependency);
    if (key != null && (type == Inner$.MODULE$ || type == LeftAnti$.MODULE$ || type == LeftOuter$.MODULE$)) {
      Expression compared = comparedWith(key, join.condition(), join.left());
      return compared == null ? join : with(join, record(join.left(), compared, dependency), join.right());
    }
    return join;
  }

  private static Join with(Join join, LogicalPlan left, LogicalPlan right) {
    return new Join(left, right, join.joinType(), join.condition(), join.hint());
  }

  /** The key column of the target, if this side of a join is its scan, perhaps with other columns and fewer rows. */
  private static Attribute keyOf(LogicalPlan side, Dependency dependency) {
    while (side instanceof Project || side instanceof Filter) side = side.children().apply(0);
    if (!(side instanceof DataSourceV2ScanRelation scan)) return null;
    if (Dependency.of(scan.relation()) != dependency) return null;
    for (Attribute column : CollectionConverters.asJava(scan.output())) {
      if (column.name().equals(dependency.keyName())) return column;
    }
    return null;
  }

  /** The expression over the source that a condition requires to equal the key; null if there is none. */
  private static Expression comparedWith(Attribute key, Option<Expression> condition, LogicalPlan source) {
    return condition.isEmpty() ? null : comparedWith(key, condition.get(), source);
  }

  private static Expression comparedWith(Attribute key, Expression condition, LogicalPlan source) {
    if (condition instanceof And and) {
      Expression left = comparedWith(key, and.left(), source);
      return left != null ? left : comparedWith(key, and.right(), source);
    }
    if (!(condition instanceof EqualTo equal)) return null;
    if (isKey(equal.left(), key) && isOf(source, equal.right(), key)) return equal.right();
    if (isKey(equal.right(), key) && isOf(source, equal.left(), key)) return equal.left();
    return null;
  }

  private static boolean isKey(Expression expression, Attribute key) {
    return expression instanceof AttributeReference reference && reference.exprId().equals(key.exprId());
  }

  private static boolean isOf(LogicalPlan source, Expression compared, Attribute key) {
    return compared.deterministic() && compared.dataType().equals(key.dataType()) && compared.references().subsetOf(source.outputSet());
  }

  private static LogicalPlan record(LogicalPlan source, Expression compared, Dependency dependency) {
    SparkSession session = SparkSession.active();
    SourceKeys keys = new SourceKeys();
    session.sparkContext().register(keys); // without a name, or Spark keeps them as text for each task
    dependency.keys = keys;
    LogicalPlan filter = new Filter(recording(session, keys, compared), source);
    return new RebalancePartitions(CollectionConverters.asScala(List.of(compared)).toSeq(), filter, Option.empty(), Option.empty());
  }

  /** A condition that records the value of an expression and is true, made by Spark over a column that is replaced. */
  private static Expression recording(SparkSession session, SourceKeys keys, Expression compared) {
    DataType type = compared.dataType();
    var recorder = udf(new SourceKeys.Recorder(keys), DataTypes.BooleanType).asNondeterministic();
    Dataset<Row> one = session.range(1).select(lit(null).cast(type).as("key"));
    LogicalPlan template = one.filter(recorder.apply(col("key").cast(DataTypes.BinaryType))).queryExecution().analyzed();
    return ((Filter) template).condition().transform(new AbstractPartialFunction<>() {
      @Override
      public boolean isDefinedAt(Expression expression) {
        return expression instanceof AttributeReference;
      }

      @Override
      @SuppressWarnings("unchecked")
      public <A extends Expression, B> B applyOrElse(A expression, scala.Function1<A, B> otherwise) {
        return isDefinedAt(expression) ? (B) compared : otherwise.apply(expression);
      }
    });
  }
}
