"""Schemas: a key column and any number of others, each with a number that never changes.

A column is known in data by its field number, so that a schema can grow, and a segment
written long ago still says which columns it has. The fingerprint is over names, types and
numbers; two schemas with the same fingerprint are the same.
"""

import hashlib
import re

import msgspec
import pyarrow as pa

from reef.errors import InvalidInputError

__all__ = ["DEFAULT_SCHEMA", "Field", "Schema", "arrow_type", "type_name"]

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
}
NAMES = {arrow: name for name, arrow in SIMPLE.items()}
TIMESTAMP = re.compile(r"timestamp\[(s|ms|us|ns)(?:, (.+))?\]")
DECIMAL = re.compile(r"decimal\((\d+), (\d+)\)")
VECTOR = re.compile(r"vector<(float32|float64), (\d+)>")
LIST = re.compile(r"list<(.+)>")


class Field(msgspec.Struct, frozen=True, array_like=True):
    """A column: its number, name and type."""

    number: int
    name: str
    type: str

    @property
    def arrow(self) -> pa.DataType:
        return arrow_type(self.type)


class Schema(msgspec.Struct, frozen=True):
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

    def types(self) -> dict[int, pa.DataType]:
        """Return the Arrow type of each column but the key, by number."""
        return {field.number: field.arrow for field in self.fields}


DEFAULT_SCHEMA = Schema(id=1, key=Field(0, "id", "binary"), fields=(Field(1, "value", "binary"),))


def type_name(data_type: pa.DataType) -> str:
    """Return the name of a column type, or raise if Reef has none."""
    if data_type in NAMES:
        return NAMES[data_type]
    if pa.types.is_timestamp(data_type):
        zone = f", {data_type.tz}" if data_type.tz else ""
        return f"timestamp[{data_type.unit}{zone}]"
    if pa.types.is_decimal128(data_type):
        return f"decimal({data_type.precision}, {data_type.scale})"
    if pa.types.is_fixed_size_list(data_type) and data_type.value_type in (
        pa.float32(),
        pa.float64(),
    ):
        return f"vector<{NAMES[data_type.value_type]}, {data_type.list_size}>"
    if pa.types.is_list(data_type):
        return f"list<{type_name(data_type.value_type)}>"
    raise InvalidInputError(
        f"{data_type} is not a column type", hint="See the list of types in the docs"
    )


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
    if match := LIST.fullmatch(name):
        return pa.list_(arrow_type(match[1]))
    raise InvalidInputError(f"{name!r} is not the name of a column type")
