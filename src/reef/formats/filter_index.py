"""Filter indexes: which rows of a segment have which values of a column.

A column with few distinct values has a roaring bitmap of row ordinals for each of them; one with
many has its values in sorted order, with their ordinals, in runs of a fixed number of rows:

    directory   msgpack: form, rows, where each part of the data begins, its rows, and an Arrow
                stream: the distinct values, or the first and last value of each run
    data        bitmaps: for each value, and for null    u32 crc32c | serialized bitmap
                runs: for each run                       u32 crc32c | u32 ordinals | Arrow stream

Conditions are evaluated on the values themselves, with the functions that filter rows: an index
can neither know an operator that scans do not, nor understand one in another way.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyroaring import BitMap

from reef.errors import UNDECODABLE
from reef.formats.coding import Buffer, corrupt, crc32c
from reef.formats.manifest import IndexSpec
from reef.formats.segment_writer import IndexParts

VALUES_MAX = 1024
"""Columns with more distinct values have sorted runs."""
VALUES_BYTES_MAX = 32 * 1024
"""The same for long values: the directory is a part of the segment's tail."""
RUN_ROWS = 4096

Span = tuple[int, int]


class _FilterDirectoryFields(msgspec.Struct, frozen=True):
    """The head of a directory."""

    runs: bool
    rows: int
    """Rows that are indexed, nulls included."""
    offsets: list[int]
    """Where each part begins in the data; one more, where the last ends."""
    counts: list[int]
    """The rows of each part; of a bitmap index, the nulls come last."""
    values: bytes


class FilterIndexBuilder:
    """Builds the filter index of one segment."""

    def __init__(self, data_type: pa.DataType) -> None:
        self._type = data_type
        self._values: list[pa.Array] = []
        self._ordinals: list[npt.NDArray[np.uint32]] = []

    def add(self, first_ordinal: int, column: pa.Array, valid: npt.NDArray[np.bool_]) -> None:
        """Add rows; those that are not valid are left out."""
        places = np.flatnonzero(valid)
        whole = len(places) == len(column)
        self._values.append(column if whole else column.take(pa.array(places)))
        self._ordinals.append((places + first_ordinal).astype(np.uint32))

    def finish(self) -> IndexParts:
        """Return the index of all rows."""
        values = pa.concat_arrays([pa.array([], self._type), *self._values])
        ordinals = np.concatenate([np.zeros(0, np.uint32), *self._ordinals])
        known = values.is_valid().to_numpy(zero_copy_only=False)
        nulls = ordinals[~known]
        values, ordinals = values.drop_null(), ordinals[known]
        encoded = pc.dictionary_encode(values)
        distinct = encoded.dictionary
        if len(distinct) <= VALUES_MAX and distinct.nbytes <= VALUES_BYTES_MAX:
            codes = encoded.indices.to_numpy(zero_copy_only=False).astype(np.int64)
            return _bitmaps(codes, distinct, ordinals, nulls)
        return _runs(values, ordinals, nulls)


def _bitmaps(
    codes: npt.NDArray[np.int64],
    distinct: pa.Array,
    ordinals: npt.NDArray[np.uint32],
    nulls: npt.NDArray[np.uint32],
) -> IndexParts:
    counts = np.bincount(codes, minlength=len(distinct))
    in_order = ordinals[np.argsort(codes, kind="stable")]
    ends = np.cumsum(counts)
    parts = [_bitmap_part(in_order[end - n : end]) for n, end in zip(counts, ends, strict=True)]
    counted = [*counts.tolist(), len(nulls)]
    return _index_parts(False, [*parts, _bitmap_part(nulls)], counted, distinct)


def _bitmap_part(ordinals: npt.NDArray[np.uint32]) -> bytes:
    bitmap = BitMap(ordinals)
    bitmap.run_optimize()
    return _prepend_checksum(bitmap.serialize())


def _runs(
    values: pa.Array, ordinals: npt.NDArray[np.uint32], nulls: npt.NDArray[np.uint32]
) -> IndexParts:
    order = pc.sort_indices(values)
    values, ordinals = values.take(order), ordinals[order.to_numpy()]
    starts = range(0, len(values), RUN_ROWS)
    parts = [
        _prepend_checksum(
            ordinals[at : at + RUN_ROWS].tobytes() + _stream(values[at : at + RUN_ROWS])
        )
        for at in starts
    ]
    counts = [min(RUN_ROWS, len(values) - at) for at in starts]
    ends = [at for start in starts for at in (start, min(start + RUN_ROWS, len(values)) - 1)]
    bounds = values.take(pa.array(ends, pa.int64()))
    return _index_parts(True, [*parts, _bitmap_part(nulls)], [*counts, len(nulls)], bounds)


def _prepend_checksum(data: bytes) -> bytes:
    return crc32c(data).to_bytes(4, "little") + data


def _index_parts(
    runs: bool, parts: Sequence[bytes], counts: Sequence[int], values: pa.Array
) -> IndexParts:
    offsets = np.cumsum([0, *map(len, parts)]).tolist()
    directory = _FilterDirectoryFields(runs, sum(counts), offsets, list(counts), _stream(values))
    return IndexParts(msgspec.msgpack.encode(directory), parts)


def _stream(values: pa.Array) -> bytes:
    batch = pa.record_batch([values], ["v"])
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    stream: bytes = sink.getvalue().to_pybytes()
    return stream


def _array(data: Buffer) -> pa.Array:
    with pa.ipc.open_stream(pa.py_buffer(data)) as reader:
        return reader.read_all().column(0).combine_chunks()


@dataclass(frozen=True, slots=True)
class FilterDirectory:
    """The directory of a filter index."""

    name: str
    runs: bool
    rows: int
    offsets: Sequence[int]
    counts: npt.NDArray[np.int64]
    values: pa.Array
    """The distinct values; of runs, the first and last value of each."""

    @classmethod
    def decode(cls, data: Buffer, name: str, offset: int) -> "FilterDirectory":
        """Return the directory from its checked bytes."""
        try:
            head = msgspec.msgpack.decode(data, type=_FilterDirectoryFields)
            values = _array(head.values)
        except (*UNDECODABLE, ValueError, pa.ArrowException) as error:
            raise corrupt(name, offset, f"not a filter directory: {error}") from error
        parts = len(values) // 2 if head.runs else len(values)
        if len(head.counts) != parts + 1 or len(head.offsets) != parts + 2:
            raise corrupt(name, offset, f"{len(head.counts)} counts for {parts} parts and nulls")
        counts = np.array(head.counts, np.int64)
        return cls(name, head.runs, head.rows, head.offsets, counts, values)

    @property
    def nulls(self) -> int:
        """The number of the part that has the nulls."""
        return len(self.counts) - 1

    def span(self, part: int) -> Span:
        """Return where a part is in the data."""
        return self.offsets[part], self.offsets[part + 1]

    def bounds(self) -> tuple[pa.Array, pa.Array]:
        """Return the first and the last value of each run."""
        places = np.arange(0, len(self.values), 2)
        return self.values.take(pa.array(places)), self.values.take(pa.array(places + 1))

    def bitmap(self, part: int, data: Buffer, *, is_checked: bool = False) -> BitMap:
        """Return the ordinals of a value, or of null, from its part of the data."""
        payload = bytes(self._payload(part, data, is_checked))
        try:
            bitmap = BitMap.deserialize(payload)
        except (ValueError, MemoryError) as error:
            raise corrupt(self.name, self.offsets[part], f"not a bitmap: {error}") from error
        self._check_count(part, len(bitmap))
        return bitmap

    def ordinals(
        self, part: int, data: Buffer, *, is_checked: bool = False
    ) -> npt.NDArray[np.uint32]:
        """Return the ordinals of a run, in the order of their values."""
        payload, count = self._payload(part, data, is_checked), int(self.counts[part])
        if len(payload) < 4 * count:
            raise corrupt(self.name, self.offsets[part], f"{len(payload)} bytes for {count} rows")
        return np.frombuffer(payload[: 4 * count], np.uint32)

    def run(
        self, part: int, data: Buffer, *, is_checked: bool = False
    ) -> tuple[pa.Array, npt.NDArray[np.uint32]]:
        """Return the sorted values of a run and their ordinals."""
        payload, count = self._payload(part, data, is_checked), int(self.counts[part])
        try:
            ordinals = np.frombuffer(payload[: 4 * count], np.uint32)
            values = _array(payload[4 * count :])
        except (ValueError, pa.ArrowException) as error:
            raise corrupt(self.name, self.offsets[part], f"not a run: {error}") from error
        self._check_count(part, len(values))
        return values, ordinals

    def _payload(self, part: int, data: Buffer, is_checked: bool) -> memoryview:
        payload = memoryview(data)[4:]
        if is_checked:
            return payload
        if crc32c(payload).to_bytes(4, "little") != bytes(memoryview(data)[:4]):
            problem = "checksum of a part of the filter index does not match"
            raise corrupt(self.name, self.offsets[part], problem)
        return payload

    def _check_count(self, part: int, count: int) -> None:
        if count != self.counts[part]:
            problem = f"{count} rows, {self.counts[part]} in the directory"
            raise corrupt(self.name, self.offsets[part], problem)


@dataclass(slots=True)
class FilterIndex:
    """A filter index whose parts are read when a condition needs them."""

    directory: FilterDirectory
    read: Callable[[Sequence[Span]], Sequence[Buffer]]
    is_checked: bool = False
    """Whether `read` verifies checksums."""
    _data: dict[int, Buffer] = field(default_factory=dict)

    def missing(self, parts: Sequence[int]) -> list[int]:
        """Return the parts that were not read yet."""
        return [part for part in parts if part not in self._data]

    def load(self, parts: Sequence[int]) -> None:
        """Read parts, all at once."""
        missing = self.missing(parts)
        if missing:
            spans = [self.directory.span(part) for part in missing]
            self._data |= zip(missing, self.read(spans), strict=True)

    def nulls(self) -> BitMap:
        """Return the rows without a value."""
        return self.rows([self.directory.nulls])

    def part(self, number: int) -> BitMap:
        """Return the rows of one value."""
        return self.rows([number])

    def rows(
        self,
        whole: Sequence[int],
        some: Sequence[int] = (),
        mask: Callable[[pa.Array], pa.Array] | None = None,
    ) -> BitMap:
        """Return all rows of parts, and of some runs those whose values meet a condition."""
        self.load([*whole, *some])
        directory, checked = self.directory, self.is_checked
        bitmaps, ordinals = [], []
        for part in whole:
            if directory.runs and part != directory.nulls:
                ordinals.append(directory.ordinals(part, self._data[part], is_checked=checked))
            else:
                bitmaps.append(directory.bitmap(part, self._data[part], is_checked=checked))
        for part in some:
            values, rows = directory.run(part, self._data[part], is_checked=checked)
            assert mask is not None
            ordinals.append(rows[mask(values).to_numpy(zero_copy_only=False)])
        if ordinals:
            bitmaps.append(_bitmap_of(ordinals))
        return BitMap.union(*bitmaps) if bitmaps else BitMap()


def _bitmap_of(parts: Sequence[npt.NDArray[np.uint32]]) -> BitMap:
    """Return the rows of runs, which are in no order: sorted first if they are many."""
    ordinals = np.concatenate(parts)
    if len(ordinals) > RUN_ROWS:
        inside = np.zeros(int(ordinals.max()) + 1, bool)
        inside[ordinals] = True
        ordinals = np.flatnonzero(inside).astype(np.uint32)
    return BitMap(ordinals)


@dataclass(frozen=True, slots=True)
class BuildableFilter:
    """A filter index to build."""

    spec: IndexSpec

    def builder(self, data_type: pa.DataType) -> FilterIndexBuilder:
        """Return a builder for one segment."""
        return FilterIndexBuilder(data_type)
