"""Centroid sets: the lists of a vector index, shared by all segments of a namespace.

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
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from reef.formats.coding import Buffer, corrupt, crc32c, unsupported

MAGIC = b"RFCTR1\0\0"
VERSION = 1
HEAD = struct.Struct("<8sII")
SIZES = struct.Struct("<IIII")

LISTS_MIN, LISTS_MAX = 8, 4096
ROWS_PER_CENTROID = 40
"""Of the sample on which they are trained; more improves nothing that a search notices."""
ITERATIONS = 8
CHUNK_ROWS = 16_384
QUERIES, NEIGHBOURS = 256, 10
COVERAGE = 0.985
"""The share of true neighbours whose lists the default probes read."""
PROBES_MIN = 4

Floats = npt.NDArray[np.float32]
Places = npt.NDArray[np.int64]


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
        raise corrupt(name, 0, f"magic is {magic!r}, expected {MAGIC!r}")
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
    """Return an order in which near centroids follow each other: halves along their main axis,
    and these again."""
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
