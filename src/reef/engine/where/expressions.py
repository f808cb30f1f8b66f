"""Filters as pyarrow expressions: to the tree that text parses to, as far as possible.

DuckDB and polars pass the filters of a query as pyarrow expressions. pyarrow has no interface to
take one apart, but it pickles them, as an Arrow file: a tree in prefix order in the metadata of its
schema, and literals and options as columns of its only batch.

    call 'and_kleene'                    x >= 80 AND y IN (1, 2)
      call 'greater_equal'
        field_ref 'x'
        literal '0'                      column 0: 80
      end 'greater_equal'
      call 'is_in'
        field_ref 'y'
        options '1'                      column 1: {value_set: [1, 2], …}
      end 'is_in'
    end 'and_kleene'

Conditions that have no counterpart in `where`, such as arithmetic or a comparison of two columns,
are evaluated by Arrow: the whole expression is then a condition of its own, next to those parts of
its conjunction that have one and exclude groups.
"""

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from reef.engine.where.literals import Clock, LiteralError, Timestamp, literal_of, pattern_text
from reef.engine.where.parser import (
    FALSE,
    TRUE,
    Op,
    Raw,
    RawAnd,
    RawExpression,
    RawNot,
    RawOr,
    RawPredicate,
    SourcePosition,
)

COMPARISONS = {
    "equal": Op.EQ,
    "not_equal": Op.NE,
    "less": Op.LT,
    "less_equal": Op.LE,
    "greater": Op.GT,
    "greater_equal": Op.GE,
}
MIRRORED = {Op.LT: Op.GT, Op.LE: Op.GE, Op.GT: Op.LT, Op.GE: Op.LE}
UNIT_NS = {"s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1}
MATCH, SKIP = 0, 1
"""`null_matching_behavior` of is_in: a null in the list matches nulls, or nothing does."""
TEXT_CHARS_MAX = 200


class _NoCounterpartError(Exception):
    """A part of an expression that `where` cannot say."""


@dataclass(slots=True)
class _Call:
    name: str
    arguments: "list[_Part]"
    options: dict[str, Any]


@dataclass(slots=True)
class _Column:
    name: str


@dataclass(slots=True)
class _Constant:
    value: Any
    """An Arrow scalar."""


_Part = _Call | _Column | _Constant


def parse_expression(expression: pc.Expression, schema: pa.Schema) -> Raw:
    """Convert an expression to a tree for the columns of a schema."""
    place = SourcePosition(_shorten(str(expression)), None)
    data = _serialize(expression)
    try:
        root = _decode(data)
    except (pa.ArrowException, ValueError, LookupError):  # another release of pyarrow
        return RawExpression(None, data, place)
    names = tuple(dict.fromkeys(_columns(root)))
    converter = _Converter(schema, place)
    parts: list[Raw] = []
    is_whole = True
    for part in _conjuncts(root):
        try:
            parts.append(converter.condition(part))
        except (_NoCounterpartError, LiteralError):
            is_whole = False
    if not is_whole:
        parts.append(RawExpression(names, data, place))
    return RawAnd(tuple(parts))


def evaluate(data: bytes, batch: pa.RecordBatch) -> pa.Array:
    """Return the value of a serialized expression for each row."""
    # On first use: with it come datasets and, where it is installed, pandas.
    from pyarrow.acero import Declaration, ProjectNodeOptions, TableSourceNodeOptions

    plan = Declaration.from_sequence(
        [
            Declaration("table_source", TableSourceNodeOptions(pa.Table.from_batches([batch]))),
            Declaration("project", ProjectNodeOptions([_deserialize(data)], ["value"])),
        ]
    )
    value = plan.to_table(use_threads=False).column(0)
    return pa.concat_arrays(value.chunks) if value.num_chunks else pa.array([], value.type)


def columns_of(expression: pc.Expression) -> tuple[str, ...] | None:
    """Return the columns that an expression uses; None if that is not known."""
    try:
        return tuple(dict.fromkeys(_columns(_decode(_serialize(expression)))))
    except (pa.ArrowException, ValueError, LookupError):
        return None


def expression_text(data: bytes) -> str:
    """Return how pyarrow shows an expression."""
    return _shorten(str(_deserialize(data)))


def _shorten(text: str) -> str:
    return text if len(text) <= TEXT_CHARS_MAX else f"{text[:TEXT_CHARS_MAX]}…"


# --- conversion -------------------------------------------------------------------------


class _Converter:
    """Converts the parts of one expression."""

    def __init__(self, schema: pa.Schema, place: SourcePosition) -> None:
        self._schema = schema
        self._place = place

    def condition(self, part: _Part) -> Raw:
        """Return the condition of a part."""
        if isinstance(part, _Column):
            return self._predicate(part.name, Op.EQ, True)
        if isinstance(part, _Constant):
            if part.value.type != pa.bool_() or not part.value.is_valid:
                raise _NoCounterpartError
            return TRUE if part.value.as_py() else FALSE
        if part.name in ("and_kleene", "or_kleene"):
            kind = RawAnd if part.name == "and_kleene" else RawOr
            return kind(tuple(self.condition(p) for p in _flat(part.name, part)))
        return self._call(part)

    def _call(self, call: _Call) -> Raw:
        if call.name == "invert":
            return RawNot(self.condition(call.arguments[0]))
        if call.name in COMPARISONS:
            return self._comparison(COMPARISONS[call.name], *call.arguments)
        if call.name == "if_else":
            return self._null_if_null(*call.arguments)
        return self._about_column(call)

    def _comparison(self, op: Op, left: _Part, right: _Part) -> Raw:
        if isinstance(right, _Column):
            left, right, op = right, left, MIRRORED.get(op, op)
        if not isinstance(left, _Column) or not isinstance(right, _Constant):
            raise _NoCounterpartError
        return self._predicate(left.name, op, right.value)

    def _about_column(self, call: _Call) -> Raw:
        column, options = call.arguments[0], call.options
        if not isinstance(column, _Column):
            raise _NoCounterpartError
        name = column.name
        if call.name == "is_valid":
            return RawPredicate(name, Op.NOT_NULL, (), self._place)
        if call.name == "is_null" and not options["nan_is_null"]:
            return RawPredicate(name, Op.IS_NULL, (), self._place)
        if call.name == "is_in":
            return self._is_in(name, options)
        if call.name == "starts_with" and not options["ignore_case"]:
            pattern = pattern_text(options["pattern"])[1:-1].replace("''", "'")
            return self._predicate(name, Op.LIKE, pattern)
        raise _NoCounterpartError

    def _is_in(self, name: str, options: dict[str, Any]) -> Raw:
        """Convert is_in, which is never null: a null is in the list, or it is not."""
        if options["null_matching_behavior"] not in (MATCH, SKIP):
            raise _NoCounterpartError
        among = self._among(name, options)
        never_null = RawAnd((RawPredicate(name, Op.NOT_NULL, (), self._place), among))
        if options["null_matching_behavior"] == MATCH and options["value_set"].null_count:
            return RawOr((RawPredicate(name, Op.IS_NULL, (), self._place), never_null))
        return never_null

    def _null_if_null(self, given: _Part, then: _Part, otherwise: _Part) -> Raw:
        """Convert DuckDB's IN: `if_else(is_valid(x), is_in(x, …), null)`."""
        is_null = isinstance(otherwise, _Constant) and not otherwise.value.is_valid
        if not is_null or not isinstance(given, _Call) or not isinstance(then, _Call):
            raise _NoCounterpartError
        column = given.arguments[0]
        if (given.name, then.name) != ("is_valid", "is_in") or then.arguments != [column]:
            raise _NoCounterpartError
        if not isinstance(column, _Column) or then.options["value_set"].null_count:
            raise _NoCounterpartError
        return self._among(column.name, then.options)

    def _among(self, name: str, options: dict[str, Any]) -> RawPredicate:
        literals = [self._literal(v, name) for v in options["value_set"] if v.is_valid]
        return RawPredicate(name, Op.IN, tuple(literals), self._place)

    def _predicate(self, name: str, op: Op, value: Any) -> Raw:
        return RawPredicate(name, op, (self._literal(value, name),), self._place)

    def _literal(self, value: Any, column: str) -> Any:
        """Return a literal of a kind that can be compared with a column as Arrow does."""
        if column not in self._schema.names:  # reported when the tree is checked
            return 0
        of_column = self._schema.field(column).type
        if pa.types.is_nested(of_column):
            raise _NoCounterpartError
        value = _python_value(value) if isinstance(value, pa.Scalar) else value
        literal = value if isinstance(value, Timestamp | Clock) else literal_of(value)
        if of_column == pa.float32() and pa.scalar(value, of_column).as_py() != value:
            raise _NoCounterpartError  # Arrow compares as float64, `where` rounds the literal
        if not _is_comparable(literal, of_column):
            raise _NoCounterpartError
        return literal


def _python_value(scalar: pa.Scalar) -> Any:
    if not scalar.is_valid:
        raise _NoCounterpartError
    if pa.types.is_timestamp(scalar.type):  # Python has no nanoseconds
        return Timestamp(scalar.value * UNIT_NS[scalar.type.unit], scalar.type.tz is not None)
    if pa.types.is_time(scalar.type):
        return Clock(scalar.value * UNIT_NS[scalar.type.unit])
    return scalar.as_py()


def _is_comparable(literal: Any, data_type: pa.DataType) -> bool:
    """Whether Arrow and `where` agree on how a literal compares with a column."""
    if isinstance(literal, bool):
        return bool(pa.types.is_boolean(data_type))
    if isinstance(literal, str | bytes):
        return bool(pa.types.is_string(data_type) or pa.types.is_binary(data_type))
    if isinstance(literal, Timestamp):
        return bool(pa.types.is_timestamp(data_type)) and literal.zoned == bool(data_type.tz)
    if isinstance(literal, Clock) or pa.types.is_time(data_type):
        return isinstance(literal, Clock) and bool(pa.types.is_time(data_type))
    if pa.types.is_temporal(data_type):
        return not isinstance(literal, int | float) and not (
            pa.types.is_timestamp(data_type) and data_type.tz
        )
    return bool(
        pa.types.is_integer(data_type)
        or pa.types.is_floating(data_type)
        or pa.types.is_decimal(data_type)
    )


def _conjuncts(part: _Part) -> list[_Part]:
    is_and = isinstance(part, _Call) and part.name == "and_kleene"
    return _flat("and_kleene", part) if is_and else [part]


def _flat(name: str, part: _Part) -> list[_Part]:
    """Return the operands of nested calls of one function: `a AND b AND c` is two of them."""
    operands: list[_Part] = []
    pending = [part]
    while pending:
        part = pending.pop()
        if isinstance(part, _Call) and part.name == name:
            pending += part.arguments[::-1]
        else:
            operands.append(part)
    return operands


def _columns(part: _Part) -> Iterator[str]:
    pending = [part]
    while pending:
        part = pending.pop()
        if isinstance(part, _Column):
            yield part.name
        elif isinstance(part, _Call):
            pending += part.arguments[::-1]


# --- pickled expressions ----------------------------------------------------------------


def _serialize(expression: pc.Expression) -> bytes:
    _, (data,) = expression.__reduce__()
    return bytes(data)


def _deserialize(data: bytes) -> pc.Expression:
    restore, _ = pc.scalar(True).__reduce__()
    return restore(pa.py_buffer(data))


def _decode(data: bytes) -> _Part:
    with pa.ipc.open_file(data) as file:
        batch = file.get_batch(0)
    open_calls = [_Call("", [], {})]
    pairs = iter(_metadata_pairs(batch.schema))
    for word, text in pairs:
        if word == "call":
            call = _Call(text, [], {})
            open_calls[-1].arguments.append(call)
            open_calls.append(call)
        elif word == "end":
            open_calls.pop()
        elif word == "field_ref":
            open_calls[-1].arguments.append(_Column(text))
        elif word == "literal":
            open_calls[-1].arguments.append(_Constant(batch.column(int(text))[0]))
        elif word == "options":
            open_calls[-1].options = _options(batch.column(int(text)))
        else:  # a field of a struct
            raise ValueError(f"{word} {text}")
    (root,) = open_calls[0].arguments
    return root


def _options(column: pa.StructArray) -> dict[str, Any]:
    """Return the options of a call; lists stay Arrow, whose values Python may not represent."""
    options = column[0]
    return {
        name: value.values if isinstance(value, pa.ListScalar) else value.as_py()
        for name, value in options.items()
        if not name.startswith("to_type")
    }


class _CSchema(ctypes.Structure):
    """The first members of ArrowSchema, Arrow's C data interface."""

    _fields_ = (
        ("format", ctypes.c_char_p),
        ("name", ctypes.c_char_p),
        ("metadata", ctypes.c_void_p),
    )


def _metadata_pairs(schema: pa.Schema) -> list[tuple[str, str]]:
    """Return all pairs of the metadata; `schema.metadata` has only one of each name."""
    capsule = schema.__arrow_c_schema__()
    pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
    pointer_of.restype = ctypes.c_void_p
    pointer_of.argtypes = [ctypes.py_object, ctypes.c_char_p]
    address = _CSchema.from_address(pointer_of(capsule, b"arrow_schema")).metadata
    if address is None:
        raise ValueError("a pickled expression without metadata")

    def number() -> int:
        nonlocal address
        value = ctypes.c_int32.from_address(address).value
        address += 4
        return value

    def text() -> str:
        nonlocal address
        length = number()
        value = ctypes.string_at(address, length)
        address += length
        return value.decode()

    return [(text(), text()) for _ in range(number())]
