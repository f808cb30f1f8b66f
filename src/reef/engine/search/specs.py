"""The search indexes of a namespace, as callers name them.

    reef.vector_index("embedding", metric="cosine")
    reef.text_index("body", language="english")
    reef.filter_index("country")

A definition names its column; `resolve` checks it against a schema and returns the spec that
manifests have, which names the column's number.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from reef.errors import ConflictError, CorruptionError, ErrorKind, InvalidInputError, NotFoundError
from reef.formats.filter_index import BuildableFilter
from reef.formats.manifest import IndexKind, IndexSpec, newest_indexes
from reef.formats.schema import Field, Schema
from reef.formats.segment_writer import BuildableIndex
from reef.formats.text_index import BuildableText
from reef.formats.tokenize import TextOptions
from reef.formats.vector_index import (
    LISTS_MAX,
    METRICS,
    BuildableVector,
    CentroidSet,
    decode_centroids,
)
from reef.paths import Namespace
from reef.stores import Store

Option = str | int | float | bool


@dataclass(frozen=True, slots=True)
class IndexDefinition:
    """A search index, by the name of its column."""

    kind: str
    column: str
    options: dict[str, Option] = field(default_factory=dict)


def vector_index(
    column: str,
    metric: str = "l2",
    *,
    lists: int | None = None,
    probes: int | None = None,
    rows_min: int | None = None,
) -> IndexDefinition:
    """Define an index of vectors, for `search(vector=…)`.

    `metric` is "l2", "cosine" or "dot". `lists` is how many lists the vectors are divided into, by
    default about the square root of their number; `probes` how many of them a search reads, by
    default as many as were measured to hold nearly all neighbours. Segments with fewer than
    `rows_min` rows get no index, and are searched row by row.
    """
    if metric not in METRICS:
        raise _invalid(f"metric={metric!r} is not one of {', '.join(METRICS)}")
    return IndexDefinition(
        IndexKind.VECTOR,
        _name(column),
        {
            "metric": metric,
            **_count("lists", lists, LISTS_MAX),
            **_count("probes", probes, LISTS_MAX),
            **_count("rows_min", rows_min),
        },
    )


def text_index(
    column: str,
    language: str = "",
    *,
    stemming: bool | None = None,
    stop_words: bool | None = None,
    tokenizer: str = "unicode",
    positions: bool = False,
    rows_min: int | None = None,
) -> IndexDefinition:
    """Define an index of the words of a text column, for `search(text=…)`.

    `language` is "english", which stems words and leaves out stop words unless `stemming` or
    `stop_words` say otherwise, or empty. `tokenizer` is "unicode" or "whitespace". `positions`
    are needed for phrases in quotes. Segments with fewer than `rows_min` rows get no index.
    """
    options: dict[str, Option] = {
        "language": language,
        **({} if stemming is None else {"stemming": stemming}),
        **({} if stop_words is None else {"stop_words": stop_words}),
        "tokenizer": tokenizer,
        "positions": positions,
    }
    TextOptions.parse(options)
    return IndexDefinition(
        IndexKind.TEXT, _name(column), {**options, **_count("rows_min", rows_min)}
    )


def filter_index(column: str, *, rows_min: int | None = None) -> IndexDefinition:
    """Define an index of the values of a column, for `where` in searches and scans.

    Segments with fewer than `rows_min` rows get no index.
    """
    return IndexDefinition(IndexKind.FILTER, _name(column), _count("rows_min", rows_min))


def _name(column: Any) -> str:
    if not isinstance(column, str) or not column:
        raise _invalid(f"{column!r} is not the name of a column")
    return column


def _count(name: str, value: int | None, most: int = 2**31 - 1) -> dict[str, Option]:
    if value is None:
        return {}
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise _invalid(f"{name}={value!r} is not a whole number from 1 to {most}")
    return {name: value}


def _invalid(message: str) -> InvalidInputError:
    return InvalidInputError(message, kind=ErrorKind.INVALID_OPTION)


# --- against a schema -------------------------------------------------------------------


def resolve_all(definitions: Iterable[Any], schema: Schema) -> tuple[IndexSpec, ...]:
    """Return the specs of definitions; InvalidInputError if a column has two of one kind."""
    if not isinstance(definitions, Iterable):
        raise _invalid(f"indexes={definitions!r:.80} is not a list of indexes")
    specs = [resolve(definition, schema) for definition in definitions]
    for place, spec in enumerate(specs):
        if any(is_same(spec, other) for other in specs[:place]):
            name = column_name(schema, spec.column)
            raise _invalid(f"column {name} has two {spec.kind} indexes")
    return tuple(specs)


def resolve(definition: Any, schema: Schema) -> IndexSpec:
    """Return the spec of a definition; InvalidInputError if its column does not fit."""
    if not isinstance(definition, IndexDefinition):
        raise InvalidInputError(
            f"{definition!r} is not an index",
            kind=ErrorKind.INVALID_OPTION,
            hint="Use reef.vector_index, reef.text_index or reef.filter_index",
        )
    column = _field(definition.column, schema)
    kind = IndexKind(definition.kind)
    if kind is IndexKind.VECTOR:
        _check_vector(column)
    elif kind is IndexKind.TEXT:
        _check_text(column)
    else:
        _check_filter(column)
    return IndexSpec(kind, column.number, dict(definition.options))


def _field(name: str, schema: Schema) -> Field:
    if name == schema.key.name:
        raise _invalid(f"column {name} is the key, by which rows are found without an index")
    for column in schema.fields:
        if column.name == name:
            return column
    names = ", ".join(column.name for column in schema.fields)
    raise InvalidInputError(
        f"there is no column {name!r} to index",
        kind=ErrorKind.INVALID_OPTION,
        hint=f"The columns are {names}",
    )


def _check_vector(column: Field) -> None:
    if not pa.types.is_fixed_size_list(column.arrow) or not column.arrow.list_size:
        raise InvalidInputError(
            f"column {column.name} is {column.type}, a vector index needs vectors",
            kind=ErrorKind.INVALID_OPTION,
            hint="Such as pa.list_(pa.float32(), 384)",
        )


def _check_text(column: Field) -> None:
    if not pa.types.is_string(column.arrow):
        raise _invalid(f"column {column.name} is {column.type}, a text index needs string")


def _check_filter(column: Field) -> None:
    if pa.types.is_nested(column.arrow):
        raise _invalid(f"column {column.name} is {column.type}, which a filter cannot compare")


def is_same(one: IndexSpec, other: IndexSpec) -> bool:
    """Whether two specs are of the same kind and column: a namespace has at most one of them."""
    return (one.kind, one.column) == (other.kind, other.column)


def column_name(schema: Schema, number: int) -> str:
    """Return the name of a column."""
    return next((c.name for c in schema.fields if c.number == number), f"#{number}")


def check_same_indexes(
    namespace: str, existing: Sequence[IndexSpec], wanted: Sequence[IndexSpec], schema: Schema
) -> None:
    """Raise ConflictError unless a namespace that exists has the wanted indexes."""
    bare = {(spec.kind, spec.column, tuple(sorted(spec.options.items()))) for spec in existing}
    asked = {(spec.kind, spec.column, tuple(sorted(spec.options.items()))) for spec in wanted}
    if bare != asked:
        listed = ", ".join(f"{s.kind} of {column_name(schema, s.column)}" for s in existing)
        raise ConflictError(
            f"namespace {namespace} exists with other indexes: {listed or 'none'}",
            hint="Change them with alter(add_index=…) and alter(drop_index=…)",
            namespace=namespace,
        )


def load_indexes(
    store: Store, names: Namespace, specs: Sequence[IndexSpec]
) -> tuple[BuildableIndex, ...]:
    """Return the indexes that segments of a namespace get.

    A centroid set that is lost or damaged must not stop folds: without it segments get no vector
    index, and are searched row by row.
    """
    return tuple(_buildable(store, names, spec) for spec in newest_indexes(specs))


def _buildable(store: Store, names: Namespace, spec: IndexSpec) -> BuildableIndex:
    if spec.kind is IndexKind.FILTER:
        return BuildableFilter(spec)
    if spec.kind is IndexKind.TEXT:
        return BuildableText(spec)
    return BuildableVector(spec, _centroids(store, names, spec))


def _centroids(store: Store, names: Namespace, spec: IndexSpec) -> CentroidSet | None:
    if not spec.centroids:
        return None
    key = names.centroids(spec.centroids, spec.home)
    try:
        return decode_centroids(store.get(key), key)
    except (NotFoundError, CorruptionError):
        return None
