r"""Manifests: what is visible in a namespace, as of one generation.

Small ones are plain JSON, so that a person can read them:

    {"crc32c":"1a2b3c4d","format":1,"manifest":{…},"segments":{"id":[…],"level":[…],…}}

Segments stand column by column, which compresses a fifth better than row by row. The
checksum is over everything after its own comma, and is checked before the format's number.
From 64 KiB on the same text is compressed:

    "RFMAN1\0\0" | block of kind MANIFEST

Fields that later parts of Reef need (branches, cursors, encryption) are here from the
first version on; unknown ones are kept out, not guessed.
"""

import re
from enum import StrEnum
from operator import attrgetter

import msgspec

from reef.errors import UNDECODABLE
from reef.formats.block import BlockKind, Codec, decode_block, encode_block
from reef.formats.coding import corrupt, crc32c, unsupported
from reef.formats.schema import DEFAULT_SCHEMA, Schema
from reef.formats.streams import Lineage

__all__ = [
    "Condemned",
    "CursorEntry",
    "DedupEntry",
    "Dropped",
    "Manifest",
    "NamespaceState",
    "OpenJob",
    "Recent",
    "SegmentEntry",
    "Snapshot",
    "Successor",
    "Sums",
    "decode_manifest",
    "decode_successor",
    "encode_manifest",
    "encode_successor",
]

MAGIC = b"RFMAN1\0\0"
FORMAT = 2
"""2: a manifest that names a successor. An older release would publish over it without one."""
PLAIN_BYTES_MAX = 64 * 1024
HEAD = re.compile(rb'\{"crc32c":"([0-9a-f]{8})",')
HEAD_BYTES = 21
GRACE_MS = 15 * 60 * 1000


class NamespaceState(StrEnum):
    """Whether a namespace is there. A dropped one keeps its last manifest for ever."""

    LIVE = "live"
    DROPPED = "dropped"


class SegmentEntry(msgspec.Struct, frozen=True):
    """A segment that is visible, with what reads need to pass it by."""

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
    visible_lsn: int = 0
    """Of an ingest: the LSN that its rows have, which store 0; otherwise 0."""
    home: str | None = None
    """Where the object lies, if not in this namespace: a branch reads its parent's."""


class Snapshot(msgspec.Struct, frozen=True, omit_defaults=True):
    """A pinned generation."""

    id: str
    generation: int
    name: str | None = None
    expires_at_ms: int | None = None
    owner: str = ""


class DedupEntry(msgspec.Struct, frozen=True, array_like=True):
    """A keyed batch that was committed: what a repeated one is answered with."""

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
    """A registered reader of the log: up to where it has read, and what it goes on from.

    What counts in the log is judged from some manifest's floor on: write ids, open jobs and
    the dedup window. So the cursor names a generation whose floor is at most `lsn` + 1, and
    keeps that manifest and the log from its floor on, but none of its segments.
    """

    lsn: int
    generation: int


class Condemned(msgspec.Struct, frozen=True, array_like=True):
    """An object that will be deleted: since which generation nobody new can need it."""

    key: str
    generation: int
    since_ms: int


class Sums(msgspec.Struct, frozen=True, array_like=True):
    """Set hashes, summed up since they are kept: what came in, what jobs dropped and made.

    The segments of a manifest add up to `added` − `dropped` + `made`: proof that no job has
    lost a version on the way (`reef.manifest.sums`).
    """

    added: str
    dropped: str
    made: str


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


class Dropped(msgspec.Struct, frozen=True, omit_defaults=True):
    """How a namespace was dropped, and where it would go on."""

    at_ms: int
    """By the store's clock."""
    end_lsn: int
    """The first LSN after the fences of the drop: a successor's log begins here."""
    below: tuple[str, ...]
    """The write ids of those fences, the last one last."""
    is_cleared: bool = False
    """Whether a sweep has taken what was in it: it cannot be brought back any more."""


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
    snapshots: tuple[Snapshot, ...] = ()
    dedup: tuple[DedupEntry, ...] = ()
    dedup_keys_max: int = 10_000
    """How many keys are remembered. Never changes: all must agree on what counts in the log."""
    stream_marks: dict[str, int] = {}
    """By stream: up to which of its places it was committed below the floor."""
    stream_lineages: dict[str, Lineage] = {}
    """By stream: the last entry below the floor of each of the last epochs that appended to it."""
    writer_stream: str = ""
    """The local log of whoever has the writer role; empty for a writer without one."""
    writer_life: str = ""
    """Which opening of that log: copies of a log share its stream, and never a life."""
    open_jobs: tuple[OpenJob, ...] = ()
    dropped_lsn: int = 0
    """The newest delete of which no trace is left, not even in a segment's LSN bounds."""
    dropped_expired_ms: int = 0
    """Rows that had expired by then may be gone, for readers of every clock."""
    sums: Sums | None = None
    condemned: tuple[Condemned, ...] = ()
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
    branch_pins: dict[str, int] = {}
    cursors: dict[str, CursorEntry] = {}
    parent: str | None = None
    dropped: Dropped | None = None
    """Of a dropped namespace; left out of all others."""
    made_for: str = ""
    """The bulk job that this namespace was made for, while nobody else has used it."""
    incarnation: int = 1
    created_at_ms: int = 0
    """When the name was created again, by the clock of the process that did; 0 for a first one."""
    predecessors: tuple[int, ...] = ()
    """Earlier incarnations of the name that still have objects for a sweep to delete."""
    successor: Successor | None = None
    """Of a dropped namespace whose name was created again: it can only be read and swept."""
    key_ids: tuple[str, ...] = ()

    @property
    def last_applied_lsn(self) -> int:
        return self.wal_floor - 1

    @property
    def schema(self) -> Schema:
        """The newest schema."""
        return self.schemas[-1]


_FIELDS = msgspec.structs.fields(SegmentEntry)
_Columns = msgspec.defstruct(
    "_Columns",
    [(field.name, list[field.type], []) for field in _FIELDS],  # type: ignore[name-defined]
    omit_defaults=True,
    forbid_unknown_fields=True,
)


class _Envelope(msgspec.Struct, frozen=True):
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
    number = 1 if manifest.successor is None else FORMAT
    rest = b'"format":%d,"manifest":%s,"segments":%s}' % (number, body, columns)
    text = b'{"crc32c":"%08x",' % crc32c(rest) + rest
    if len(text) < PLAIN_BYTES_MAX:
        return text
    return MAGIC + encode_block(BlockKind.MANIFEST, text, Codec.ZSTD)


def decode_manifest(data: bytes, name: str) -> Manifest:
    """Return the manifest; CorruptionError for damage, UnsupportedFormatError for news."""
    if data.startswith(MAGIC):
        data = bytes(decode_block(data[len(MAGIC) :], BlockKind.MANIFEST, name, len(MAGIC)))
    head = HEAD.match(data)
    if head is None:
        raise corrupt(name, 0, f"begins with {data[:HEAD_BYTES]!r}, which no manifest does")
    if f"{crc32c(data[HEAD_BYTES:]):08x}".encode() != head[1]:
        raise corrupt(name, HEAD_BYTES, "checksum of the manifest does not match")
    try:
        envelope = msgspec.json.decode(data, type=_Envelope)
        if envelope.format > FORMAT:
            raise unsupported(name, "manifest", envelope.format, FORMAT)
        manifest = msgspec.json.decode(envelope.manifest, type=Manifest)
        segments = _from_columns(msgspec.json.decode(envelope.segments, type=_Columns))
    except (*UNDECODABLE, ValueError) as error:
        raise corrupt(name, HEAD_BYTES, f"not a manifest: {error}") from error
    return msgspec.structs.replace(manifest, segments=segments)


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
    """Columns that hold nothing but their default are left out."""
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
