"""Ranked text over one snapshot: the text indexes of segments, and the rows that none covers.

Rows of memory and of segments without a text index are indexed in memory, piece by piece, so that
BM25 scores all sources in the same way and with the same statistics. The k best are exact: only
rows that are current and meet the condition count, and `recall="exact"` merely scores every row
that has a term instead of skipping blocks that cannot contribute.

An index that cannot be read is reported once, and its segment joins the others.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from reef.engine.read.skipping import rows_by_index
from reef.engine.search.bm25 import Hits, Statistics, exhaustive, top_k
from reef.engine.search.request import (
    Ranked,
    SearchReport,
    SearchRequest,
    TextSearch,
    matches,
    one_by_one,
)
from reef.engine.search.state import SearchState
from reef.engine.search.text_sources import PostingRead, TextSource, collect, index_cached
from reef.errors import CorruptionError
from reef.formats.coding import BLOCK_HEAD_BYTES, Buffer
from reef.formats.manifest import IndexKind, SegmentEntry
from reef.formats.segment import IndexPlace, SegmentTail
from reef.formats.text_index import TextDirectory
from reef.formats.versions import Versions, concat_versions


@dataclass(slots=True)
class _Indexed:
    """The text index of one segment."""

    entry: SegmentEntry
    place: IndexPlace
    source: TextSource


@dataclass(slots=True)
class _Scanned:
    """Rows that were indexed in memory."""

    rows: Versions
    is_current: bool
    source: TextSource


@dataclass
class TextRanking:
    """One text search of one snapshot."""

    state: SearchState
    request: SearchRequest
    query: TextSearch
    report: SearchReport
    damaged: set[str] = field(default_factory=set)
    checked: dict[tuple[str, bytes], Versions] = field(default_factory=dict)
    """The last rows that were read of each segment, by their ordinals."""

    def run(self, k: int) -> Ranked:
        """Return the k best rows, the best first."""
        while True:
            indexed = self._find_indexes()
            try:
                return self._run(indexed, k)
            except CorruptionError as error:
                broken = [one.entry for one in indexed if self._is_of(error, one.entry)]
                if not broken:
                    raise
                for entry in broken:
                    self.damaged.add(entry.id)
                    self.report.add_damage(entry.id, error)

    def _is_of(self, error: CorruptionError, entry: SegmentEntry) -> bool:
        """Whether damage is in the index of a segment, and not in its rows."""
        key = self.state.segments.namespace.segment(entry.id, entry.home)
        return error.context.get("object") == key and entry.id not in self.damaged

    # --- sources --------------------------------------------------------------------
    def _find_indexes(self) -> list[_Indexed]:
        """Return the text indexes that serve the query."""
        state, spec = self.state, self.query.spec
        if spec is None:
            return []
        entries = [
            e for e in state.entries if e.rows and not e.patches and e.id not in self.damaged
        ]
        if state.segments.waits:
            state.runtime.map(state.segments.tail, entries)
        found = []
        for entry in entries:
            tail = state.segments.tail(entry)
            for number, place in enumerate(tail.footer.indexes):
                is_text = place.spec.kind is IndexKind.TEXT and place.is_built
                if is_text and place.spec.serves(spec):
                    try:
                        directory = self._directory(tail, number)
                    except CorruptionError as error:
                        self.report.add_damage(entry.id, error)
                        continue
                    base = place.data.offset + BLOCK_HEAD_BYTES
                    found.append(_Indexed(entry, place, TextSource(directory, base)))
        return found

    def _directory(self, tail: SegmentTail, number: int) -> TextDirectory:
        """Return the directory of an index, decoded once."""
        offset = tail.footer.indexes[number].directory.offset

        def load() -> tuple[TextDirectory, int]:
            directory = TextDirectory.decode(tail.directory(number), tail.name, offset)
            return directory, directory.bytes

        return self.state.segments.cache.get(("text", tail.name, offset), load)

    def _index_scanned(self, rest: Sequence[SegmentEntry]) -> list[_Scanned]:
        """Index the rows of memory and of segments without a usable index."""
        column, found = self.query.column.number, []
        for rows, is_current in self.state.unindexed(rest, self.request.unfiltered):
            self.report.rows_scanned += len(rows)
            text = rows.fields.get(column)
            if text is not None:
                source = index_cached(text, self.query.options, self.state.segments.cache)
                found.append(_Scanned(rows, is_current, source))
        return found

    # --- the search -----------------------------------------------------------------
    def _run(self, indexed: list[_Indexed], k: int) -> Ranked:
        known = {one.entry.id for one in indexed}
        rest = [entry for entry in self.state.entries if entry.id not in known]
        scanned = self._index_scanned(rest)
        sources = [*(one.source for one in indexed), *(one.source for one in scanned)]
        cache = self.state.segments.cache
        terms = collect(sources, self.query.query, partial(self._read_ranges, indexed), cache)
        statistics = Statistics.of(terms)
        rank = exhaustive if self.request.exact else top_k
        hits = rank(
            terms,
            self.query.query,
            statistics,
            k,
            allowed=partial(self._allowed_rows, indexed, scanned, rest),
            matching=self._matching(indexed, len(scanned)),
        )
        self._note(indexed, rest, hits, statistics)
        return self._rank_hits(indexed, scanned, hits, k)

    def _note(
        self,
        indexed: Sequence[_Indexed],
        rest: Sequence[SegmentEntry],
        hits: Hits,
        statistics: Statistics,
    ) -> None:
        self.report.plan = "indexed" if indexed else "exhaustive"
        self.report.segments_indexed = len(indexed)
        self.report.segments_exhaustive = len(rest)
        self.report.candidates += len(hits)
        self.report.documents, self.report.tokens = statistics.documents, statistics.tokens
        self.report.terms = {t: statistics.frequencies.get(t, 0) for t in self.query.query.terms}

    def _read_ranges(
        self, indexed: Sequence[_Indexed], requests: Sequence[PostingRead]
    ) -> list[Buffer]:
        """Read ranges of the indexes, those of each segment together, all in parallel."""
        places: dict[int, list[int]] = {}
        for at, request in enumerate(requests):
            places.setdefault(request.source, []).append(at)

        def read(number: int) -> list[Buffer]:
            one = indexed[number]
            asked = [requests[at] for at in places[number]]
            spans = [(request.offset, request.offset + request.length) for request in asked]
            return self.state.segments.index_parts(one.entry, one.place, spans, checks=False)

        gather = self.state.runtime.map if self.state.segments.waits else one_by_one
        bodies: list[Any] = [None] * len(requests)
        for number, parts in zip(places, gather(read, list(places)), strict=True):
            for at, part in zip(places[number], parts, strict=True):
                bodies[at] = part
        return bodies

    def _matching(self, indexed: Sequence[_Indexed], scanned: int) -> list[Any] | None:
        """Return the rows that the filter indexes leave, by source; None without a condition."""
        if self.request.where is None:
            return None
        masks: list[Any] = []
        found = rows_by_index(
            self.state.segments,
            self.state.runtime,
            [one.entry for one in indexed],
            self.request.where,
        )
        for one, rows in zip(indexed, found, strict=True):
            mask = None
            if isinstance(rows, CorruptionError):  # every row that is returned is checked anyway
                self.report.add_damage(one.entry.id, rows)
            elif rows is not None:
                mask = np.zeros(one.source.directory.rows, bool)
                mask[np.array(rows.to_array(), np.int64)] = True
            masks.append(mask)
        return [*masks, *[None] * scanned]

    def _allowed_rows(
        self,
        indexed: Sequence[_Indexed],
        scanned: Sequence[_Scanned],
        rest: Sequence[SegmentEntry],
        source: int,
        ordinals: npt.NDArray[np.uint32],
    ) -> npt.NDArray[np.bool_]:
        """Return which rows of a source are current and meet the condition."""
        self.report.rows_read += len(ordinals)
        if not len(ordinals):
            return np.zeros(0, bool)
        if source < len(indexed):
            entry = indexed[source].entry
            rows = self._rows_at(entry, ordinals)
            allowed = self.state.are_current(rows, [entry], in_memory=False)
            allowed &= ~self.state.are_looked_up(rows, rest)
        else:
            one = scanned[source - len(indexed)]
            rows = one.rows.take(ordinals.astype(np.int64))
            allowed = np.ones(len(rows), bool)
            if not one.is_current:
                allowed = self.state.are_current(rows, rest, in_memory=True)
        allowed &= matches(rows, self.request)
        self.report.rows_stale += int((~allowed).sum())
        return allowed

    def _rows_at(self, entry: SegmentEntry, ordinals: npt.NDArray[np.uint32]) -> Versions:
        """Return rows of a segment; those that were checked last are at hand."""
        key = entry.id, ordinals.tobytes()
        rows = self.checked.get(key)
        if rows is None:
            rows = self.state.rows_at(entry, ordinals, self.request.unfiltered.numbers)
            self.checked = {k: r for k, r in self.checked.items() if k[0] != entry.id} | {key: rows}
        return rows

    def _rank_hits(
        self, indexed: Sequence[_Indexed], scanned: Sequence[_Scanned], hits: Hits, k: int
    ) -> Ranked:
        """Return the rows of hits; of equal scores, the smaller keys."""
        parts, scores = [Versions.empty(self.request.schema)], [np.zeros(0)]
        for number in np.unique(hits.sources).tolist():
            own = hits.sources == number
            ordinals = hits.ordinals[own]
            if number < len(indexed):
                parts.append(self._rows_at(indexed[number].entry, ordinals))
            else:
                rows = scanned[number - len(indexed)].rows
                parts.append(rows.take(ordinals.astype(np.int64)))
            scores.append(hits.scores[own])
        rows = concat_versions(parts, self.request.schema)
        return Ranked.best(rows, np.concatenate(scores), k, descending=True)
