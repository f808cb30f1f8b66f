"""What one object of a namespace says, and what is wrong with it. Reads only.

Damage does not end a look: what can still be read is told beside it, with the offset of each
part that cannot. A segment is read group by group, so that a large one fits into memory.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from reef.engine.history.change_rows import OP_NAMES
from reef.errors import UNDECODABLE, CorruptionError, NotFoundError, UnsupportedFormatError
from reef.formats.batch import decode_ops
from reef.formats.coding import Cursor, decode_msgpack
from reef.formats.frame import read_frame
from reef.formats.manifest import decode_manifest
from reef.formats.schema import Schema
from reef.formats.segment import HEAD as SEGMENT_HEAD
from reef.formats.segment import MAGIC as SEGMENT_MAGIC
from reef.formats.segment import VERSION as SEGMENT_VERSION
from reef.formats.segment_tail import SegmentTail, decode_tail
from reef.formats.wal_object import FOOTER, HEAD, WalHeader, WalObject
from reef.manifest.head import HeadFinder
from reef.manifest.invariants import check_loaded
from reef.manifest.leases import LeaseRecord
from reef.paths import Namespace, number_of
from reef.stores import Store
from reef.stores.dates import now_to_look

__all__ = ["Damage", "Looked", "ObjectReader"]

TAIL_BYTES = 16 << 20
"""At least so much of a segment's end is read: filter and index of a gigabyte fit."""
DAMAGED = (CorruptionError, UnsupportedFormatError)


@dataclass(frozen=True, slots=True)
class Damage:
    """A part of an object that cannot be read."""

    offset: int
    message: str


@dataclass(slots=True)
class Looked:
    """An object: what it says, its parts, and its damage."""

    object: str
    bytes: int
    facts: dict[str, Any] = field(default_factory=dict)
    parts: str = ""
    """What the rows of the table are."""
    rows: list[dict[str, Any]] = field(default_factory=list)
    damage: list[Damage] = field(default_factory=list)

    def note(self, error: CorruptionError | UnsupportedFormatError) -> None:
        self.damage.append(Damage(error.context.get("offset", 0), error.message))

    def to_dict(self) -> dict[str, Any]:
        parts = {self.parts: self.rows} if self.parts else {}
        damage = [{"offset": d.offset, "message": d.message} for d in self.damage]
        return {"object": self.object, "bytes": self.bytes, **self.facts, **parts, "damage": damage}


@dataclass(frozen=True, slots=True)
class ObjectReader:
    """Looks at objects of one namespace."""

    store: Store
    names: Namespace

    # --- manifests ----------------------------------------------------------------
    def manifest(self, generation: int | None) -> Looked:
        """Look at a generation, or at the newest there is."""
        if generation is None:
            listed = (number_of(info.key) for info in self.store.list(self.names.manifests))
            generation = max((number for number in listed if number), default=0)
            if not generation:
                raise NotFoundError(f"there is no namespace {self.names.name} in {self.store.url}")
        key = self.names.manifest(generation)
        data = self.store.get(key)
        looked = Looked(key, len(data), parts="segments")
        try:
            found = check_loaded(decode_manifest(data, key), key)
        except DAMAGED as error:
            looked.note(error)
            return looked
        looked.facts = _plain(found)
        looked.rows = looked.facts.pop("segments", [])
        return looked

    # --- the log ------------------------------------------------------------------
    def wal_object(self, lsn: int) -> Looked:
        """Look at an object of the log."""
        key = self.names.wal_object(lsn)
        data = self.store.get(key)
        looked = Looked(key, len(data), parts="operations")
        try:
            found = WalObject.decode(data, key)
        except DAMAGED as error:
            looked.note(error)
            _walk(looked, data)
            return looked
        looked.facts = _plain(found.header)
        schema = self._schema(found.header)
        if schema is not None:
            looked.rows = list(_operations(looked, found, schema))
        return looked

    def _schema(self, header: WalHeader) -> Schema | None:
        """Return what the records are read with; None if no manifest says it any more."""
        if header.schema is not None:
            return header.schema
        try:
            head = HeadFinder(self.store, self.names).find(fallback=True).manifest
        except (NotFoundError, *DAMAGED):
            return None
        return next((s for s in head.schemas if s.id == header.schema_id), None)

    # --- segments -----------------------------------------------------------------
    def segment(self, segment_id: str) -> Looked:
        """Look at a segment: footer, index, and every group."""
        key = self.names.segment(segment_id)
        size = self.store.head(key).size
        looked = Looked(key, size, parts="groups")
        self._check_start(looked)
        try:
            tail = self._tail(segment_id, size)
        except DAMAGED as error:
            looked.note(error)
            return looked
        looked.facts = _plain(tail.footer)
        looked.facts["range_tombstones"] = [_plain_tuple(t) for t in tail.range_tombstones]
        looked.rows = [self._group(looked, tail, group) for group in range(len(tail.index))]
        return looked

    def _check_start(self, looked: Looked) -> None:
        start = self.store.get_range(looked.object, 0, min(SEGMENT_HEAD.size, looked.bytes))
        wanted = SEGMENT_HEAD.pack(SEGMENT_MAGIC, SEGMENT_VERSION, 0)
        if start != wanted:
            looked.damage.append(Damage(0, f"begins with {start!r}, expected {wanted!r}"))

    def _tail(self, segment_id: str, size: int) -> SegmentTail:
        """Read the end of a segment: as much as the manifest says, or enough for any."""
        try:
            head = HeadFinder(self.store, self.names).find(fallback=True).manifest
        except (NotFoundError, *DAMAGED):
            named = []
        else:
            named = [entry.tail_bytes for entry in head.segments if entry.id == segment_id]
        key, start = self.names.segment(segment_id), max(0, size - max([*named, TAIL_BYTES]))
        return decode_tail(self.store.get_range(key, start, size), size, key)

    def _group(self, looked: Looked, tail: SegmentTail, group: int) -> dict[str, Any]:
        index, numbers = tail.index, sorted(tail.footer.schema.types())
        spans = tail.ranges(group, numbers)
        try:
            tail.decode_group(group, numbers, self.store.get_ranges(looked.object, spans))
        except DAMAGED as error:
            looked.note(error)
        return {
            "group": group,
            "offset": spans[0][0],
            "bytes": spans[-1][1] - spans[0][0],
            "rows": int(index.rows[group]),
            "lsn_min": int(index.lsn_min[group]),
            "lsn_max": int(index.lsn_max[group]),
            "first_key": index.first_keys[group],
            "last_key": index.last_keys[group],
        }

    # --- leases -------------------------------------------------------------------
    def lease(self, lease_id: str) -> Looked:
        """Look at a lease, and how long it has to live."""
        key = self.names.lease(lease_id)
        info, data = self.store.head(key), self.store.get(key)
        looked = Looked(key, len(data))
        try:
            record = msgspec.json.decode(data, type=LeaseRecord)
        except UNDECODABLE as error:
            looked.damage.append(Damage(0, f"not a lease: {error}"))
            return looked
        left_s = record.ttl_ms / 1000 - (now_to_look(self.store) - info.last_modified_s)
        looked.facts = {**_plain(record), "seconds_left": round(left_s, 3), "lapsed": left_s < 0}
        return looked


def _walk(looked: Looked, data: bytes) -> None:
    """Read an object of the log frame by frame, up to the one that is damaged."""
    cursor = Cursor(memoryview(data)[: -FOOTER.size], looked.object)
    try:
        cursor.take(HEAD.size)
        header = decode_msgpack(
            read_frame(cursor, "the header"), WalHeader, looked.object, HEAD.size
        )
        assert isinstance(header, WalHeader)
        looked.facts = _plain(header)
        for number in range(len(header.batches)):
            read_frame(cursor, f"record {number}")
    except DAMAGED as error:
        looked.note(error)


def _operations(looked: Looked, found: WalObject, schema: Schema) -> Iterator[dict[str, Any]]:
    for number, (record, start) in enumerate(zip(found.records, found.starts, strict=True)):
        try:
            ops = decode_ops(record, schema, looked.object, start)
        except DAMAGED as error:
            looked.note(error)
            continue
        kinds, keys = ops.kinds.to_pylist(), ops.keys.to_pylist()
        ends = ops.end_keys.to_pylist() if ops.end_keys is not None else [None] * len(ops)
        for kind, key, end in zip(kinds, keys, ends, strict=True):
            yield {"batch": number, "op": OP_NAMES[kind], "key": key, "end_key": end}


def _plain(value: Any) -> dict[str, Any]:
    """Return a struct as a dictionary; bytes stay bytes."""
    plain: dict[str, Any] = msgspec.to_builtins(value, builtin_types=(bytes,))
    return plain


def _plain_tuple(value: Any) -> dict[str, Any]:
    return {name: getattr(value, name) for name in ("start", "end", "lsn", "seq")}
