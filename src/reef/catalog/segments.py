"""The segment store: immutable objects, and the chain that they form.

`chain` gives the segments that a reader needs, in order. Their names are known from the head's
list of recent write ids; for what is older, a listing gives the candidates, and following each
segment's predecessor tells which of them count. The others are orphans: transactions that were
never published, and never will be once the head has moved on.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from reef.catalog.cache import BlobCache
from reef.catalog.segment_format import Segment, decode_segment, encode_segment
from reef.errors import CorruptionError, NotFoundError
from reef.formats.coding import corrupt
from reef.paths import CatalogNames, catalog_object
from reef.runtime import leaf_lock
from reef.stores import Store, WriteResult
from reef.stores.fetch import read_again

__all__ = ["Chain", "FoundSegment", "SegmentStore"]

DECODED_MAX = 1024
DECODED_BYTES_MAX = 16 << 20
"""What is decoded is kept beside its bytes, which the cache has: for what is read all the time."""


@dataclass(frozen=True, slots=True)
class Chain:
    """The end of a history: the last segments' write ids, oldest first."""

    last_seq: int
    recent: tuple[str, ...]

    @property
    def first_seq(self) -> int:
        return self.last_seq - len(self.recent) + 1


@dataclass(frozen=True, slots=True)
class FoundSegment:
    """A segment as a listing shows it."""

    key: str
    seq: int
    write_id: str
    bytes: int


class SegmentStore:
    """Writes, reads and lists segments. Safe for threads."""

    def __init__(self, store: Store, names: CatalogNames, cache: BlobCache | None) -> None:
        self._store = store
        self._names = names
        self._cache = cache
        self._lock = leaf_lock()
        self._decoded: OrderedDict[str, tuple[Segment, int]] = OrderedDict()
        self.decoded_bytes = 0

    # --- one segment --------------------------------------------------------------
    def create(self, segment: Segment) -> tuple[WriteResult, int]:
        """Write a segment under its name; return the answer and the size."""
        body = encode_segment(segment)
        name = self._names.segment(segment.seq, segment.write_id)
        result = self._store.create(name, body)
        if result.landed and not segment.abandoned:
            self._keep(segment, body)
        return result, len(body)

    def read(self, seq: int, write_id: str) -> Segment:
        """Return a segment; NotFoundError if it is not there."""
        known = self._known(write_id)
        if known is not None:
            return known
        name = self._names.segment(seq, write_id)
        label = f"{self._store.url}/{name}"
        segment, body = read_again(
            lambda: self._fetch(name, label, write_id),
            lambda: self._cache.forget(label, write_id) if self._cache is not None else None,
        )
        if (segment.seq, segment.write_id) != (seq, write_id):
            raise corrupt(name, 0, f"holds segment {segment.seq} of {segment.write_id}")
        if not segment.abandoned:
            self._keep(segment, body)
        return segment

    def _fetch(self, name: str, label: str, write_id: str) -> tuple[Segment, bytes]:
        body = self._cache.get(label, write_id) if self._cache is not None else None
        if body is None:
            body = self._store.get(name)
        return decode_segment(body, name), body

    # --- many ---------------------------------------------------------------------
    def found(self, after_seq: int = 0, upto_seq: int | None = None) -> list[FoundSegment]:
        """Return what a listing shows, by number: orphans too."""
        infos = []
        for info in self._store.list(self._names.segments, self._names.segments_after(after_seq)):
            named = catalog_object(info.key)
            if named is None:
                continue
            if upto_seq is not None and named[0] > upto_seq:
                break
            infos.append(FoundSegment(info.key, *named, info.size))
        return infos

    def chain(self, chain: Chain, after_seq: int) -> list[Segment]:
        """Return the segments behind `after_seq`, oldest first; NotFoundError if one is gone."""
        listed = range(max(after_seq + 1, chain.first_seq), chain.last_seq + 1)
        ids = chain.recent[len(chain.recent) - len(listed) :] if listed else ()
        segments = self._read_many(list(zip(listed, ids, strict=True)))
        if chain.first_seq <= after_seq + 1 or not segments:
            return self._checked(segments)
        older = self._older(segments[0], after_seq)
        return self._checked([*older, *segments])

    def _read_many(self, named: Sequence[tuple[int, str]]) -> list[Segment]:
        """Return segments in order: what is not known here is fetched together."""
        known = {write_id: self._known(write_id) for _, write_id in named}
        missing = [one for one in named if known[one[1]] is None]
        fetched = self._store.runtime.gather(
            [lambda one=one: self.read(*one) for one in missing]  # type: ignore[misc]
        )
        known.update((segment.write_id, segment) for segment in fetched)
        return [found for _, write_id in named if (found := known[write_id]) is not None]

    def _older(self, first: Segment, after_seq: int) -> list[Segment]:
        """Follow the chain back from a segment, among all that a listing shows."""
        found = self.found(after_seq, first.seq - 1)
        missing = [one for one in found if self._known(one.write_id) is None]
        read = self._store.runtime.gather(
            [lambda one=one: self._read_sound(one) for one in missing]  # type: ignore[misc]
        )
        by_name = {(s.seq, s.write_id): s for s in read if s is not None}
        older: list[Segment] = []
        seq, write_id = first.seq - 1, first.base_write_id
        while seq > after_seq:
            segment = by_name.get((seq, write_id)) or self.read(seq, write_id)
            older.append(segment)
            seq, write_id = seq - 1, segment.base_write_id
        return older[::-1]

    def _read_sound(self, found: FoundSegment) -> Segment | None:
        """An orphan may be damaged, or go meanwhile: it is nobody's."""
        try:
            return self.read(found.seq, found.write_id)
        except (CorruptionError, NotFoundError):
            return None

    def _checked(self, segments: Sequence[Segment]) -> list[Segment]:
        for before, after in pairwise(segments):
            if after.base_write_id != before.write_id:
                raise corrupt(
                    self._names.segment(after.seq, after.write_id),
                    0,
                    f"stands on {after.base_write_id}, the one before is {before.write_id}",
                )
        return list(segments)

    # --- memory -------------------------------------------------------------------
    def _known(self, write_id: str) -> Segment | None:
        with self._lock:
            known = self._decoded.get(write_id)
        return None if known is None else known[0]

    def _keep(self, segment: Segment, body: bytes) -> None:
        if self._cache is None:
            return
        name = self._names.segment(segment.seq, segment.write_id)
        self._cache.put(f"{self._store.url}/{name}", segment.write_id, body)
        if len(body) > DECODED_BYTES_MAX:  # it would take the place of all others
            return
        with self._lock:
            self.decoded_bytes -= self._decoded.pop(segment.write_id, (segment, 0))[1]
            self._decoded[segment.write_id] = segment, len(body)
            self.decoded_bytes += len(body)
            while self.decoded_bytes > DECODED_BYTES_MAX or len(self._decoded) > DECODED_MAX:
                self.decoded_bytes -= self._decoded.popitem(last=False)[1][1]
