"""Vector indexes: the vectors of a segment in lists by their nearest centroid, as 8-bit codes.

    directory   msgpack: metric, dimensions, rows of each list; float32 offset and scale of each
                dimension
    data        for each list, in the order of the centroids:
                u32 crc32c | u32 ordinals | float32 squared lengths | uint8 codes, row by row

A code means `offset + code * scale`. Distances to codes rank the candidates; the distances in
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
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from reef import kernel
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
COVERAGE = 0.97
"""The share of true neighbours whose lists the default probes read."""
PROBES_MIN = 3
Places = npt.NDArray[np.int64]
METRICS = ("l2", "cosine", "dot")
CRC_BYTES = 4
LEVELS = 255
WEIGHT_MAX = 32_767
PRODUCTS_MAX = 2**31 - 1
ERROR_MAX = 3 * (2 / 12) ** 0.5
"""Three standard deviations of the difference of two errors, in steps."""
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
        return np.argsort(self.distances(query, by_product=by_product), kind="stable")

    def distances(self, query: Floats, *, by_product: bool) -> Floats:
        """Return distances of a query to the centroids, comparable with each other."""
        products: Floats = self.centroids @ query
        return -products if by_product else self._squares - 2 * products

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


def rows_compared(made: CentroidSet, sample: Floats, *, by_product: bool, seed: int = 2) -> float:
    """Return the share of the rows that a search compares, to find the neighbours in a sample."""
    rng = np.random.default_rng(seed)
    queries = sample[rng.permutation(len(sample))[: min(QUERIES, len(sample) // 8)]]
    counts = np.bincount(made.assign(sample), minlength=len(made))
    mean = float(np.square(counts, dtype=np.float64).sum()) / len(sample)
    return _probes(made, sample, queries, by_product=by_product) * mean / len(sample)


def vectors_of(
    column: pa.Array, data_type: type[np.floating[Any]] = np.float32
) -> tuple[npt.NDArray[Any], npt.NDArray[np.bool_]]:
    """Return the vectors of a column as a matrix, and which rows have one; null rows are zero."""
    size = column.type.list_size
    known = _are_known(column)
    flat = (
        (column.drop_null() if column.null_count else column)
        .flatten()
        .to_numpy(zero_copy_only=False)
    )
    with np.errstate(over="ignore"):
        flat = flat.astype(data_type, copy=False)
    if not column.null_count:
        return flat.reshape(len(column), size), known
    vectors = np.zeros((len(column), size), data_type)
    vectors[known] = flat.reshape(-1, size)
    return vectors, known


def _are_known(column: pa.Array) -> npt.NDArray[np.bool_]:
    if not column.null_count:
        return np.ones(len(column), bool)
    return np.asarray(column.is_valid().to_numpy(zero_copy_only=False))


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
    """The rows of one list."""

    ordinals: Ordinals
    squares: Floats
    codes: npt.NDArray[np.uint8]

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
        return self._edges[number], self._edges[number + 1]

    def spans(self, numbers: Iterable[int]) -> list[Span]:
        """Return where lists are in the data, without the empty ones."""
        edges = self._edges
        return [(edges[n], edges[n + 1]) for n in numbers if edges[n] < edges[n + 1]]

    def span_array(self, numbers: Sequence[int]) -> npt.NDArray[np.int64]:
        """Return the same as an array of pairs."""
        chosen = np.array(numbers, np.int64)
        chosen = chosen[self.counts[chosen] > 0]
        ends = self.ends[chosen]
        sizes = CRC_BYTES + self.counts[chosen] * (8 + len(self.scale))
        return np.stack([ends - sizes, ends], axis=1)

    @cached_property
    def _edges(self) -> list[int]:
        return [0, *self.ends.tolist()]

    @property
    def bytes(self) -> int:
        """The size of all lists."""
        return int(self.ends[-1]) if len(self.ends) else 0

    @cached_property
    def step(self) -> float:
        """The difference between neighbouring codes, root mean square over the dimensions."""
        return float(np.sqrt(np.mean(np.square(self.scale, dtype=np.float64))))

    def decode_list(self, number: int, data: Buffer) -> VectorList:
        """Return the rows of a list from its bytes, and verify their checksum."""
        start, end = self.span(number)
        is_intact = len(data) == end - start
        if is_intact:
            stored = bytes(memoryview(data)[:CRC_BYTES])
            is_intact = crc32c(memoryview(data)[CRC_BYTES:]).to_bytes(4, "little") == stored
        if not is_intact:
            raise corrupt(self.name, start, f"checksum of list {number} does not match")
        return self.rows_of(data)

    def rows_of(self, data: Buffer) -> VectorList:
        """Return the rows of a list from its checked bytes."""
        dimensions = len(self.scale)
        count = (len(data) - CRC_BYTES) // (8 + dimensions)
        return VectorList(
            np.frombuffer(data, "<u4", count, CRC_BYTES),
            np.frombuffer(data, "<f4", count, CRC_BYTES + 4 * count),
            np.frombuffer(data, np.uint8, -1, CRC_BYTES + 8 * count).reshape(count, dimensions),
        )


# --- distances to codes -----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CodedLists:
    """Lists of one segment whose rows are compared with a query."""

    directory: VectorDirectory
    data: Sequence[Buffer]
    """Lists as they are stored, their checksums verified; or one buffer that has all of them."""
    spans: npt.NDArray[np.int64] | None = None
    """Where each list begins and ends, if they are in one buffer."""
    inside: npt.NDArray[np.bool_] | None = None
    """Which rows of the segment may be among the nearest; None for all."""

    @property
    def lists(self) -> Sequence[Buffer]:
        """Each list by itself."""
        if self.spans is None:
            return self.data
        whole = memoryview(self.data[0])
        return [whole[start:end] for start, end in self.spans.tolist()]


@dataclass(frozen=True, slots=True)
class NearRows:
    """Rows in the order of their distances to a query, then of their sources and ordinals."""

    sources: Places
    ordinals: Ordinals
    far: Floats
    """Comparable within a metric: squared distances without the length of the query, or minus
    products."""

    def __len__(self) -> int:
        return len(self.far)

    @classmethod
    def nearest(cls, sources: Places, ordinals: Ordinals, far: Floats, most: int) -> "NearRows":
        """Return the nearest of some rows; those whose distance is not finite are left out."""
        order = np.lexsort((ordinals, sources, far))[: min(most, int(np.isfinite(far).sum()))]
        return cls(sources[order], ordinals[order], far[order])


@dataclass(frozen=True, slots=True)
class _CodedQuery:
    """A query in the codes of several segments.

    A distance is a sum of products of 8-bit codes and 16-bit weights, whole numbers: it is the same
    in whatever order they are added. Each weight stands for `step` times as much.
    """

    weights: npt.NDArray[np.int16]
    bases: Floats
    steps: Floats

    @classmethod
    def of(cls, query: Floats, sources: Sequence[CodedLists]) -> "_CodedQuery":
        offsets = np.array([source.directory.offset for source in sources])
        products = np.array([source.directory.scale for source in sources]) * query
        most = min(WEIGHT_MAX, PRODUCTS_MAX // (LEVELS * len(query)))
        steps = np.abs(products).max(axis=1) / np.float32(most)
        steps[steps == 0] = 1
        weights = np.clip(np.rint(products / steps[:, None]), -most, most)
        return cls(weights.astype(np.int16), offsets @ query, steps)


def nearest_codes(sources: Sequence[CodedLists], query: Floats, most: int) -> NearRows:
    """Return the rows of lists whose codes are nearest to a query."""
    if not sources:
        return NearRows(np.zeros(0, np.int64), np.zeros(0, np.uint32), np.zeros(0, np.float32))
    coded = _CodedQuery.of(query, sources)
    compare = getattr(kernel.native, "nearest_codes", None)  # earlier builds do not have it
    if compare is not None:
        parts = zip(coded.weights, coded.bases.tolist(), coded.steps.tolist(), strict=True)
        held = [
            (list(source.data), source.spans, *part, source.inside)
            for source, part in zip(sources, parts, strict=True)
        ]
        is_product = sources[0].directory.metric == "dot"
        found = compare(held, len(query), most, is_product)
        if found is not None:
            numbers, ordinals, far = found
            return NearRows(
                np.frombuffer(numbers, np.int64),
                np.frombuffer(ordinals, np.uint32),
                np.frombuffer(far, np.float32),
            )
    return _nearest_codes(sources, coded, most)


def _nearest_codes(sources: Sequence[CodedLists], query: _CodedQuery, most: int) -> NearRows:
    """Return what the kernel does."""
    numbers, ordinals, far = [], [], []
    for number, source in enumerate(sources):
        for data in source.lists:
            rows = source.directory.rows_of(data)
            if source.inside is not None:
                rows = rows.take(np.flatnonzero(source.inside[rows.ordinals]))
            ordinals.append(rows.ordinals)
            far.append(_distances(rows, query, number, source.directory.metric))
            numbers.append(np.full(len(rows.ordinals), number, np.int64))
    return NearRows.nearest(
        np.concatenate([np.zeros(0, np.int64), *numbers]),
        np.concatenate([np.zeros(0, np.uint32), *ordinals]),
        np.concatenate([np.zeros(0, np.float32), *far]),
        most,
    )


def _distances(rows: VectorList, query: _CodedQuery, number: int, metric: str) -> Floats:
    """Return the distances of rows; float64 has the sums of whole numbers as they are."""
    sums = rows.codes.astype(np.float64) @ query.weights[number].astype(np.float64)
    products: Floats = sums.astype(np.float32) * query.steps[number] + query.bases[number]
    return -products if metric == "dot" else rows.squares - 2 * products


def code_margin(sources: Sequence[CodedLists], query: Floats, far: float) -> float:
    """Return by how much distances to codes may differ, about: a row that is that much farther
    than `far` by its code is hardly ever nearer by its vector.

    Errors of codes are spread evenly over a step, of another sign in each dimension; the
    difference of two such sums is hardly ever above three standard deviations.
    """
    step = max(source.directory.step for source in sources)
    length = float(query @ query)
    if sources[0].directory.metric == "dot":
        return float(ERROR_MAX * step * length**0.5)
    return float(2 * ERROR_MAX * step * max(0.0, far + length) ** 0.5)


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
