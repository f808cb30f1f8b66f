"""Merges from callers: operands, checked and converted to the operations of one batch.

    w.merge("page", {"hits": reef.add(1), "last": reef.max_(now), "tags": reef.union(["a"])})
    w.merge_rows(table, {"hits": "add", "last": "max"})

A merge applies an operator to each column that it names (`reef.formats.operators`); a null is no
operand. A key without a row gets one, with the operands as values: so nothing is read first. The
row then expires as the merge says (`ttl_s`), like that of a put.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from reef.engine.read.operands import normal_list
from reef.engine.rows.input import (
    InputColumns,
    check_names,
    expiry_of,
    fit_column,
    fit_keys,
    read_columns,
)
from reef.engine.rows.output import EXPIRES_AT
from reef.errors import ErrorKind, InvalidInputError
from reef.formats.operators import NAMES, Codes, Operator, type_problem
from reef.formats.schema import Field, Schema
from reef.formats.wal_object import OpKind, Ops


@dataclass(frozen=True, slots=True)
class Operand:
    """An operator and the value that it applies to a column: made by `add`, `max_` and so on."""

    operator: Operator
    value: Any

    def __repr__(self) -> str:
        name = self.operator.name.lower()
        return f"reef.{name}{'_' if name in ('max', 'min') else ''}({self.value!r})"


def add(value: float) -> Operand:
    """Add a number to a column of int64, uint64 or float64; integers wrap around at 64 bits."""
    return Operand(Operator.ADD, value)


def max_(value: Any) -> Operand:
    """Keep the larger of a column's value and this one."""
    return Operand(Operator.MAX, value)


def min_(value: Any) -> Operand:
    """Keep the smaller of a column's value and this one."""
    return Operand(Operator.MIN, value)


def union(values: Sequence[Any]) -> Operand:
    """Add elements to a list that is used as a set: sorted, each element once, no nulls."""
    if isinstance(values, str | bytes) or not hasattr(values, "__iter__"):
        raise InvalidInputError(f"union() takes a list of elements, got {values!r:.40}")
    return Operand(Operator.UNION, list(values))


def merge_ops(
    rows: Sequence[Mapping[str, Any]], schema: Schema, *, ttl_s: float | None, now_ms: int
) -> Ops:
    """Return rows whose columns are operands, other than the key, as merges."""
    key = schema.key.name
    names = list(dict.fromkeys(name for row in rows for name in row if name != key))
    for place, row in enumerate(rows):
        _check_operands(row, key, place)
    columns: dict[str, Any] = {key: [row[key] for row in rows]}
    columns |= {name: [_value(row.get(name)) for row in rows] for name in names}
    codes = {name: np.array([_operator(row.get(name)) for row in rows], np.uint8) for name in names}
    return _merge(InputColumns(columns, len(rows)), codes, schema, ttl_s, now_ms)


def merge_rows_ops(
    data: object,
    operators: Mapping[str, str],
    schema: Schema,
    *,
    ttl_s: float | None = None,
    now_ms: int = 0,
) -> Ops:
    """Return rows in any form as merges, with one operator for each of their columns."""
    given = read_columns(data, schema.key.name)
    if not given.rows:
        raise InvalidInputError("a batch without operations")
    codes = {}
    for name in given.columns:
        if name not in (schema.key.name, EXPIRES_AT):
            operator = operator_of(name, operators)
            codes[name] = np.full(given.rows, operator, np.uint8)
    return _merge(given, codes, schema, ttl_s, now_ms)


def operator_of(column: str, operators: Mapping[str, str]) -> Operator:
    """Return the operator of a column by its name; InvalidInputError if there is none."""
    if column not in operators:
        raise InvalidInputError(
            f"column {column}: a merge needs an operator for each column",
            hint=f"Name one of {', '.join(NAMES)}, or leave the column out",
            column=column,
        )
    name = str(operators[column]).removesuffix("_")
    if name not in NAMES:
        raise InvalidInputError(
            f"column {column}: {operators[column]!r} is no merge operator",
            kind=ErrorKind.INVALID_OPTION,
            hint=f"There are: {', '.join(NAMES)}",
            column=column,
        )
    return NAMES[name]


def _merge(
    given: InputColumns,
    codes: Mapping[str, Codes],
    schema: Schema,
    ttl_s: float | None,
    now_ms: int,
) -> Ops:
    check_names(given, schema)
    named = [field for field in schema.fields if field.name in codes]
    fields = {}
    for field in named:
        _check_types(codes[field.name], field)
        array = fit_column(given.columns[field.name], field)
        fields[field.number] = normal_list(array) if _is_union(codes[field.name]) else array
    touched = {f.number: _touched(codes[f.name], fields[f.number]) for f in named}
    _check_some_column(touched, given.rows)
    return Ops(
        keys=fit_keys(given.columns[schema.key.name], schema.key),
        kinds=pa.array(np.full(given.rows, OpKind.MERGE, np.uint8)),
        expires_at_ms=expiry_of(given, ttl_s, now_ms),
        fields=fields,
        touched={number: pa.array(array) for number, array in touched.items()},
        merged_at_ms=pa.array(np.full(given.rows, now_ms, np.int64)),
    )


def _check_operands(row: Mapping[str, Any], key: str, place: int) -> None:
    for name, operand in row.items():
        if name != key and not isinstance(operand, Operand):
            raise InvalidInputError(
                f"row {place}, column {name}: an operand expected, got {operand!r:.40}",
                hint='For instance {"count": reef.add(1)}; patch sets a column',
                row=place,
                column=name,
            )
        if isinstance(operand, Operand) and operand.value is None:
            raise InvalidInputError(
                f"row {place}, column {name}: None is no operand",
                hint="Leave the column out",
                row=place,
                column=name,
            )


def _check_types(codes: Codes, field: Field) -> None:
    for code in np.unique(codes).tolist():
        problem = type_problem(Operator(code), field.arrow) if code else ""
        if problem:
            raise InvalidInputError(
                f"column {field.name}: {problem}, not {field.type}", column=field.name
            )


def _check_some_column(touched: Mapping[int, Codes], rows: int) -> None:
    empty = np.ones(rows, dtype=bool)
    for codes in touched.values():
        empty &= codes == Operator.NONE
    if empty.any():
        row = int(np.flatnonzero(empty)[0])
        raise InvalidInputError(
            f"row {row}: a merge without an operand", hint="Name a column to change", row=row
        )


def _is_union(codes: Codes) -> bool:
    return bool((codes == Operator.UNION).any())


def _touched(codes: Codes, array: pa.Array) -> Codes:
    """Return the operators, none where the operand is null."""
    valid = array.is_valid().to_numpy(zero_copy_only=False)
    return np.where(valid, codes, np.uint8(Operator.NONE))


def _value(operand: Operand | None) -> Any:
    return None if operand is None else operand.value


def _operator(operand: Operand | None) -> int:
    return Operator.NONE if operand is None else operand.operator
