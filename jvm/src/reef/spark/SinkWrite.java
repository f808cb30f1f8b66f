package reef.spark;

import org.apache.spark.sql.connector.metric.CustomMetric;
import org.apache.spark.sql.connector.write.BatchWrite;
import org.apache.spark.sql.connector.write.DataWriterFactory;
import org.apache.spark.sql.connector.write.PhysicalWriteInfo;
import org.apache.spark.sql.connector.write.Write;
import org.apache.spark.sql.connector.write.WriterCommitMessage;
import org.apache.spark.sql.connector.write.streaming.StreamingWrite;

/** A write of the Python sink, whose errors are those of Reef instead of tracebacks. */
record SinkWrite(Write python) implements Write {
  @Override public String description() { return python.description(); }
  @Override public StreamingWrite toStreaming() { return python.toStreaming(); }
  @Override public CustomMetric[] supportedCustomMetrics() { return python.supportedCustomMetrics(); }

  @Override
  public BatchWrite toBatch() {
    return new Batch(python.toBatch());
  }

  private record Batch(BatchWrite python) implements BatchWrite {
    @Override public boolean useCommitCoordinator() { return python.useCommitCoordinator(); }
    @Override public void onDataWriterCommit(WriterCommitMessage message) { python.onDataWriterCommit(message); }
    @Override public void abort(WriterCommitMessage[] messages) { python.abort(messages); }

    @Override
    public DataWriterFactory createBatchWriterFactory(PhysicalWriteInfo info) {
      try {
        return python.createBatchWriterFactory(info);
      } catch (Throwable error) { // checked exceptions that the sink does not declare
        throw ReefException.from(error);
      }
    }

    @Override
    public void commit(WriterCommitMessage[] messages) {
      try {
        python.commit(messages);
      } catch (Throwable error) {
        throw ReefException.from(error);
      }
    }
  }
}
