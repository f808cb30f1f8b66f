"""Segments: the changes of one transaction each, linked into a chain, with an index by key.

    magic       8 bytes, "RFCSEG1" and a zero
    header      a frame: msgpack of all fields but the records
    records     a frame: msgpack list of [key, value], null for a deletion

A segment has a number and a write id of its own, and names the write id of its predecessor, so a
chain has one history. An abandoned segment has no records: it occupies a name, so that a late
write of it fails.

The names of the newest segments are in the head. Older ones are found by a listing, and following
each segment's predecessor shows which of them belong to the chain. The others are orphans:
transactions that were not published, and cannot be once the head has moved on.

A process reads a segment once. `ChainIndex` maps each key to the segments that change it, and
grows by the segments that are new in the head; so a lookup costs the same after ten segments as
after ten thousand. Values stay in the segments, of which the caches hold as many as fit.

The blob cache holds immutable objects: segments, and ranges of checkpoints. Their tag is the unique
write id, so a hit needs no request. Head, plan, leases and "not found" are never cached (H9).
Catalogs may share a cache: names begin with the address of the store.
"""

from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import msgspec

from reef.errors import UNDECODABLE, CorruptionError, NotFoundError
from reef.formats.coding import ByteReader, corrupt, encode_frame, read_frame, unsupported
from reef.paths import CatalogNames, catalog_object
from reef.runtime import leaf_lock
from reef.stores import Store, WriteResult
from reef.stores.base import reread_if_damaged
from reef.types import KeyRange

# --- the format ---------------------------------------------------------------------

MAGIC = b"RFCSEG1\0"
FORMAT = 1


class _Header(msgspec.Struct, frozen=True):
    format: int
    seq: int
    txn_id: int
    write_id: str
    base_write_id: str
    lease_id: str
    created_at_ms: int
    abandoned: bool = False


@dataclass(frozen=True, slots=True)
class CatalogSegment:
    """One transaction: None in `records` is a deletion."""

    seq: int
    txn_id: int
    write_id: str
    base_write_id: str
    """Write id of its predecessor; empty in the first."""
    records: Mapping[bytes, bytes | None]
    lease_id: str = ""
    """Lease of its session: while it is alive, no other process publishes the segment."""
    created_at_ms: int = 0
    abandoned: bool = False


def encode_segment(segment: CatalogSegment) -> bytes:
    """Encode a segment, with its records sorted by key."""
    header = _Header(
        FORMAT,
        segment.seq,
        segment.txn_id,
        segment.write_id,
        segment.base_write_id,
        segment.lease_id,
        segment.created_at_ms,
        segment.abandoned,
    )
    records = msgspec.msgpack.encode(sorted(segment.records.items()))
    return MAGIC + encode_frame(msgspec.msgpack.encode(header)) + encode_frame(records)


def decode_segment(data: bytes, name: str) -> CatalogSegment:
    """Decode a segment; CorruptionError with the offset of the damage."""
    cursor = ByteReader(data, name)
    cursor.expect(MAGIC, "magic of a catalog's segment")
    offset = cursor.offset
    try:
        header = msgspec.msgpack.decode(read_frame(cursor, "the header"), type=_Header)
    except UNDECODABLE as error:
        cursor.position = offset
        cursor.fail(f"not a segment's header: {error}")
    if header.format > FORMAT:
        raise unsupported(name, "segment of a catalog", header.format, FORMAT)
    offset = cursor.offset
    try:
        pairs = msgspec.msgpack.decode(
            read_frame(cursor, "the records"), type=list[tuple[bytes, bytes | None]]
        )
    except UNDECODABLE as error:
        cursor.position = offset
        cursor.fail(f"not a segment's records: {error}")
    cursor.end()
    return CatalogSegment(
        header.seq,
        header.txn_id,
        header.write_id,
        header.base_write_id,
        dict(pairs),
        header.lease_id,
        header.created_at_ms,
        header.abandoned,
    )


# --- the blob cache -----------------------------------------------------------------

CACHE_BYTES = 256 << 20
ENTRY_BYTES = 200
"""Approximate memory of an entry besides its bytes."""


class BlobCache(Protocol):
    """A cache of immutable blobs by name and tag. Thread-safe."""

    def get(self, name: str, tag: str) -> bytes | None: ...
    def put(self, name: str, tag: str, blob: bytes) -> None: ...
    def forget(self, name: str, tag: str) -> None: ...


class MemoryBlobCache:
    """Evicts the least recently used blobs above a number of bytes."""

    def __init__(self, bytes_max: int = CACHE_BYTES) -> None:
        self.bytes_max = bytes_max
        self.bytes = 0
        self._lock = leaf_lock()
        self._blobs: OrderedDict[tuple[str, str], bytes] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blobs)

    def __reduce__(self) -> tuple[type["MemoryBlobCache"], tuple[int]]:
        return MemoryBlobCache, (self.bytes_max,)  # another process has its own memory

    def get(self, name: str, tag: str) -> bytes | None:
        with self._lock:
            blob = self._blobs.get((name, tag))
            if blob is not None:
                self._blobs.move_to_end((name, tag))
            return blob

    def put(self, name: str, tag: str, blob: bytes) -> None:
        if _weight(blob) > self.bytes_max:
            return
        with self._lock:
            self._drop((name, tag))
            self._blobs[name, tag] = blob
            self.bytes += _weight(blob)
            while self.bytes > self.bytes_max:
                self.bytes -= _weight(self._blobs.popitem(last=False)[1])

    def forget(self, name: str, tag: str) -> None:
        with self._lock:
            self._drop((name, tag))

    def _drop(self, key: tuple[str, str]) -> None:
        blob = self._blobs.pop(key, None)
        if blob is not None:
            self.bytes -= _weight(blob)


def _weight(blob: bytes) -> int:
    return len(blob) + ENTRY_BYTES


# --- the chain ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ChainTip:
    """The end of a chain: the number of its last segment, and the last write ids."""

    last_seq: int
    recent: tuple[str, ...]
    """Oldest first."""

    @property
    def first_seq(self) -> int:
        """The first segment whose write id is listed."""
        return self.last_seq - len(self.recent) + 1


class ChainIndex:
    """The segments of a chain above a checkpoint, by key. It only grows. Thread-safe.

    Serves every snapshot whose segments it has: a lookup ignores segments after the snapshot's.
    """

    def __init__(self, floor: int, segments: Sequence[CatalogSegment] = ()) -> None:
        self.floor = floor
        """The segments after this one are indexed."""
        self._lock = leaf_lock()
        self._write_ids: list[str] = []
        self._seqs: dict[bytes, list[int]] = {}
        self._keys: list[bytes] = []
        """Sorted."""
        self.extend(segments)

    @property
    def last_seq(self) -> int:
        return self.floor + len(self._write_ids)

    def write_id(self, seq: int) -> str | None:
        """Return the write id of a segment; None if it is not indexed."""
        return self._write_ids[seq - self.floor - 1] if self.floor < seq <= self.last_seq else None

    def covers(self, tip: ChainTip, after_seq: int) -> bool:
        """Whether all segments from `after_seq` to the tip are indexed.

        A write id identifies all segments before it, so one comparison is enough.
        """
        return self.floor <= after_seq and self.write_id(tip.last_seq) == tip.recent[-1]

    def extend(self, segments: Sequence[CatalogSegment]) -> None:
        """Add the segments that come next; those that another thread has added are skipped."""
        with self._lock:
            new_keys: list[bytes] = []
            for segment in segments:
                if segment.seq != self.last_seq + 1:
                    continue
                self._write_ids.append(segment.write_id)
                for key in segment.records:
                    seqs = self._seqs.get(key)
                    if seqs is None:
                        self._seqs[key] = [segment.seq]
                        new_keys.append(key)
                    else:
                        seqs.append(segment.seq)
            if len(segments) > 1:
                self._keys = sorted(self._seqs)
            else:
                for key in new_keys:
                    insort(self._keys, key)

    def above(self, floor: int) -> "ChainIndex":
        """Return an index without the segments up to `floor`, which a checkpoint contains."""
        rest = ChainIndex(floor)
        with self._lock:
            rest._write_ids = self._write_ids[floor - self.floor :]
            for key in self._keys:
                seqs = self._seqs[key]
                if seqs[-1] > floor:
                    rest._seqs[key] = seqs[bisect_right(seqs, floor) :]
                    rest._keys.append(key)
        return rest

    def find(self, key: bytes, last_seq: int) -> int | None:
        """Return the newest segment up to `last_seq` that changes a key."""
        with self._lock:
            seqs = self._seqs.get(key, ())
            place = bisect_right(seqs, last_seq)
            return seqs[place - 1] if place else None

    def find_range(self, key_range: KeyRange, last_seq: int) -> dict[bytes, int]:
        """Return the keys of a range that are changed, each with the newest such segment."""
        with self._lock:
            start = bisect_left(self._keys, key_range.start)
            end = None if key_range.end is None else bisect_left(self._keys, key_range.end)
            changed: dict[bytes, int] = {}
            for key in self._keys[start:end]:
                place = bisect_right(self._seqs[key], last_seq)
                if place:
                    changed[key] = self._seqs[key][place - 1]
            return changed


# --- the store ----------------------------------------------------------------------

DECODED_BYTES_MAX = 16 << 20
"""Decoded segments are cached up to this many encoded bytes, besides the blob cache."""


@dataclass(frozen=True, slots=True)
class ListedSegment:
    """A segment in a listing."""

    key: str
    seq: int
    write_id: str
    bytes: int


class CatalogSegmentStore:
    """Writes, reads and lists segments. Thread-safe."""

    def __init__(self, store: Store, names: CatalogNames, cache: BlobCache | None) -> None:
        self._store = store
        self._names = names
        self._cache = cache
        self._lock = leaf_lock()
        self._decoded: OrderedDict[str, tuple[CatalogSegment, int]] = OrderedDict()
        self.decoded_bytes = 0
        self._index: ChainIndex | None = None
        """Index of the newest chain read."""

    # --- one segment --------------------------------------------------------------
    def create(self, segment: CatalogSegment) -> tuple[WriteResult, int]:
        """Write a segment under its name; return the result and the size."""
        body = encode_segment(segment)
        name = self._names.segment(segment.seq, segment.write_id)
        result = self._store.create(name, body)
        if result.landed and not segment.abandoned:
            self._keep(segment, body)
        return result, len(body)

    def read(self, seq: int, write_id: str) -> CatalogSegment:
        """Return a segment; NotFoundError if it does not exist."""
        cached = self._cached(write_id)
        if cached is not None:
            return cached
        name = self._names.segment(seq, write_id)
        label = f"{self._store.url}/{name}"
        segment, body = reread_if_damaged(
            lambda: self._fetch(name, label, write_id),
            lambda: self._cache.forget(label, write_id) if self._cache is not None else None,
        )
        if (segment.seq, segment.write_id) != (seq, write_id):
            raise corrupt(name, 0, f"holds segment {segment.seq} of {segment.write_id}")
        if not segment.abandoned:
            self._keep(segment, body)
        return segment

    def _fetch(self, name: str, label: str, write_id: str) -> tuple[CatalogSegment, bytes]:
        body = self._cache.get(label, write_id) if self._cache is not None else None
        if body is None:
            body = self._store.get(name)
        return decode_segment(body, name), body

    # --- many ---------------------------------------------------------------------
    def list_segments(self, after_seq: int = 0, upto_seq: int | None = None) -> list[ListedSegment]:
        """List segments by number, including orphans."""
        listed = []
        for info in self._store.list(self._names.segments, self._names.segments_after(after_seq)):
            named = catalog_object(info.key)
            if named is None:
                continue
            if upto_seq is not None and named[0] > upto_seq:
                break
            listed.append(ListedSegment(info.key, *named, info.size))
        return listed

    def read_many(self, named: Sequence[tuple[int, str]]) -> list[CatalogSegment]:
        """Return segments in order; those that are not cached are fetched in parallel."""
        cached = {write_id: self._cached(write_id) for _, write_id in named}
        missing = [one for one in named if cached[one[1]] is None]
        fetched = self._store.runtime.map(lambda one: self.read(*one), missing)
        cached.update((segment.write_id, segment) for segment in fetched)
        return [segment for _, write_id in named if (segment := cached[write_id]) is not None]

    def chain(self, tip: ChainTip, after_seq: int) -> list[CatalogSegment]:
        """Return the segments after `after_seq`, oldest first; NotFoundError if one is missing."""
        listed = range(max(after_seq + 1, tip.first_seq), tip.last_seq + 1)
        ids = tip.recent[len(tip.recent) - len(listed) :] if listed else ()
        segments = self.read_many(list(zip(listed, ids, strict=True)))
        if segments and tip.first_seq > after_seq + 1:
            segments = [*self._older(segments[0], after_seq), *segments]
        for before, after in pairwise(segments):
            if after.base_write_id != before.write_id:
                raise corrupt(
                    self._names.segment(after.seq, after.write_id),
                    0,
                    f"its base is {after.base_write_id}, its predecessor is {before.write_id}",
                )
        return segments

    def _older(self, first: CatalogSegment, after_seq: int) -> list[CatalogSegment]:
        """Follow the chain back from a segment, among those in a listing."""
        listed = self.list_segments(after_seq, first.seq - 1)
        fetched = self._store.runtime.map(
            self._read_intact, [one for one in listed if self._cached(one.write_id) is None]
        )
        by_name = {(s.seq, s.write_id): s for s in fetched if s is not None}
        older: list[CatalogSegment] = []
        seq, write_id = first.seq - 1, first.base_write_id
        while seq > after_seq:
            segment = by_name.get((seq, write_id)) or self.read(seq, write_id)
            older.append(segment)
            seq, write_id = seq - 1, segment.base_write_id
        return older[::-1]

    def _read_intact(self, listed: ListedSegment) -> CatalogSegment | None:
        """Return a segment; None for an orphan that is damaged, or removed meanwhile."""
        try:
            return self.read(listed.seq, listed.write_id)
        except (CorruptionError, NotFoundError):
            return None

    # --- by key -------------------------------------------------------------------
    def index(self, tip: ChainTip, after_seq: int) -> ChainIndex:
        """Return an index of the segments after `after_seq`; only new ones are read."""
        index = self._index
        if index is not None and index.covers(tip, after_seq):
            return index
        last_seq = 0 if index is None else index.last_seq
        if index is not None and index.floor <= after_seq <= last_seq < tip.last_seq:
            added = self.chain(tip, last_seq)
            if added[0].base_write_id == index.write_id(last_seq):
                if after_seq > index.floor:
                    index = index.above(after_seq)
                index.extend(added)
                return self._keep_index(index, tip)
        return self._keep_index(ChainIndex(after_seq, self.chain(tip, after_seq)), tip)

    def _keep_index(self, index: ChainIndex, tip: ChainTip) -> ChainIndex:
        """Keep the index of the newest chain; that of an old snapshot is its reader's only."""
        with self._lock:
            kept = self._index
            known = None if kept is None else kept.write_id(tip.last_seq)
            is_other = known not in (None, tip.recent[-1])  # the catalog was created again
            if kept is None or is_other or index.last_seq >= kept.last_seq:
                self._index = index
        return index

    # --- memory -------------------------------------------------------------------
    def _cached(self, write_id: str) -> CatalogSegment | None:
        with self._lock:
            cached = self._decoded.get(write_id)
        return None if cached is None else cached[0]

    def _keep(self, segment: CatalogSegment, body: bytes) -> None:
        if self._cache is None:
            return
        name = self._names.segment(segment.seq, segment.write_id)
        self._cache.put(f"{self._store.url}/{name}", segment.write_id, body)
        weight = _weight(body)
        if weight > DECODED_BYTES_MAX:  # it would evict all others
            return
        with self._lock:
            self.decoded_bytes -= self._decoded.pop(segment.write_id, (segment, 0))[1]
            self._decoded[segment.write_id] = segment, weight
            self.decoded_bytes += weight
            while self.decoded_bytes > DECODED_BYTES_MAX:
                self.decoded_bytes -= self._decoded.popitem(last=False)[1][1]
