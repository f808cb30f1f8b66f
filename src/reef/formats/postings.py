"""Postings: the documents of one term with frequencies, lengths and bounds for pruning.

    1 byte   widths of the next streams: delta, frequency, length (two bits each: 0, 1, 2, 4 bytes)
    u32 × b  first ordinal of each block of 128 documents
    u32 × b  the largest frequency of the block                   absent if b = 1
    f32 × b  the smallest length / frequency, rounded down        absent if b = 1
    d × n    ordinal minus the one before it; 0 at the beginning of a block
    f × n    frequency; no bytes if all are 1
    l × n    length of the document

Positions, if the index has them, follow: a byte with the width, then for each document its
positions in ascending order, each minus the one before it.

Streams of one width per term decode without a loop. The two bounds hold for any collection
statistics: with s = (1 - b)/f + b·l/(f·average), a BM25 contribution decreases in s, and s is at
least (1 - b)/max f + b·min(l/f)/average. So segments need not agree on an average length.

`encode` takes the postings of many terms, and writes all of their streams by scattering bytes.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NoReturn

import numpy as np
import numpy.typing as npt

from reef.formats.coding import Buffer, corrupt

BLOCK_DOCUMENTS = 128
WIDTHS = np.array([0, 1, 2, 4], np.int64)
U32S = npt.NDArray[np.uint32]
I64S = npt.NDArray[np.int64]
F64S = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class TermRuns:
    """Postings of several terms, one after the other."""

    counts: I64S
    """Documents of each term, at least one."""
    ordinals: U32S
    """Ascending within a term."""
    frequencies: U32S
    lengths: U32S
    positions: U32S | None = None
    """Positions in all postings one after the other, ascending in each; as many as frequencies
    sum to."""


@dataclass(frozen=True, slots=True)
class EncodedRuns:
    """The bytes of several terms, one after the other."""

    data: npt.NDArray[np.uint8]
    postings_bytes: I64S
    positions_bytes: I64S


class _Layout:
    """Where the parts of each term begin, while streams are added one after the other."""

    def __init__(self, terms: int) -> None:
        self.sizes: list[I64S] = []
        self.terms = terms

    def add(self, sizes: I64S) -> int:
        self.sizes.append(sizes)
        return len(self.sizes) - 1

    def starts(self) -> tuple[I64S, I64S]:
        """Return per part and term its first byte, and per term the byte after its end."""
        matrix = np.stack(self.sizes, axis=1)
        ends = np.cumsum(matrix.reshape(-1)).reshape(matrix.shape)
        return (ends - matrix).T.copy(), ends[:, -1]


def encode(runs: TermRuns) -> EncodedRuns:
    """Encode the postings of several terms."""
    counts, terms = runs.counts, len(runs.counts)
    firsts = np.cumsum(counts) - counts
    blocks = -(-counts // BLOCK_DOCUMENTS)
    block_at = _stretches(blocks) * BLOCK_DOCUMENTS + np.repeat(firsts, blocks)
    deltas = np.diff(runs.ordinals, prepend=np.uint32(0)).astype(np.uint32)
    deltas[block_at] = 0
    delta_codes = _width_codes(np.maximum.reduceat(deltas, firsts))
    frequency_codes = _width_codes(np.maximum.reduceat(runs.frequencies, firsts) - 1, one_is_1=True)
    length_codes = _width_codes(np.maximum.reduceat(runs.lengths, firsts))
    table = np.where(blocks > 1, blocks, 0)
    layout = _Layout(terms)
    for sizes in (np.ones(terms, np.int64), 4 * blocks, 4 * table, 4 * table):
        layout.add(sizes)
    for codes in (delta_codes, frequency_codes, length_codes):
        layout.add(counts * WIDTHS[codes])
    place = _add_positions(layout, runs, firsts)
    starts, ends = layout.starts()
    out = np.zeros(int(ends[-1]), np.uint8)
    out[starts[0]] = (delta_codes | frequency_codes << 2 | length_codes << 4).astype(np.uint8)
    _scatter(out, runs.ordinals[block_at], starts[1], blocks, 4)
    _write_bounds(out, runs, block_at, blocks, starts)
    for part, codes, values in (
        (4, delta_codes, deltas),
        (5, frequency_codes, runs.frequencies),
        (6, length_codes, runs.lengths),
    ):
        _write_stream(out, values, starts[part], counts, codes)
    if place is not None:
        place.write(out, starts)
    begins = starts[0]
    positions_from = starts[7] if place is not None else ends
    return EncodedRuns(out, positions_from - begins, ends - positions_from)


@dataclass(frozen=True, slots=True)
class _PositionStream:
    deltas: U32S
    counts: I64S
    codes: I64S

    def write(self, out: npt.NDArray[np.uint8], starts: I64S) -> None:
        out[starts[7]] = self.codes.astype(np.uint8)
        _write_stream(out, self.deltas, starts[8], self.counts, self.codes)


def _add_positions(layout: _Layout, runs: TermRuns, firsts: I64S) -> _PositionStream | None:
    if runs.positions is None:
        return None
    ends = np.cumsum(runs.frequencies, dtype=np.int64)
    document_at = ends - runs.frequencies
    deltas = np.diff(runs.positions, prepend=np.uint32(0)).astype(np.uint32)
    deltas[document_at] = runs.positions[document_at]
    counts = np.add.reduceat(runs.frequencies.astype(np.int64), firsts)
    codes = _width_codes(np.maximum.reduceat(deltas, document_at[firsts]))
    layout.add(np.ones(len(counts), np.int64))
    layout.add(counts * WIDTHS[codes])
    return _PositionStream(deltas, counts, codes)


def _write_bounds(
    out: npt.NDArray[np.uint8], runs: TermRuns, block_at: I64S, blocks: I64S, starts: I64S
) -> None:
    """Write the bounds of the blocks of terms that have more than one."""
    highest = np.maximum.reduceat(runs.frequencies, block_at)
    ratios = runs.lengths.astype(np.float64) / runs.frequencies
    lowest = _rounded_down(np.minimum.reduceat(ratios, block_at))
    many = blocks > 1
    ours = np.repeat(many, blocks)
    _scatter(out, highest[ours], starts[2][many], blocks[many], 4)
    _scatter(out, lowest[ours].view(np.uint32), starts[3][many], blocks[many], 4)


def _rounded_down(values: F64S) -> npt.NDArray[np.float32]:
    rounded = values.astype(np.float32)
    return np.where(rounded > values, np.nextafter(rounded, np.float32(0)), rounded).astype("<f4")


def _write_stream(
    out: npt.NDArray[np.uint8], values: U32S, starts: I64S, counts: I64S, codes: I64S
) -> None:
    for code in (1, 2, 3):
        chosen = codes == code
        if chosen.any():
            ours = values[np.repeat(chosen, counts)]
            _scatter(out, ours, starts[chosen], counts[chosen], int(WIDTHS[code]))


def _scatter(
    out: npt.NDArray[np.uint8], values: U32S, starts: I64S, counts: I64S, width: int
) -> None:
    """Write values of one width: `counts[i]` of them from the byte `starts[i]` on."""
    places = np.repeat(starts, counts) + width * _stretches(counts)
    for byte in range(width):
        out[places + byte] = (values >> np.uint32(8 * byte)).astype(np.uint8)


def _stretches(counts: I64S) -> I64S:
    """Return 0, 1, … for each count, one after the other."""
    firsts = np.cumsum(counts) - counts
    return np.arange(int(counts.sum()), dtype=np.int64) - np.repeat(firsts, counts)


def _width_codes(highest: U32S, *, one_is_1: bool = False) -> I64S:
    """Return the code of the narrowest width; with `one_is_1` of numbers that are one more."""
    limit = 1 if one_is_1 else 0
    codes = (highest > 0).astype(np.int64)
    codes += highest > 0xFF - limit
    codes += highest > 0xFFFF - limit
    return codes


class Postings:
    """The postings of one term in one segment, decoded on first use; immutable.

    Construction checks the sizes, so that nothing larger than the bytes is ever allocated.
    """

    def __init__(self, data: Buffer, documents: int, rows: int, name: str, offset: int) -> None:
        self._data = np.frombuffer(data, np.uint8)
        self._name, self._offset = name, offset
        self._rows = rows
        self.documents = documents
        if not 1 <= documents <= rows or not len(data):
            self._fail(f"{len(data)} bytes with {documents} documents of {rows} rows")
        blocks = -(-documents // BLOCK_DOCUMENTS)
        widths = int(self._data[0])
        codes = [widths & 3, widths >> 2 & 3, widths >> 4 & 3]
        self._widths = [int(WIDTHS[code]) for code in codes]
        expected = 1 + blocks * (12 if blocks > 1 else 4) + documents * sum(self._widths)
        if widths >> 6 or expected != len(data) or (not codes[0] and documents > blocks):
            self._fail(f"expected {expected} bytes with widths {widths:#x}, found {len(data)}")
        self._blocks = blocks
        self._saturation: tuple[float, float, F64S] = 0.0, 0.0, np.empty(0)

    @property
    def bytes(self) -> int:
        """The memory that it takes once it is decoded, for caches."""
        return len(self._data) + 12 * self.documents + 512

    def saturation(self, base: float, slope: float) -> F64S:
        """Return f / (f + base + slope·l) for all documents; the last result is kept.

        Statistics of the collection, on which the slope depends, change by writes only.
        """
        known_base, known_slope, known = self._saturation
        if known_slope != slope or known_base != base:
            known = self._saturate(base, slope, slice(None))
            self._saturation = base, slope, known
        return known

    def saturation_at(self, places: I64S, base: float, slope: float) -> F64S:
        """Return the same for some documents."""
        known_base, known_slope, known = self._saturation
        if known_slope == slope and known_base == base:
            return known[places]
        return self._saturate(base, slope, places)

    def _saturate(self, base: float, slope: float, places: I64S | slice) -> F64S:
        damping: F64S = np.multiply(self.lengths[places], slope, dtype=np.float64)
        damping += base
        if self.frequencies is None:
            damping += 1.0
            return np.divide(1.0, damping, out=damping)
        counts = self.frequencies[places].astype(np.float64)
        damping += counts
        return np.divide(counts, damping, out=damping)

    @cached_property
    def firsts(self) -> U32S:
        """The first ordinal of each block."""
        return self._u32(1, self._blocks)

    @cached_property
    def ordinals(self) -> U32S:
        """Ascending; below the number of rows."""
        padded = np.zeros(self._blocks * BLOCK_DOCUMENTS, np.uint32)
        deltas = self._stream(0)
        if deltas is not None:
            padded[: self.documents] = deltas
        matrix = padded.reshape(self._blocks, BLOCK_DOCUMENTS)
        matrix[:, 0] += self.firsts
        np.cumsum(matrix, axis=1, out=matrix)
        ordinals = padded[: self.documents]
        if ordinals[-1] >= self._rows or (ordinals[1:] <= ordinals[:-1]).any():
            self._fail("ordinals of postings do not ascend")
        ordinals.flags.writeable = False
        return ordinals

    @cached_property
    def frequencies(self) -> npt.NDArray[np.unsignedinteger] | None:
        """None if each is 1."""
        stream = self._stream(1)
        if stream is not None and not stream.all():
            self._fail("a frequency of postings is 0")
        return stream

    @property
    def counts(self) -> I64S:
        """The frequencies, also if each is 1."""
        if self.frequencies is None:
            return np.ones(self.documents, np.int64)
        return self.frequencies.astype(np.int64)

    @cached_property
    def lengths(self) -> npt.NDArray[np.unsignedinteger]:
        """Of the documents, at least 1."""
        stream = self._stream(2)
        if stream is None or not stream.all():
            self._fail("a length of a document is 0")
        return stream

    @cached_property
    def bounds(self) -> tuple[F64S, F64S]:
        """Per block: the largest frequency, and the smallest length / frequency."""
        if self._blocks == 1:
            return self._own_bounds()
        frequencies = self._u32(1 + 4 * self._blocks, self._blocks).astype(np.float64)
        at = 1 + 8 * self._blocks
        ratios = self._data[at : at + 4 * self._blocks].view("<f4").astype(np.float64)
        if not (frequencies >= 1).all() or not (ratios >= 0).all():
            self._fail("a bound of postings is out of range")
        return frequencies, ratios

    @cached_property
    def bound(self) -> tuple[float, float]:
        """The same for all blocks together."""
        highest, lowest = self.bounds
        return float(highest.max()), float(lowest.min())

    @property
    def blocks(self) -> int:
        return self._blocks

    def _own_bounds(self) -> tuple[F64S, F64S]:
        lengths = self.lengths.astype(np.float64)
        if self.frequencies is None:
            return np.ones(1), np.array([lengths.min()])
        ratios = lengths / self.frequencies
        return np.array([float(self.frequencies.max())]), np.array([ratios.min()])

    def _stream(self, stream: int) -> npt.NDArray[np.unsignedinteger] | None:
        width = self._widths[stream]
        if not width:
            return None
        at = 1 + self._blocks * (12 if self._blocks > 1 else 4)
        at += self.documents * sum(self._widths[:stream])
        return _numbers(self._data, at, self.documents, width)

    def _u32(self, at: int, count: int) -> U32S:
        return self._data[at : at + 4 * count].view("<u4")

    def _fail(self, problem: str) -> NoReturn:
        raise corrupt(self._name, self._offset, problem)


def decode_positions(
    data: Buffer, frequencies: I64S, name: str, offset: int
) -> npt.NDArray[np.int64]:
    """Return the positions of all postings of a term one after the other."""
    array, count = np.frombuffer(data, np.uint8), int(frequencies.sum())
    code = int(array[0]) if len(array) else 4
    if code > 3 or len(array) != 1 + count * int(WIDTHS[code]):
        problem = f"{len(array)} bytes of positions with width {code}, of {count} tokens"
        raise corrupt(name, offset, problem)
    if not code:
        return np.zeros(count, np.int64)
    positions = np.cumsum(_numbers(array, 1, count, int(WIDTHS[code])), dtype=np.int64)
    starts = np.cumsum(frequencies) - frequencies
    before = np.concatenate(([0], positions))[starts]
    within: npt.NDArray[np.int64] = positions - np.repeat(before, frequencies)
    return within


def _numbers(
    data: npt.NDArray[np.uint8], at: int, count: int, width: int
) -> npt.NDArray[np.unsignedinteger]:
    numbers: npt.NDArray[np.unsignedinteger] = data[at : at + count * width].view(f"<u{width}")
    return numbers
