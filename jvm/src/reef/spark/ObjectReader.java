package reef.spark;

import java.io.Closeable;
import java.io.EOFException;
import java.io.IOException;
import java.io.InterruptedIOException;
import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpResponse;
import java.nio.ByteBuffer;
import java.nio.channels.FileChannel;
import java.nio.file.Files;
import java.nio.file.NoSuchFileException;
import java.nio.file.Path;
import java.time.Duration;
import java.util.concurrent.atomic.AtomicLong;

/**
 * Ranged reads of one object: of a local file, of a URL that the driver's Python has signed, or of
 * bytes that came with the plan. Readers need no credentials and no client library of a store.
 */
abstract class ObjectReader implements Closeable {
  final String name;
  final AtomicLong requests = new AtomicLong();
  final AtomicLong bytes = new AtomicLong();

  ObjectReader(String name) {
    this.name = name;
  }

  static ObjectReader open(ObjectLocation location) {
    if (location.inline != null) return new InlineReader(location);
    return location.url.startsWith("http") ? new HttpReader(location) : new FileReader(location);
  }

  /** Whether an object exists; an IOException if that cannot be known. */
  static boolean exists(ObjectLocation location) throws IOException {
    if (location.url.startsWith("http")) return HttpReader.exists(location);
    Path path = Path.of(URI.create(location.url));
    if (Files.exists(path)) return true;
    if (Files.notExists(path)) return false;
    throw new IOException("whether " + location.name + " exists is not known");
  }

  /** Reads exactly {@code length} bytes; fails if the object is shorter or gone. */
  final byte[] read(long start, int length) throws IOException {
    requests.incrementAndGet();
    byte[] data = fetch(start, length);
    bytes.addAndGet(length);
    return data;
  }

  abstract byte[] fetch(long start, int length) throws IOException;

  @Override
  public void close() throws IOException {}

  private static final class InlineReader extends ObjectReader {
    private final ObjectLocation location;

    InlineReader(ObjectLocation location) {
      super(location.name);
      this.location = location;
    }

    @Override
    byte[] fetch(long start, int length) throws IOException {
      long from = start - location.inlineStart;
      if (from < 0 || from + length > location.inline.length) throw new EOFException(name);
      byte[] data = new byte[length];
      System.arraycopy(location.inline, (int) from, data, 0, length);
      return data;
    }
  }

  private static final class FileReader extends ObjectReader {
    private final Path path;
    private FileChannel channel;

    FileReader(ObjectLocation location) {
      super(location.name);
      path = Path.of(URI.create(location.url));
    }

    @Override
    byte[] fetch(long start, int length) throws IOException {
      FileChannel file = channel();
      ByteBuffer buffer = ByteBuffer.allocate(length);
      while (buffer.hasRemaining()) {
        int read = file.read(buffer, start + buffer.position());
        if (read < 0) throw new CorruptObjectException(name, start, "ends before " + (start + length));
      }
      return buffer.array();
    }

    private synchronized FileChannel channel() throws IOException {
      try {
        if (channel == null) channel = FileChannel.open(path);
      } catch (NoSuchFileException error) {
        throw new IOException(gone(name), error);
      }
      return channel;
    }

    @Override
    public synchronized void close() throws IOException {
      if (channel != null) channel.close();
    }
  }

  private static final class HttpReader extends ObjectReader {
    private static final HttpClient CLIENT =
        HttpClient.newBuilder().version(HttpClient.Version.HTTP_1_1).connectTimeout(Duration.ofSeconds(10)).build();
    private static final Duration TIMEOUT = Duration.ofSeconds(60);
    private static final int ATTEMPTS_MAX = 5;
    private static final long BACKOFF_MS = 100;
    private final URI uri;

    HttpReader(ObjectLocation location) {
      super(location.name);
      uri = URI.create(location.url);
    }

    @Override
    byte[] fetch(long start, int length) throws IOException {
      HttpRequest request =
          HttpRequest.newBuilder(uri)
              .timeout(TIMEOUT)
              .header("Range", "bytes=" + start + "-" + (start + length - 1))
              .build();
      for (int attempt = 1; ; attempt++) {
        IOException failure;
        try {
          HttpResponse<byte[]> response = CLIENT.send(request, HttpResponse.BodyHandlers.ofByteArray());
          if (response.statusCode() == 206 && response.body().length == length) return response.body();
          failure = failure(response, start, length);
          if (response.statusCode() < 500 && response.statusCode() != 429) throw failure;
        } catch (InterruptedException error) {
          Thread.currentThread().interrupt();
          throw new InterruptedIOException("interrupted while reading " + name);
        } catch (IOException error) {
          if (error instanceof RefusedException) throw error;
          failure = error;
        }
        if (attempt == ATTEMPTS_MAX) throw new IOException(name + ": no response after " + attempt + " attempts", failure);
        pause(BACKOFF_MS << attempt);
      }
    }

    /** One attempt: the URL is signed for GET only. */
    static boolean exists(ObjectLocation location) throws IOException {
      HttpRequest request = HttpRequest.newBuilder(URI.create(location.url)).timeout(TIMEOUT).header("Range", "bytes=0-0").build();
      try {
        int status = CLIENT.send(request, HttpResponse.BodyHandlers.discarding()).statusCode();
        if (status == 200 || status == 206 || status == 416) return true; // 416: it is empty
        if (status == 404) return false;
        throw new IOException(location.name + ": status " + status);
      } catch (InterruptedException error) {
        Thread.currentThread().interrupt();
        throw new InterruptedIOException("interrupted while probing " + location.name);
      }
    }

    private IOException failure(HttpResponse<byte[]> response, long start, int length) {
      int status = response.statusCode();
      if (status == 404) return new RefusedException(gone(name));
      if (status == 401 || status == 403 || status == 400) {
        return new RefusedException(
            name + ": the store refused the signed URL with status " + status
                + "; it has expired, or its credentials were revoked, or this store accepts none. Load the table again,"
                + " or read with option(\"engine\", \"python\")");
      }
      if (status == 416) return new RefusedException(name + ": ends before " + (start + length));
      if (status == 200) {
        return new RefusedException(name + ": the store ignored the Range header; use option(\"engine\", \"python\")");
      }
      return new IOException(name + ": status " + status + ", " + response.body().length + " bytes for " + length);
    }

    private static void pause(long millis) throws InterruptedIOException {
      try {
        Thread.sleep(millis);
      } catch (InterruptedException error) {
        Thread.currentThread().interrupt();
        throw new InterruptedIOException("interrupted between attempts");
      }
    }
  }

  /** The store has responded, and another attempt would get the same. */
  private static final class RefusedException extends IOException {
    RefusedException(String message) {
      super(message);
    }
  }

  private static String gone(String name) {
    return name + " was garbage-collected: the lease of this read has expired. Load the table again, or raise the option leaseSeconds";
  }
}
