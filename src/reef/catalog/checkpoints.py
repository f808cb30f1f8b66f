"""The checkpoint store: immutable objects, read by range.

A key costs the tail and one block, both cached; a scan costs the tail and the blocks of its
range, fetched together. A checkpoint that was collected is told by NotFoundError: whoever reads
without a lease looks at the head again.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from reef.catalog.cache import BlobCache
from reef.catalog.checkpoint_format import (
    CheckpointMeta,
    Pair,
    Tail,
    decode_checkpoint,
    decode_pairs,
    decode_tail,
    encode_checkpoint,
    tail_bytes_of,
)
from reef.catalog.head import CheckpointRef
from reef.errors import InvalidInputError, Kind
from reef.formats.coding import corrupt
from reef.paths import CatalogNames, catalog_object
from reef.stores import Store
from reef.stores.fetch import fetch, read_again
from reef.types import KeyRange

__all__ = ["CheckpointStore", "FoundCheckpoint"]


@dataclass(frozen=True, slots=True)
class FoundCheckpoint:
    """A checkpoint as a listing shows it."""

    key: str
    id: str
    seq: int
    bytes: int
    last_modified_s: float


class CheckpointStore:
    """Writes, reads and lists checkpoints. Safe for threads."""

    def __init__(self, store: Store, names: CatalogNames, cache: BlobCache | None) -> None:
        self._store = store
        self._names = names
        self._cache = cache

    def write(self, meta: CheckpointMeta, pairs: Sequence[Pair]) -> CheckpointRef:
        """Write sorted pairs under a name that was never used before."""
        body, tail_bytes = encode_checkpoint(meta, pairs)
        self._store.upload(self._names.checkpoint(meta.id), [body])
        return CheckpointRef(
            meta.id, meta.last_segment_seq_at_ckpt, meta.txn_id, len(body), tail_bytes
        )

    def meta(self, ref: CheckpointRef) -> CheckpointMeta:
        """Return what a checkpoint says of itself, without reading its pairs."""
        return self._tail(ref).meta

    def get(self, ref: CheckpointRef, key: bytes) -> bytes | None:
        """Return a value: the tail and one block are read, at most."""
        index = self._tail(ref).index
        block = index.block_of(key)
        if block is None:
            return None
        keys, values = self._blocks(ref, [index.span(block)])[0]
        place = bisect_left(keys, key)
        return values[place] if place < len(keys) and keys[place] == key else None

    def scan(self, ref: CheckpointRef, wanted: KeyRange) -> list[Pair]:
        """Return the pairs of a range, in order."""
        index = self._tail(ref).index
        spans = [index.span(block) for block in index.blocks_in(wanted)]
        return [
            pair
            for keys, values in self._blocks(ref, spans)
            for pair in zip(keys, values, strict=True)
            if wanted.has(pair[0])
        ]

    def read_whole(self, checkpoint_id: str) -> tuple[CheckpointMeta, list[Pair]]:
        """Return everything, every byte checked, nothing of it from a cache."""
        name = self._names.checkpoint(checkpoint_id)
        tail, pairs = fetch(
            self._store, name, lambda body: decode_checkpoint(body, name, tail_bytes_of(body, name))
        )
        if tail.meta.id != checkpoint_id:
            raise corrupt(name, 0, f"holds checkpoint {tail.meta.id}")
        return tail.meta, pairs

    def found(self) -> list[FoundCheckpoint]:
        """Return what a listing shows, oldest first."""
        infos = (
            (info, catalog_object(info.key)) for info in self._store.list(self._names.checkpoints)
        )
        return [
            FoundCheckpoint(
                info.key, f"{named[0]:020}-{named[1]}", named[0], info.size, info.last_modified_s
            )
            for info, named in infos
            if named is not None
        ]

    # --- ranges -------------------------------------------------------------------
    def _tail(self, ref: CheckpointRef) -> Tail:
        name = self._names.checkpoint(ref.id)
        start = ref.bytes - ref.tail_bytes
        tail = read_again(
            lambda: decode_tail(self._ranges(ref, [(start, ref.bytes)])[0], name, start),
            lambda: self._forget(ref, [(start, ref.bytes)]),
        )
        if tail.meta.id != ref.id:
            raise corrupt(name, start, f"holds checkpoint {tail.meta.id}")
        return tail

    def _blocks(
        self, ref: CheckpointRef, spans: Sequence[tuple[int, int]]
    ) -> list[tuple[list[bytes], list[bytes]]]:
        name = self._names.checkpoint(ref.id)

        def read() -> list[tuple[list[bytes], list[bytes]]]:
            bodies = self._ranges(ref, spans)
            return [
                decode_pairs(body, name, start)
                for body, (start, _) in zip(bodies, spans, strict=True)
            ]

        return read_again(read, lambda: self._forget(ref, spans))

    def _ranges(self, ref: CheckpointRef, spans: Sequence[tuple[int, int]]) -> list[bytes]:
        """Return ranges from the cache; what is missing is fetched in one go."""
        bodies = {span: self._cached(ref, span) for span in spans}
        missing = [span for span, body in bodies.items() if body is None]
        if missing:
            name = self._names.checkpoint(ref.id)
            try:
                fetched = self._store.get_ranges(name, missing)
            except InvalidInputError as error:
                if error.kind is not Kind.INVALID_RANGE:
                    raise
                raise corrupt(name, missing[0][0], f"cut short: {error.message}") from error
            for span, blob in zip(missing, fetched, strict=True):
                bodies[span] = blob
                if self._cache is not None:
                    self._cache.put(self._label(ref, span), ref.id, blob)
        return [body for span in spans if (body := bodies[span]) is not None]

    def _cached(self, ref: CheckpointRef, span: tuple[int, int]) -> bytes | None:
        return self._cache.get(self._label(ref, span), ref.id) if self._cache is not None else None

    def _forget(self, ref: CheckpointRef, spans: Sequence[tuple[int, int]]) -> None:
        self._store.forget(self._names.checkpoint(ref.id), spans)
        for span in spans:
            if self._cache is not None:
                self._cache.forget(self._label(ref, span), ref.id)

    def _label(self, ref: CheckpointRef, span: tuple[int, int]) -> str:
        return f"{self._store.url}/{self._names.checkpoint(ref.id)}[{span[0]}:{span[1]}]"
