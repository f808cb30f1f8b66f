"""Filters of scans: which rows match, and which groups can be skipped.

`where="amount > 5 AND (id LIKE 'a%' OR open = TRUE)"` is a tree of predicates on single columns;
the grammar is in `where.parser`. A pyarrow expression becomes the same tree (`where.expressions`).
The tree is checked against the schema once, and literals are cast to the types of their columns. It
then gives the matching rows of a batch (`mask`), the groups of a segment that can have such rows
(`groups`), and the key range (`key_range`).

Semantics:

    NULL     a comparison with it is neither true nor false, and so is its negation (SQL's logic)
    NaN      is unlike every number: only !=, NOT IN, IS NOT NULL and negated comparisons
    -0.0     equals 0.0
    text     compares by code point, bytes bytewise; for a bytes column text means its UTF-8
    time     without a zone is of UTC where the column has one; DATE is midnight
    5.5      is between two integers: x > 5.5 means x >= 6, x = 5.5 never matches

NOT is moved down to the predicates, `NOT (a < 1 OR b = 2)` becomes `a >= 1 AND b != 2`, which is
valid in three-valued logic too. Above the predicates there are then only AND and OR, of which a row
matches if and only if enough predicates are true: whether another one is false or unknown makes no
difference. So masks have no nulls, and "no row of this group matches" can be decided part by part.

**Bounds**, the smallest and the largest value of a group, show for many groups at once whether they
can have rows that match, and err on one side only: an unknown bound, or one that is wider than the
values (the index truncates long text), gives True. Text is compared as UTF-8 bytes, which sort the
same and can be truncated anywhere. A group of floats with a NaN has no bounds.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import product
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from reef.engine.where.expressions import evaluate, expression_text, parse_expression
from reef.engine.where.literals import (
    Literal,
    LiteralError,
    Value,
    cast,
    literal_text,
    pattern_text,
    prefix_of,
    value_text,
)
from reef.engine.where.parser import (
    Op,
    Raw,
    RawAnd,
    RawExpression,
    RawNot,
    RawPredicate,
    parse_text,
    parse_tuples,
    quote_name,
)
from reef.errors import InvalidInputError
from reef.formats.schema import Field, Schema, arrow_type
from reef.formats.segment_index import SegmentIndex
from reef.types import KeyRange

__all__ = [
    "COMPARE",
    "And",
    "ArrowFilter",
    "Bounds",
    "Node",
    "Op",
    "Or",
    "Predicate",
    "Where",
    "bound_array",
    "can_match",
    "parse",
    "parse_raw",
    "value_set",
]


Flags = npt.NDArray[np.bool_]
COMPARE = {
    Op.EQ: pc.equal,
    Op.NE: pc.not_equal,
    Op.LT: pc.less,
    Op.LE: pc.less_equal,
    Op.GT: pc.greater,
    Op.GE: pc.greater_equal,
}


@dataclass(frozen=True, slots=True)
class Bounds:
    """The bounds of one column in each of `count` groups."""

    count: int
    low: pa.Array | None = None
    high: pa.Array | None = None
    """Null where it is not known; None where it is known of no group."""
    all_null: Flags | None = None
    no_null: Flags | None = None


def bound_array(bounds: pa.Array | Sequence[Any], data_type: pa.DataType) -> pa.Array | None:
    """Convert bounds to the type they are compared in; None if that is impossible."""
    target = _compared_as(data_type)
    try:
        array = bounds if isinstance(bounds, pa.Array) else pa.array(bounds, target)
        array = array.cast(target)
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError, OverflowError):
        return None  # a column that was widened since, by values that the new type lacks
    if pa.types.is_floating(target):
        array = pc.if_else(pc.is_nan(array), pa.scalar(None, target), array)
    return array


def value_set(values: Sequence[Value], data_type: pa.DataType) -> pa.Array:
    """Return values for `is_in`, which compares bits: 0.0 and -0.0 differ."""
    both = [*values, -0.0] if pa.types.is_floating(data_type) and 0.0 in values else values
    return pa.array(both, data_type)


def can_match(op: Op, values: Sequence[Value], data_type: pa.DataType, bounds: Bounds) -> Flags:
    """Return for each group whether some row of it may meet the condition."""
    if op is Op.IS_NULL:
        return np.ones(bounds.count, bool) if bounds.no_null is None else ~bounds.no_null
    target = _compared_as(data_type)
    if pa.types.is_string(data_type):
        values = [str(value).encode() for value in values]
    if op in (Op.EQ, Op.IN):
        possible = _some_between(pa.array(values, target), bounds)
    elif op in (Op.NE, Op.NOT_IN):
        possible = _not_only(value_set(values, target), bounds)
    elif op is Op.LIKE:
        possible = _prefix_between(values[0], bounds)
    elif op is Op.NOT_LIKE:
        possible = _not_only_prefix(values[0], bounds)
    elif op is Op.NOT_NULL:
        possible = np.ones(bounds.count, bool)
    else:
        side = bounds.low if op in (Op.LT, Op.LE) else bounds.high
        possible = _flags(op, side, pa.array(values, target)[0], bounds.count)
    return possible if bounds.all_null is None else possible & ~bounds.all_null


def _compared_as(data_type: pa.DataType) -> pa.DataType:
    return pa.binary() if pa.types.is_string(data_type) else data_type


def _flags(op: Op, side: pa.Array | None, value: pa.Scalar, count: int) -> Flags:
    if side is None:
        return np.ones(count, bool)
    return _numpy(COMPARE[op](side, value).fill_null(True))


def _some_between(values: pa.Array, bounds: Bounds) -> Flags:
    """Return whether one of the sorted values is between the bounds."""
    if not len(values):
        return np.zeros(bounds.count, bool)
    sought = _as_comparable(values)
    places = np.zeros(bounds.count, np.int64)  # of the first value that is not below `low`
    if bounds.low is not None:
        known = _numpy(bounds.low.is_valid())
        low = _as_comparable(bounds.low.fill_null(values[0]))
        places[known] = np.searchsorted(sought, low)[known]
    found: Flags = places < len(sought)
    if bounds.high is None:
        return found
    high = _as_comparable(bounds.high.fill_null(values[len(values) - 1]))
    candidates = sought[np.minimum(places, len(sought) - 1)]
    found &= np.less_equal(candidates, high).astype(bool)
    return found


def _not_only(values: pa.Array, bounds: Bounds) -> Flags:
    """Whether a group may have a value outside a list; not if its only value is in it."""
    if bounds.low is None or bounds.high is None:
        return np.ones(bounds.count, bool)
    single = pc.equal(bounds.low, bounds.high).fill_null(False)
    return _numpy(pc.invert(pc.and_(single, pc.is_in(bounds.low, value_set=values))))


def _prefix_between(prefix: Any, bounds: Bounds) -> Flags:
    prefixed = KeyRange.of_prefix(prefix)
    possible = _flags(Op.GE, bounds.high, pa.scalar(prefix, pa.binary()), bounds.count)
    if prefixed.end is not None:
        end = pa.scalar(prefixed.end, pa.binary())
        possible &= _flags(Op.LT, bounds.low, end, bounds.count)
    return possible


def _not_only_prefix(prefix: Any, bounds: Bounds) -> Flags:
    """Whether a group can have a value without the prefix: one before or after all with it."""
    span = KeyRange.of_prefix(prefix)
    possible = _flags(Op.LT, bounds.low, pa.scalar(prefix, pa.binary()), bounds.count)
    if span.end is not None:
        possible |= _flags(Op.GE, bounds.high, pa.scalar(span.end, pa.binary()), bounds.count)
    return possible


def _as_comparable(array: pa.Array) -> npt.NDArray[Any]:
    """Return values that numpy compares as Arrow does."""
    if pa.types.is_temporal(array.type):
        array = array.view(pa.int32() if array.type.bit_width == 32 else pa.int64())
    values: npt.NDArray[Any] = array.to_numpy(zero_copy_only=False)
    return values


def _numpy(array: pa.Array) -> Flags:
    flags: Flags = array.to_numpy(zero_copy_only=False)
    return flags


T = TypeVar("T")
NO_KEYS = KeyRange(b"", b"")
CLAUSES_MAX = 64
"""Most clauses of `Where.clauses`; a filter with more uses weaker ones."""
INVERSE = {
    Op.EQ: Op.NE,
    Op.IN: Op.NOT_IN,
    Op.LT: Op.GE,
    Op.LE: Op.GT,
    Op.LIKE: Op.NOT_LIKE,
    Op.IS_NULL: Op.NOT_NULL,
}
INVERSE |= {negation: op for op, negation in INVERSE.items()}
NEGATED = {Op.LT: Op.NOT_LT, Op.LE: Op.NOT_LE, Op.GT: Op.NOT_GT, Op.GE: Op.NOT_GE}
"""Comparisons of floats; those of NaN are false, and so their negations true."""
NEGATED_OF = {negation: op for op, negation in NEGATED.items()}


@dataclass(frozen=True, slots=True)
class Predicate:
    """One predicate, with values of its column's type."""

    column: str
    number: int
    type: str
    is_key: bool
    op: Op
    values: tuple[Value, ...] = ()
    """One for a comparison; a prefix for LIKE; sorted and unique for lists."""

    def __str__(self) -> str:
        name = quote_name(self.column)
        if self.op in (Op.IS_NULL, Op.NOT_NULL):
            return f"{name} {self.op}"
        if self.op in (Op.LIKE, Op.NOT_LIKE):
            return f"{name} {self.op} {pattern_text(_bytes(self.values[0]).decode())}"
        texts = [value_text(value, self.arrow) for value in self.values]
        if self.op in (Op.IN, Op.NOT_IN):
            return f"{name} {self.op} ({', '.join(texts)})"
        if self.op in NEGATED_OF:
            return f"NOT {name} {NEGATED_OF[self.op]} {texts[0]}"
        return f"{name} {self.op} {texts[0]}"

    @property
    def arrow(self) -> pa.DataType:
        return arrow_type(self.type)

    def mask(self, column: pa.Array) -> pa.Array:
        """Return for each value whether it matches; never null."""
        if self.op is Op.IS_NULL:
            return column.is_null()
        if self.op is Op.NOT_NULL:
            return column.is_valid()
        if column.type != self.arrow:
            column = column.cast(self.arrow)
        if self.op in (Op.IN, Op.NOT_IN):
            among = pc.is_in(column, value_set=value_set(self.values, self.arrow))
            return among if self.op is Op.IN else pc.and_not(column.is_valid(), among)
        if self.op in (Op.LIKE, Op.NOT_LIKE):
            matching = pc.starts_with(column, pattern=self.values[0])
        else:
            value = pa.array(self.values, self.arrow)[0]
            matching = COMPARE[NEGATED_OF.get(self.op, self.op)](column, value)
        if self.op in NEGATED_OF or self.op is Op.NOT_LIKE:
            matching = pc.invert(matching)
        return matching.fill_null(False)

    def can_match(self, bounds: Bounds) -> Flags:
        """Return for each group whether one of its rows may match."""
        # Where bounds are known there is no NaN, so that NOT < is >=.
        op = INVERSE[NEGATED_OF[self.op]] if self.op in NEGATED_OF else self.op
        return can_match(op, self.values, self.arrow, bounds)

    def key_range(self) -> KeyRange:
        """Return a range that has all keys that match."""
        if not self.is_key or not _is_text(self.arrow):
            return KeyRange()
        keys = [_bytes(value) for value in self.values] or [b""]
        ranges = {
            Op.EQ: KeyRange(keys[0], keys[0] + b"\0"),
            Op.IN: KeyRange(keys[0], keys[-1] + b"\0") if self.values else NO_KEYS,
            Op.LT: KeyRange(b"", keys[0]),
            Op.LE: KeyRange(b"", keys[0] + b"\0"),
            Op.GT: KeyRange(keys[0] + b"\0"),
            Op.GE: KeyRange(keys[0]),
            Op.LIKE: KeyRange.of_prefix(keys[0]),
            Op.IS_NULL: NO_KEYS,
        }
        return ranges.get(self.op, KeyRange())


@dataclass(frozen=True, slots=True)
class ArrowFilter:
    """A pyarrow expression that Arrow evaluates: it excludes rows, but no groups."""

    columns: tuple[str, ...]
    data: bytes
    is_key = False

    def __str__(self) -> str:
        return expression_text(self.data)

    def mask(self, batch: pa.RecordBatch) -> pa.Array:
        """Return for each row whether it matches; never null."""
        return evaluate(self.data, batch.select(list(self.columns))).fill_null(False)


@dataclass(frozen=True, slots=True)
class And:
    """A conjunction below an OR."""

    parts: "tuple[Node, ...]"

    @property
    def is_key(self) -> bool:
        """Whether all of its predicates are about the key."""
        return all(part.is_key for part in self.parts)

    def __str__(self) -> str:
        return " AND ".join(_in_and(part) for part in self.parts)


@dataclass(frozen=True, slots=True)
class Or:
    """A disjunction; an empty one is false."""

    parts: "tuple[Node, ...]"

    @property
    def is_key(self) -> bool:
        """Whether all of its predicates are about the key."""
        return all(part.is_key for part in self.parts)

    def __str__(self) -> str:
        return " OR ".join(map(str, self.parts)) if self.parts else "FALSE"


Leaf = Predicate | ArrowFilter
Node = Leaf | And | Or


@dataclass(frozen=True, slots=True)
class Where:
    """A conjunction of conditions; `str` gives text that parses to the same filter."""

    conditions: tuple[Node, ...] = ()

    def __str__(self) -> str:
        if len(self.conditions) == 1:
            return str(self.conditions[0])
        return " AND ".join(_in_and(condition) for condition in self.conditions)

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of the predicates, each once."""
        names: dict[str, None] = {}
        for leaf in _leaves(self.conditions):
            names |= dict.fromkeys(
                leaf.columns if isinstance(leaf, ArrowFilter) else (leaf.column,)
            )
        return tuple(names)

    def mask(self, batch: pa.RecordBatch) -> pa.BooleanArray:
        """Return for each row whether it matches; never null."""

        def mask_of(leaf: Leaf) -> pa.Array:
            source = batch if isinstance(leaf, ArrowFilter) else batch.column(leaf.column)
            return leaf.mask(source)

        return self.fold(
            mask_of, pc.and_, pc.or_, lambda known: pa.array(np.full(len(batch), known))
        )

    def groups(self, index: SegmentIndex, schema: Schema) -> Flags:
        """Return for each group of a segment whether it can have rows that match.

        `schema` is the one that the segment was written with. The result is about stored versions:
        a group may hide older rows of other segments that match, or hold a patch for one, so a
        scan skips a group only if no older segment overlaps it.
        """

        def possible(leaf: Leaf) -> Flags:
            if isinstance(leaf, ArrowFilter):
                return np.ones(len(index), bool)
            return leaf.can_match(_bounds_in(index, leaf, schema))

        return self.fold(
            possible, np.logical_and, np.logical_or, lambda known: np.full(len(index), known)
        )

    def key_range(self) -> KeyRange:
        """Return a range that has all keys that match; an empty one ends where it starts."""

        def range_of(leaf: Leaf) -> KeyRange:
            return leaf.key_range() if isinstance(leaf, Predicate) else KeyRange()

        return self.fold(
            range_of, _intersection, _hull, lambda known: KeyRange() if known else NO_KEYS
        )

    def clauses(self) -> "list[Where]":
        """Return filters that each match all rows that this one matches.

        Each is a disjunction of predicates, and fails for a row that is made of several versions
        if it fails for each of them.
        """
        return [
            Where((_join(Or, clause),)) for node in self.conditions for clause in _clauses(node)
        ]

    def fold(
        self,
        leaf: Callable[[Leaf], T],
        both: Callable[[T, T], T],
        either: Callable[[T, T], T],
        constant: Callable[[bool], T],
    ) -> T:
        """Combine what `leaf` returns for each predicate by AND and OR."""

        def of(node: Node) -> T:
            if isinstance(node, And | Or):
                is_and = isinstance(node, And)
                if not node.parts:
                    return constant(is_and)
                return reduce(both if is_and else either, map(of, node.parts))
            return leaf(node)

        return of(And(self.conditions))


def parse(where: Any, schema: Schema) -> Where:
    """Parse a filter for the columns of a schema: text, a list of tuples, a pyarrow expression.

    A filter that was parsed for the same schema is returned as it is.
    """
    raw: Raw
    if isinstance(where, Where):
        return where
    if isinstance(where, str):
        raw = parse_text(where)
    elif isinstance(where, list | tuple):
        raw = parse_tuples(where)
    elif isinstance(where, pc.Expression):
        raw = parse_expression(where, schema.arrow())
    else:
        raise InvalidInputError(
            f"where must be str or a list of tuples or a pyarrow expression, "
            f"got {type(where).__name__}",
            hint="Such as \"amount > 5\", [('amount', '>', 5)] or pc.field('amount') > 5",
        )
    return parse_raw(raw, schema)


def parse_raw(raw: Raw, schema: Schema) -> Where:
    """Check a tree of predicates against a schema."""
    try:
        node = _check_node(raw, schema, negated=False)
    except RecursionError:
        raise InvalidInputError("where has too many levels of AND, OR and NOT") from None
    return Where(node.parts if isinstance(node, And) else (node,))


# --- checking against a schema ----------------------------------------------------------


def _check_node(raw: Raw, schema: Schema, *, negated: bool) -> Node:
    """Return the node of a part, or of its negation, with values of the columns' types."""
    if isinstance(raw, RawNot):
        return _check_node(raw.part, schema, negated=not negated)
    if isinstance(raw, RawPredicate):
        return _predicate(raw, schema, negated)
    if isinstance(raw, RawExpression):
        return _arrow_filter(raw, schema)
    kind = And if isinstance(raw, RawAnd) is not negated else Or
    return _join(kind, [_check_node(part, schema, negated=negated) for part in raw.parts])


def _join(kind: type[And] | type[Or], parts: Sequence[Node]) -> Node:
    """Return the conjunction or disjunction of nodes, without needless levels and constants."""
    flat: list[Node] = []
    for part in parts:
        flat += part.parts if isinstance(part, kind) else (part,)
    other = Or if kind is And else And
    for part in flat:
        if isinstance(part, other) and not part.parts:
            return part
    return flat[0] if len(flat) == 1 else kind(tuple(flat))


def _predicate(raw: RawPredicate, schema: Schema, negated: bool) -> Predicate:
    field = _field(raw.column, raw, schema)
    if pa.types.is_nested(field.arrow) and raw.op not in (Op.IS_NULL, Op.NOT_NULL):
        raise raw.place.error(
            f"column {field.name} is {field.type}, which cannot be compared",
            "Lists, maps and structs have only IS NULL and IS NOT NULL; use db.sql",
        )
    keeps = negated and raw.op in NEGATED and pa.types.is_floating(field.arrow)
    op, values = _meaning(raw, INVERSE[raw.op] if negated and not keeps else raw.op, field)
    op = NEGATED.get(op, Op.NOT_NULL) if keeps else op
    return Predicate(field.name, field.number, field.type, field is schema.key, op, values)


def _field(name: str, raw: RawPredicate | RawExpression, schema: Schema) -> Field:
    fields = {field.name: field for field in (*schema.fields, schema.key)}
    field = fields.get(name)
    if field is None:
        names = ", ".join(map(quote_name, [schema.key.name, *(f.name for f in schema.fields)]))
        raise raw.place.error(f"there is no column {name!r}", f"The columns are {names}")
    return field


def _arrow_filter(raw: RawExpression, schema: Schema) -> ArrowFilter:
    names = raw.columns if raw.columns is not None else tuple(schema.arrow().names)
    for name in names:
        _field(name, raw, schema)
    types = pa.schema([schema.arrow().field(name) for name in names])
    empty = pa.record_batch([pa.array([], field.type) for field in types], schema=types)
    try:
        kind = evaluate(raw.data, empty).type
    except (pa.ArrowException, TypeError) as error:
        raise raw.place.error(str(error), "Arrow cannot evaluate this expression") from error
    if kind != pa.bool_():
        raise raw.place.error(f"it is {kind}, not a condition", "A filter is true or false")
    return ArrowFilter(tuple(names), raw.data)


def _meaning(raw: RawPredicate, op: Op, field: Field) -> tuple[Op, tuple[Value, ...]]:
    if op in (Op.IS_NULL, Op.NOT_NULL):
        return op, ()
    if op in (Op.LIKE, Op.NOT_LIKE):
        return _prefix(raw, op, field)
    casts = [_cast(raw, literal, field) for literal in raw.values]
    if op in (Op.EQ, Op.NE, Op.IN, Op.NOT_IN):
        return _membership(op in (Op.EQ, Op.IN), casts)
    return _comparison(op, *casts[0])


def _membership(included: bool, casts: list[tuple[Any, Any]]) -> tuple[Op, tuple[Value, ...]]:
    """Return the simplest operator for membership in a list, or for its negation."""
    values = tuple(
        sorted({below for below, above in casts if below is not None and below == above})
    )
    if len(values) == 1:
        return Op.EQ if included else Op.NE, values
    if included:
        return Op.IN, values
    return (Op.NOT_IN, values) if values else (Op.NOT_NULL, ())


def _comparison(op: Op, below: Value | None, above: Value | None) -> tuple[Op, tuple[Value, ...]]:
    """Return an equivalent comparison with a value that the column can hold."""
    upward = op in (Op.GT, Op.GE)
    nearest = above if upward else below
    if nearest is None:
        return Op.IN, ()
    if below == above:
        return op, (nearest,)
    return Op.GE if upward else Op.LE, (nearest,)


def _prefix(raw: RawPredicate, op: Op, field: Field) -> tuple[Op, tuple[Value, ...]]:
    (pattern,) = raw.values
    if not isinstance(pattern, str) or not _is_text(field.arrow):
        raise _unfit(raw, field, pattern, "LIKE compares a text or bytes column with a text")
    try:
        prefix, is_open = prefix_of(pattern)
        value, _ = cast(prefix, field.arrow)
    except LiteralError as error:
        raise _unfit(raw, field, pattern, str(error)) from None
    assert value is not None
    if not is_open:
        return Op.EQ if op is Op.LIKE else Op.NE, (value,)
    if value:
        return op, (value,)
    return (Op.NOT_NULL, ()) if op is Op.LIKE else (Op.IN, ())


def _cast(raw: RawPredicate, literal: Literal, field: Field) -> tuple[Value | None, Value | None]:
    try:
        return cast(literal, field.arrow)
    except LiteralError as error:
        raise _unfit(raw, field, literal, str(error)) from None


def _unfit(raw: RawPredicate, field: Field, literal: Any, why: str) -> InvalidInputError:
    comparison = f"column {field.name} is {field.type}, compared with {literal_text(literal)}"
    return raw.place.error(f"{comparison}: {why}")


# --- trees ----------------------------------------------------------------------------


def _leaves(nodes: Sequence[Node]) -> Iterator[Leaf]:
    for node in nodes:
        if isinstance(node, And | Or):
            yield from _leaves(node.parts)
        else:
            yield node


def _in_and(node: Node) -> str:
    return f"({node})" if isinstance(node, Or) and node.parts else str(node)


def _clauses(node: Node) -> list[list[Node]]:
    """Return the conjunctive normal form of a node; weaker clauses if they were too many."""
    if isinstance(node, And):
        return [clause for part in node.parts for clause in _clauses(part)]
    if not isinstance(node, Or):
        return [[node]]
    choices = [_clauses(part) for part in node.parts]
    count = 1
    for place, clauses in enumerate(choices):
        if count * len(clauses) > CLAUSES_MAX:
            choices[place] = clauses[:1]  # which each row that matches the part meets
        count *= len(choices[place])
    return [[leaf for clause in chosen for leaf in clause] for chosen in product(*choices)]


def _intersection(one: KeyRange, other: KeyRange) -> KeyRange:
    both = one.both(other)
    empty = both.end is not None and both.start >= both.end
    return NO_KEYS if empty else both


def _hull(one: KeyRange, other: KeyRange) -> KeyRange:
    """Return the smallest range that has all keys of both."""
    if NO_KEYS in (one, other):
        return other if one == NO_KEYS else one
    ends = (one.end, other.end)
    end = None if None in ends else max(end for end in ends if end is not None)
    return KeyRange(min(one.start, other.start), end)


# --- bounds of a column -------------------------------------------------------------------


def _bounds_in(index: SegmentIndex, condition: Predicate, schema: Schema) -> Bounds:
    count, number = len(index), condition.number
    if condition.is_key:
        no_null = np.ones(count, bool)
        if not _is_text(condition.arrow):
            return Bounds(count, no_null=no_null)
        low, high = (pa.array(keys, pa.binary()) for keys in (index.first_keys, index.last_keys))
        return Bounds(count, low, high, no_null=no_null)
    if number not in schema.types():  # the column is younger than the segment
        return Bounds(count, all_null=np.ones(count, bool))
    low, high = (
        bound_array(side[number], condition.arrow) if number in side else None
        for side in (index.smallest, index.largest)
    )
    blocks = index.column_blocks.get(number)
    return Bounds(count, low, high, all_null=None if blocks is None else blocks == 0)


def _is_text(data_type: pa.DataType) -> bool:
    return bool(pa.types.is_string(data_type) or pa.types.is_binary(data_type))


def _bytes(value: Value) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode()
