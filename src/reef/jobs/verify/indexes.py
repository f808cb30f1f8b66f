"""Checks of search indexes: their blocks, their centroids, and a sample of rows against them.

Damage to an index is a warning. It loses no row: searches read the segment's rows instead, and a
compaction of the segment, or `build_indexes(…, again=True)`, writes it again from them.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from reef.errors import CorruptionError, NotFoundError
from reef.formats.coding import BlockKind, Buffer, corrupt, decode_block
from reef.formats.filter_index import FilterDirectory, FilterIndex
from reef.formats.manifest import IndexKind, IndexSpec, Manifest
from reef.formats.segment import IndexPlace, SegmentTail
from reef.formats.text_index import TermEntry, TextDirectory, TextIndexBuilder, text_options
from reef.formats.vector_index import (
    CentroidSet,
    VectorDirectory,
    decode_centroids,
    vectors_in_lists,
)
from reef.jobs.verify.chain import Problem, ProblemKind, Severity
from reef.paths import Namespace
from reef.stores import Store

CODE_ERROR = 0.51
"""How far a value may be from its code, in steps; half a step and what rounding adds."""
NEARNESS = 1e-3
"""By how much another centroid may be nearer than that of the list: machines round differently."""

DIRECTORIES = {
    IndexKind.FILTER: FilterDirectory,
    IndexKind.VECTOR: VectorDirectory,
    IndexKind.TEXT: TextDirectory,
}
Sample = tuple[npt.NDArray[np.uint32], pa.Array]
"""Ordinals of whole rows, and their values in one column."""


def check_centroids(store: Store, names: Namespace, manifest: Manifest) -> Iterator[Problem]:
    """Check the centroid sets that a generation names."""
    for spec in manifest.indexes:
        if not spec.centroids:
            continue
        key = names.centroids(spec.centroids, spec.home)
        try:
            decode_centroids(store.get(key), key)
        except NotFoundError:
            yield _damage(key, f"object {key} is missing, though the newest generation names it", 0)
        except CorruptionError as error:
            yield _damage(key, error.message, 0)


def check_directories(key: str, tail: SegmentTail) -> Iterator[Problem]:
    """Check the directories of a segment's indexes, which are in its tail."""
    for number, place in enumerate(tail.footer.indexes):
        if place.is_built:
            try:
                _directory(tail, number, place)
            except CorruptionError as error:
                yield _damage(key, error.message, place.directory.offset)


def check_rows(
    key: str,
    tail: SegmentTail,
    data: Mapping[int, Buffer],
    samples: Mapping[int, Sequence[Sample]],
    centroids: Mapping[str, CentroidSet],
) -> Iterator[Problem]:
    """Check data blocks by index, and sampled rows by column, against each other."""
    for number, place in enumerate(tail.footer.indexes):
        if not place.is_built or number not in data:
            continue
        try:
            at = place.data.offset
            payload = decode_block(data[number], BlockKind.INDEX_DATA, key, at)
            directory = _intact_directory(tail, number, place)
            if isinstance(directory, TextDirectory) and place.spec.column in samples:
                _check_text(directory, payload, samples[place.spec.column], place.spec, at)
            for sample in samples.get(place.spec.column, ()):
                if isinstance(directory, FilterDirectory):
                    _check_filter(directory, payload, sample, at)
                elif isinstance(directory, VectorDirectory) and place.spec.centroids in centroids:
                    lists = centroids[place.spec.centroids]
                    _check_vectors(directory, payload, sample, lists, at)
        except CorruptionError as error:
            yield _damage(key, error.message, place.data.offset)


def _directory(
    tail: SegmentTail, number: int, place: IndexPlace
) -> FilterDirectory | VectorDirectory | TextDirectory:
    kind: Any = DIRECTORIES[place.spec.kind]
    found: FilterDirectory | VectorDirectory | TextDirectory = kind.decode(
        tail.directory(number), tail.name, place.directory.offset
    )
    return found


def _intact_directory(
    tail: SegmentTail, number: int, place: IndexPlace
) -> FilterDirectory | VectorDirectory | TextDirectory | None:
    """Return a directory; None if it is damaged, which `check_directories` reports."""
    try:
        return _directory(tail, number, place)
    except CorruptionError:
        return None


def _damage(key: str, message: str, offset: int) -> Problem:
    text = f"{message}; searches read the rows instead"
    return Problem(ProblemKind.INDEX_DAMAGED, key, text, Severity.WARNING, offset)


def _check_filter(directory: FilterDirectory, payload: Buffer, sample: Sample, at: int) -> None:
    """Raise unless the index has each sampled row under its value."""
    ordinals, values = sample
    view = memoryview(payload)
    index = FilterIndex(directory, lambda spans: [view[a:b] for a, b in spans])
    known = values.is_valid().to_numpy(zero_copy_only=False)
    listed = index.nulls()
    wrong = [o for o in ordinals[~known].tolist() if o not in listed]
    values, ordinals = values.drop_null().cast(directory.values.type), ordinals[known]
    if directory.runs:
        wrong += _not_in_runs(directory, view, ordinals, values)
    else:
        places = pc.index_in(values, value_set=directory.values).fill_null(-1)
        for ordinal, place in zip(ordinals.tolist(), places.to_pylist(), strict=True):
            if place < 0 or ordinal not in index.part(place):
                wrong.append(ordinal)
    if wrong:
        problem = f"row {wrong[0]} is not under its value in the filter index"
        raise corrupt(directory.name, at, problem)


def _not_in_runs(
    directory: FilterDirectory,
    view: memoryview,
    ordinals: npt.NDArray[np.uint32],
    values: pa.Array,
) -> list[int]:
    runs = [directory.run(n, view[slice(*directory.span(n))]) for n in range(directory.nulls)]
    stored = pa.concat_arrays([values[:0], *(found for found, _ in runs)])
    where = np.concatenate([np.zeros(0, np.uint32), *(found for _, found in runs)])
    order = np.argsort(where, kind="stable")
    places = np.searchsorted(where[order], ordinals)
    inside = places < len(where)
    at = order[np.minimum(places, len(where) - 1)] if len(where) else np.zeros(len(ordinals), int)
    if not len(where):
        return [int(o) for o in ordinals]
    same = inside & (where[at] == ordinals)
    equal = pc.equal(stored.take(pa.array(at)), values)
    if pa.types.is_floating(values.type):
        equal = pc.or_(equal, pc.is_nan(values))
    same &= equal.to_numpy(zero_copy_only=False)
    return [int(o) for o in ordinals[~same]]


def _check_vectors(
    directory: VectorDirectory, payload: Buffer, sample: Sample, centroids: CentroidSet, at: int
) -> None:
    """Raise unless each sampled vector is in the list of its nearest centroid, by its codes."""
    ordinals, column = sample
    vectors, known = vectors_in_lists(column, directory.metric)
    view = memoryview(payload)
    places: dict[int, tuple[int, int]] = {}
    lists = {}
    for number in np.flatnonzero(directory.counts).tolist():
        lists[number] = directory.decode_list(number, view[slice(*directory.span(number))])
        rows = lists[number].ordinals.tolist()
        places |= {ordinal: (number, row) for row, ordinal in enumerate(rows)}
    if len(places) != directory.rows:
        raise corrupt(directory.name, at, "a row is twice in the vector index")
    for ordinal, vector in zip(ordinals[known].tolist(), vectors[known], strict=True):
        number, row = places.get(ordinal, (-1, 0))
        if number < 0:
            raise corrupt(directory.name, at, f"row {ordinal} is in no list of the vector index")
        steps = (vector - directory.offset) / np.where(directory.scale > 0, directory.scale, 1)
        off = np.abs(steps - lists[number].codes[row])
        far = np.square(centroids.centroids - vector).sum(axis=1)
        is_near = far[number] <= far.min() * (1 + NEARNESS)
        if not is_near or (off[directory.scale > 0] > CODE_ERROR).any():
            raise corrupt(
                directory.name, at, f"row {ordinal} is in another list, or has other codes"
            )


def _check_text(
    directory: TextDirectory, payload: Buffer, samples: Sequence[Sample], spec: IndexSpec, at: int
) -> None:
    """Raise unless sampled rows are in the postings of their words, as often as these are in them,
    and in no others of these; of all rows, the index has to have the words of these and no more.
    """
    ordinals = np.concatenate([some for some, _ in samples])
    builder = TextIndexBuilder(text_options(spec))
    column = pa.concat_arrays([texts for _, texts in samples])
    builder.add(0, column, np.ones(len(column), bool))
    parts = builder.finish()
    data = parts.data if isinstance(parts.data, bytes) else b"".join(parts.data)
    made, view = TextDirectory.decode(parts.directory, directory.name, 0), memoryview(payload)
    stored = dict(directory.every_entry(view))
    for term, entry in made.every_entry(data):
        expected = made.postings(entry, _postings_in(memoryview(data), entry), 0)
        rows, times = ordinals[expected.ordinals], expected.counts
        if term not in stored or not _has(directory, stored[term], view, ordinals, rows, times, at):
            problem = f"the postings of {term!r} in the text index are not those of the rows"
            raise corrupt(directory.name, at, problem)
    sizes = (directory.documents, directory.tokens, len(stored))
    if len(ordinals) == directory.rows and sizes != (made.documents, made.tokens, made.terms):
        problem = f"{sizes} documents, tokens and terms in the text index, the rows have others"
        raise corrupt(directory.name, at, problem)


def _has(  # noqa: PLR0917 - two sides of one comparison
    directory: TextDirectory,
    entry: TermEntry,
    view: memoryview,
    sampled: npt.NDArray[np.uint32],
    rows: npt.NDArray[np.uint32],
    times: npt.NDArray[np.int64],
    at: int,
) -> bool:
    """Whether of the sampled rows, postings have these, so many times each."""
    postings = directory.postings(entry, _postings_in(view, entry), at)
    ours = np.isin(postings.ordinals, sampled)
    return np.array_equal(postings.ordinals[ours], rows) and np.array_equal(
        postings.counts[ours], times
    )


def _postings_in(data: memoryview, entry: TermEntry) -> memoryview:
    start, length = entry.postings_range
    return data[start : start + length]
