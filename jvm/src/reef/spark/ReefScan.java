package reef.spark;

import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import java.util.OptionalLong;
import java.util.TreeMap;
import org.apache.spark.sql.connector.expressions.Expression;
import org.apache.spark.sql.connector.expressions.Expressions;
import org.apache.spark.sql.connector.expressions.NamedReference;
import org.apache.spark.sql.connector.expressions.SortDirection;
import org.apache.spark.sql.connector.expressions.SortOrder;
import org.apache.spark.sql.connector.expressions.filter.Predicate;
import org.apache.spark.sql.connector.metric.CustomMetric;
import org.apache.spark.sql.connector.read.Batch;
import org.apache.spark.sql.connector.read.InputPartition;
import org.apache.spark.sql.connector.read.PartitionReaderFactory;
import org.apache.spark.sql.connector.read.Scan;
import org.apache.spark.sql.connector.read.Statistics;
import org.apache.spark.sql.connector.read.SupportsReportOrdering;
import org.apache.spark.sql.connector.read.SupportsReportPartitioning;
import org.apache.spark.sql.connector.read.SupportsReportStatistics;
import org.apache.spark.sql.connector.read.SupportsRuntimeV2Filtering;
import org.apache.spark.sql.connector.read.partitioning.KeyGroupedPartitioning;
import org.apache.spark.sql.connector.read.partitioning.Partitioning;
import org.apache.spark.sql.connector.read.partitioning.UnknownPartitioning;
import org.apache.spark.sql.connector.read.streaming.MicroBatchStream;
import org.apache.spark.sql.types.StructType;

/**
 * A batch scan. Planning reads the tails of the segments whose key ranges can match, drops the pages that cannot, and
 * cuts the rest into key ranges of about {@code splitBytes}, each of which is a task.
 */
final class ReefScan
    implements Scan, Batch, SupportsReportStatistics, SupportsReportOrdering, SupportsReportPartitioning, SupportsRuntimeV2Filtering {
  private static final int PARTITIONS_MAX = 10_000;
  /** Less is not worth a task, unless the option splitBytes says so. */
  private static final long SPLIT_BYTES_MIN = 1 << 20;

  private final String description;
  private final ReefSchema schema;
  private final ReadPlan plan;
  private final StructType required;
  private final List<Predicate> predicates;
  private final long limit;
  private final long splitBytes;
  private final List<Predicate> runtime = new ArrayList<>();
  /** False for the scan of a statement: Spark would first read the table once more, to find the keys that match. */
  boolean takesRuntimeFilters = true;
  boolean reportsPartitioning;
  /** Where the key range is cut into tasks; runtime filters, which come later, must not move the cuts. */
  private List<byte[]> cuts;
  /** The pages to read; null again when a runtime filter arrives. */
  private List<Source> pruned;

  ReefScan(String description, ReadPlan plan, StructType required, List<Predicate> predicates, long limit, long splitBytes) {
    this.description = description;
    this.plan = plan;
    schema = plan.schema;
    this.required = required;
    this.predicates = predicates;
    this.limit = limit;
    this.splitBytes = splitBytes;
  }

  @Override public StructType readSchema() { return required; }
  @Override public Batch toBatch() { return this; }
  @Override public CustomMetric[] supportedCustomMetrics() { return ScanMetrics.supported(); }
  @Override public Scan.ColumnarSupportMode columnarSupportMode() { return Scan.ColumnarSupportMode.SUPPORTED; }

  @Override
  public MicroBatchStream toMicroBatchStream(String checkpointLocation) {
    throw new IllegalArgumentException(
        "a stream of Reef needs one of the options starting, startingLsn, startingGeneration, startingSnapshot. "
            + "Such as option(\"starting\", \"all\"): all rows, then all changes");
  }

  @Override
  public String description() {
    return "Reef " + description + " (native) [" + String.join(", ", required.fieldNames()) + "], PushedFilters: " + predicates
        + (limit == Long.MAX_VALUE ? "" : ", PushedLimit: " + limit);
  }

  @Override
  public Statistics estimateStatistics() {
    long rows = 0;
    long bytes = 0;
    for (ReadPlan.Segment segment : candidates()) {
      rows += segment.rows() - Math.min(segment.rows(), segment.tombstones());
      bytes += segment.location().size;
    }
    double share = (double) Math.max(1, required.defaultSize()) / Math.max(1, schema.spark().defaultSize());
    OptionalLong numRows = OptionalLong.of(Math.min(rows, limit));
    OptionalLong size = OptionalLong.of(Math.max(1, (long) (bytes * Math.min(1.0, share))));
    return new Statistics() {
      @Override public OptionalLong sizeInBytes() { return size; }
      @Override public OptionalLong numRows() { return numRows; }
    };
  }

  @Override
  public SortOrder[] outputOrdering() {
    if (!readsKey()) return new SortOrder[0];
    return new SortOrder[] {Expressions.sort(Expressions.column(schema.key.name()), SortDirection.ASCENDING)};
  }

  @Override
  public NamedReference[] filterAttributes() {
    return takesRuntimeFilters && readsKey() ? new NamedReference[] {Expressions.column(schema.key.name())} : new NamedReference[0];
  }

  @Override
  public Partitioning outputPartitioning() {
    if (!reportsPartitioning || !readsKey()) return new UnknownPartitioning(0);
    cutOnce(prunedSources());
    Expression ranges = Expressions.apply(ranges().name(), Expressions.column(schema.key.name()));
    return new KeyGroupedPartitioning(new Expression[] {ranges}, cuts.size() + 1);
  }

  private RangeFunction ranges() {
    return RangeFunction.of(cuts, schema.key.type().spark());
  }

  private void cutOnce(List<Source> sources) {
    if (cuts == null) cuts = cuts(sources);
  }

  private boolean readsKey() {
    return schema.areNamesUnambiguous() && Arrays.asList(required.fieldNames()).contains(schema.key.name());
  }

  /** Keys that the other side of a join has: pages without any of them are not read. */
  @Override
  public void filter(Predicate[] predicates) {
    Pruner pruner = new Pruner(schema);
    for (Predicate predicate : predicates) {
      if (pruner.isAboutKey(predicate) && pruner.understands(predicate)) runtime.add(predicate);
    }
    pruned = null;
  }

  @Override
  public InputPartition[] planInputPartitions() {
    List<Source> sources = prunedSources();
    cutOnce(sources);
    List<RangeTombstone> tombstones = new ArrayList<>();
    for (Source source : sources) {
      for (RangeTombstone tombstone : source.tail.tombstones) tombstones.add(tombstone.at(source.segment.rowsLsn()));
    }
    ReadColumns columns = schema.columns(required);
    RangeFunction ranges = ranges();
    List<InputPartition> partitions = new ArrayList<>();
    for (int i = 0; i <= cuts.size(); i++) {
      byte[] start = i == 0 ? new byte[0] : cuts.get(i - 1);
      byte[] end = i == cuts.size() ? null : cuts.get(i);
      List<PageRange> read = new ArrayList<>();
      for (Source source : sources) {
        List<Integer> pages = source.within(start, end);
        if (!pages.isEmpty()) read.add(PageRange.of(source.tail, source.location(pages), source.segment.rowsLsn(), pages, columns));
      }
      if (!read.isEmpty()) partitions.add(new ReefPartition(start, end, ranges.value(start), read, overlapping(tombstones, start, end)));
    }
    return partitions.toArray(new InputPartition[0]);
  }

  /** Reads the tails of the segments that may match, and drops the pages that cannot. */
  private List<Source> prunedSources() {
    if (pruned != null) return pruned;
    List<ReadPlan.Segment> candidates = candidates();
    candidates.parallelStream().forEach(plan::tail);
    List<Source> sources = new ArrayList<>();
    for (ReadPlan.Segment segment : candidates) sources.add(new Source(segment, plan.tail(segment)));
    prune(sources);
    pruned = sources;
    return sources;
  }

  @Override
  public PartitionReaderFactory createReaderFactory() {
    return new ReaderFactory(schema.columns(required), plan.nowMs, limit);
  }

  /** Segments whose key ranges, as the manifest has them, may match; no request is made. */
  private List<ReadPlan.Segment> candidates() {
    Pruner pruner = new Pruner(schema);
    List<ReadPlan.Segment> found = new ArrayList<>();
    for (ReadPlan.Segment segment : plan.segments) {
      boolean matches = true;
      for (Predicate predicate : keyPredicates(pruner)) matches &= pruner.mayMatchKey(predicate, segment.minKey(), segment.maxKey());
      if (matches) found.add(segment);
    }
    return found;
  }

  private List<Predicate> keyPredicates(Pruner pruner) {
    List<Predicate> about = new ArrayList<>(runtime);
    for (Predicate predicate : predicates) if (pruner.isAboutKey(predicate)) about.add(predicate);
    return about;
  }

  /**
   * Drops pages that cannot match. A predicate on other columns than the key may only drop a page if no other source
   * has a version of its keys that could match: an older version would otherwise come back.
   */
  private void prune(List<Source> sources) {
    Pruner pruner = new Pruner(schema);
    List<Predicate> aboutKey = keyPredicates(pruner);
    List<Predicate> others = new ArrayList<>(predicates);
    others.removeIf(pruner::isAboutKey);
    List<Predicate> lists = new ArrayList<>(aboutKey);
    lists.removeIf(predicate -> !hasList(predicate));
    aboutKey.removeAll(lists);
    KeyRanges ranges = KeyRanges.of(pruner, aboutKey);
    boolean patched = sources.stream().anyMatch(source -> source.segment.patches() > 0);
    for (Source source : sources) source.match(pruner, ranges, lists, patched ? List.of() : others);
    for (Source source : sources) source.drop(sources);
  }

  /** A join may have a hundred thousand keys: they are searched, not made into ranges. */
  private static boolean hasList(Predicate predicate) {
    if (predicate.name().equals("IN")) return true;
    for (Expression child : predicate.children()) if (child instanceof Predicate inner && hasList(inner)) return true;
    return false;
  }

  private List<byte[]> cuts(List<Source> sources) {
    // Two scans that report their partitioning must be cut alike, whatever columns they read.
    int[] fields = reportsPartitioning && readsKey() ? null : schema.columns(required).fields();
    TreeMap<byte[], Long> weights = new TreeMap<>(Arrays::compareUnsigned);
    long total = 0;
    for (Source source : sources) {
      for (int page : source.kept()) {
        long bytes = source.tail.pageBytes(page, fields);
        weights.merge(source.tail.firstKeys[page], bytes, Long::sum);
        total += bytes;
      }
    }
    int cores = cores();
    long wanted = Math.max(1, Math.min(splitBytes, Math.max(SPLIT_BYTES_MIN, total / cores + 1)));
    long parts = Math.min(PARTITIONS_MAX, (total + wanted - 1) / wanted);
    if (parts > cores) parts = (parts + cores - 1) / cores * cores; // no core idles in the last round
    List<byte[]> cuts = new ArrayList<>();
    long sum = 0;
    for (var entry : weights.entrySet()) {
      if (sum > 0 && sum * parts / Math.max(1, total) > cuts.size()) cuts.add(entry.getKey());
      sum += entry.getValue();
    }
    return cuts;
  }

  private static int cores() {
    var session = org.apache.spark.sql.SparkSession.getActiveSession();
    return session.isEmpty() ? 1 : Math.max(1, session.get().sparkContext().defaultParallelism());
  }

  private static List<RangeTombstone> overlapping(List<RangeTombstone> tombstones, byte[] start, byte[] end) {
    List<RangeTombstone> found = new ArrayList<>();
    for (RangeTombstone tombstone : tombstones) {
      boolean after = end != null && Arrays.compareUnsigned(tombstone.start(), end) >= 0;
      if (!after && Arrays.compareUnsigned(tombstone.end(), start) > 0) found.add(tombstone);
    }
    return found;
  }

  /** A segment while it is planned: which of its pages may match, and which are read. */
  private static final class Source {
    final ReadPlan.Segment segment;
    final SegmentTail tail;
    private final boolean[] inRange;
    private final boolean[] matches;
    private final boolean[] kept;

    Source(ReadPlan.Segment segment, SegmentTail tail) {
      this.segment = segment;
      this.tail = tail;
      inRange = new boolean[tail.pages];
      matches = new boolean[tail.pages];
      kept = new boolean[tail.pages];
    }

    void match(Pruner pruner, KeyRanges ranges, List<Predicate> lists, List<Predicate> others) {
      for (KeyRanges.Range range : ranges.ranges()) {
        for (int page = firstAtOrAfter(range.start()); page < tail.pages; page++) {
          if (range.end() != null && Arrays.compareUnsigned(tail.firstKeys[page], range.end()) >= 0) break;
          inRange[page] = true;
        }
      }
      for (int page = 0; page < tail.pages; page++) {
        for (Predicate predicate : lists) inRange[page] = inRange[page] && pruner.mayMatch(predicate, tail, page);
        matches[page] = inRange[page];
        for (Predicate predicate : others) matches[page] = matches[page] && pruner.mayMatch(predicate, tail, page);
      }
    }

    void drop(List<Source> all) {
      for (int page = 0; page < tail.pages; page++) {
        kept[page] = inRange[page] && (matches[page] || isNeeded(page, all));
      }
    }

    private boolean isNeeded(int page, List<Source> all) {
      for (Source other : all) if (other != this && other.mayMatchWithin(tail.firstKeys[page], tail.lastKeys[page])) return true;
      return false;
    }

    private boolean mayMatchWithin(byte[] first, byte[] last) {
      for (int page = firstAtOrAfter(first); page < tail.pages && Arrays.compareUnsigned(tail.firstKeys[page], last) <= 0; page++) {
        if (matches[page]) return true;
      }
      return false;
    }

    private int firstAtOrAfter(byte[] key) {
      int low = 0;
      for (int high = tail.pages; low < high; ) {
        int middle = low + high >>> 1;
        if (Arrays.compareUnsigned(tail.lastKeys[middle], key) < 0) low = middle + 1;
        else high = middle;
      }
      return low;
    }

    List<Integer> kept() {
      return within(new byte[0], null);
    }

    List<Integer> within(byte[] start, byte[] end) {
      List<Integer> pages = new ArrayList<>();
      for (int page = firstAtOrAfter(start); page < tail.pages; page++) {
        if (end != null && Arrays.compareUnsigned(tail.firstKeys[page], end) >= 0) break;
        if (kept[page]) pages.add(page);
      }
      return pages;
    }

    /** Of bytes that came with the plan, a task gets the stretch that has its own pages. */
    ObjectLocation location(List<Integer> pages) {
      long start = Long.MAX_VALUE;
      long end = 0;
      for (int page : pages) {
        start = Math.min(start, tail.keyStarts[page]);
        end = Math.max(end, tail.keyStarts[page] + tail.keyLengths[page]);
        for (int number : tail.columnStarts.keySet()) {
          end = Math.max(end, tail.columnStarts.get(number)[page] + tail.columnLengths.get(number)[page]);
        }
      }
      return segment.location().slice(start, end);
    }
  }
}
