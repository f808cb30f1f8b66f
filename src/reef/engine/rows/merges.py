"""Merges: operands from callers, and how they are applied to the values below.

    w.merge("page", {"hits": reef.add(1), "last": reef.max_(now), "tags": reef.union(["a"])})
    w.merge_rows(table, {"hits": "add", "last": "max"})

A merge applies an operator to each column that it names (`reef.formats.schema`); a null is no
operand. A key without a row gets one, with the operands as values: so nothing is read first. The
row then expires as the merge says (`ttl_s`), like that of a put.

The versions of one key that become one row are a *group*. Groups are contiguous, and the rows of
each are ordered from the oldest to the newest. `ColumnOperands.lay_over` returns one value for each
group: the newest value that one of its rows sets, then the operands of newer rows in order.
Neighbouring operands of the same operator are combined by one vector operation over all groups.
Where operators alternate, each change of operator is another round.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from reef.engine.rows.convert import EXPIRES_AT
from reef.engine.rows.input import (
    InputColumns,
    check_names,
    expiry_of,
    fit_column,
    fit_keys,
    read_columns,
)
from reef.errors import ErrorKind, InvalidInputError
from reef.formats.schema import OPERATORS, Codes, Field, Operator, Schema, is_joinable, type_problem
from reef.formats.wal_object import OpKind, Ops

Places = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
SIGN = np.int64(2**63 - 1)


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
            hint=f"Name one of {', '.join(OPERATORS)}, or leave the column out",
            column=column,
        )
    name = str(operators[column]).removesuffix("_")
    if name not in OPERATORS:
        raise InvalidInputError(
            f"column {column}: {operators[column]!r} is no merge operator",
            kind=ErrorKind.INVALID_OPTION,
            hint=f"There are: {', '.join(OPERATORS)}",
            column=column,
        )
    return OPERATORS[name]


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
    touched = {f.number: _mask_nulls(codes[f.name], fields[f.number]) for f in named}
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
                f"row {place}, column {name}: expected an operand, got {operand!r:.40}",
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


def _mask_nulls(codes: Codes, array: pa.Array) -> Codes:
    """Return the operators, none where the operand is null."""
    valid = array.is_valid().to_numpy(zero_copy_only=False)
    return np.where(valid, codes, np.uint8(Operator.NONE))


def _value(operand: Operand | None) -> Any:
    return None if operand is None else operand.value


def _operator(operand: Operand | None) -> int:
    return Operator.NONE if operand is None else operand.operator


class Column(NamedTuple):
    """A column of merged rows."""

    values: pa.Array
    codes: Codes
    """How each row changes the column of the row below it: `Operator.SET` where it is known."""


class ColumnOperands:
    """The operands of one column that are newer than the newest value set in their group."""

    def __init__(self, codes: Codes, group_of: Places, groups: int) -> None:
        self._group_of = group_of
        self.set_at = np.full(groups, -1, np.int64)
        """The row that sets the value of each group; -1 if none does."""
        setting = np.flatnonzero(codes == Operator.SET)
        self.set_at[group_of[setting]] = setting  # the last one counts
        operands = np.flatnonzero(codes > Operator.SET)
        self.places = operands[operands > self.set_at[group_of[operands]]]
        self.owners = group_of[self.places]
        self.codes = codes[self.places]

    def rounds(self) -> Places:
        """Return for each operand how often the operator has changed below it in its group."""
        if not len(self.places):
            return self.places
        same_group = self.owners[1:] == self.owners[:-1]
        changed = same_group & (self.codes[1:] != self.codes[:-1])
        total = np.concatenate(([0], np.cumsum(changed)))
        first = np.concatenate(([True], ~same_group))
        before: Places = total - total[np.flatnonzero(first)][np.cumsum(first) - 1]
        return before

    def unjoinable(self, data_type: pa.DataType) -> Mask:
        """Return the groups whose operands have no common form without the value below."""
        groups = np.zeros(len(self.set_at), dtype=bool)
        groups[self.owners[self.rounds() > 0]] = True
        for code in np.unique(self.codes).tolist():
            if not is_joinable(Operator(code), data_type):
                owners, counts = np.unique(self.owners[self.codes == code], return_counts=True)
                groups[owners[counts > 1]] = True
        groups &= self.set_at < 0
        return groups

    def lay_over(self, array: pa.Array | None, places: Places, data_type: pa.DataType) -> Column:
        """Return the value of each group. `array` has the values, None if all are null, and
        `places` where in it each row is."""
        codes = np.where(self.set_at >= 0, Operator.SET, Operator.NONE).astype(np.uint8)
        if array is None:
            return Column(pa.nulls(len(codes), data_type), codes)
        values = array.take(pa.array(places[self.set_at], mask=self.set_at < 0))
        if not len(self.places):
            return Column(values, codes)
        open_groups = codes[self.owners] == Operator.NONE
        codes[self.owners[open_groups]] = self.codes[open_groups]
        rounds = self.rounds()
        for number in range(int(rounds.max()) + 1):
            for code in np.unique(self.codes[rounds == number]).tolist():
                chosen = np.flatnonzero((rounds == number) & (self.codes == code))
                operands = array.take(pa.array(places[self.places[chosen]]))
                values = _apply_operands(Operator(code), values, self.owners[chosen], operands)
        return Column(values, codes)


def _apply_operands(
    operator: Operator, values: pa.Array, owners: Places, operands: pa.Array
) -> pa.Array:
    """Return the values after applying operands in order; a null operand changes nothing."""
    if operands.null_count:
        there = operands.is_valid()
        owners = owners[there.to_numpy(zero_copy_only=False)]
        operands = operands.filter(there)
    if not len(owners):
        return values
    if operator is Operator.ADD:
        return _add_operands(values, owners, operands)
    if operator is Operator.UNION:
        return _unite_lists(values, owners, operands)
    return _take_extremes(values, owners, operands, largest=operator is Operator.MAX)


def _add_operands(values: pa.Array, owners: Places, operands: pa.Array) -> pa.Array:
    """Add operands one after the other: sums of floats depend on the order."""
    # -0.0 plus any number is that number, also plus -0.0.
    nothing = -0.0 if pa.types.is_floating(values.type) else 0
    is_null: Mask = values.is_null().to_numpy(zero_copy_only=False).copy()
    sums = values.fill_null(nothing).to_numpy(zero_copy_only=False).copy()
    with np.errstate(all="ignore"):
        np.add.at(sums, owners, operands.to_numpy(zero_copy_only=False))
    is_null[owners] = False
    return pa.array(sums, values.type, mask=is_null, from_pandas=False)


def _take_extremes(
    values: pa.Array, owners: Places, operands: pa.Array, *, largest: bool
) -> pa.Array:
    """Return the largest or smallest of each value and its operands."""
    touched = np.unique(owners)
    before = values.take(pa.array(touched))
    both = pa.concat_arrays([before, operands])
    of = np.concatenate([touched, owners])
    there = np.flatnonzero(both.is_valid().to_numpy(zero_copy_only=False))
    ordered = there[_by_owner(of[there], both.take(pa.array(there)))]
    last = np.append(of[ordered][1:] != of[ordered][:-1], True)
    first = np.append(True, of[ordered][1:] != of[ordered][:-1])
    chosen = ordered[last if largest else first]
    return _replace_at(values, of[chosen], both.take(pa.array(chosen)))


def _unite_lists(values: pa.Array, owners: Places, operands: pa.Array) -> pa.Array:
    """Return the distinct elements of each list and its operands, sorted, without nulls."""
    touched = np.unique(owners)
    before = values.take(pa.array(touched))
    both = pa.concat_arrays([before, operands])
    lengths = pc.list_value_length(both).fill_null(0).to_numpy(zero_copy_only=False)
    of = np.repeat(np.concatenate([touched, owners]), lengths)
    elements = both.flatten()
    there = np.flatnonzero(elements.is_valid().to_numpy(zero_copy_only=False))
    elements, of = elements.take(pa.array(there)), of[there]
    order = _by_owner(of, elements)
    elements, of = elements.take(pa.array(order)), of[order]
    distinct = np.flatnonzero(_differs(of, _comparable(elements)))
    counts = np.bincount(np.searchsorted(touched, of[distinct]), minlength=len(touched))
    offsets = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    lists = pa.ListArray.from_arrays(pa.array(offsets), elements.take(pa.array(distinct)))
    return _replace_at(values, touched, lists.cast(values.type))


def normal_list(lists: pa.Array) -> pa.Array:
    """Return the operands of a union: each list sorted, without nulls and repetitions."""
    places = np.arange(len(lists))
    there = np.flatnonzero(lists.is_valid().to_numpy(zero_copy_only=False))
    operands = lists.take(pa.array(there))
    return (
        _unite_lists(pa.nulls(len(lists), lists.type), places[there], operands)
        if len(there)
        else lists
    )


def _replace_at(values: pa.Array, at: Places, new: pa.Array) -> pa.Array:
    places = np.arange(len(values))
    places[at] = len(values) + np.arange(len(at))
    return pa.concat_arrays([values, new]).take(pa.array(places))


def _by_owner(owners: Places, values: pa.Array) -> Places:
    """Return the order of values by owner, then ascending."""
    table = pa.table({"owner": pa.array(owners), "value": _comparable(values)})
    order: Places = pc.sort_indices(
        table, [("owner", "ascending"), ("value", "ascending")]
    ).to_numpy()
    return order


def _differs(owners: Places, values: pa.Array) -> Mask:
    """Return which sorted values differ from their predecessor."""
    if not len(owners):
        return np.zeros(0, dtype=bool)
    same = pc.equal(values[1:], values[:-1]).to_numpy(zero_copy_only=False)
    return np.append(True, (owners[1:] != owners[:-1]) | ~same)


def _comparable(values: pa.Array) -> pa.Array:
    """Return floats as integers in the same order: -0.0 below 0.0, and NaN above all."""
    if not pa.types.is_floating(values.type):
        return values
    floats = values.cast(pa.float64()).to_numpy(zero_copy_only=False)
    bits = np.where(np.isnan(floats), np.nan, floats).view(np.int64)
    return pa.array(np.where(bits < 0, bits ^ SIGN, bits))
