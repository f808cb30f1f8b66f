package reef.spark;

import com.fasterxml.jackson.databind.JsonNode;
import java.io.IOException;
import java.io.UncheckedIOException;
import java.lang.ref.Cleaner;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.Base64;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.Executors;
import java.util.concurrent.ScheduledExecutorService;
import java.util.concurrent.ScheduledFuture;
import java.util.concurrent.TimeUnit;

/**
 * One pinned state of a namespace, as Python has planned it: segments with their URLs, and the unfolded log as a segment
 * of its own. Its lease is renewed for as long as this object is reachable, and released afterwards.
 */
final class ReadPlan {
  record Segment(ObjectLocation location, int tailBytes, byte[] minKey, byte[] maxKey, long rows, long tombstones, long patches, long rowsLsn) {
    boolean overlaps(byte[] start, byte[] end) {
      return Arrays.compareUnsigned(maxKey, start) >= 0 && (end == null || Arrays.compareUnsigned(minKey, end) < 0);
    }
  }

  private static final Cleaner CLEANER = Cleaner.create();
  private static final ScheduledExecutorService HEARTBEAT =
      Executors.newSingleThreadScheduledExecutor(task -> {
        Thread thread = new Thread(task, "reef-leases");
        thread.setDaemon(true);
        return thread;
      });
  private static final int BEATS = 3;

  final ReefSchema schema;
  final long generation;
  final long lsn;
  final long nowMs;
  final List<Segment> segments = new ArrayList<>();
  private final Map<String, SegmentTail> tails = new ConcurrentHashMap<>();
  /** Of all plans: objects never change, so a tail that was read once is good for later queries. */
  private static final TailCache CACHE = new TailCache(32L << 20);

  ReadPlan(JsonNode json, Map<String, String> options) {
    schema = new ReefSchema(json.get("schema"));
    generation = json.get("generation").asLong();
    lsn = json.get("lsn").asLong();
    nowMs = json.get("now_ms").asLong();
    for (JsonNode node : json.get("segments")) segments.add(segment(node));
    JsonNode log = json.get("log");
    if (log != null && !log.isNull()) segments.add(logSegment(log));
    keepAlive(json.get("lease"), options);
  }

  private static Segment segment(JsonNode node) {
    ObjectLocation location = ObjectLocation.at(node.get("name").asText(), node.get("url").asText(), node.get("size").asLong());
    return segment(node, location);
  }

  private static Segment segment(JsonNode node, ObjectLocation location) {
    return new Segment(
        location,
        node.get("tail_bytes").asInt(),
        bytes(node.get("min_key")),
        bytes(node.get("max_key")),
        node.get("rows").asLong(),
        node.get("tombstones").asLong(),
        node.get("patches").asLong(),
        node.get("rows_lsn").asLong());
  }

  /** The unfolded log comes in a temporary file that Python has written; it is deleted once read. */
  private static Segment logSegment(JsonNode node) {
    Path file = Path.of(node.get("file").asText());
    try {
      byte[] data = Files.readAllBytes(file);
      Files.deleteIfExists(file);
      return segment(node, ObjectLocation.inline(node.get("name").asText(), data));
    } catch (IOException error) {
      throw new UncheckedIOException(error);
    }
  }

  private static byte[] bytes(JsonNode node) {
    return Base64.getDecoder().decode(node.asText());
  }

  SegmentTail tail(Segment segment) {
    return tails.computeIfAbsent(segment.location().name, name -> CACHE.get(segment, () -> readTail(segment)));
  }

  private static SegmentTail readTail(Segment segment) {
    try (ObjectReader reader = ObjectReader.open(segment.location())) {
      return SegmentTail.read(reader, segment.location().size, segment.tailBytes());
    } catch (IOException error) {
      throw new UncheckedIOException(error);
    }
  }

  private void keepAlive(JsonNode lease, Map<String, String> options) {
    String id = lease.get("id").asText();
    long ttlMs = lease.get("ttl_ms").asLong();
    Map<String, String> own = new HashMap<>(options);
    ScheduledFuture<?> beat =
        HEARTBEAT.scheduleWithFixedDelay(() -> renew(own, id, ttlMs), ttlMs / BEATS, ttlMs / BEATS, TimeUnit.MILLISECONDS);
    CLEANER.register(this, () -> {
      beat.cancel(false);
      HEARTBEAT.execute(() -> quietly(own, "release", id, ttlMs));
    });
  }

  private static void renew(Map<String, String> options, String id, long ttlMs) {
    quietly(options, "renew", id, ttlMs);
  }

  /** A lease that could not be renewed is noticed by the tasks, which then miss an object. */
  private static void quietly(Map<String, String> options, String operation, String id, long ttlMs) {
    try {
      Planner.call(options, Planner.request(operation).put("lease", id).put("ttl_ms", ttlMs));
    } catch (RuntimeException error) {
      org.slf4j.LoggerFactory.getLogger(ReadPlan.class).warn("Could not {} lease {}: {}", operation, id, error.toString());
    }
  }
}
