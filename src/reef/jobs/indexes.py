"""Search indexes for the segments that exist: train centroids, rewrite those without an index.

    1  train     of a vector index without centroids, from a sample of the rows, if there are enough
                 rows; put them under a new name, then name them in the manifest by CAS
    2  rewrite   segment by segment, those without an index that serves the manifest's: a compaction
                 of one segment, with the role, the tasks and the publish of any other

No row changes, and nothing waits: until a segment is rewritten, searches read its rows. A driver
that dies leaves centroids that no manifest names, and a sweep deletes them. Centroids that fit the
rows no more are replaced in the same way, by `retrain_worn`. Two drivers that train
at once publish one set; the loser's segments would have another set's lists, so it trains before it
rewrites, and rewrites by the manifest.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np

from reef.config import CompactSettings
from reef.engine.handles.database import Database
from reef.engine.read.caches import ByteCache
from reef.engine.read.segments import SegmentStore
from reef.engine.search.specs import load_indexes
from reef.errors import CorruptionError, NotFoundError, UnavailableError
from reef.formats.manifest import IndexKind, IndexSpec, Manifest, SegmentEntry, newest_indexes
from reef.formats.segment_writer import BuildableIndex
from reef.formats.vector_index import (
    QUERIES,
    ROWS_PER_CENTROID,
    BuildableVector,
    CentroidSet,
    Floats,
    decode_centroids,
    lists_for,
    rows_compared,
    train,
    vectors_in_lists,
)
from reef.jobs.arguments import check_arguments
from reef.jobs.compact.job import Compactor, CompactReport
from reef.jobs.compact.merge import read_tail
from reef.jobs.compact.plan import CompactPlan
from reef.manifest.edits import forget_replaced_centroids, retrain_index, set_centroids
from reef.manifest.head import Publisher
from reef.paths import Namespace
from reef.runtime import Executor
from reef.stores import Outcome, Store
from reef.telemetry import operation

SAMPLE_BYTES_MAX = 256 << 20
CACHE_BYTES = 64 << 20
PAGES_AT_ONCE = 256
SAMPLE_ROWS_MIN = 8 * QUERIES
WORN_SHARE = 0.6
"""New centroids replace others if searches compare at most this share of the rows."""


@dataclass(frozen=True, slots=True)
class IndexReport:
    """The result of building indexes."""

    namespace: str
    generation: int
    trained: int
    """Vector indexes that got centroids."""
    segments: int
    """Segments that were rewritten."""
    rows: int
    bytes: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def build_indexes(
    db: Database, namespace: str, *, executor: Executor | None = None, again: bool = False
) -> IndexReport:
    """Build the search indexes of a namespace for all segments that lack them.

    With `again`, for all segments: after damage to an index. Acquires the compactor role. Safe
    while writers, readers, folds and sweeps run.
    """
    check_arguments(db, executor)
    reports: list[CompactReport] = []
    shown = db._working("index", namespace)
    with operation(db.metrics, "index"), shown, Compactor(db, namespace, executor=executor) as work:
        trained = train_missing(db, namespace) + retrain_worn(db, namespace)
        planner = IndexPlanner(db, namespace, again=again)
        for _ in range(planner.rounds()):
            report = work.step(take_over=True, planner=planner)
            if report is None or not report.published:
                break
            reports.append(report)
        forget_replaced(db, namespace)
    head = db._namespaces.publisher(namespace).heads.found.manifest
    return IndexReport(
        namespace,
        head.generation,
        trained,
        sum(report.inputs for report in reports),
        sum(report.rows_written for report in reports),
        sum(report.output_bytes for report in reports),
    )


class IndexPlanner:
    """Plans the rewrite of one segment that lacks an index of the manifest.

    Reads the footer of each segment once.
    """

    def __init__(
        self,
        db: Database,
        namespace: str,
        *,
        again: bool = False,
        known: dict[str, dict[str, bool]] | None = None,
    ) -> None:
        heads = db._namespaces.publisher(namespace).heads
        self._store, self._names = db.store, heads.names
        self._segments = heads.found.manifest.segments
        indexes = load_indexes(self._store, self._names, heads.found.manifest.indexes)
        self._specs = [index.spec for index in indexes if _can_build(index)]
        self.state = (heads.found.manifest.indexes, self._segments)
        """The indexes and segments that it was made for."""
        self._lacking: dict[str, bool] = {}
        """By segment, whether it lacks an index that it can get."""
        if known is not None:
            self._lacking = known.setdefault(repr(self._specs), self._lacking)
        self._again = frozenset(s.id for s in self._segments) if again else frozenset()

    def rounds(self) -> int:
        """Return how many segments there were at the beginning: each is rewritten at most once."""
        return len(self._segments)

    def __call__(
        self, segments: Sequence[SegmentEntry], settings: CompactSettings
    ) -> CompactPlan | None:
        """Plan the rewrite of one segment; None if all have their indexes."""
        for entry in segments:
            if entry.id not in self._lacking:
                self._lacking[entry.id] = self._lacks(entry)
            if self._lacking[entry.id]:
                return CompactPlan(entry.level, (entry,), why="a segment without its indexes")
        return None

    def _lacks(self, entry: SegmentEntry) -> bool:
        large = [spec for spec in self._specs if entry.rows >= spec.rows_min]
        if not large or entry.patches or entry.home is not None:
            return False
        if entry.id in self._again:
            return True
        places = read_tail(self._store, self._names, entry).footer.indexes
        return not all(
            any(place.is_built and place.spec.serves(spec) for place in places) for spec in large
        )


def _can_build(index: BuildableIndex) -> bool:
    return not isinstance(index, BuildableVector) or index.centroids is not None


# --- training ---------------------------------------------------------------------------


def train_missing(db: Database, namespace: str) -> int:
    """Train the centroids of vector indexes that have none; return how many got them."""
    publisher = db._namespaces.publisher(namespace)
    manifest, trained = publisher.heads.found.manifest, 0
    for spec in manifest.indexes:
        if spec.kind is IndexKind.VECTOR and not spec.centroids:
            trained += _train(db.store, publisher, manifest, spec)
    return trained


def _train(store: Store, publisher: Publisher, manifest: Manifest, spec: IndexSpec) -> bool:
    """Train, store and publish the centroids of one index; False if there are too few rows."""
    rows = _rows(manifest)
    if rows < spec.rows_min:
        return False
    sample = _sample(store, publisher.heads.names, manifest, spec, _lists(spec, rows))
    if not len(sample):
        return False
    made = train(sample, _lists(spec, rows), rows, by_product=_is_product(spec))
    return _publish(store, publisher, made, partial(set_centroids, spec=spec))


def _publish(
    store: Store, publisher: Publisher, made: CentroidSet, edit: Callable[..., Manifest | None]
) -> bool:
    """Store centroids, and name them by an edit; False if another process was first."""
    centroids_id = store.runtime.ulid()
    key = publisher.heads.names.centroids(centroids_id)
    if store.create(key, made.encode()).outcome is not Outcome.CREATED:
        raise UnavailableError(f"{key} may not have been written", hint="Build the index again")
    store.runtime.reach("centroids stored")
    after = publisher.publish(lambda head: edit(head, centroids=centroids_id))
    return any(index.centroids == centroids_id for index in after.indexes)


def _rows(manifest: Manifest) -> int:
    return sum(entry.rows for entry in manifest.segments if not entry.patches)


def _lists(spec: IndexSpec, rows: int) -> int:
    return int(spec.options.get("lists", lists_for(rows)))


def _is_product(spec: IndexSpec) -> bool:
    return spec.options.get("metric") == "dot"


# --- training again ---------------------------------------------------------------------


def retrain_worn(db: Database, namespace: str) -> int:
    """Train indexes again whose centroids fit the rows no more; return how many.

    Centroids wear when a table grows, its lists become longer than they need be, and when its
    vectors drift: most are then in few lists, or their neighbours in many. A new set is
    compared with the old one on the same sample, and replaces it if a search would compare far
    fewer rows. Both are named until no segment has lists of the old one: nothing waits, and all
    segments are searched by their lists all the time.
    """
    publisher = db._namespaces.publisher(namespace)
    manifest, trained = publisher.heads.found.manifest, 0
    if newest_indexes(manifest.indexes) != manifest.indexes:
        return 0
    for spec in manifest.indexes:
        if spec.kind is IndexKind.VECTOR and spec.centroids:
            trained += _retrain(db.store, publisher, manifest, spec)
    return trained


def _retrain(store: Store, publisher: Publisher, manifest: Manifest, spec: IndexSpec) -> bool:
    names, rows = publisher.heads.names, _rows(manifest)
    try:
        old = decode_centroids(store.get(key := names.centroids(spec.centroids, spec.home)), key)
    except (NotFoundError, CorruptionError):
        return False  # verify reports it; the index has to be added again
    lists = _lists(spec, rows)
    sample = _sample(store, names, manifest, spec, max(lists, len(old)))
    if rows < spec.rows_min or len(sample) < SAMPLE_ROWS_MIN:
        return False
    made = train(sample, lists, rows, by_product=_is_product(spec))
    before, after = (rows_compared(s, sample, by_product=_is_product(spec)) for s in (old, made))
    if after > WORN_SHARE * before:
        return False
    return _publish(store, publisher, made, partial(retrain_index, spec=spec))


def forget_replaced(db: Database, namespace: str) -> bool:
    """Name replaced centroids no more, once no segment has lists of them."""
    publisher = db._namespaces.publisher(namespace)
    manifest = publisher.heads.find().manifest
    newest = newest_indexes(manifest.indexes)
    replaced = [spec for spec in manifest.indexes if spec not in newest]
    if not replaced:
        return False
    names = publisher.heads.names
    for entry in manifest.segments:
        if entry.rows and not entry.patches:
            places = read_tail(db.store, names, entry).footer.indexes
            if any(p.is_built and p.spec.serves(spec) for p in places for spec in replaced):
                return False
    publisher.publish(lambda head: _forget(head, manifest))
    return True


def _forget(head: Manifest, seen: Manifest) -> Manifest | None:
    """Return the edit, unless segments came that were not checked."""
    return forget_replaced_centroids(head) if head.segments == seen.segments else None


def _sample(
    store: Store, names: Namespace, manifest: Manifest, spec: IndexSpec, lists: int
) -> Floats:
    """Return vectors of pages that are spread evenly over all segments."""
    segments = SegmentStore(store, names, ByteCache(CACHE_BYTES))
    entries = [e for e in manifest.segments if e.rows and not e.patches]
    size = manifest.schema.types()[spec.column].list_size
    total = sum(entry.rows for entry in entries)
    sample_rows = min(ROWS_PER_CENTROID * lists + 8 * QUERIES, SAMPLE_BYTES_MAX // (4 * size))
    parts = [np.zeros((0, size), np.float32)]
    for entry in entries:
        parts += _vectors(segments, entry, spec, min(1.0, sample_rows / total))
    return np.concatenate(parts)


def _vectors(
    segments: SegmentStore, entry: SegmentEntry, spec: IndexSpec, share: float
) -> list[Floats]:
    column, metric = spec.column, str(spec.options.get("metric", "l2"))
    count = len(segments.tail(entry).index.pages.rows)
    pages = np.unique(np.linspace(0, count - 1, max(1, round(share * count))).astype(np.int64))
    parts = []
    for at in range(0, len(pages), PAGES_AT_ONCE):
        rows = segments.rows(entry, pages[at : at + PAGES_AT_ONCE].tolist(), [column], keep=False)
        found = rows.fields.get(column)
        if found is not None:
            vectors, listed = vectors_in_lists(found, metric)
            parts.append(vectors[listed])
    return parts
