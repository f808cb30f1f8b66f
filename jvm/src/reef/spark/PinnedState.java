package reef.spark;

import com.fasterxml.jackson.databind.JsonNode;
import java.io.IOException;
import java.io.UncheckedIOException;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
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
 * of its own. Every {@link ReadPlan} on it holds it. Its lease is renewed while it is held, and released afterwards.
 *
 * <p>A probe shows whether it is still the newest state: neither the next manifest nor the next slot of the log exists,
 * and its lease does. Such a miss proves that only as long as nothing behind it can have been published and swept,
 * which is half the grace period from when the state was last known to be the newest (ADR 0054).
 */
final class PinnedState {
  private static final ScheduledExecutorService HEARTBEAT =
      Executors.newSingleThreadScheduledExecutor(task -> {
        Thread thread = new Thread(task, "reef-leases");
        thread.setDaemon(true);
        return thread;
      });
  private static final int BEATS = 3;
  /** An older state is planned again, since its URLs expire some time. */
  private static final long AGE_MAX_MS = 3_600_000;
  /** Of all plans: objects never change, so a tail that was read once is good for later queries. */
  private static final TailCache CACHE = new TailCache(32L << 20);

  /** Whether an object must exist for the state to be the newest. */
  private record Probe(ObjectLocation location, boolean exists) {
    boolean holds() {
      try {
        return ObjectReader.exists(location) == exists;
      } catch (IOException error) {
        return false; // not known, so Python plans
      }
    }
  }

  final ReefSchema schema;
  final long generation;
  final long lsn;
  final List<ReadPlan.Segment> segments = new ArrayList<>();
  private final Map<String, SegmentTail> tails = new ConcurrentHashMap<>();
  private final List<Probe> probes = new ArrayList<>();
  private final long graceMs;
  private final String leaseId;
  private final long ttlMs;
  private final Map<String, String> options;
  private final ScheduledFuture<?> beat;
  private final Stopwatch planned;
  private volatile Stopwatch newest;
  private volatile Stopwatch renewed;
  private int holders;

  /** {@code asked} was started before Python was asked for the plan. */
  PinnedState(JsonNode json, Map<String, String> options, Stopwatch asked) {
    schema = new ReefSchema(json.get("schema"));
    generation = json.get("generation").asLong();
    lsn = json.get("lsn").asLong();
    for (JsonNode node : json.get("segments")) segments.add(segment(node));
    JsonNode log = json.get("log");
    if (log != null && !log.isNull()) segments.add(logSegment(log));
    JsonNode probed = json.path("probes");
    graceMs = probed.path("grace_ms").asLong();
    for (JsonNode url : probed.path("absent")) probes.add(new Probe(ObjectLocation.at("a probe", url.asText(), 0), false));
    for (JsonNode url : probed.path("present")) probes.add(new Probe(ObjectLocation.at("a probe", url.asText(), 0), true));
    leaseId = json.get("lease").get("id").asText();
    ttlMs = json.get("lease").get("ttl_ms").asLong();
    this.options = new HashMap<>(options);
    planned = asked;
    newest = asked;
    renewed = asked;
    beat = HEARTBEAT.scheduleWithFixedDelay(this::renew, ttlMs / BEATS, ttlMs / BEATS, TimeUnit.MILLISECONDS);
  }

  /** Whether it can be probed at all; past states cannot, and a long log would take memory while nothing reads it. */
  boolean canBeReused(long logBytesMax) {
    long inline = segments.stream().filter(segment -> segment.location().inline != null).mapToLong(segment -> segment.location().size).sum();
    return !probes.isEmpty() && inline <= logBytesMax;
  }

  /** Whether this is the newest state of the namespace, by a few requests and no call of Python. */
  boolean isNewest() {
    Stopwatch started = new Stopwatch();
    if (probes.isEmpty() || renewed.elapsedMs() > ttlMs / 2 || planned.elapsedMs() > AGE_MAX_MS) return false;
    boolean isRemote = probes.get(0).location.url.startsWith("http");
    if (!(isRemote ? probes.parallelStream() : probes.stream()).allMatch(Probe::holds)) return false;
    if (newest.elapsedMs() > graceMs / 2) return false; // counted after the probes: a slow miss proves nothing
    newest = started;
    return true;
  }

  /** Keeps the lease for one more holder; false if it was released. */
  synchronized boolean hold() {
    if (holders < 0) return false;
    holders++;
    return true;
  }

  /** Releases the lease with the last holder. */
  synchronized void drop() {
    if (--holders > 0) return;
    holders = -1;
    beat.cancel(false);
    HEARTBEAT.execute(() -> call("release"));
  }

  /** Runs a task of the driver's one background thread. */
  static void later(Runnable task, long delayMs) {
    HEARTBEAT.schedule(task, delayMs, TimeUnit.MILLISECONDS);
  }

  private void renew() {
    Stopwatch started = new Stopwatch();
    if (call("renew")) renewed = started;
  }

  /** A lease that could not be renewed is noticed by the tasks, which then miss an object. */
  private boolean call(String operation) {
    try {
      Planner.call(options, Planner.request(operation).put("lease", leaseId).put("ttl_ms", ttlMs));
      return true;
    } catch (Exception error) { // a ReefException is thrown unchecked
      org.slf4j.LoggerFactory.getLogger(PinnedState.class).warn("Could not {} lease {}: {}", operation, leaseId, error.toString());
      return false;
    }
  }

  private static ReadPlan.Segment segment(JsonNode node) {
    ObjectLocation location = ObjectLocation.at(node.get("name").asText(), node.get("url").asText(), node.get("size").asLong());
    return segment(node, location);
  }

  private static ReadPlan.Segment segment(JsonNode node, ObjectLocation location) {
    return new ReadPlan.Segment(
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
  private static ReadPlan.Segment logSegment(JsonNode node) {
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

  SegmentTail tail(ReadPlan.Segment segment) {
    return tails.computeIfAbsent(segment.location().name, name -> CACHE.get(segment, () -> readTail(segment)));
  }

  private static SegmentTail readTail(ReadPlan.Segment segment) {
    try (ObjectReader reader = ObjectReader.open(segment.location())) {
      return SegmentTail.read(reader, segment.location().size, segment.tailBytes());
    } catch (IOException error) {
      throw new UncheckedIOException(error);
    }
  }
}
