"""The text index of a segment: a sorted term dictionary and the postings of its terms.

    data        postings of term 0 · [positions] · postings of term 1 · …       in term order
                dictionary block · dictionary block · …      unless the directory has them
    directory   documents, tokens, the first term and the size of each dictionary block

A search reads the directory with the segment's tail, then the dictionary blocks of its terms, then
their postings: two rounds of ranged reads, or one if the dictionary has at most 64 KiB, which is
then in the directory. Postings of a few bytes are in the dictionary itself, so that a rare term
costs no read of its own.

A dictionary block, after a block's usual header (`formats/coding.py`, with its checksum):

    u32 × 1  terms                      u64 × 1  where postings of the block begin in the data
    u8  × t  length of the term         u32 × t  documents of the term
    u32 × t  bytes of its postings      u32 × t  bytes of its positions
    u32 × t  crc32c of the postings     u32 × t  crc32c of the positions
    terms, one after the other          postings and positions of at most 64 bytes, likewise

Terms are UTF-8 and ascend bytewise. The number of documents counts rows that have at least one
indexed token; rows that are no whole row (tombstones, patches) are not indexed.

The builder splits 8 MiB of text at a time. It keeps some 30 bytes per distinct term of a row,
and takes 50 in `finish`, which encodes a million postings at a time.
"""

import struct
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from reef.errors import InvalidInputError
from reef.formats.coding import (
    BlockKind,
    Buffer,
    ByteReader,
    corrupt,
    crc32c,
    decode_block,
    encode_block,
    unsupported,
)
from reef.formats.manifest import IndexSpec
from reef.formats.postings import Postings, TermRuns, decode_positions, encode
from reef.formats.segment_writer import IndexParts
from reef.formats.tokenize import ANALYSIS, TERM_BYTES_MAX, Analyzer, OptionValue, TextOptions

VERSION = 1
DICTIONARY_INLINE_MAX = 64 * 1024
DICTIONARY_BLOCK_BYTES = 16 * 1024
POSTINGS_INLINE_MAX = 64
"""Bytes of postings and positions that are kept in the dictionary."""
ENTRY_BYTES = 21
PENDING_BYTES = 8 << 20
"""Text that is split at once."""
ENCODED_AT_ONCE = 1 << 20
ROWS_MAX = 1 << 32
HEAD = struct.Struct("<BBBBIIQIQQ")
BLOCK_START = struct.Struct("<IQ")
POSITIONS = 1


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Postings of some rows: terms by id, ascending by (id, ordinal)."""

    ids: npt.NDArray[np.uint32]
    ordinals: npt.NDArray[np.uint32]
    frequencies: npt.NDArray[np.uint32]
    positions: npt.NDArray[np.uint32] | None


class TextIndexBuilder:
    """Builds the text index of one segment; an `IndexBuilder`."""

    def __init__(self, options: Mapping[str, OptionValue]) -> None:
        self._options = TextOptions.parse(options)
        self._analyzer = Analyzer(self._options)
        self._ids: dict[str, int] = {}
        """By word; -1 if it is not indexed."""
        self._terms: dict[str, int] = {}
        self._pending: list[tuple[int, pa.Array]] = []
        self._pending_bytes = 0
        self._chunks: list[_Chunk] = []
        self._lengths: list[npt.NDArray[np.uint32]] = []
        """Tokens of every row from 0 on, indexed or not."""
        self._rows = 0

    def add(self, first_ordinal: int, column: pa.Array, valid: npt.NDArray[np.bool_]) -> None:
        """Add the rows from an ordinal on; those that are not valid are not indexed."""
        if first_ordinal < self._rows or first_ordinal + len(column) > ROWS_MAX:
            raise InvalidInputError(
                f"text index: rows from {first_ordinal} on after {self._rows} rows"
            )
        if column.type != pa.string():
            raise InvalidInputError(
                f"text index: expected a column of type string, found {column.type}"
            )
        if column.nbytes > 2 * PENDING_BYTES and len(column) > 1:
            half = len(column) // 2
            self.add(first_ordinal, column[:half], valid[:half])
            self.add(first_ordinal + half, column[half:], valid[half:])
            return
        if not valid.all():
            column = _without(column, valid)
        self._pending.append((first_ordinal, column))
        self._pending_bytes += column.nbytes
        self._rows = first_ordinal + len(column)
        if self._pending_bytes >= PENDING_BYTES:
            self._split_pending()

    def finish(self) -> IndexParts:
        """Return the index of all rows that were added."""
        self._split_pending()
        lengths = np.concatenate([np.empty(0, np.uint32), *self._lengths])
        terms = sorted(self._terms)
        entries = _Entries([term.encode() for term in terms])
        order, chunk = self._sorted(terms)
        for runs in _slabs(order, chunk, lengths, len(terms)):
            entries.add(runs)
        counts = (len(lengths), int(np.count_nonzero(lengths)), int(lengths.sum(dtype=np.int64)))
        return entries.finish(counts, positions=self._options.positions)

    def _split_pending(self) -> None:
        for first, column in _join_adjacent(self._pending):
            self._split(first, column)
        self._pending, self._pending_bytes = [], 0

    def _split(self, first_ordinal: int, column: pa.Array) -> None:
        """Count the tokens of some rows per term and row."""
        tokens = self._analyzer.split(column)
        ids = self._ids_of(tokens.words)[tokens.codes]
        kept = np.flatnonzero(ids >= 0)
        ids, rows = ids[kept], tokens.rows[kept]
        gap = first_ordinal - sum(map(len, self._lengths))
        self._lengths.append(np.zeros(gap, np.uint32))
        self._lengths.append(np.bincount(rows, minlength=len(column)).astype(np.uint32))
        if not len(ids):
            return
        keys = ids.astype(np.uint64) << np.uint64(32) | np.arange(len(ids), dtype=np.uint64)
        keys.sort()
        at = (keys & np.uint64(0xFFFFFFFF)).astype(np.int64)
        ids, rows = ids[at], rows[at]
        new = np.concatenate(([True], (ids[1:] != ids[:-1]) | (rows[1:] != rows[:-1])))
        firsts = np.flatnonzero(new)
        positions = None
        if self._options.positions:
            positions = tokens.positions[kept[at]].astype(np.uint32)
        self._chunks.append(
            _Chunk(
                ids[firsts].astype(np.uint32),
                (rows[firsts] + first_ordinal).astype(np.uint32),
                np.diff(firsts, append=len(ids)).astype(np.uint32),
                positions,
            )
        )

    def _ids_of(self, words: Sequence[str]) -> npt.NDArray[np.int64]:
        """Return the ids of the terms of distinct words; -1 for those that are not indexed."""
        known, terms, term_of = self._ids, self._terms, self._analyzer.term
        for word in words:
            if word not in known:
                term = term_of(word)
                known[word] = -1 if term is None else terms.setdefault(term, len(terms))
        return np.fromiter((known[word] for word in words), np.int64, len(words))

    def _sorted(self, terms: Sequence[str]) -> tuple[npt.NDArray[np.uint64], _Chunk]:
        """Return all postings, and keys (place of the term, posting) in ascending order."""
        places = np.empty(len(terms), np.uint64)
        places[[self._terms[term] for term in terms]] = np.arange(len(terms), dtype=np.uint64)
        chunks, self._chunks = self._chunks, []
        chunk = _concat_chunks(chunks, positions=self._options.positions)
        order = places[chunk.ids] << np.uint64(32)
        order |= np.arange(len(order), dtype=np.uint64)
        order.sort()
        return order, chunk


def _without(column: pa.Array, valid: npt.NDArray[np.bool_]) -> pa.Array:
    """Return the column with nulls instead of the rows that are not valid."""
    return pc.if_else(pa.array(valid), column, pa.scalar(None, pa.string()))


def _join_adjacent(pending: list[tuple[int, pa.Array]]) -> list[tuple[int, pa.Array]]:
    """Return pending rows with adjacent arrays joined."""
    joined: list[tuple[int, list[pa.Array]]] = []
    expected = -1
    for first, column in pending:
        if first != expected:
            joined.append((first, []))
        joined[-1][1].append(column)
        expected = first + len(column)
    return [(first, pa.concat_arrays(columns)) for first, columns in joined]


def _concat_chunks(chunks: list[_Chunk], *, positions: bool) -> _Chunk:
    empty = np.empty(0, np.uint32)
    return _Chunk(
        np.concatenate([empty, *(chunk.ids for chunk in chunks)]),
        np.concatenate([empty, *(chunk.ordinals for chunk in chunks)]),
        np.concatenate([empty, *(chunk.frequencies for chunk in chunks)]),
        np.concatenate([empty, *(chunk.positions for chunk in chunks)]) if positions else None,
    )


def _slabs(
    order: npt.NDArray[np.uint64], chunk: _Chunk, lengths: npt.NDArray[np.uint32], terms: int
) -> Iterable[TermRuns]:
    """Yield the postings of all terms in order, about a million at a time."""
    starts = np.searchsorted(order, np.arange(terms + 1, dtype=np.uint64) << np.uint64(32))
    counts = np.diff(starts)
    position_at = np.cumsum(chunk.frequencies, dtype=np.int64) - chunk.frequencies
    first = 0
    while first < terms:
        limit = starts[first] + ENCODED_AT_ONCE
        last = max(first + 1, int(np.searchsorted(starts, limit, "right")) - 1)
        at = (order[starts[first] : starts[last]] & np.uint64(0xFFFFFFFF)).astype(np.int64)
        ordinals, frequencies = chunk.ordinals[at], chunk.frequencies[at]
        positions = None
        if chunk.positions is not None:
            begins = np.repeat(position_at[at], frequencies)
            ends = np.cumsum(frequencies, dtype=np.int64)
            within = np.arange(len(begins)) - np.repeat(ends - frequencies, frequencies)
            positions = chunk.positions[begins + within]
        yield TermRuns(counts[first:last], ordinals, frequencies, lengths[ordinals], positions)
        first = last


class _Entries:
    """Collects the encoded postings of terms in order, and makes the dictionary of them."""

    def __init__(self, terms: list[bytes]) -> None:
        self._terms = terms
        self._counts: list[npt.NDArray[np.int64]] = []
        self._postings_bytes: list[npt.NDArray[np.int64]] = []
        self._positions_bytes: list[npt.NDArray[np.int64]] = []
        self._checksums: list[tuple[int, int]] = []
        self._inline: list[bytes] = []
        self._data: list[bytes] = []

    def add(self, runs: TermRuns) -> None:
        """Encode the postings of the next terms."""
        encoded = encode(runs)
        sizes = encoded.postings_bytes + encoded.positions_bytes
        ends = np.cumsum(sizes)
        self._counts.append(runs.counts)
        self._postings_bytes.append(encoded.postings_bytes)
        self._positions_bytes.append(encoded.positions_bytes)
        data = encoded.data.tobytes()
        view = memoryview(data)
        edges = ((ends - sizes).tolist(), encoded.postings_bytes.tolist(), ends.tolist())
        for begin, size, end in zip(*edges, strict=True):
            if end - begin <= POSTINGS_INLINE_MAX:
                self._inline.append(bytes(view[begin:end]))
                self._checksums.append((0, 0))
                continue
            self._inline.append(b"")
            positions = view[begin + size : end]
            self._checksums.append((crc32c(view[begin : begin + size]), crc32c(positions)))
        stored = np.repeat(sizes > POSTINGS_INLINE_MAX, sizes)
        self._data.append(encoded.data[stored].tobytes())

    def finish(self, counts: tuple[int, int, int], *, positions: bool) -> IndexParts:
        blocks, firsts = self._blocks()
        sizes = [len(block) for block in blocks]
        in_directory = sum(sizes) <= DICTIONARY_INLINE_MAX
        postings_bytes = sum(map(len, self._data))
        rows, documents, tokens = counts
        payload = [
            HEAD.pack(
                *(VERSION, ANALYSIS, POSITIONS if positions else 0, in_directory),
                *(rows, documents, tokens, len(blocks), postings_bytes, len(self._terms)),
            ),
            np.array(sizes, "<u4").tobytes(),
            bytes(map(len, firsts)),
            *firsts,
            *(blocks if in_directory else ()),
        ]
        directory = encode_block(BlockKind.TERMS, b"".join(payload))
        return IndexParts(directory, self._data if in_directory else [*self._data, *blocks])

    def _blocks(self) -> tuple[list[bytes], list[bytes]]:
        """Return the dictionary blocks, and the first term of each."""
        if not self._terms:
            return [], []
        counts, postings = np.concatenate(self._counts), np.concatenate(self._postings_bytes)
        positions = np.concatenate(self._positions_bytes)
        checksums = np.array(self._checksums).T
        stored = np.where(postings + positions > POSTINGS_INLINE_MAX, postings + positions, 0)
        offsets = np.cumsum(stored) - stored
        sizes = [
            ENTRY_BYTES + len(term) + len(inline)
            for term, inline in zip(self._terms, self._inline, strict=True)
        ]
        edges = _cuts(sizes)
        blocks = []
        for first, last in pairwise(edges):
            ours = slice(first, last)
            parts = [
                BLOCK_START.pack(last - first, int(offsets[first])),
                bytes(map(len, self._terms[ours])),
                *(
                    column[ours].astype("<u4").tobytes()
                    for column in (counts, postings, positions, *checksums)
                ),
                *self._terms[ours],
                *self._inline[ours],
            ]
            blocks.append(encode_block(BlockKind.TERMS, b"".join(parts)))
        return blocks, [self._terms[first] for first in edges[:-1]]


def _cuts(sizes: list[int]) -> list[int]:
    """Return the places at which runs of about a block's size begin, and the end."""
    ends = np.array(list(accumulate(sizes)))
    numbers = (ends - np.array(sizes)) // DICTIONARY_BLOCK_BYTES
    changes = np.flatnonzero(np.diff(numbers)) + 1
    return [0, *changes.tolist(), len(sizes)]


@dataclass(frozen=True, slots=True)
class TermEntry:
    """A term of one segment, and where its postings are."""

    documents: int
    offset: int
    """In the data part; of no meaning if the postings are in the dictionary."""
    postings_bytes: int
    positions_bytes: int
    checksums: tuple[int, int]
    """Checksums of the postings and of the positions."""
    inline: bytes | None
    """Postings and positions that the dictionary has itself."""

    @property
    def postings_range(self) -> tuple[int, int]:
        """Offset and length in the data part."""
        return self.offset, self.postings_bytes

    @property
    def positions_range(self) -> tuple[int, int]:
        """Offset and length in the data part."""
        return self.offset + self.postings_bytes, self.positions_bytes


class TextDirectory:
    """The index of one segment as far as its tail has it."""

    def __init__(self, name: str, offset: int) -> None:
        self.name, self.offset = name, offset
        self.rows = self.documents = self.tokens = self.terms = self.data_bytes = 0
        self.has_positions = False
        self.bytes = 0
        """About the memory that it takes."""
        self._firsts: list[bytes] = []
        self._ranges: list[tuple[int, int]] = []
        self._own: dict[int, DictionaryBlock] = {}
        self._postings_bytes = 0

    @classmethod
    def decode(cls, data: Buffer, name: str, offset: int) -> "TextDirectory":
        """Decode a directory; `offset` is that of its first byte in the object."""
        payload = decode_block(data, BlockKind.TERMS, name, offset)
        reader = ByteReader(payload, name, offset)
        head = HEAD.unpack(reader.take(HEAD.size))
        version, analysis, flags, in_directory = head[:4]
        if version > VERSION or analysis > ANALYSIS:
            raise unsupported(name, "text index", max(version, analysis), VERSION)
        directory = cls(name, offset)
        directory.rows, directory.documents, directory.tokens = head[4:7]
        directory._postings_bytes, directory.terms = head[8:10]
        directory.has_positions = bool(flags & POSITIONS)
        if not directory.documents <= directory.rows <= directory.tokens + directory.rows:
            reader.fail(f"{directory.documents} documents of {directory.rows} rows")
        if flags & ~POSITIONS or in_directory > 1 or directory.tokens < directory.documents:
            reader.fail(f"flags {flags}, {in_directory}; {directory.tokens} tokens")
        directory._decode_blocks(reader, head[7], bool(in_directory))
        directory.bytes = 2 * len(payload) + 1024
        reader.end()
        return directory

    def _decode_blocks(self, reader: ByteReader, count: int, in_directory: bool) -> None:
        sizes = np.frombuffer(reader.take(4 * count), "<u4").tolist()
        lengths = bytes(reader.take(count))
        ends = list(accumulate(lengths))
        joined = bytes(reader.take(ends[-1] if ends else 0))
        self._firsts = [joined[end - n : end] for end, n in zip(ends, lengths, strict=True)]
        if any(right <= left for left, right in pairwise(self._firsts)):
            reader.fail("first terms of dictionary blocks do not ascend")
        at = self._postings_bytes
        for number, size in enumerate(sizes):
            self._ranges.append((at, size))
            if in_directory:
                block = reader.take(size)
                self._own[number] = self.block(block, reader.offset - size)
            at += size
        self.data_bytes = self._postings_bytes if in_directory else at

    def block_ranges(self, terms: Iterable[str]) -> dict[int, tuple[int, int]]:
        """Return the dictionary blocks to read for terms: offset and length in the data by number.

        Empty if the directory has the dictionary.
        """
        numbers = {self._number(term.encode()) for term in terms} - {-1}
        return {number: self._ranges[number] for number in numbers if number not in self._own}

    def block(self, data: Buffer, offset: int) -> "DictionaryBlock":
        """Decode a dictionary block that was read; `offset` is that in the object."""
        return DictionaryBlock(data, self.name, offset, self)

    def entries(
        self, terms: Iterable[str], blocks: Mapping[int, "DictionaryBlock"]
    ) -> dict[str, TermEntry]:
        """Return the entries of those terms that the segment has; `blocks` are those read."""
        found: dict[str, TermEntry] = {}
        for term in terms:
            encoded = term.encode()
            number = self._number(encoded)
            if number >= 0:
                block = self._own[number] if number in self._own else blocks[number]
                if (entry := block.find(encoded)) is not None:
                    found[term] = entry
        return found

    def every_entry(self, data: Buffer) -> Iterator[tuple[str, TermEntry]]:
        """Yield all terms with their entries; `data` is the whole data part."""
        view = memoryview(data)
        for number, (offset, length) in enumerate(self._ranges):
            block = self._own.get(number)
            if block is None:
                block = self.block(view[offset : offset + length], offset)
            for place in range(block.count):
                yield block.term(place).decode(), block.entry(place)

    def ranges(
        self, terms: Iterable[str], blocks: Mapping[int, "DictionaryBlock"]
    ) -> dict[str, tuple[int, int]]:
        """Return the byte ranges of the data to read for terms: offset and length by term."""
        entries = self.entries(terms, blocks).items()
        return {term: entry.postings_range for term, entry in entries if entry.inline is None}

    def postings(self, entry: TermEntry, data: Buffer, base: int) -> Postings:
        """Return the postings of a term; `data` is their range of the data part at `base`.

        Nothing has to be read if the dictionary has them: `data` is then ignored.
        """
        if entry.inline is not None:
            data = memoryview(entry.inline)[: entry.postings_bytes]
        else:
            self._check(data, entry.postings_bytes, entry.checksums[0], base + entry.offset)
        return Postings(data, entry.documents, self.rows, self.name, base + entry.offset)

    def positions(
        self, entry: TermEntry, data: Buffer, base: int, postings: Postings
    ) -> npt.NDArray[np.int64]:
        """Return the positions of all tokens of a term, posting by posting."""
        offset = base + entry.offset + entry.postings_bytes
        if entry.inline is not None:
            data = memoryview(entry.inline)[entry.postings_bytes :]
        else:
            self._check(data, entry.positions_bytes, entry.checksums[1], offset)
        return decode_positions(data, postings.counts, self.name, offset)

    def _check(self, data: Buffer, length: int, checksum: int, offset: int) -> None:
        if len(data) != length:
            raise corrupt(self.name, offset, f"expected {length} bytes, found {len(data)}")
        if crc32c(data) != checksum:
            raise corrupt(self.name, offset, f"checksum of {length} bytes does not match")

    def _number(self, term: bytes) -> int:
        """Return the dictionary block that has a term if any has; -1 if none can."""
        return bisect_right(self._firsts, term) - 1


class DictionaryBlock:
    """Some hundred terms in order; decoded by binary search."""

    def __init__(self, data: Buffer, name: str, offset: int, directory: TextDirectory) -> None:
        payload = decode_block(data, BlockKind.TERMS, name, offset)
        reader = ByteReader(payload, name, offset)
        count, self._base = BLOCK_START.unpack(reader.take(BLOCK_START.size))
        lengths = np.frombuffer(reader.take(count), np.uint8)
        columns = [np.frombuffer(reader.take(4 * count), "<u4") for _ in range(5)]
        self._documents, self._postings, self._positions, *self._checksums = columns
        self._term_ends = np.cumsum(lengths, dtype=np.int64)
        sizes = self._postings.astype(np.int64) + self._positions
        is_inline = sizes <= POSTINGS_INLINE_MAX
        self._stored_ends = np.cumsum(np.where(is_inline, 0, sizes))
        self._inline_ends = np.cumsum(np.where(is_inline, sizes, 0))
        if not count or lengths.max() > TERM_BYTES_MAX or not lengths.all():
            reader.fail(f"dictionary block of {count} terms")
        if self._base + int(self._stored_ends[-1]) > directory._postings_bytes:
            reader.fail("postings end after the data of the index")
        self._terms = reader.take(int(self._term_ends[-1]))
        self._inline = reader.take(int(self._inline_ends[-1]))
        reader.end()
        self.count = count
        self.bytes = len(payload) + 24 * count

    def find(self, term: bytes) -> TermEntry | None:
        """Return the entry of a term, or None."""
        low, high = 0, self.count
        while low < high:
            middle = (low + high) // 2
            if self.term(middle) < term:
                low = middle + 1
            else:
                high = middle
        return self.entry(low) if low < self.count and self.term(low) == term else None

    def term(self, place: int) -> bytes:
        begin = int(self._term_ends[place - 1]) if place else 0
        return bytes(self._terms[begin : int(self._term_ends[place])])

    def entry(self, place: int) -> TermEntry:
        postings, positions = int(self._postings[place]), int(self._positions[place])
        size = postings + positions
        inline = None
        if size <= POSTINGS_INLINE_MAX:
            end = int(self._inline_ends[place])
            inline = bytes(self._inline[end - size : end])
            size = 0
        offset = self._base + int(self._stored_ends[place]) - size
        checksums = int(self._checksums[0][place]), int(self._checksums[1][place])
        documents = int(self._documents[place])
        return TermEntry(documents, offset, postings, positions, checksums, inline)


@dataclass(frozen=True, slots=True)
class BuildableText:
    """A text index to build."""

    spec: IndexSpec

    def builder(self, data_type: pa.DataType) -> TextIndexBuilder:
        """Return a builder for one segment."""
        return TextIndexBuilder(text_options(self.spec))


def text_options(spec: IndexSpec) -> dict[str, OptionValue]:
    """Return the options of a spec that are about text."""
    return {name: value for name, value in spec.options.items() if name != "rows_min"}
