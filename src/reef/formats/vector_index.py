"""Vector indexes: the vectors of a segment in lists by their nearest centroid, as 8-bit codes.

    directory   msgpack: metric, dimensions, rows of each list; float32 offset and scale of each
                dimension
    data        for each list, in the order of the centroids:
                u32 crc32c | u32 ordinals | float32 squared lengths | uint8 codes, row by row

A code stands for `offset + code * scale`. Distances to codes rank the candidates; the distances in
results are computed from the stored vectors. For the metric cosine all vectors have length 1 here;
those of length 0, and those with a NaN or an infinity, have no distance and are in no list.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from reef.errors import UNDECODABLE
from reef.formats.centroids import CentroidSet
from reef.formats.coding import Buffer, corrupt, crc32c
from reef.formats.index_block import IndexParts, IndexSpec

METRICS = ("l2", "cosine", "dot")
CRC_BYTES = 4
LEVELS = 255
STEP_ROWS = 16_384
FLOAT32_BITS = 32
TINY = 1e-150
LARGEST = 1e17
"""Larger components count as this in lists: squared lengths are float32. Exact distances have them
in full."""

Floats = npt.NDArray[np.float32]
Ordinals = npt.NDArray[np.uint32]
Span = tuple[int, int]


def vectors_of(
    column: pa.Array, data_type: type[np.floating[Any]] = np.float32
) -> tuple[npt.NDArray[Any], npt.NDArray[np.bool_]]:
    """Return the vectors of a column as a matrix, and which rows have one; null rows are zero."""
    size = column.type.list_size
    known = column.is_valid().to_numpy(zero_copy_only=False)
    flat = column.drop_null().flatten().to_numpy(zero_copy_only=False)
    with np.errstate(over="ignore"):
        flat = flat.astype(data_type, copy=False)
    if known.all():
        return flat.reshape(len(column), size), known
    vectors = np.zeros((len(column), size), data_type)
    vectors[known] = flat.reshape(-1, size)
    return vectors, known


def as_indexed(vectors: npt.NDArray[Any], metric: str) -> Floats:
    """Return vectors as indexes have them: of length 1 by cosine, and no component so large that
    the square of a length overflows.
    """
    if metric == "cosine":
        return normalized(vectors)
    bounded: Floats = np.clip(vectors, -LARGEST, LARGEST).astype(np.float32)
    return bounded


def vectors_in_lists(column: pa.Array, metric: str) -> tuple[Floats, npt.NDArray[np.bool_]]:
    """Return the vectors of a column as indexes have them, and which of them are in a list."""
    is_wide = column.type.value_type.bit_width > FLOAT32_BITS
    vectors, known = vectors_of(column, np.float64 if is_wide else np.float32)
    listed = known & np.isfinite(vectors).all(axis=1)
    if metric == "cosine":
        listed &= vectors.any(axis=1)
    if not listed.all():
        vectors = np.where(listed[:, None], vectors, 0)
    return as_indexed(vectors, metric), listed


def normalized(vectors: npt.NDArray[Any]) -> Floats:
    """Return vectors of length 1; those of length 0 stay."""
    scaled = _scaled(vectors.astype(np.float64))
    lengths = np.linalg.norm(scaled, axis=-1, keepdims=True)
    unit: Floats = (scaled / np.where(lengths > 0, lengths, 1)).astype(np.float32)
    return unit


def distances(
    vectors: npt.NDArray[Any], query: npt.NDArray[Any], metric: str
) -> npt.NDArray[np.float64]:
    """Return exact distances, the smaller the nearer: Euclidean, 1 - cosine, or minus the product.

    Not finite for vectors without one: of length 0 by cosine, or with a NaN or an infinity.
    """
    exact, target = vectors.astype(np.float64, copy=False), query.astype(np.float64)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        if metric == "l2":
            return _lengths(exact - target)
        if metric == "dot":
            return np.asarray(-(exact @ target))
        exact, target = _scaled(exact), _scaled(target)
        lengths = np.linalg.norm(exact, axis=1) * np.linalg.norm(target)
        return np.asarray(1 - exact @ target / lengths)


def _lengths(vectors: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return the lengths of vectors, those too whose squares overflow or vanish."""
    lengths: npt.NDArray[np.float64] = np.sqrt(np.einsum("ij,ij->i", vectors, vectors))
    extreme = ~(np.isfinite(lengths) & (lengths > TINY))
    if extreme.any():
        some = vectors[extreme]
        largest = np.abs(some).max(axis=1, keepdims=True, initial=0)
        scaled = some / np.where(largest > 0, largest, 1)
        lengths[extreme] = largest[:, 0] * np.linalg.norm(scaled, axis=1)
    return lengths


def _scaled(vectors: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return vectors of the same directions, whose squares neither overflow nor vanish."""
    largest = np.abs(vectors).max(axis=-1, keepdims=True, initial=0)
    extreme = (largest > 0) & ((largest > 1e100) | (largest < 1e-100))
    if not extreme.any():
        return vectors
    return np.asarray(vectors / np.where(extreme & np.isfinite(largest), largest, 1))


class _Directory(msgspec.Struct, frozen=True):
    """The head of a directory."""

    metric: str
    dimensions: int
    counts: bytes
    """u32 rows of each list."""
    offset: bytes
    scale: bytes


@dataclass
class VectorIndexBuilder:
    """Builds the vector index of one segment."""

    centroids: CentroidSet
    metric: str

    def __post_init__(self) -> None:
        self._vectors: list[Floats] = []
        self._ordinals: list[Ordinals] = []

    def add(self, first_ordinal: int, column: pa.Array, valid: npt.NDArray[np.bool_]) -> None:
        """Add rows; those that are not valid, and those without a vector, are left out."""
        vectors, listed = vectors_in_lists(column, self.metric)
        places = np.flatnonzero(listed & valid)
        self._vectors.append(vectors[places])
        self._ordinals.append((places + first_ordinal).astype(np.uint32))

    def finish(self) -> IndexParts:
        """Return the index of all rows."""
        empty = np.zeros((0, self.centroids.dimensions), np.float32)
        vectors = np.concatenate([empty, *self._vectors])
        ordinals = np.concatenate([np.zeros(0, np.uint32), *self._ordinals])
        self._vectors.clear()
        return self._lists(vectors, ordinals)

    def _lists(self, vectors: Floats, ordinals: Ordinals) -> IndexParts:
        labels = self.centroids.assign(vectors)
        order = np.argsort(labels, kind="stable")
        counts = np.bincount(labels, minlength=len(self.centroids))
        low = vectors.min(axis=0) if len(vectors) else np.zeros(vectors.shape[1], np.float32)
        high = vectors.max(axis=0) if len(vectors) else low
        scale = ((high - low) / LEVELS).astype(np.float32)
        codes = _codes(vectors, order, low, scale)
        squares = _squares(codes, low, scale)
        ordinals = ordinals[order]
        parts, end = [], 0
        for count in counts.tolist():
            start, end = end, end + count
            part = b"".join(
                (
                    ordinals[start:end].astype("<u4").tobytes(),
                    squares[start:end].astype("<f4").tobytes(),
                    codes[start:end].tobytes(),
                )
            )
            parts.append(crc32c(part).to_bytes(4, "little") + part if count else b"")
        directory = _Directory(
            self.metric,
            self.centroids.dimensions,
            counts.astype("<u4").tobytes(),
            low.astype("<f4").tobytes(),
            scale.astype("<f4").tobytes(),
        )
        return IndexParts(msgspec.msgpack.encode(directory), parts)


def _codes(
    vectors: Floats, order: npt.NDArray[np.int64], low: Floats, scale: Floats
) -> npt.NDArray[np.uint8]:
    """Return the codes of vectors in an order, a part at a time to save memory."""
    steps = np.where(scale > 0, scale, 1)
    codes = np.empty(vectors.shape, np.uint8)
    for at in range(0, len(order), STEP_ROWS):
        part = (vectors[order[at : at + STEP_ROWS]] - low) / steps
        codes[at : at + STEP_ROWS] = np.clip(np.rint(part), 0, LEVELS)
    return codes


def _squares(codes: npt.NDArray[np.uint8], low: Floats, scale: Floats) -> Floats:
    """Return the squared length of each decoded vector, a part at a time."""
    parts = [
        np.square(codes[at : at + STEP_ROWS].astype(np.float32) * scale + low).sum(axis=1)
        for at in range(0, len(codes), STEP_ROWS)
    ]
    return np.concatenate([np.zeros(0, np.float32), *parts]).astype(np.float32)


@dataclass(frozen=True, slots=True)
class VectorList:
    """The rows of one list."""

    ordinals: Ordinals
    squares: Floats
    codes: npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class VectorDirectory:
    """The directory of a vector index."""

    name: str
    metric: str
    counts: npt.NDArray[np.int64]
    ends: npt.NDArray[np.int64]
    offset: Floats
    scale: Floats

    @classmethod
    def decode(cls, data: Buffer, name: str, offset: int) -> "VectorDirectory":
        """Return the directory from its checked bytes."""
        try:
            head = msgspec.msgpack.decode(data, type=_Directory)
            counts = np.frombuffer(head.counts, "<u4").astype(np.int64)
            low, scale = np.frombuffer(head.offset, "<f4"), np.frombuffer(head.scale, "<f4")
        except (*UNDECODABLE, ValueError) as error:
            raise corrupt(name, offset, f"not a vector directory: {error}") from error
        if not len(low) == len(scale) == head.dimensions or head.metric not in METRICS:
            raise corrupt(name, offset, f"{len(low)} dimensions, expected {head.dimensions}")
        sizes = np.where(counts > 0, CRC_BYTES + counts * (8 + head.dimensions), 0)
        return cls(name, head.metric, counts, np.cumsum(sizes), low, scale)

    @property
    def rows(self) -> int:
        """How many rows are in lists."""
        return int(self.counts.sum())

    def span(self, number: int) -> Span:
        """Return where a list is in the data."""
        return (int(self.ends[number - 1]) if number else 0), int(self.ends[number])

    def decode_list(self, number: int, data: Buffer) -> VectorList:
        """Return the rows of a list from its checked bytes."""
        payload, count = memoryview(data)[CRC_BYTES:], int(self.counts[number])
        start, end = self.span(number)
        stored = bytes(memoryview(data)[:CRC_BYTES])
        if len(data) != end - start or crc32c(payload).to_bytes(4, "little") != stored:
            raise corrupt(self.name, start, f"checksum of list {number} does not match")
        return VectorList(
            np.frombuffer(payload[: 4 * count], "<u4"),
            np.frombuffer(payload[4 * count : 8 * count], "<f4"),
            np.frombuffer(payload[8 * count :], np.uint8).reshape(count, len(self.scale)),
        )

    def distances(self, lists: Sequence[VectorList], query: Floats) -> tuple[Ordinals, Floats]:
        """Return the ordinals of lists and about their distances, comparable within a metric."""
        if not lists:
            return np.zeros(0, np.uint32), np.zeros(0, np.float32)
        codes = np.concatenate([one.codes for one in lists])
        ordinals = np.concatenate([one.ordinals for one in lists])
        base = np.float32(query @ self.offset)
        products: Floats = (codes.astype(np.float32) @ (query * self.scale) + base).astype("f4")
        if self.metric == "dot":
            return ordinals, -products
        squares = np.concatenate([one.squares for one in lists])
        return ordinals, squares - 2 * products


@dataclass(frozen=True, slots=True)
class BuildableVector:
    """A vector index, and its centroids once they are trained."""

    spec: IndexSpec
    centroids: CentroidSet | None

    def builder(self, data_type: pa.DataType) -> VectorIndexBuilder | None:
        """Return a builder for one segment; None without centroids."""
        if self.centroids is None or self.centroids.dimensions != data_type.list_size:
            return None
        return VectorIndexBuilder(self.centroids, str(self.spec.options.get("metric", "l2")))
