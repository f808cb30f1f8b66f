"""Lazy frames of polars: `reef.polars.scan(reader)`.

    lazy = reef.polars.scan(db.reader("events"))
    lazy.filter(pl.col("amount") > 5).group_by("city").agg(pl.len()).collect()

polars passes the columns that a query needs, its filter and its limit to the source. The filter is
converted to a `where`, which excludes groups; polars filters the remaining rows by its own rules.
So a part that has no counterpart in `where`, or whose meaning differs, need not be converted: only
that no row is lost matters. polars has no interface to take an expression apart but its JSON form,
which may change from release to release; a form that is not understood is not converted.

All reads of a lazy frame, also of frames derived from it, are of the snapshot as of `scan`.
"""

import json
from collections.abc import Iterator, Sequence
from datetime import date, timedelta
from decimal import Decimal
from typing import Any

import polars as pl
import pyarrow as pa
from polars.io.plugins import register_io_source

from reef.engine.handles.dataset import Dataset
from reef.engine.handles.readable import Readable
from reef.engine.where import Where, parse_raw
from reef.engine.where.literals import LiteralError, Timestamp, literal_of, pattern_text
from reef.engine.where.parser import Op, Raw, RawAnd, RawNot, RawOr, RawPredicate, SourcePosition
from reef.errors import InvalidInputError
from reef.formats.schema import Schema

__all__ = ["scan"]

COMPARISONS = {
    "Eq": Op.EQ,
    "NotEq": Op.NE,
    "Lt": Op.LT,
    "LtEq": Op.LE,
    "Gt": Op.GT,
    "GtEq": Op.GE,
}
MIRRORED = {Op.LT: Op.GT, Op.LE: Op.GE, Op.GT: Op.LT, Op.GE: Op.LE}
OPPOSITE = {Op.GT: Op.LE, Op.GE: Op.LT}
UNIT_NS = {"Milliseconds": 10**6, "Microseconds": 10**3, "Nanoseconds": 1}
EXACT_INTEGERS = 2**53
"""Up to here float64 has all integers: polars compares integers with a float as floats."""


def scan(reader: Readable) -> pl.LazyFrame:
    """Return a lazy frame of the rows of a reader, as of now."""
    if not isinstance(reader, Readable):
        raise InvalidInputError(
            f"reef.polars.scan takes a reader, got {type(reader).__name__}",
            hint='For instance reef.polars.scan(db.reader("events"))',
        )
    dataset = reader.dataset()
    return register_io_source(
        lambda columns, predicate, limit, batch_size: _frames(
            dataset, columns, predicate, limit, batch_size
        ),
        schema=pl.DataFrame(dataset.schema.empty_table()).schema,
        is_pure=True,
        explain_name="reef",
        explain_detail=repr(dataset),
    )


def _frames(
    dataset: Dataset,
    columns: Sequence[str] | None,
    predicate: pl.Expr | None,
    limit: int | None,
    batch_size: int | None,
) -> Iterator[pl.DataFrame]:
    """Yield the rows of a query; a limit counts rows before the filter."""
    where = None
    if predicate is not None and limit is None:
        where = _where(predicate, dataset._scan.manifest.schema)
    names = columns
    if columns is not None and predicate is not None:
        names = list(dict.fromkeys([*columns, *predicate.meta.root_names()]))
    left = limit
    for batch in dataset.scanner(names, where, batch_size).to_batches():
        rows = batch if left is None else batch[:left]
        frame = pl.DataFrame(rows)
        if predicate is not None:
            frame = frame.filter(predicate)
        yield frame if columns is None else frame.select(columns)
        if left is not None:
            left -= len(rows)
            if left <= 0:
                return


# --- filters ----------------------------------------------------------------------------


class _NotConverted(Exception):
    """A part of an expression that is left to polars."""


def _where(predicate: pl.Expr, schema: Schema) -> Where | None:
    """Return a filter that every matching row meets, if any."""
    try:
        parts = list(_conjuncts(json.loads(predicate.meta.serialize(format="json"))))
    except Exception:
        return None
    place = SourcePosition(str(predicate), None)
    raw: list[Raw] = []
    for part in parts:
        try:
            condition = _PredicateConverter(schema, place).condition(part)
            parse_raw(condition, schema)
            raw.append(condition)
        except (_NotConverted, LiteralError, InvalidInputError, LookupError, TypeError, ValueError):
            continue
    return parse_raw(RawAnd(tuple(raw)), schema) if raw else None


def _conjuncts(part: Any) -> Iterator[Any]:
    pending = [part]
    while pending:
        part = pending.pop()
        binary = part.get("BinaryExpr", {}) if isinstance(part, dict) else {}
        if binary.get("op") in ("And", "LogicalAnd"):
            pending += [binary["right"], binary["left"]]
        else:
            yield part


class _PredicateConverter:
    """Converts the JSON form of one expression."""

    def __init__(self, schema: Schema, place: SourcePosition) -> None:
        self._types = {field.name: field.arrow for field in (schema.key, *schema.fields)}
        self._place = place

    def condition(self, part: Any) -> Raw:
        """Return the condition of a part."""
        ((kind, body),) = part.items()
        if kind == "Column":
            return self._predicate(body, Op.EQ, True)
        if kind == "BinaryExpr":
            return self._binary(body["left"], body["op"], body["right"])
        if kind == "Function":
            return self._function(body["function"], body["input"])
        raise _NotConverted

    def _binary(self, left: Any, op: str, right: Any) -> Raw:
        if op in ("And", "LogicalAnd"):
            return RawAnd((self.condition(left), self.condition(right)))
        if op in ("Or", "LogicalOr"):
            return RawOr((self.condition(left), self.condition(right)))
        compared = COMPARISONS[op]
        if "Column" in right:
            left, right, compared = right, left, MIRRORED.get(compared, compared)
        return self._predicate(left["Column"], compared, _value(right["Literal"]))

    def _function(self, function: Any, inputs: Sequence[Any]) -> Raw:
        if function == {"StringExpr": "StartsWith"}:
            pattern = pattern_text(_value(inputs[1]["Literal"]))[1:-1].replace("''", "'")
            return self._predicate(inputs[0]["Column"], Op.LIKE, pattern)
        named = function["Boolean"]
        if named == "Not":
            return RawNot(self.condition(inputs[0]))
        column = inputs[0]["Column"]
        if named in ("IsNull", "IsNotNull"):
            op = Op.IS_NULL if named == "IsNull" else Op.NOT_NULL
            return RawPredicate(column, op, (), self._place)
        if named == {"IsBetween": {"closed": "Both"}}:
            low, high = (_value(bound["Literal"]) for bound in inputs[1:])
            bounds = ((Op.GE, low), (Op.LE, high))
            return RawAnd(tuple(self._predicate(column, op, value) for op, value in bounds))
        if named == {"IsIn": {"nulls_equal": False}}:
            values = [self._literal(column, value) for value in _values(inputs[1]["Literal"])]
            return RawPredicate(column, Op.IN, tuple(values), self._place)
        raise _NotConverted

    def _predicate(self, column: str, op: Op, value: Any) -> Raw:
        literal = self._literal(column, value)
        if pa.types.is_floating(self._types[column]) and op in OPPOSITE:
            # To polars NaN is above all numbers; to `where` it is not below or equal.
            return RawNot(RawPredicate(column, OPPOSITE[op], (literal,), self._place))
        return RawPredicate(column, op, (literal,), self._place)

    def _literal(self, column: str, value: Any) -> Any:
        kind = self._types[column]
        if isinstance(value, Timestamp):
            if not pa.types.is_timestamp(kind) or value.zoned != bool(kind.tz):
                raise _NotConverted
            return value
        if isinstance(value, date) and not pa.types.is_date(kind):
            raise _NotConverted
        inexact = isinstance(value, float) and abs(value) > EXACT_INTEGERS
        if kind == pa.float32() or (inexact and not pa.types.is_floating(kind)):
            raise _NotConverted  # polars may compare it as another type than `where`
        return literal_of(value)


def _value(literal: Any) -> Any:
    """Return the value of a literal; not of null."""
    ((kind, body),) = literal.items()
    ((name, value),) = body.items()
    if kind == "Dyn" or name.startswith(("Int", "UInt", "Float")) or name in ("String", "Boolean"):
        if not isinstance(value, bool | int | float | str):
            raise _NotConverted
        return value
    if name == "Date":
        return date(1970, 1, 1) + timedelta(days=value)
    if name == "Datetime":
        count, unit, zone = value
        return Timestamp(count * UNIT_NS[unit], zone is not None)
    if name == "Decimal":
        digits, _, scale = value
        return Decimal(digits).scaleb(-scale)
    raise _NotConverted


def _values(literal: Any) -> list[Any]:
    """Return the values of a list, which is an Arrow stream."""
    values = pa.ipc.open_stream(bytes(literal["Scalar"]["List"])).read_all().column(0)
    plain = values.type if values.num_chunks else pa.null()
    simple = pa.types.is_integer(plain) or plain in (
        pa.large_string(),
        pa.string(),
        pa.string_view(),
    )
    if values.null_count or not simple:
        raise _NotConverted
    return list(values.to_pylist())
