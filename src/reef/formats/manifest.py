"""Manifests: the visible state of a namespace, as of one generation.

Small ones are plain JSON, so that a person can read them:

    {"crc32c":"1a2b3c4d","format":1,"manifest":{…},"segments":{"id":[…],"level":[…],…}}

Segments are stored column by column, which compresses a fifth better than row by row. The
checksum is over everything after its own comma, and is checked before the format's number.
From 64 KiB on the same text is compressed:

    "RFMAN1\0\0" | block of kind MANIFEST

The number of the format says which features a manifest uses: a release refuses a higher one than it
knows, and never guesses.

**Points of streams** say which entry was committed last. An index alone does not identify an entry:
copies of a local log number on from the same place. The epoch of the writer that appended it does,
because a bucket hands out every epoch once; the digest covers the entry and all entries before it.
"""

import re
from collections.abc import Iterable, Iterator
from enum import StrEnum
from operator import attrgetter, gt

import msgspec

from reef.errors import UNDECODABLE
from reef.formats.coding import (
    BlockKind,
    Codec,
    corrupt,
    crc32c,
    decode_block,
    encode_block,
    unsupported,
)
from reef.formats.schema import DEFAULT_SCHEMA, Schema
from reef.paths import centroids_name, numbered_key


class StreamPoint(msgspec.Struct, frozen=True, array_like=True):
    """One entry of a stream: `[epoch, index, digest]`."""

    epoch: int
    """Epoch of the writer that appended the entry, which may be older than the uploader's."""
    index: int
    digest: bytes
    """Digest of the entry and of all before it, 16 bytes."""


Lineage = tuple[StreamPoint, ...]
"""The last committed entry of each epoch, in ascending order of both."""


MAGIC = b"RFMAN1\0\0"
FORMAT = 7
"""2: a manifest that names a successor. 3: one of a namespace that was or is being renamed, or an
alias. 4: one of a branch, or of a namespace with branches. 5: one whose successor is restored from
a backup. An older release would publish over them without these fields. 6: one with a load with
`live_wins`, open or committed, whose rows an older release would sort at the wrong LSN. 7: one with
search indexes, which an older release would forget."""
PLAIN_BYTES_MAX = 64 * 1024
HEAD = re.compile(rb'\{"crc32c":"([0-9a-f]{8})",')
HEAD_BYTES = 21
GRACE_MS = 15 * 60 * 1000
INDEX_ROWS_MIN = 1024


class NamespaceState(StrEnum):
    """Whether a namespace is live or dropped. A dropped one keeps its last manifest for ever."""

    LIVE = "live"
    DROPPED = "dropped"


class IndexKind(StrEnum):
    """The kind of search that an index serves."""

    FILTER = "filter"
    VECTOR = "vector"
    TEXT = "text"


class IndexSpec(msgspec.Struct, frozen=True, omit_defaults=True):
    """An index of a namespace, as its manifest names it."""

    kind: IndexKind
    column: int
    """The number of the column in the schema."""
    options: dict[str, str | int | float | bool] = {}
    """Metric, language, stemming, positions, by kind."""
    centroids: str = ""
    """Id of a vector index's centroid object; empty until it is trained."""
    home: str | None = None
    """The root of the namespace that has the centroid object, if it is another one: a branch."""

    @property
    def rows_min(self) -> int:
        """Segments with fewer rows get no index: searching them row by row is as fast."""
        return int(self.options.get("rows_min", INDEX_ROWS_MIN))

    def serves(self, other: "IndexSpec") -> bool:
        """Whether an index that was built for this spec can be used for another one."""
        mine, theirs = ({**s.options, "rows_min": 0} for s in (self, other))
        return (self.kind, self.column, self.centroids) == (
            other.kind,
            other.column,
            other.centroids,
        ) and mine == theirs


def newest_indexes(indexes: Iterable[IndexSpec]) -> tuple[IndexSpec, ...]:
    """Return the indexes that segments get: without the centroids that a retraining replaces.

    While segments are rewritten, a manifest names both, the newer ones first.
    """
    first: dict[tuple[IndexKind, int], IndexSpec] = {}
    for spec in indexes:
        first.setdefault((spec.kind, spec.column), spec)
    return tuple(first.values())


class SegmentEntry(msgspec.Struct, frozen=True):
    """A visible segment, with the bounds by which reads skip it."""

    id: str
    level: int
    size: int
    checksum: int
    rows: int
    tombstones: int
    min_key: bytes
    max_key: bytes
    lsn_min: int
    lsn_max: int
    tail_bytes: int
    schema_id: int
    set_hash: str
    patches: int = 0
    """Rows that change only some columns of the row below: patches and merges."""
    visible_lsn: int = 0
    """LSN of an ingest, from which on its rows are visible; 0 in other segments."""
    home: str | None = None
    """Where the object is, if not in this namespace: a branch reads its parent's."""

    @property
    def rows_lsn(self) -> int:
        """LSN at which an ingest's rows sort, which store 0; 0 in other segments.

        That is the LSN of the ingest, or of the begin of a load with `live_wins`.
        """
        return self.lsn_max if self.visible_lsn else 0

    @property
    def is_late(self) -> bool:
        """Whether its rows became visible after newer ones: those of a load with `live_wins`."""
        return self.visible_lsn > self.lsn_max


class SnapshotEntry(msgspec.Struct, frozen=True, omit_defaults=True):
    """A pinned generation."""

    id: str
    generation: int
    name: str | None = None
    expires_at_ms: int | None = None
    owner: str = ""


class DedupEntry(msgspec.Struct, frozen=True, array_like=True):
    """A keyed batch that was committed: the receipt of its repeats."""

    key: str
    digest: str
    lsn: int
    index: int
    ops: int
    epoch: int
    write_id: str
    committed_at_ms: int


class OpenJob(msgspec.Struct, frozen=True, omit_defaults=True):
    """A bulk job whose begin was folded and whose end was not."""

    id: str
    begin_lsn: int
    key: str | None = None
    live_wins: bool = False


class CursorEntry(msgspec.Struct, frozen=True, array_like=True):
    """A registered reader of the log: up to where it has read, and the manifest that it resumes
    from.

    Objects of the log are classified from some manifest's floor on: write ids, open jobs and
    the dedup window. So the cursor names a generation whose floor is at most `lsn` + 1, and
    keeps that manifest and the log from its floor on, but none of its segments.
    """

    lsn: int
    generation: int


class Condemned(msgspec.Struct, frozen=True, array_like=True):
    """An object that will be deleted: since which generation no new reader can need it."""

    key: str
    generation: int
    since_ms: int


class CondemnedRange(msgspec.Struct, frozen=True, array_like=True):
    """Consecutive numbered objects that will be deleted: slots of the log, or manifests (ADR 0031).

    A log with a thousand commits a second has a million of them within a grace period.
    """

    folder: str
    """`wal` or `manifest`."""
    first: int
    last: int
    generation: int
    since_ms: int

    def __len__(self) -> int:
        return self.last - self.first + 1

    def all_keys(self) -> Iterator[str]:
        """Yield the keys of the objects, relative to the namespace."""
        return (numbered_key(self.folder, n) for n in range(self.first, self.last + 1))

    def without(self, first: int, last: int) -> "list[CondemnedRange]":
        """Return the parts below `first` and above `last`."""
        if first > last:
            return [self]
        below = msgspec.structs.replace(self, last=min(self.last, first - 1))
        above = msgspec.structs.replace(self, first=max(self.first, last + 1))
        return [part for part in (below, above) if part.first <= part.last]


class Sums(msgspec.Struct, frozen=True, array_like=True):
    """Set hashes, summed up since they are kept: of versions added, dropped and made by jobs.

    The segments of a manifest add up to `added` − `dropped` + `made`: proof that no job has
    lost a version on the way (`reef.manifest.invariants`).
    """

    added: str
    dropped: str
    made: str


class Rename(msgspec.Struct, frozen=True):
    """A rename that was announced, and is not decided yet."""

    to: str
    id: str


class Alias(msgspec.Struct, frozen=True):
    """The namespace that has a name by a rename; in force while its head has this rename's id."""

    folder: str
    id: str


class Origin(msgspec.Struct, frozen=True, array_like=True):
    """How a branch was made: `[id, root, generation, last_lsn, at_ms]`."""

    id: str
    """Id of the branch: two processes that make a branch of the same name have two."""
    root: str
    """The folder of the namespace that was branched."""
    generation: int
    last_lsn: int
    """The branch has the log of that generation up to here, and its own from the next LSN on."""
    at_ms: int
    """When it was made, by the store's clock."""


class InheritedLog(msgspec.Struct, frozen=True, array_like=True):
    """A part of the log that a branch reads in the folder of another namespace."""

    last_lsn: int
    root: str


class BranchPin(msgspec.Struct, frozen=True, array_like=True):
    """Objects of this namespace that a branch needs: a generation, and its log up to an LSN."""

    root: str
    """The folder of the branch."""
    generation: int
    last_lsn: int
    pinned_at_ms: int
    """By the store's clock."""


class Successor(msgspec.Struct, frozen=True, omit_defaults=True):
    """The incarnation that replaces a dropped namespace, and how its first manifest is made.

    Published in the last manifest of the dropped one, so that exactly one re-creation wins, and
    stored again as `successors/<incarnation>.json`. Any process can make the first manifest of
    the new chain from it.
    """

    incarnation: int
    schema: Schema
    generation: int
    wal_base: int
    """All numbers continue (generations, LSNs, epochs, schema ids): a receipt, a cursor, an
    `as_of` or a local log of one incarnation is never taken for a position in another."""
    writer_epoch: int = 0
    compactor_epoch: int = 0
    made_for: str = ""
    predecessors: tuple[int, ...] = ()
    created_at_ms: int = 0
    grace_ms: int = GRACE_MS
    names: tuple[str, ...] = ()
    rename_id: str = ""
    origin: Origin | None = None
    """Origin of a branch that replaces a dropped namespace."""
    indexes: tuple[IndexSpec, ...] = ()
    prepared: str = ""
    """Object with the first manifest of a namespace that is restored from a backup."""


class Dropped(msgspec.Struct, frozen=True, omit_defaults=True):
    """How a namespace was dropped, and where it would continue."""

    at_ms: int
    """By the store's clock."""
    end_lsn: int
    """The first LSN after the fences of the drop: a successor's log begins here."""
    below: tuple[str, ...]
    """The write ids of those fences, the last one last."""
    is_cleared: bool = False
    """Whether a sweep has deleted its content: it cannot be undropped any more."""


class Recent(msgspec.Struct, frozen=True, array_like=True):
    """A published generation: the only proof that a slow publish has landed."""

    generation: int
    write_id: str
    published_at_ms: int


class Manifest(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """One generation. Never changed; the next one is made from it by a pure edit."""

    generation: int
    write_id: str
    published_at_ms: int
    state: NamespaceState = NamespaceState.LIVE
    schemas: tuple[Schema, ...] = (DEFAULT_SCHEMA,)
    writer_epoch: int = 0
    compactor_epoch: int = 0
    compactor_job: str = ""
    """In whose name the current compactor stages segments: they are kept for it (H28)."""
    max_parallel_writes: int = 1
    wal_floor: int = 1
    """The first LSN that is not folded into segments."""
    wal_base: int = 1
    """The first LSN that this namespace ever had: a branch begins after its parent's."""
    wal_id_last_seen: int = 0
    segments: tuple[SegmentEntry, ...] = ()
    snapshots: tuple[SnapshotEntry, ...] = ()
    dedup: tuple[DedupEntry, ...] = ()
    dedup_keys_max: int = 10_000
    """How many keys are remembered. Never changes: all must agree on which batches count."""
    stream_marks: dict[str, int] = {}
    """By stream: up to which of its places it was committed below the floor."""
    stream_lineages: dict[str, Lineage] = {}
    """By stream: the last entry below the floor of each of the last epochs that appended to it."""
    writer_stream: str = ""
    """The local log of the holder of the writer role; empty for a writer without one."""
    writer_life: str = ""
    """Which opening of that log: copies of a log share its stream, and never a life."""
    open_jobs: tuple[OpenJob, ...] = ()
    dropped_lsn: int = 0
    """The newest change that no LSN bounds show: a delete that was dropped, or the ingest of a load
    whose rows sort below it."""
    dropped_expired_ms: int = 0
    """Rows that had expired by then may be gone, for readers of every clock."""
    sums: Sums | None = None
    condemned: tuple[Condemned, ...] = ()
    condemned_ranges: tuple[CondemnedRange, ...] = ()
    """Numbered objects that are condemned; releases before this field list them in `condemned`."""
    oldest_retained: int = 1
    recent: tuple[Recent, ...] = ()
    below_floor: tuple[str, ...] = ()
    """Write ids of the slots just below the floor, the last one last: for the void rule."""
    grace_ms: int = GRACE_MS
    grace_before_ms: int = 0
    """The longer grace that still holds until `grace_lowered_at_ms` plus itself."""
    grace_lowered_at_ms: int = 0
    skipped_lsns: tuple[int, ...] = ()
    skipped_generations: tuple[int, ...] = ()
    ingests_without_begin: tuple[int, ...] = ()
    """LSNs of ingests that count although a repair has skipped the begin of their job."""
    branches: dict[str, BranchPin] = {}
    """Branches that need objects of this namespace, by their id."""
    cursors: dict[str, CursorEntry] = {}
    origin: Origin | None = None
    """Where a branch was made."""
    inherited: tuple[InheritedLog, ...] = ()
    """Parts of a branch's log that are stored elsewhere, in ascending order."""
    pinned_homes: tuple[str, ...] = ()
    """Folders of other namespaces in which a branch pins objects."""
    releases_origin: bool = False
    """Set in a branch by a full compaction or a purge, which rewrite the rows that it shared: the
    pin in its origin may end. Until then it holds the state that a merge compares with."""
    dropped: Dropped | None = None
    """Set in a dropped namespace only."""
    made_for: str = ""
    """The bulk job that this namespace was created for, while no other process has used it."""
    incarnation: int = 1
    created_at_ms: int = 0
    """When the name was created again, by the clock of the process that did; 0 for a first one."""
    predecessors: tuple[int, ...] = ()
    """Earlier incarnations of the name that still have objects for a sweep to delete."""
    successor: Successor | None = None
    """Next incarnation of a dropped namespace, which can only be read and swept from then on."""
    key_ids: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    """All names since the first rename, the current one last; empty if it was never renamed."""
    rename_id: str = ""
    """Id of the rename that gave it its current name."""
    renaming: Rename | None = None
    alias: Alias | None = None
    """Set if the name was given to another namespace: this one has no rows of its own."""
    indexes: tuple[IndexSpec, ...] = ()
    """The search indexes that new segments get; the footer of a segment names those that it has."""

    def name_in(self, folder: str) -> str:
        """Return the current name of a namespace whose objects are stored in this folder."""
        return self.names[-1] if self.names else folder

    @property
    def schema(self) -> Schema:
        """The newest schema."""
        return self.schemas[-1]

    @property
    def own_objects(self) -> set[str]:
        """The segments and centroid sets that it names in its own folder.

        Segments by their ids; centroid sets by their names, which have another ending.
        """
        named = {segment.id for segment in self.segments if segment.home is None}
        return named | _centroids_in(self.indexes)


def unindexed_rows(manifest: Manifest) -> int:
    """Return how many rows are in segments that get no search index unless they are merged: those
    with patches, and small ones, if all of these have enough rows for one. 0 without indexes.
    """
    rows_min = max((spec.rows_min for spec in manifest.indexes), default=0)
    if not rows_min:
        return 0
    patched = sum(e.rows for e in manifest.segments if e.patches)
    small = sum(e.rows for e in manifest.segments if e.rows < rows_min and not e.patches)
    return patched + (small if small >= rows_min else 0)


def _centroids_in(indexes: tuple[IndexSpec, ...]) -> set[str]:
    return {centroids_name(i.centroids) for i in indexes if i.centroids and i.home is None}


_FIELDS = msgspec.structs.fields(SegmentEntry)
_Columns = msgspec.defstruct(
    "_Columns",
    [(field.name, list[field.type], []) for field in _FIELDS],  # type: ignore[name-defined]
    omit_defaults=True,
    forbid_unknown_fields=True,
)


class _ManifestEnvelope(msgspec.Struct, frozen=True):
    crc32c: str
    format: int
    manifest: msgspec.Raw = msgspec.Raw(b"null")
    segments: msgspec.Raw = msgspec.Raw(b"{}")


def encode_manifest(manifest: Manifest) -> bytes:
    """Return the object's bytes."""
    body = msgspec.json.encode(msgspec.structs.replace(manifest, segments=()))
    # What cannot be read back would end the namespace: better not to publish it.
    msgspec.json.decode(body, type=Manifest)
    columns = msgspec.json.encode(_to_columns(manifest.segments))
    number = 1 if manifest.successor is None else 2
    if manifest.names or manifest.renaming is not None or manifest.alias is not None:
        number = 3
    if manifest.origin is not None or manifest.branches or _branches_next(manifest):
        number = 4
    if manifest.successor is not None and manifest.successor.prepared:
        number = 5
    if any(job.live_wins for job in manifest.open_jobs) or _has_late_rows(manifest.segments):
        number = 6
    if manifest.indexes:
        number = 7
    rest = b'"format":%d,"manifest":%s,"segments":%s}' % (number, body, columns)
    text = b'{"crc32c":"%08x",' % crc32c(rest) + rest
    if len(text) < PLAIN_BYTES_MAX:
        return text
    return MAGIC + encode_block(BlockKind.MANIFEST, text, Codec.ZSTD)


def _has_late_rows(segments: tuple[SegmentEntry, ...]) -> bool:
    """Whether any segment is of a load with `live_wins`; there may be 100,000 of them."""
    visible, sorts = attrgetter("visible_lsn"), attrgetter("lsn_max")
    return any(map(gt, map(visible, segments), map(sorts, segments)))


def _branches_next(manifest: Manifest) -> bool:
    return manifest.successor is not None and manifest.successor.origin is not None


def decode_manifest(data: bytes, name: str) -> Manifest:
    """Return the manifest; CorruptionError for damage, UnsupportedFormatError for newer ones."""
    return ManifestDecoder().decode(data, name)


class ManifestDecoder:
    """Decodes manifests of one chain; equal segment lists share one tuple.

    Most generations differ in other fields: snapshots, cursors, epochs, condemned keys.
    """

    def __init__(self) -> None:
        self._last: tuple[bytes, tuple[SegmentEntry, ...]] = (b"{}", ())

    def decode(self, data: bytes, name: str) -> Manifest:
        """Return the manifest; raises as `decode_manifest` does."""
        data = _checked_text(data, name)
        try:
            envelope = msgspec.json.decode(data, type=_ManifestEnvelope)
            if envelope.format > FORMAT:
                raise unsupported(name, "manifest", envelope.format, FORMAT)
            manifest = msgspec.json.decode(envelope.manifest, type=Manifest)
            segments = self._segments(bytes(envelope.segments))
        except (*UNDECODABLE, ValueError) as error:
            raise corrupt(name, HEAD_BYTES, f"not a manifest: {error}") from error
        return msgspec.structs.replace(manifest, segments=segments)

    def _segments(self, text: bytes) -> tuple[SegmentEntry, ...]:
        last = self._last
        if text != last[0]:
            last = self._last = (
                text,
                _from_columns(msgspec.json.decode(text, type=_Columns)),
            )
        return last[1]


class ManifestOutline(msgspec.Struct, frozen=True):
    """The fields of a manifest that a sweep needs of every retained generation."""

    generation: int
    wal_floor: int
    segment_ids: tuple[str, ...]
    """Without the segments of other namespaces; with the names of its centroid sets."""
    homes: frozenset[str] = frozenset()
    """The folders of other namespaces whose segments it names."""


class _OutlineFields(msgspec.Struct, frozen=True):
    generation: int
    wal_floor: int = 1
    indexes: tuple[IndexSpec, ...] = ()


class _OutlineColumns(msgspec.Struct, frozen=True):
    id: list[str] = []
    home: list[str | None] = []


class _OutlineEnvelope(msgspec.Struct, frozen=True):
    format: int
    manifest: _OutlineFields
    segments: _OutlineColumns = _OutlineColumns()


def decode_outline(data: bytes, name: str) -> ManifestOutline:
    """Return a few fields of a manifest, whose checksum is verified, several times faster."""
    data = _checked_text(data, name)
    try:
        envelope = msgspec.json.decode(data, type=_OutlineEnvelope)
    except (*UNDECODABLE, ValueError) as error:
        raise corrupt(name, HEAD_BYTES, f"not a manifest: {error}") from error
    if envelope.format > FORMAT:
        raise unsupported(name, "manifest", envelope.format, FORMAT)
    ids, homes = envelope.segments.id, envelope.segments.home
    own = [i for i, home in zip(ids, homes, strict=True) if home is None] if homes else ids
    fields = envelope.manifest
    own = [*own, *sorted(_centroids_in(fields.indexes))]
    named = (*homes, *(index.home for index in fields.indexes))
    others = frozenset(home for home in named if home is not None)
    return ManifestOutline(fields.generation, fields.wal_floor, tuple(own), others)


def _checked_text(data: bytes, name: str) -> bytes:
    """Return the JSON of a manifest, decompressed, after its checksum was verified."""
    if data.startswith(MAGIC):
        data = bytes(decode_block(data[len(MAGIC) :], BlockKind.MANIFEST, name, len(MAGIC)))
    head = HEAD.match(data)
    if head is None:
        raise corrupt(name, 0, f"begins with {data[:HEAD_BYTES]!r}, which no manifest does")
    if f"{crc32c(data[HEAD_BYTES:]):08x}".encode() != head[1]:
        raise corrupt(name, HEAD_BYTES, "checksum of the manifest does not match")
    return data


def encode_successor(successor: Successor) -> bytes:
    """Return the bytes of a successor record: the same for every process that writes it."""
    rest = b'"successor":%s}' % msgspec.json.encode(successor)
    return b'{"crc32c":"%08x",' % crc32c(rest) + rest


def decode_successor(data: bytes, name: str) -> Successor:
    """Return a successor record; CorruptionError for damage."""
    head = HEAD.match(data)
    if head is None or f"{crc32c(data[HEAD_BYTES:]):08x}".encode() != head[1]:
        raise corrupt(name, 0, "checksum of the successor record does not match")
    try:
        return msgspec.json.decode(data, type=_SuccessorEnvelope).successor
    except (*UNDECODABLE, ValueError) as error:
        raise corrupt(name, HEAD_BYTES, f"not a successor record: {error}") from error


class _SuccessorEnvelope(msgspec.Struct, frozen=True):
    crc32c: str
    successor: Successor


def _to_columns(segments: tuple[SegmentEntry, ...]) -> msgspec.Struct:
    """Columns with only default values are omitted."""
    columns = {}
    for field in _FIELDS:
        values = list(map(attrgetter(field.name), segments))
        if values.count(field.default) < len(values):
            columns[field.name] = values
    return _Columns(**columns)


def _from_columns(columns: msgspec.Struct) -> tuple[SegmentEntry, ...]:
    count = len(columns.id)  # type: ignore[attr-defined]  # made by defstruct
    values = []
    for field in _FIELDS:
        column = getattr(columns, field.name)
        if not column and field.default is not msgspec.NODEFAULT:
            column = [field.default] * count
        if len(column) != count:
            raise ValueError(f"{len(column)} values of {field.name} for {count} segments")
        values.append(column)
    return tuple(map(SegmentEntry, *values))
