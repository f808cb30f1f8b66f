"""A search's arguments, checked against a schema; its ranked rows, their fusion, and its report."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from operator import index
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from reef.engine.read.scan import Projection
from reef.engine.rows.convert import check_columns, to_record_batch
from reef.engine.where import Where, parse
from reef.errors import ErrorKind, InvalidInputError
from reef.formats.manifest import IndexKind, IndexSpec, Manifest
from reef.formats.schema import Field, Schema
from reef.formats.text_index import text_options
from reef.formats.tokenize import Analyzer, TextOptions, TextQuery
from reef.formats.versions import Versions, concat_versions

K_MAX = 10_000
DISTANCE, SCORE = "_distance", "_score"
T = TypeVar("T")
FUSION_CONSTANT = 60
"""Constant of reciprocal rank fusion: the larger, the less the first ranks outweigh the next."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class VectorQuery:
    """A vector to which the nearest are searched."""

    column: Field
    values: npt.NDArray[np.floating[Any]]
    """As precise as the column."""
    metric: str
    spec: IndexSpec | None
    """None if the column has no index."""
    probes: int | None = None
    replaced: tuple[IndexSpec, ...] = ()
    """The same index with centroids that a retraining replaces; some segments still have them."""


@dataclass(frozen=True, slots=True)
class TextSearch:
    """A text whose words are searched."""

    column: Field
    query: TextQuery
    options: Mapping[str, str | int | float | bool]
    spec: IndexSpec | None
    """None if the column has no index."""


@dataclass(frozen=True, slots=True)
class SearchRequest:
    """A search whose arguments fit the schema."""

    schema: Schema
    vector: VectorQuery | None
    text: TextSearch | None
    weights: tuple[float, float]
    """Weights of vector and text, if the request has both."""
    where: Where | None
    k: int
    columns: tuple[str, ...]
    """Columns of the result, the key first, without the distance."""
    exact: bool

    @property
    def projection(self) -> Projection:
        """The columns that are read of each row."""
        return Projection.of(self.schema, self._names, self.where)

    @property
    def unfiltered(self) -> Projection:
        """The same without skipping rows that cannot match: statistics of text count them."""
        names = list(dict.fromkeys((*self._names, *self.columns_read)))
        return Projection.of(self.schema, names, None)

    @property
    def columns_read(self) -> list[str]:
        """The columns of the result, and those in the condition."""
        where = () if self.where is None else self.where.columns
        return list(dict.fromkeys((*self.columns, *where)))

    @property
    def _names(self) -> list[str]:
        queries = [query for query in (self.vector, self.text) if query is not None]
        return list(dict.fromkeys((*self.columns, *(query.column.name for query in queries))))


def parse_request(
    manifest: Manifest,
    *,
    vector: Any,
    text: Any,
    weights: Any,
    where: Any,
    k: Any,
    columns: Sequence[str] | None,
    recall: Any,
    probes: Any,
) -> SearchRequest:
    """Check the arguments of a search; InvalidInputError names the one that is wrong."""
    schema = manifest.schema
    if vector is None and text is None:
        problem = "search() needs vector=(column, values), text=(column, query) or both"
        raise _invalid(problem, "Use scan() for a filter alone")
    if weights is not None and (vector is None or text is None):
        raise _invalid("weights= is for a search by vector and text together")
    if probes is not None and vector is None:
        raise _invalid("probes= is for a search by vector")
    if recall not in (None, "exact"):
        raise _invalid(f"recall={recall!r} is neither None nor 'exact'")
    if isinstance(columns, str):
        raise _invalid(f"columns={columns!r} is text", f"Use [{columns!r}]")
    asked = schema.arrow().names if columns is None else list(columns)
    check_columns(schema, asked)
    for name in (DISTANCE, SCORE):
        if name in asked:
            raise _invalid(f"column {name} is a result of search(), and cannot be asked for")
    return SearchRequest(
        schema,
        None if vector is None else _vector(manifest, vector, probes),
        None if text is None else _text(manifest, text),
        _weights(weights),
        None if where is None else parse(where, schema),
        _count("k", k, K_MAX),
        tuple(dict.fromkeys([schema.key.name, *asked])),
        recall == "exact",
    )


def _count(name: str, value: Any, most: int) -> int:
    try:
        count = 0 if isinstance(value, bool) else index(value)  # NumPy has integers of its own
    except TypeError:
        count = 0
    if not 1 <= count <= most:
        raise _invalid(f"{name}={value!r} is not a whole number from 1 to {most}")
    return count


def _weights(weights: Any) -> tuple[float, float]:
    """Return the weights of vector and text, both 1 by default."""
    if weights is None:
        return 1.0, 1.0
    try:
        pair = {"vector": 1.0, "text": 1.0} | {str(k): float(v) for k, v in dict(weights).items()}
    except (TypeError, ValueError):
        pair = {}
    values = tuple(pair.values())
    if len(pair) != 2 or not all(np.isfinite(v) and v >= 0 for v in values) or not any(values):
        raise _invalid(
            f"weights={weights!r} are not numbers from 0 on", "Such as {'vector': 1, 'text': 0.5}"
        )
    return pair["vector"], pair["text"]


def _text(manifest: Manifest, text: Any) -> TextSearch:
    if not isinstance(text, tuple | list) or [type(part) for part in text] != [str, str]:
        raise _invalid(f"text={_short(text)} is not (column, query)")
    name, query = text
    column = _column(manifest, name, "text", pa.types.is_string)
    spec = _spec(manifest, IndexKind.TEXT, column)
    options = {} if spec is None else text_options(spec)
    parsed = Analyzer(TextOptions.parse(options)).query(query)
    return TextSearch(column, parsed, options, spec)


def _column(
    manifest: Manifest, name: str, noun: str, has_type: Callable[[pa.DataType], bool]
) -> Field:
    """Return the column of a search; InvalidInputError if there is none of that name and type."""
    columns = {c.name: c for c in manifest.schema.fields if has_type(c.arrow)}
    if name not in columns:
        hint = f"Columns of {noun}: {', '.join(columns) or 'none'}"
        raise _invalid(f"there is no column of {noun} named {name!r}", hint)
    return columns[name]


def _spec(manifest: Manifest, kind: IndexKind, column: Field) -> IndexSpec | None:
    """Return the index of a kind that a column has, if any."""
    specs = (s for s in manifest.indexes if (s.kind, s.column) == (kind, column.number))
    return next(specs, None)


def _vector(manifest: Manifest, vector: Any, probes: Any) -> VectorQuery:
    if probes is not None:
        probes = _count("probes", probes, 2**31)
    if not isinstance(vector, tuple | list) or len(vector) != 2 or not isinstance(vector[0], str):
        raise _invalid(f"vector={_short(vector)} is not (column, values)")
    name, values = vector
    column = _column(manifest, name, "vectors", pa.types.is_fixed_size_list)
    spec = _spec(manifest, IndexKind.VECTOR, column)
    metric = "l2" if spec is None else str(spec.options.get("metric", "l2"))
    query = _numbers(column, values)
    if metric == "cosine" and not query.any():
        raise _invalid(f"the vector for {name} has length 0, which has no cosine")
    same = (IndexKind.VECTOR, column.number)
    replaced = [s for s in manifest.indexes if (s.kind, s.column) == same and s is not spec]
    return VectorQuery(column, query, metric, spec, probes, tuple(replaced))


def _numbers(column: Field, values: Any) -> npt.NDArray[np.floating[Any]]:
    is_float64 = pa.types.is_float64(column.arrow.value_type)
    try:
        with np.errstate(over="ignore"):
            data_type: Any = np.float64 if is_float64 else np.float32
            query: npt.NDArray[Any] = np.asarray(values, data_type)
    except (TypeError, ValueError) as error:
        raise _invalid(f"the vector for {column.name} is not numbers: {error}") from None
    if query.shape != (column.arrow.list_size,):
        found = " × ".join(map(str, query.shape)) or "no"
        expected = column.arrow.list_size
        raise _invalid(f"the vector for {column.name}: expected {expected} values, found {found}")
    if not np.isfinite(query).all():
        raise _invalid(f"the vector for {column.name} has a NaN or an infinity")
    return query


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _invalid(message: str, hint: str = "") -> InvalidInputError:
    return InvalidInputError(message, kind=ErrorKind.INVALID_OPTION, hint=hint)


@dataclass(slots=True)
class SearchReport:
    """How a search was run."""

    plan: str = "exhaustive"
    """`exhaustive` if all rows were read, otherwise `indexed`."""
    segments_indexed: int = 0
    segments_exhaustive: int = 0
    segments_exact: int = 0
    """Indexed segments with so few rows after the filter that all were compared."""
    lists: int = 0
    candidates: int = 0
    """Rows that the indexes returned."""
    rows_read: int = 0
    """Candidates that were read."""
    rows_stale: int = 0
    """Candidates that had been replaced, deleted or expired, or did not meet the condition."""
    rows_scanned: int = 0
    """Rows of memory and of segments without index."""
    documents: int = 0
    """Rows that the statistics of a text search count, stored old versions included."""
    tokens: int = 0
    terms: dict[str, int] = field(default_factory=dict)
    """By term of the query: how many of these rows have it."""
    damaged: list[str] = field(default_factory=list)
    """Segments whose index could not be read."""
    results: int = 0
    requests: int = 0
    bytes: int = 0
    milliseconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def add_damage(self, segment_id: str, error: Exception) -> None:
        """Note that the index of a segment cannot be used, and log it once."""
        if segment_id not in self.damaged:
            self.damaged.append(segment_id)
            _log.warning("segment %s is searched row by row: %s", segment_id, error)


@dataclass(frozen=True, slots=True)
class Ranked:
    """Rows in rank order, with their distances or scores."""

    rows: Versions
    values: npt.NDArray[np.float64]

    @classmethod
    def best(
        cls, rows: Versions, values: npt.NDArray[np.float64], k: int, *, descending: bool = False
    ) -> "Ranked":
        """Return the k best rows with finite values; of equal values, the smaller keys."""
        places = np.flatnonzero(np.isfinite(values))
        order = -values[places] if descending else values[places]
        if len(places) > 4 * k:  # only those that may be among the k best are sorted by key
            bound = np.partition(order, k - 1)[k - 1]
            places, order = places[order <= bound], order[order <= bound]
        keys = rows.keys.take(pa.array(places)).to_pylist()
        ranked = sorted(range(len(places)), key=lambda at: (order[at], keys[at]))[:k]
        chosen = places[ranked].astype(np.int64)
        return cls(rows.take(chosen), values[chosen])

    def table(self, request: SearchRequest, name: str) -> pa.Table:
        """Return the rows as a table with their values in a last column."""
        batch = to_record_batch(self.rows, request.schema, list(request.columns))
        return pa.Table.from_batches([batch]).append_column(name, pa.array(self.values))


def fuse(rankings: Sequence[Ranked], weights: Sequence[float], request: SearchRequest) -> Ranked:
    """Fuse rankings by reciprocal ranks: a row scores weight / (60 + rank) in each of them."""
    scores: dict[bytes, float] = {}
    rows = concat_versions([ranked.rows for ranked in rankings], request.schema)
    for ranked, weight in zip(rankings, weights, strict=True):
        for rank, key in enumerate(ranked.rows.keys.to_pylist(), 1):
            scores[key] = scores.get(key, 0.0) + weight / (FUSION_CONSTANT + rank)
    keys = rows.keys.to_pylist()
    first = {key: at for at, key in reversed(list(enumerate(keys)))}
    places = np.array([first[key] for key in scores], np.int64)
    values = np.array(list(scores.values()), np.float64)
    return Ranked.best(rows.take(places), values, request.k, descending=True)


def matches(rows: Versions, request: SearchRequest) -> npt.NDArray[np.bool_]:
    """Return which rows meet the condition."""
    if request.where is None or not len(rows):
        return np.ones(len(rows), bool)
    batch = to_record_batch(rows, request.schema, list(request.where.columns))
    return np.asarray(request.where.mask(batch).to_numpy(zero_copy_only=False))


def one_by_one(call: Callable[[Any], T], items: Sequence[Any]) -> list[T]:
    """Call a function for each item: where reads do not wait, threads gain nothing."""
    return [call(item) for item in items]
