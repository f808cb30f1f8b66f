"""Reading the terms of a query from all text indexes of a view, in two rounds of requests.

A source is the text index of one segment, or of rows that no segment's index covers: those are
indexed in memory by the same codec (`index_in_memory`), so that one code path searches both. Round
one reads dictionary blocks, round two postings, and positions if the query has phrases. Each round
is one call of `read` for all sources. Terms in the cache, which also knows those that a source does
not have, need none of it; dictionaries that their directory contains need no round one.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from reef.engine.read.caches import ByteCache
from reef.errors import InvalidInputError
from reef.formats.coding import Buffer
from reef.formats.postings import Postings
from reef.formats.text_index import DictionaryBlock, TermEntry, TextDirectory, TextIndexBuilder
from reef.formats.tokenize import OptionValue, Phrase, TextQuery

T = TypeVar("T")
Positions = npt.NDArray[np.int64]
ABSENT = "absent"
"""In the cache: a source does not have the term."""
ABSENT_BYTES = 128


@dataclass(frozen=True, slots=True)
class TextSource:
    """One text index."""

    directory: TextDirectory
    base: int = 0
    """Where the data part begins in the object."""
    data: Buffer | None = None
    """The whole data part, of an index in memory."""


@dataclass(frozen=True, slots=True)
class PostingRead:
    """A byte range of the data part of a source."""

    source: int
    offset: int
    length: int


Read = Callable[[Sequence[PostingRead]], Sequence[Buffer]]
Fetched = list[tuple[tuple[int, T, PostingRead], Buffer]]


@dataclass(frozen=True, slots=True)
class SourceTerms:
    """The terms of a query that one source has."""

    source: TextSource
    postings: dict[str, Postings] = field(default_factory=dict)
    positions: dict[str, Positions] = field(default_factory=dict)

    def phrase_rows(self, phrases: Iterable[Phrase]) -> npt.NDArray[np.uint32]:
        """Return the ordinals of the rows that have all phrases, ascending."""
        found: npt.NDArray[np.uint32] | None = None
        for phrase in phrases:
            rows = self._rows_of(phrase)
            found = rows if found is None else np.intersect1d(found, rows, assume_unique=True)
        return np.empty(0, np.uint32) if found is None else found

    def _rows_of(self, phrase: Phrase) -> npt.NDArray[np.uint32]:
        """Intersect (row, position of the phrase's first word) over its terms."""
        if any(term not in self.postings for term, _ in phrase.terms):
            return np.empty(0, np.uint32)
        if len(phrase.terms) == 1:
            return self.postings[phrase.terms[0][0]].ordinals
        starts = np.empty(0, np.int64)
        for place, (term, distance) in enumerate(phrase.terms):
            postings = self.postings[term]
            rows = np.repeat(postings.ordinals.astype(np.int64), postings.counts)
            positions = self.positions[term] - distance
            ours = (rows << 32 | positions)[positions >= 0]
            starts = np.intersect1d(starts, ours, assume_unique=True) if place else ours
        return np.unique(starts >> 32).astype(np.uint32)


def index_in_memory(
    column: pa.Array, valid: npt.NDArray[np.bool_], options: Mapping[str, OptionValue], name: str
) -> TextSource:
    """Index rows that no segment's index covers; ordinals are their places in the column.

    With a cache, the name has to be that of no other rows.
    """
    builder = TextIndexBuilder(options)
    builder.add(0, column, valid)
    parts = builder.finish()
    data = parts.data if isinstance(parts.data, bytes) else b"".join(parts.data)
    return TextSource(TextDirectory.decode(parts.directory, name, 0), 0, data)


def index_cached(
    column: pa.Array, options: Mapping[str, OptionValue], cache: ByteCache
) -> TextSource:
    """Index rows that no segment's index covers, unless the cache has the index of such texts.

    Rows of memory and of small segments are the same from search to search until one is written, so
    that their texts are hashed (5 GB/s) and not split again (20 MB/s).
    """
    digest = _digest(column, options)

    def load() -> tuple[TextSource, int]:
        valid = np.ones(len(column), bool)
        source = index_in_memory(column, valid, options, f"rows in memory {digest}")
        return source, len(source.data or b"") + source.directory.bytes

    return cache.get(("text of rows", digest), load)


def _digest(column: pa.Array, options: Mapping[str, OptionValue]) -> str:
    """Return a hash of the values of a column of text, and of how they are indexed."""
    column = pa.concat_arrays([column, column[:0]])  # a copy that begins at zero
    _, offsets, data = column.buffers()
    end = int(np.frombuffer(offsets, "<i4", len(column) + 1)[-1]) if len(column) else 0
    digest = xxhash.xxh3_128(repr((len(column), sorted(options.items()))).encode())
    if column.null_count:
        digest.update(column.is_null().to_numpy(zero_copy_only=False).tobytes())
    if end:
        digest.update(memoryview(offsets)[: 4 * (len(column) + 1)])
        digest.update(memoryview(data)[:end])
    return str(digest.hexdigest())


def collect(
    sources: Sequence[TextSource], query: TextQuery, read: Read, cache: ByteCache | None = None
) -> list[SourceTerms]:
    """Read the postings of a query's terms from all sources."""
    _check_positions(sources, query)
    return _Collection(sources, query, read, cache).run()


def _check_positions(sources: Sequence[TextSource], query: TextQuery) -> None:
    phrases = [phrase for phrase in query.phrases if len(phrase.terms) > 1]
    if phrases and not all(source.directory.has_positions for source in sources):
        words = " ".join(term for term, _ in phrases[0].terms)
        raise InvalidInputError(
            f'text query has the phrase "{words}", but the index has no positions',
            hint="Add the text index with positions=True, or remove the quotes",
        )


class _Collection:
    """The rounds of reading one query's terms."""

    def __init__(
        self, sources: Sequence[TextSource], query: TextQuery, read: Read, cache: ByteCache | None
    ) -> None:
        self._sources, self._query, self._read, self._cache = sources, query, read, cache
        self.found = [SourceTerms(source) for source in sources]
        self._missing = [self._load_cached(found) for found in self.found]
        """Per source: terms that are not cached."""
        self._entries: list[dict[str, TermEntry]] = []

    def _load_cached(self, found: SourceTerms) -> list[str]:
        """Take the postings of terms from the cache; return the terms that are not in it."""
        terms, source = list(self._query.terms), found.source
        if self._cache is None or self._needs_positions:
            return terms
        name, base = source.directory.name, source.base
        missing = []
        known = self._cache.peek_many([(name, base, term) for term in terms])
        for term, postings in zip(terms, known, strict=True):
            if postings is None:
                missing.append(term)
            elif postings is not ABSENT:
                found.postings[term] = postings
        return missing

    @property
    def _needs_positions(self) -> bool:
        return any(len(phrase.terms) > 1 for phrase in self._query.phrases)

    def run(self) -> list[SourceTerms]:
        """Read everything that is not in the cache."""
        if any(self._missing):
            self._load_entries()
            self._load_postings()
            if self._needs_positions:
                self._load_positions()
        return self.found

    def _load_entries(self) -> None:
        """Round one: dictionary blocks of the terms."""
        requests: list[tuple[int, int, PostingRead]] = []
        blocks: list[dict[int, DictionaryBlock]] = [{} for _ in self._sources]
        for number, source in enumerate(self._sources):
            for block, (offset, length) in source.directory.block_ranges(
                self._missing[number]
            ).items():
                known = self._peek(source, block)
                if known is not None:
                    blocks[number][block] = known
                else:
                    requests.append((number, block, PostingRead(number, offset, length)))
        for (number, block, request), data in self._fetch(requests):
            source = self._sources[number]
            decoded = source.directory.block(data, source.base + request.offset)
            blocks[number][block] = decoded
            self._keep(source, block, decoded, decoded.bytes)
        self._entries = [
            source.directory.entries(missing, ours)
            for source, missing, ours in zip(self._sources, self._missing, blocks, strict=True)
        ]

    def _load_postings(self) -> None:
        """Round two: postings."""
        requests: list[tuple[int, str, PostingRead]] = []
        for number, entries in enumerate(self._entries):
            for term in self._missing[number]:
                entry = entries.get(term)
                if entry is None:
                    self._keep(self._sources[number], term, ABSENT, ABSENT_BYTES)
                    continue
                length = 0 if entry.inline is not None else entry.postings_bytes
                requests.append((number, term, PostingRead(number, entry.offset, length)))
        for (number, term, _), data in self._fetch(requests):
            source = self._sources[number]
            entry = self._entries[number][term]
            postings = source.directory.postings(entry, data, source.base)
            self.found[number].postings[term] = postings
            self._keep(source, term, postings, postings.bytes)

    def _load_positions(self) -> None:
        """Read the positions of the phrases' terms, which follow their postings."""
        terms = {term for phrase in self._query.phrases for term, _ in phrase.terms}
        requests: list[tuple[int, str, PostingRead]] = []
        for number, entries in enumerate(self._entries):
            for term in terms & entries.keys():
                offset, length = entries[term].positions_range
                length = 0 if entries[term].inline is not None else length
                requests.append((number, term, PostingRead(number, offset, length)))
        for (number, term, _), data in self._fetch(requests):
            source, found = self._sources[number], self.found[number]
            found.positions[term] = source.directory.positions(
                self._entries[number][term], data, source.base, found.postings[term]
            )

    def _fetch(self, requests: list[tuple[int, T, PostingRead]]) -> "Fetched[T]":
        """Read all requests in one call; those of indexes in memory, and empty ones, directly."""
        bodies: dict[PostingRead, Buffer] = {}
        remote: list[PostingRead] = []
        for _, _, request in requests:
            data = self._sources[request.source].data
            if not request.length:
                bodies[request] = b""
            elif data is not None:
                view = memoryview(data)
                bodies[request] = view[request.offset : request.offset + request.length]
            else:
                remote.append(request)
        if remote:
            bodies.update(zip(remote, self._read(remote), strict=True))
        return [(item, bodies[item[2]]) for item in requests]

    def _peek(self, source: TextSource, part: int | str) -> Any | None:
        if self._cache is None:
            return None
        return self._cache.peek((source.directory.name, source.base, part))

    def _keep(self, source: TextSource, part: int | str, value: object, size: int) -> None:
        if self._cache is not None:
            self._cache.put((source.directory.name, source.base, part), value, size)
