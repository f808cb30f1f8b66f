"""Vector indexes: the vectors of a segment in lists by their nearest centroid, as 8-bit codes.

    directory   msgpack: metric, dimensions, rows of each list; float32 offset and scale of each
                dimension
    data        for each list, in the order of the centroids:
                u32 crc32c | u32 ordinals | float32 squared lengths | uint8 codes, row by row

A code stands for `offset + code * scale`. Distances to codes rank the candidates; the distances in
results are computed from the stored vectors. For the metric cosine all vectors have length 1 here;
those of length 0, and those with a NaN or an infinity, have no distance and are in no list.

Centroid sets are objects of their own, shared by all segments of a namespace:

    "RFCTR1\0\0" | u32 1 | u32 crc32c of all that follows | u32 lists | u32 dimensions
    u32 probes | u32 rows it was trained on | float32 centroids, one after the other

Segments that share centroids put similar vectors into the same list, so that a search reads the
same lists of each segment: recall and bytes do not depend on how many there are. Neighbouring
centroids follow each other (`neighbours_first`), so that lists that are probed together are read
with few requests.

`probes` is how many lists a search reads by default. It is measured when the set is trained: of
rows that were held back, the nearest neighbours must be in the lists that come first.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from reef.errors import UNDECODABLE
from reef.formats.coding import Buffer, corrupt, crc32c, unsupported
from reef.formats.manifest import IndexSpec
from reef.formats.segment_writer import IndexParts

MAGIC = b"RFCTR1\0\0"
VERSION = 1
HEAD = struct.Struct("<8sII")
SIZES = struct.Struct("<IIII")
LISTS_MIN, LISTS_MAX = 8, 4096
ROWS_PER_CENTROID = 40
"""Sampled rows per centroid in training; more does not improve recall."""
ITERATIONS = 8
CHUNK_ROWS = 16_384
QUERIES, NEIGHBOURS = 256, 10
COVERAGE = 0.985
"""The share of true neighbours whose lists the default probes read."""
PROBES_MIN = 4
Places = npt.NDArray[np.int64]
METRICS = ("l2", "cosine", "dot")
CRC_BYTES = 4
FOUR = np.arange(4)
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


@dataclass(frozen=True)
class CentroidSet:
    """The centroids of all lists, in the order of the lists."""

    centroids: Floats
    probes: int
    trained_rows: int = 0

    def __len__(self) -> int:
        return len(self.centroids)

    @property
    def dimensions(self) -> int:
        return int(self.centroids.shape[1])

    @cached_property
    def _squares(self) -> Floats:
        squares: Floats = np.einsum("ij,ij->i", self.centroids, self.centroids)
        return squares

    def assign(self, vectors: Floats) -> Places:
        """Return the list of each vector: that of the nearest centroid."""
        parts = [
            np.argmin(
                self._squares - 2 * (vectors[at : at + CHUNK_ROWS] @ self.centroids.T), axis=1
            )
            for at in range(0, len(vectors), CHUNK_ROWS)
        ]
        return np.concatenate([np.zeros(0, np.int64), *parts])

    def nearest(self, query: Floats, *, by_product: bool) -> Places:
        """Return all lists, the most promising first."""
        products = self.centroids @ query
        far = -products if by_product else self._squares - 2 * products
        return np.argsort(far, kind="stable")

    def encode(self) -> bytes:
        """Return the bytes of the object."""
        sizes = SIZES.pack(len(self), self.dimensions, self.probes, self.trained_rows)
        rest = sizes + self.centroids.astype("<f4").tobytes()
        return HEAD.pack(MAGIC, VERSION, crc32c(rest)) + rest


def decode_centroids(data: Buffer, name: str) -> CentroidSet:
    """Return a centroid set; CorruptionError for damage."""
    if len(data) < HEAD.size + SIZES.size:
        raise corrupt(name, 0, f"{len(data)} bytes are too few for centroids")
    magic, version, expected = HEAD.unpack_from(data)
    if magic != MAGIC:
        raise corrupt(name, 0, f"expected magic {MAGIC!r}, found {magic!r}")
    if crc32c(bytes(data[HEAD.size :])) != expected:
        raise corrupt(name, HEAD.size, "checksum of the centroids does not match")
    if version > VERSION:
        raise unsupported(name, "centroid set", version, VERSION)
    lists, dimensions, probes, rows = SIZES.unpack_from(data, HEAD.size)
    floats = np.frombuffer(data, "<f4", offset=HEAD.size + SIZES.size)
    if len(floats) != lists * dimensions or not lists or not 1 <= probes <= lists:
        raise corrupt(name, HEAD.size, f"{len(floats)} numbers for {lists} × {dimensions}")
    return CentroidSet(floats.reshape(lists, dimensions).astype(np.float32), probes, rows)


# --- training ---------------------------------------------------------------------------


def lists_for(rows: int) -> int:
    """Return how many lists so many rows get by default: about as many as rows in each."""
    return int(np.clip(round(rows**0.5), LISTS_MIN, LISTS_MAX))


def train(
    sample: Floats, lists: int, rows: int, *, seed: int = 1, by_product: bool = False
) -> CentroidSet:
    """Return centroids for `rows` rows of which `sample` is a random part."""
    rng = np.random.default_rng(seed)
    lists = max(1, min(lists, len(sample)))
    chosen = rng.permutation(len(sample))
    held_back = sample[chosen[: min(QUERIES, len(sample) // 8)]]
    centroids = _kmeans(sample[chosen[len(held_back) :]], lists, rng)
    made = CentroidSet(centroids[neighbours_first(centroids)], lists, rows)
    probes = _probes(made, sample, held_back, by_product=by_product)
    return CentroidSet(made.centroids, probes, rows)


def _kmeans(sample: Floats, lists: int, rng: np.random.Generator) -> Floats:
    lists = min(lists, len(sample))
    centroids = sample[rng.choice(len(sample), lists, replace=False)].copy()
    for _ in range(ITERATIONS):
        labels = CentroidSet(centroids, 1).assign(sample)
        order = np.argsort(labels, kind="stable")
        counts = np.bincount(labels, minlength=lists)
        starts = np.cumsum(counts) - counts
        sums = np.add.reduceat(sample[order], np.minimum(starts, len(sample) - 1), axis=0)
        filled = counts > 0
        centroids[filled] = sums[filled] / counts[filled, None]
        empty = np.flatnonzero(~filled)
        if len(empty):  # split the fullest lists
            fullest = np.argsort(counts)[::-1][: len(empty)]
            members = order[np.minimum(starts[fullest] + counts[fullest] // 2, len(sample) - 1)]
            centroids[empty[: len(members)]] = sample[members]
    return np.ascontiguousarray(centroids, np.float32)


def neighbours_first(centroids: Floats) -> Places:
    """Order centroids so that near ones are adjacent: halves along their main axis, recursively."""
    order: list[Places] = []
    pending = [np.arange(len(centroids))]
    while pending:
        part = pending.pop()
        if len(part) <= 2:
            order.append(part)
            continue
        points = centroids[part] - centroids[part].mean(axis=0)
        axis = _main_axis(points)
        ordered = part[np.argsort(points @ axis, kind="stable")]
        middle = len(part) // 2
        pending += [ordered[middle:], ordered[:middle]]
    return np.concatenate(order)


def _main_axis(points: Floats) -> Floats:
    """Return the direction in which points vary most, by power iteration."""
    axis = points[np.argmax(np.einsum("ij,ij->i", points, points))].astype(np.float64)
    for _ in range(8):
        axis = points.T @ (points @ axis)
        length = float(np.linalg.norm(axis))
        if length < 1e-12:
            return np.zeros(points.shape[1], np.float32)
        axis = axis / length
    main: Floats = axis.astype(np.float32)
    return main


def _probes(made: CentroidSet, sample: Floats, queries: Floats, *, by_product: bool) -> int:
    """Return how many lists hold nearly all neighbours of rows that were held back."""
    count = len(made)
    if not len(queries) or count <= PROBES_MIN:
        return count
    labels = made.assign(sample)
    squares = np.einsum("ij,ij->i", sample, sample)
    ranks = []
    for query in queries:
        products = sample @ query
        far = -products if by_product else squares - 2 * products
        near = np.argpartition(far, min(NEIGHBOURS, len(far) - 1))[: NEIGHBOURS + 1]
        rank = np.empty(count, np.int64)
        rank[made.nearest(query, by_product=by_product)] = np.arange(count)
        ranks.append(rank[labels[near]])
    needed = int(np.quantile(np.concatenate(ranks), COVERAGE)) + 1
    return int(np.clip(needed, PROBES_MIN, count))


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
    scaled = _scale(vectors.astype(np.float64))
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
        exact, target = _scale(exact), _scale(target)
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


def _scale(vectors: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return vectors of the same directions, whose squares neither overflow nor vanish."""
    largest = np.abs(vectors).max(axis=-1, keepdims=True, initial=0)
    extreme = (largest > 0) & ((largest > 1e100) | (largest < 1e-100))
    if not extreme.any():
        return vectors
    return np.asarray(vectors / np.where(extreme & np.isfinite(largest), largest, 1))


class _VectorDirectoryFields(msgspec.Struct, frozen=True):
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
        directory = _VectorDirectoryFields(
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
    """The rows of one list, or of several."""

    ordinals: Ordinals
    squares: Floats
    codes: npt.NDArray[np.uint8]

    @classmethod
    def join(cls, lists: Sequence["VectorList"]) -> "VectorList":
        """Return the rows of lists, one list after the other."""
        if len(lists) == 1:
            return lists[0]
        return cls(
            np.concatenate([one.ordinals for one in lists]),
            np.concatenate([one.squares for one in lists]),
            np.concatenate([one.codes for one in lists]),
        )

    def take(self, places: npt.NDArray[Any]) -> "VectorList":
        """Return some of the rows."""
        return VectorList(self.ordinals[places], self.squares[places], self.codes[places])


@dataclass(frozen=True)
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
            head = msgspec.msgpack.decode(data, type=_VectorDirectoryFields)
            counts = np.frombuffer(head.counts, "<u4").astype(np.int64)
            low, scale = np.frombuffer(head.offset, "<f4"), np.frombuffer(head.scale, "<f4")
        except (*UNDECODABLE, ValueError) as error:
            raise corrupt(name, offset, f"not a vector directory: {error}") from error
        if not len(low) == len(scale) == head.dimensions or head.metric not in METRICS:
            raise corrupt(name, offset, f"expected {head.dimensions} dimensions, found {len(low)}")
        sizes = np.where(counts > 0, CRC_BYTES + counts * (8 + head.dimensions), 0)
        return cls(name, head.metric, counts, np.cumsum(sizes), low, scale)

    @property
    def rows(self) -> int:
        """How many rows are in lists."""
        return int(self.counts.sum())

    def span(self, number: int) -> Span:
        """Return where a list is in the data."""
        return (int(self.ends[number - 1]) if number else 0), int(self.ends[number])

    @property
    def bytes(self) -> int:
        """The size of all lists."""
        return int(self.ends[-1]) if len(self.ends) else 0

    @cached_property
    def _row_starts(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Where the list of each row begins, and the place of the row in it."""
        starts = np.repeat(self.ends - np.diff(self.ends, prepend=0), self.counts)
        firsts = np.repeat(np.cumsum(self.counts) - self.counts, self.counts)
        return starts + CRC_BYTES, np.arange(self.rows) - firsts

    def rows_among(self, inside: npt.NDArray[np.bool_], data: Buffer) -> VectorList:
        """Return the rows of all lists whose ordinals are marked, from checked bytes."""
        flat, dimensions = np.frombuffer(data, np.uint8), len(self.scale)
        starts, places = self._row_starts
        ordinals = flat[(starts + 4 * places)[:, None] + FOUR].view("<u4")[:, 0]
        chosen = np.flatnonzero(inside[ordinals])
        counts = np.repeat(self.counts, self.counts)[chosen]
        starts, places = starts[chosen] + 4 * counts, places[chosen]
        squares = flat[(starts + 4 * places)[:, None] + FOUR].view("<f4")[:, 0]
        starts += 4 * counts + dimensions * places
        codes = flat[starts[:, None] + np.arange(dimensions)]
        return VectorList(ordinals[chosen], squares, codes)

    def decode_list(self, number: int, data: Buffer, *, is_checked: bool = False) -> VectorList:
        """Return the rows of a list from its bytes; their checksum is verified unless it was."""
        count = int(self.counts[number])
        start, end = self.span(number)
        is_intact = len(data) == end - start
        if is_intact and not is_checked:
            stored = bytes(memoryview(data)[:CRC_BYTES])
            is_intact = crc32c(memoryview(data)[CRC_BYTES:]).to_bytes(4, "little") == stored
        if not is_intact:
            raise corrupt(self.name, start, f"checksum of list {number} does not match")
        return VectorList(
            np.frombuffer(data, "<u4", count, CRC_BYTES),
            np.frombuffer(data, "<f4", count, CRC_BYTES + 4 * count),
            np.frombuffer(data, np.uint8, -1, CRC_BYTES + 8 * count).reshape(
                count, len(self.scale)
            ),
        )

    def distances(self, some: VectorList, query: Floats) -> Floats:
        """Return about the distances of rows, comparable within a metric."""
        base = np.float32(query @ self.offset)
        products: Floats = some.codes.astype(np.float32) @ (query * self.scale)
        products += base
        if self.metric == "dot":
            return -products
        products *= -2
        products += some.squares
        return products


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
