package reef.spark;

import org.apache.spark.sql.connector.metric.CustomMetric;
import org.apache.spark.sql.connector.metric.CustomSumMetric;
import org.apache.spark.sql.connector.metric.CustomTaskMetric;

/** What a scan has asked of the bucket, summed up over its tasks and shown in Spark's UI. */
final class ScanMetrics {
  private ScanMetrics() {}

  static CustomMetric[] supported() {
    return new CustomMetric[] {new Requests(), new Bytes(), new Pages(), new Rows()};
  }

  static CustomTaskMetric[] values(long requests, long bytes, long pages, long rows) {
    return new CustomTaskMetric[] {
      new Value("requests", requests), new Value("bytesRead", bytes), new Value("pagesRead", pages), new Value("rowsRead", rows)
    };
  }

  record Value(String name, long value) implements CustomTaskMetric {}

  public static final class Requests extends CustomSumMetric {
    @Override public String name() { return "requests"; }
    @Override public String description() { return "requests to the bucket"; }
  }

  public static final class Bytes extends CustomSumMetric {
    @Override public String name() { return "bytesRead"; }
    @Override public String description() { return "bytes read from the bucket"; }
  }

  public static final class Pages extends CustomSumMetric {
    @Override public String name() { return "pagesRead"; }
    @Override public String description() { return "pages decoded"; }
  }

  public static final class Rows extends CustomSumMetric {
    @Override public String name() { return "rowsRead"; }
    @Override public String description() { return "rows after the merge"; }
  }
}
