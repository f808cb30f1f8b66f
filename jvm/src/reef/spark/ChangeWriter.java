package reef.spark;

import java.io.IOException;
import java.io.InterruptedIOException;
import java.io.Serializable;
import java.util.ArrayList;
import java.util.Iterator;
import java.util.List;
import java.util.NoSuchElementException;
import java.util.concurrent.ArrayBlockingQueue;
import java.util.concurrent.BlockingQueue;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.FutureTask;
import java.util.concurrent.TimeUnit;
import org.apache.spark.TaskContext;
import org.apache.spark.TaskContext$;
import org.apache.spark.sql.catalyst.InternalRow;
import org.apache.spark.sql.catalyst.expressions.GenericInternalRow;
import org.apache.spark.sql.catalyst.expressions.JoinedRow;
import org.apache.spark.sql.connector.write.DataWriter;
import org.apache.spark.sql.connector.write.DataWriterFactory;
import org.apache.spark.sql.connector.write.DeltaWriter;
import org.apache.spark.sql.connector.write.DeltaWriterFactory;
import org.apache.spark.sql.connector.write.WriterCommitMessage;
import org.apache.spark.sql.types.DataType;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.unsafe.types.UTF8String;

/**
 * Turns the deletes, updates and inserts of a task into rows for the Python writer. Spark pushes changes, the Python
 * writer pulls rows, so a thread with a bounded queue is between them.
 */
final class ChangeWriter implements DeltaWriter<InternalRow> {
  private static final int CHUNK_ROWS = 512;
  private static final int CHUNKS_MAX = 4;
  private static final long POLL_MS = 100;
  private static final InternalRow[] END = new InternalRow[0];
  private static final InternalRow PUT = operation("put");
  private static final InternalRow PATCH = operation("patch");
  private static final InternalRow DELETE = operation("delete");

  /** How many columns a row has, and which one is the key. */
  record Layout(int width, int key, DataType keyType) implements Serializable {
    static Layout of(StructType rows, String key) {
      int place = rows.fieldIndex(key);
      return new Layout(rows.size(), place, rows.fields()[place].dataType());
    }
  }

  record Factory(DataWriterFactory python, Layout layout) implements DeltaWriterFactory {
    @Override
    public DeltaWriter<InternalRow> createWriter(int partition, long task) {
      return new ChangeWriter(python.createWriter(partition, task), layout);
    }
  }

  private final DataWriter<InternalRow> python;
  private final Layout layout;
  private final BlockingQueue<InternalRow[]> queue = new ArrayBlockingQueue<>(CHUNKS_MAX);
  private final List<InternalRow> chunk = new ArrayList<>(CHUNK_ROWS);
  private final FutureTask<Void> writing;
  private volatile boolean aborted;

  private ChangeWriter(DataWriter<InternalRow> python, Layout layout) {
    this.python = python;
    this.layout = layout;
    TaskContext context = TaskContext.get();
    writing = new FutureTask<>(() -> write(context));
    Thread thread = new Thread(writing, "reef-changes-" + (context == null ? 0 : context.partitionId()));
    thread.setDaemon(true);
    thread.start();
  }

  private Void write(TaskContext context) throws IOException {
    TaskContext$.MODULE$.setTaskContext(context); // Spark's Python runner looks it up by thread
    try {
      python.writeAll(new Changes());
      return null;
    } finally {
      TaskContext$.MODULE$.unset();
    }
  }

  @Override
  public void insert(InternalRow row) throws IOException {
    add(row.copy(), PUT);
  }

  /**
   * An update is a patch of all columns, which keeps the expiry of the row. A changed key is refused: the row that may
   * have the new key already would be lost.
   */
  @Override
  public void update(InternalRow metadata, InternalRow id, InternalRow row) throws IOException {
    if (id.get(0, layout.keyType).equals(row.get(layout.key, layout.keyType)) || sameBytes(id, row)) {
      add(row.copy(), PATCH);
      return;
    }
    throw ReefException.ofRow("an UPDATE cannot change the key of a row. INSERT the row with the new key, then DELETE the one with the old key");
  }

  private boolean sameBytes(InternalRow id, InternalRow row) {
    Object before = id.get(0, layout.keyType);
    return before instanceof byte[] bytes && java.util.Arrays.equals(bytes, (byte[]) row.get(layout.key, layout.keyType));
  }

  @Override
  public void delete(InternalRow metadata, InternalRow id) throws IOException {
    Object[] values = new Object[layout.width];
    values[layout.key] = id.copy().get(0, layout.keyType);
    add(new GenericInternalRow(values), DELETE);
  }

  private void add(InternalRow row, InternalRow operation) throws IOException {
    chunk.add(new JoinedRow(row, operation));
    if (chunk.size() == CHUNK_ROWS) flush();
  }

  private void flush() throws IOException {
    if (!chunk.isEmpty()) send(chunk.toArray(new InternalRow[0]));
    chunk.clear();
  }

  private void send(InternalRow[] rows) throws IOException {
    try {
      while (!queue.offer(rows, POLL_MS, TimeUnit.MILLISECONDS)) {
        if (writing.isDone()) {
          await();
          throw new IOException("the Python writer ended before the last row");
        }
      }
    } catch (InterruptedException error) {
      Thread.currentThread().interrupt();
      throw new InterruptedIOException("interrupted while writing changes");
    }
  }

  private void await() throws IOException {
    try {
      writing.get();
    } catch (ExecutionException error) {
      throw new IOException(error.getCause());
    } catch (InterruptedException error) {
      Thread.currentThread().interrupt();
      throw new InterruptedIOException("interrupted while writing changes");
    }
  }

  @Override
  public WriterCommitMessage commit() throws IOException {
    flush();
    send(END);
    await();
    return python.commit();
  }

  @Override
  public void abort() throws IOException {
    aborted = true;
    queue.clear();
    queue.offer(END);
    python.abort();
  }

  @Override
  public void close() throws IOException {
    aborted = true;
    python.close();
  }

  private static InternalRow operation(String name) {
    return new GenericInternalRow(new Object[] {UTF8String.fromString(name)});
  }

  /** The rows, as the Python writer pulls them. */
  private final class Changes implements Iterator<InternalRow> {
    private InternalRow[] current = new InternalRow[0];
    private int next;
    private boolean ended;

    @Override
    public boolean hasNext() {
      while (next == current.length && !ended) {
        current = take();
        next = 0;
        ended = current == END;
      }
      return next < current.length;
    }

    private InternalRow[] take() {
      try {
        while (!aborted) {
          InternalRow[] rows = queue.poll(POLL_MS, TimeUnit.MILLISECONDS);
          if (rows != null) return rows;
        }
      } catch (InterruptedException error) {
        Thread.currentThread().interrupt();
      }
      throw new IllegalStateException("the task was aborted");
    }

    @Override
    public InternalRow next() {
      if (!hasNext()) throw new NoSuchElementException();
      return current[next++];
    }
  }
}
