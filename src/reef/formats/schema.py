"""Schemas: a key column and any number of others, each with a number that never changes.

A column is known in data by its field number, so that a schema can grow, and a segment
written long ago still says which columns it has. The fingerprint is over names, types and
numbers; two schemas with the same fingerprint are the same.

`Schema.of` accepts any Arrow schema: large and view types, dictionaries and small decimals are
other layouts of a type that Reef has, and become that type. All columns may be null.

`Schema.grown` is the next version: columns are added, and numbers widened where no value
can change. That holds between

    int8 → int16 → int32 → int64        uint8 → uint16 → uint32 → uint64
    uintN → any larger int              float32 → float64
    8 and 16 bit integers → float32     integers up to 32 bits → float64
    decimal → more digits, same scale   lists, vectors and maps → the same of a wider type

Older rows are read with the type that they were written with, then cast (`cast_column`).

Column types are stored by name:

bool  int8 … int64  uint8 … uint64  float32  float64  string  binary  date
time[us]                     s, ms, us or ns of a day
timestamp[us]                timestamp[us, UTC]
decimal(12, 2)
vector<float32, 64>          a fixed number of floats, none of them null
list<int64>
map<string, int64>           the keys are not null, and not nested
struct<"x": int64, "y": list<string>>      names are JSON strings

`parse_type` also takes what people write: Arrow's names, such as time64[us] or decimal128(12, 2),
and names of fields without quotes.

**Merge operators** say how a merge changes a column. A merge names for each column that it touches
one operator of a closed list and an operand:

    add      the sum; integers wrap around at 64 bits
    max      the larger one; NaN is above all numbers, -0.0 below 0.0
    min      the smaller one, in the same order
    union    of two lists: the distinct elements of both, sorted, without nulls

All are commutative and associative, so merges need not be read before they are written. A column
that is null takes the operand. `set` is no operator of callers: a patch that was joined with a
merge below it sets its columns.

A sum has the widest type of its kind, so that no later schema can widen the column: whether a sum
has wrapped around would then depend on when a fold has computed it. Sums of floats depend on their
order and are computed from the row upwards only (`is_joinable`).
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from enum import IntEnum
from functools import cached_property, lru_cache
from types import MappingProxyType

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from reef.errors import InvalidInputError, UnsupportedFormatError

SIMPLE = {
    "bool": pa.bool_(),
    **{
        f"{sign}int{bits}": getattr(pa, f"{sign}int{bits}")()
        for sign in ("", "u")
        for bits in (8, 16, 32, 64)
    },
    "float32": pa.float32(),
    "float64": pa.float64(),
    "string": pa.string(),
    "binary": pa.binary(),
    "date": pa.date32(),
    "time[s]": pa.time32("s"),
    "time[ms]": pa.time32("ms"),
    "time[us]": pa.time64("us"),
    "time[ns]": pa.time64("ns"),
}
NAMES = {arrow: name for name, arrow in SIMPLE.items()}
FLOATS = (pa.float32(), pa.float64())
NESTING_MAX = 16
TIMESTAMP = re.compile(r"timestamp\[(s|ms|us|ns)(?:, (.+))?\]")
DECIMAL = re.compile(r"decimal\((\d+), (\d+)\)")
VECTOR = re.compile(r"vector<(float32|float64), (\d+)>")
NESTED = re.compile(r"(list|map|struct)<(.*)>", re.DOTALL)
PART = re.compile(r'"(?:[^"\\]|\\.)*"|[<(\[]|[>)\]]|, |[^"<>()\[\],]+|.', re.DOTALL)
FIELDS_MAX = 32_000
"""A column and its touched flag share the 16 bits of a column set's numbers."""
OTHER_LAYOUTS = {
    pa.large_string(): pa.string(),
    pa.string_view(): pa.string(),
    pa.large_binary(): pa.binary(),
    pa.binary_view(): pa.binary(),
}


def type_name(data_type: pa.DataType) -> str:
    """Return the name of a column type, or raise if Reef has none."""
    if data_type in NAMES:
        return NAMES[data_type]
    types = pa.types
    if types.is_timestamp(data_type):
        zone = f", {data_type.tz}" if data_type.tz else ""
        return f"timestamp[{data_type.unit}{zone}]"
    if types.is_decimal128(data_type):
        return f"decimal({data_type.precision}, {data_type.scale})"
    if types.is_fixed_size_list(data_type) and data_type.value_type in FLOATS:
        return f"vector<{NAMES[data_type.value_type]}, {data_type.list_size}>"
    return _nested_name(data_type)


def _nested_name(data_type: pa.DataType) -> str:
    types = pa.types
    if types.is_list(data_type):
        return f"list<{type_name(data_type.value_type)}>"
    if types.is_map(data_type):
        return f"map<{type_name(data_type.key_type)}, {type_name(data_type.item_type)}>"
    if types.is_struct(data_type):
        fields = (f"{_quote(field.name)}: {type_name(field.type)}" for field in data_type)
        return f"struct<{', '.join(fields)}>"
    raise InvalidInputError(
        f"{data_type} is not a column type", hint="See the list of types in the docs"
    )


@lru_cache(maxsize=1024)
def arrow_type(name: str) -> pa.DataType:
    """Return the Arrow type for a name that `type_name` gave."""
    if name in SIMPLE:
        return SIMPLE[name]
    if match := TIMESTAMP.fullmatch(name):
        return pa.timestamp(match[1], match[2])
    if match := DECIMAL.fullmatch(name):
        return pa.decimal128(int(match[1]), int(match[2]))
    if match := VECTOR.fullmatch(name):
        return pa.list_(SIMPLE[match[1]], int(match[2]))
    if match := NESTED.fullmatch(name):
        return _nested_type(name, match[1], _split(match[2]))
    raise _unknown(name)


def _nested_type(name: str, kind: str, parts: list[str]) -> pa.DataType:
    if kind == "list" and len(parts) == 1:
        return pa.list_(arrow_type(parts[0]))
    if kind == "map" and len(parts) == 2:
        return pa.map_(*map(arrow_type, parts))
    if kind == "struct":
        return pa.struct([_struct_field(name, part) for part in parts])
    raise _unknown(name)


def _struct_field(name: str, part: str) -> pa.Field:
    try:
        field, end = json.JSONDecoder().raw_decode(part)
    except ValueError:
        raise _unknown(name) from None
    if not isinstance(field, str) or not part.startswith(": ", end):
        raise _unknown(name)
    return pa.field(field, arrow_type(part[end + 2 :]))


ALIASES = {
    "boolean": "bool",
    "float": "float32",
    "double": "float64",
    "utf8": "string",
    "large_string": "string",
    "large_binary": "binary",
    "date32": "date",
    "date32[day]": "date",
    "time": "time[us]",
    "time32[s]": "time[s]",
    "time32[ms]": "time[ms]",
    "time64[us]": "time[us]",
    "time64[ns]": "time[ns]",
}
AS_WRITTEN = (
    (re.compile(r"timestamp"), "timestamp[us]"),
    (re.compile(r"timestamp\[(s|ms|us|ns), *(?:tz=)?([^ ].*)\]"), r"timestamp[\1, \2]"),
    (re.compile(r"decimal(?:128)?\((\d+), *(\d+)\)"), r"decimal(\1, \2)"),
    (re.compile(r"(?:vector|fixed_size_list)<(?:float|float32), *(\d+)>"), r"vector<float32, \1>"),
    (re.compile(r"(?:vector|fixed_size_list)<(?:double|float64), *(\d+)>"), r"vector<float64, \1>"),
    (re.compile(r"fixed_size_list<\w+: float>\[(\d+)\]"), r"vector<float32, \1>"),
    (re.compile(r"fixed_size_list<\w+: double>\[(\d+)\]"), r"vector<float64, \1>"),
)
ITEM = re.compile(r"(?:item|element): *(.*)", re.DOTALL)
FIELD = re.compile(r"([^\s:<>\"]+) *: *(.*)", re.DOTALL)


def parse_type(text: str) -> pa.DataType:
    """Return the type for a name as people write it: Reef's name, or Arrow's."""
    try:
        return arrow_type(_canonical(text.strip()))
    except InvalidInputError:
        raise _unknown(text) from None


def _canonical(text: str) -> str:
    """Return Reef's name for one of Arrow's; any other text as it is."""
    for pattern, name in AS_WRITTEN:
        if pattern.fullmatch(text):
            return pattern.sub(name, text)
    match = NESTED.fullmatch(text)
    if match is None:
        return ALIASES.get(text, text)
    parts = [part.strip() for part in _split(match[2], (",", ", "))]
    if match[1] == "struct":
        parts = [_canonical_field(part) for part in parts]
    else:
        parts = [_canonical(item[1] if (item := ITEM.fullmatch(part)) else part) for part in parts]
    return f"{match[1]}<{', '.join(parts)}>"


def _canonical_field(part: str) -> str:
    match = FIELD.fullmatch(part)
    if match is not None:
        return f"{_quote(match[1])}: {_canonical(match[2])}"
    name, end = _decoded(part)
    return f"{_quote(name)}: {_canonical(part[end:].lstrip(': '))}" if end else part


def _decoded(part: str) -> tuple[str, int]:
    """Return the quoted name that some text begins with, and its length; 0 if there is none."""
    try:
        name, end = json.JSONDecoder().raw_decode(part)
    except ValueError:
        return "", 0
    return (name, end) if isinstance(name, str) else ("", 0)


def _split(text: str, commas: tuple[str, ...] = (", ",)) -> list[str]:
    """Return the parts between commas that are not within brackets or quotes."""
    parts, depth = [""], 0
    for match in PART.finditer(text):
        piece = match[0]
        depth += (piece in "<([") - (piece in ">)]")
        if piece in commas and not depth:
            parts.append("")
        else:
            parts[-1] += piece
    return parts


def _quote(name: str) -> str:
    return json.dumps(name, ensure_ascii=False)


def _unknown(name: str) -> InvalidInputError:
    return InvalidInputError(f"{name[:200]!r} is not the name of a column type")


class Field(msgspec.Struct, frozen=True, array_like=True):
    """A column: its number, name and type."""

    number: int
    name: str
    type: str

    @property
    def arrow(self) -> pa.DataType:
        """Its Arrow type; UnsupportedFormatError for a name that a newer release has stored."""
        try:
            return arrow_type(self.type)
        except (ValueError, OverflowError, RecursionError) as error:
            raise UnsupportedFormatError(
                f"column {self.name} has the type {self.type[:100]!r}, not known to this release",
                hint="Upgrade Reef",
                column=self.name,
            ) from error


class Schema(msgspec.Struct, frozen=True, dict=True):
    """The columns of a namespace, as of one version of it."""

    id: int
    key: Field
    fields: tuple[Field, ...]

    @property
    def fingerprint(self) -> str:
        text = msgspec.json.encode([self.key, self.fields])
        return hashlib.sha256(text).hexdigest()[:16]

    def field(self, number: int) -> Field:
        return next(field for field in self.fields if field.number == number)

    def types(self) -> Mapping[int, pa.DataType]:
        """Return the Arrow type of each column but the key, by number."""
        return self._types

    @cached_property
    def _types(self) -> Mapping[int, pa.DataType]:
        return MappingProxyType({field.number: field.arrow for field in self.fields})

    @classmethod
    def of(cls, arrow_schema: pa.Schema, key: str = "id") -> "Schema":
        """Return the first version of a schema; InvalidInputError names what cannot be."""
        columns = _checked_columns(arrow_schema, key)
        others = [(name, typed) for name, typed in columns.items() if name != key]
        return cls(1, Field(0, key, columns[key]), _number_fields(others, 1))

    def grown(self, wanted: pa.Schema) -> "Schema":
        """Return the next version, with columns added or numbers widened; self if the same.

        The columns keep their order, whatever the order in `wanted`, and new ones come last.
        """
        columns = _checked_columns(wanted, self.key.name)
        kept = tuple(_grown_field(field, columns) for field in (self.key, *self.fields))
        known = {field.name for field in kept}
        added = [(name, typed) for name, typed in columns.items() if name not in known]
        for name, _ in added:
            _check_nullable(wanted.field(name))
        if not added and kept == (self.key, *self.fields):
            return self
        next_number = max(field.number for field in kept) + 1
        return Schema(self.id + 1, kept[0], kept[1:] + _number_fields(added, next_number))

    def arrow(self) -> pa.Schema:
        """Return the Arrow schema: the key column, then the others in their order."""
        return self._arrow

    @cached_property
    def _arrow(self) -> pa.Schema:
        return pa.schema([(field.name, field.arrow) for field in (self.key, *self.fields)])

    @cached_property
    def is_plain(self) -> bool:
        """Whether rows are just a key and bytes, so that `get` returns bytes."""
        if self.key.type != "binary" or len(self.fields) != 1:
            return False
        return self.fields[0].name == "value" and self.fields[0].type == "binary"


DEFAULT_SCHEMA = Schema(id=1, key=Field(0, "id", "binary"), fields=(Field(1, "value", "binary"),))


def cast_column(array: pa.Array, field_type: pa.DataType) -> pa.Array:
    """Return old data as the wider type that its column has by now."""
    return array if array.type == field_type else array.cast(field_type)


# --- types from users ----------------------------------------------------------------


def normal_type(data_type: pa.DataType) -> pa.DataType:
    """Return the type that Reef stores for this one: one layout for each kind of value."""
    types = pa.types
    if types.is_dictionary(data_type):
        return normal_type(data_type.value_type)
    if types.is_decimal(data_type) and data_type.bit_width < 128:
        return pa.decimal128(data_type.precision, data_type.scale)
    if types.is_nested(data_type):
        return _normal_nested(data_type)
    return OTHER_LAYOUTS.get(data_type, data_type)


def _normal_nested(data_type: pa.DataType) -> pa.DataType:
    types = pa.types
    if types.is_list(data_type) or types.is_large_list(data_type):
        return pa.list_(normal_type(data_type.value_type))
    if types.is_fixed_size_list(data_type):
        return pa.list_(normal_type(data_type.value_type), data_type.list_size)
    if types.is_map(data_type):
        return pa.map_(normal_type(data_type.key_type), normal_type(data_type.item_type))
    if types.is_struct(data_type):
        return pa.struct([(field.name, normal_type(field.type)) for field in data_type])
    return data_type


def _checked_columns(given: pa.Schema, key: str) -> dict[str, str]:
    """Return names and types of a schema that can be stored, the key column among them."""
    if not isinstance(given, pa.Schema):
        raise InvalidInputError(f"a schema is a pyarrow.Schema, got {type(given).__name__}")
    _check_names(given.names)
    if key not in given.names:
        raise InvalidInputError(
            f"the schema has no key column {key!r}, only {', '.join(given.names) or 'nothing'}",
            hint="Add it, or name another with key=, in SQL with TBLPROPERTIES ('key' = …)",
        )
    if len(given) - 1 > FIELDS_MAX:
        raise InvalidInputError(f"{len(given) - 1} columns, a schema has at most {FIELDS_MAX}")
    _check_key_type(key, normal_type(given.field(key).type))
    return {field.name: _stored_type(field) for field in given}


def _check_names(names: Sequence[str]) -> None:
    seen: set[str] = set()
    for place, name in enumerate(names):
        if not name:
            raise InvalidInputError(f"column {place} of the schema has an empty name")
        if name.startswith("_"):
            raise InvalidInputError(
                f"column {name}: names that begin with _ are Reef's own", hint="Rename it"
            )
        if name in seen:
            raise InvalidInputError(f"column {name} is there twice")
        seen.add(name)


def _check_key_type(key: str, data_type: pa.DataType) -> None:
    if data_type not in (pa.string(), pa.binary()):
        raise InvalidInputError(
            f"column {key}: a key is string or binary, got {data_type}",
            hint="Make binary keys that sort like the values with reef.keys.pack",
        )


def _check_nullable(field: pa.Field) -> None:
    if not field.nullable:
        raise InvalidInputError(
            f"column {field.name}: a new column must be nullable, since older rows have none"
        )


def _stored_type(field: pa.Field) -> str:
    problem = _type_problem(field.type)
    if problem:
        raise InvalidInputError(
            f"column {field.name}: {field.type} is not a column type", hint=problem
        )
    return type_name(normal_type(field.type))


def _type_problem(data_type: pa.DataType, depth: int = 0) -> str:
    """Return why a type cannot be stored and what to take instead; empty if it can."""
    data_type, types = normal_type(data_type), pa.types
    if depth > NESTING_MAX:
        return f"Types are nested at most {NESTING_MAX} deep"
    if types.is_nested(data_type):
        return _nested_problem(data_type, depth)
    if types.is_date64(data_type):
        return "Use date32 for days, timestamp for instants"
    if types.is_decimal128(data_type):
        return "" if data_type.scale >= 0 else "The scale of a decimal is 0 or more"
    known = data_type in NAMES or types.is_timestamp(data_type)
    return "" if known else "See the list of types in the docs"


def _nested_problem(data_type: pa.DataType, depth: int) -> str:
    types = pa.types
    if types.is_fixed_size_list(data_type):
        floats = data_type.value_type in FLOATS
        return "" if floats and data_type.list_size else "Vectors hold 1 or more float32 or float64"
    if types.is_list(data_type):
        return _type_problem(data_type.value_type, depth + 1)
    if types.is_map(data_type):
        return _map_problem(data_type, depth)
    if types.is_struct(data_type):
        return _struct_problem(data_type, depth)
    return "See the list of types in the docs"


def _map_problem(data_type: pa.DataType, depth: int) -> str:
    if pa.types.is_nested(data_type.key_type):
        return "The keys of a map are not nested"
    items = _type_problem(data_type.item_type, depth + 1)
    return _type_problem(data_type.key_type, depth + 1) or items


def _struct_problem(data_type: pa.DataType, depth: int) -> str:
    names = [field.name for field in data_type]
    if not names or "" in names or len(set(names)) < len(names):
        return "The fields of a struct have names, each another one, and there is at least one"
    problems = (_type_problem(field.type, depth + 1) for field in data_type)
    return next((problem for problem in problems if problem), "")


def _number_fields(columns: Sequence[tuple[str, str]], first: int) -> tuple[Field, ...]:
    return tuple(Field(n, name, typed) for n, (name, typed) in enumerate(columns, first))


# --- growth -------------------------------------------------------------------------


def _grown_field(field: Field, new_types: dict[str, str]) -> Field:
    """Return the field with the type that the grown schema gives it."""
    if field.name not in new_types:
        raise InvalidInputError(
            f"column {field.name} is missing: to drop or rename it would lose data",
            hint="Keep it in the schema; new columns may be added",
        )
    new = new_types[field.name]
    if new == field.type:
        return field
    if field.number == 0 or not _widens(field.arrow, arrow_type(new)):
        raise InvalidInputError(
            f"column {field.name}: a change from {field.type} to {new} would lose data",
            hint="Add a column of the new type instead",
        )
    return Field(field.number, field.name, new)


def _widens(old: pa.DataType, new: pa.DataType) -> bool:
    """Whether each value of the old type is the same value in the new one."""
    types = pa.types
    if types.is_decimal(old) and types.is_decimal(new):
        return bool(old.scale == new.scale and old.precision <= new.precision)
    if types.is_fixed_size_list(old) and types.is_fixed_size_list(new):
        return old.list_size == new.list_size and _widens(old.value_type, new.value_type)
    if types.is_list(old) and types.is_list(new):
        return _widens(old.value_type, new.value_type)
    if types.is_map(old) and types.is_map(new):
        return old.key_type == new.key_type and _widens(old.item_type, new.item_type)
    return old == new or _widens_number(old, new)


def _widens_number(old: pa.DataType, new: pa.DataType) -> bool:
    types = pa.types
    if types.is_integer(old) and types.is_integer(new):
        signs = types.is_unsigned_integer(old) or types.is_signed_integer(new)
        return bool(signs and old.bit_width < new.bit_width)
    if types.is_integer(old) and new in FLOATS:
        # A float32 counts exactly up to 2**24, a float64 up to 2**53.
        return bool(old.bit_width * 2 <= new.bit_width)
    return bool(old == pa.float32() and new == pa.float64())


Codes = npt.NDArray[np.uint8]


class Operator(IntEnum):
    """How a version changes a column; the numbers are those of stored rows."""

    NONE = 0
    SET = 1
    ADD = 2
    MAX = 3
    MIN = 4
    UNION = 5


OPERATORS = {operator.name.lower(): operator for operator in Operator if operator > Operator.SET}
"""Operators that callers may use."""
SUMS = (pa.int64(), pa.uint64(), pa.float64())


def type_problem(operator: Operator, data_type: pa.DataType) -> str:
    """Return why an operator is not defined for a column type; empty if it is."""
    nested = pa.types.is_nested(data_type)
    if operator is Operator.ADD:
        return "" if data_type in SUMS else "add takes a column of int64, uint64 or float64"
    if operator is Operator.UNION:
        scalars = pa.types.is_list(data_type) and not pa.types.is_nested(data_type.value_type)
        return "" if scalars else "union takes a column of lists, whose elements are no lists"
    return f"{operator.name.lower()} takes a column of single values" if nested else ""


def is_joinable(operator: Operator, data_type: pa.DataType) -> bool:
    """Whether operands can be joined before the value below them is known, with the same result."""
    return operator is not Operator.ADD or not pa.types.is_floating(data_type)


def codes_of(touched: pa.Array | None, length: int) -> Codes:
    """Return the operator of each row: patches store only whether they set the column."""
    if touched is None:
        return np.zeros(length, np.uint8)
    filled = touched.fill_null(False if pa.types.is_boolean(touched.type) else 0)
    codes: Codes = filled.to_numpy(zero_copy_only=False).astype(np.uint8)
    return codes


def as_codes(touched: pa.Array) -> pa.Array:
    """Return an array of `codes_of` from flags or codes."""
    if pa.types.is_uint8(touched.type) and not touched.null_count:
        return touched
    return pa.array(codes_of(touched, len(touched)))


def as_flags(touched: pa.Array) -> pa.Array:
    """Return whether each row sets a column, where no row is a merge."""
    return pa.array(codes_of(touched, len(touched)) != Operator.NONE)
