"""A model of merges: the state of a row, changed step by step in plain Python."""

import math
import struct
from dataclasses import dataclass, field, replace

import pyarrow as pa

import reef

SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("n", pa.int64()),
        ("u", pa.uint64()),
        ("x", pa.float64()),
        ("s", pa.string()),
        ("l", pa.list_(pa.int64())),
        ("f", pa.list_(pa.float64())),
        ("d", pa.decimal128(12, 2)),
        ("t", pa.timestamp("us", "UTC")),
    ]
)
COLUMNS = SCHEMA.names[1:]
OPERATORS = {
    "n": ("add", "max", "min"),
    "u": ("add", "max"),
    "x": ("add", "max", "min"),
    "s": ("max", "min"),
    "l": ("union",),
    "f": ("union",),
    "d": ("max", "min"),
    "t": ("max", "min"),
}
OPERANDS = {"add": reef.add, "max": reef.max_, "min": reef.min_, "union": reef.union}


def total_order(value):
    """Order floats as merges do: -0.0 below 0.0, NaN above all."""
    if not isinstance(value, float):
        return value
    if math.isnan(value):
        return (1, 0)
    bits = struct.unpack("<q", struct.pack("<d", value))[0]
    return (0, bits if bits >= 0 else bits ^ (2**63 - 1))


def combine(operator, old, operand, column):
    """Return the value of a column after one operand."""
    if operator == "union":
        both = [*(old or []), *operand]
        distinct = {total_order(value): value for value in both if value is not None}
        return [distinct[key] for key in sorted(distinct)]
    if old is None:
        return operand
    if operator == "add":
        return _sum(old, operand, column)
    if operator == "max":
        return operand if total_order(operand) > total_order(old) else old
    return operand if total_order(operand) < total_order(old) else old


def _sum(old, operand, column):
    if column == "x":
        return old + operand
    total = (old + operand) % 2**64
    return total - 2**64 if column == "n" and total >= 2**63 else total


@dataclass(frozen=True)
class ModelRow:
    """The row of one key; `columns` is None where there is none."""

    columns: dict | None = None
    expires_at_ms: int | None = None

    def at(self, now_ms):
        """Return the columns as of a time."""
        gone = self.expires_at_ms is not None and self.expires_at_ms <= now_ms
        return None if gone else self.columns

    def put(self, columns, expires_at_ms=None):
        return ModelRow({**dict.fromkeys(COLUMNS), **columns}, expires_at_ms)

    def patch(self, columns):
        return self if self.columns is None else replace(self, columns={**self.columns, **columns})

    def merge(self, operands, now_ms, expires_at_ms=None):
        """Apply {column: (operator, operand)}."""
        columns = dict(self.at(now_ms) or dict.fromkeys(COLUMNS))
        for column, (operator, operand) in operands.items():
            columns[column] = combine(operator, columns[column], operand, column)
        return ModelRow(columns, expires_at_ms)


@dataclass
class Model:
    """Rows by key."""

    rows: dict = field(default_factory=dict)

    def row(self, key):
        return self.rows.get(key, ModelRow())

    def visible(self, now_ms):
        """Return the rows that a reader sees at a time."""
        seen = {key: row.at(now_ms) for key, row in sorted(self.rows.items())}
        return {key: columns for key, columns in seen.items() if columns is not None}


def canonical(columns):
    """Return columns that compare equal if they are the same bit by bit, but for NaN."""
    return {name: _canonical(value) for name, value in columns.items() if name != "id"}


def _canonical(value):
    if isinstance(value, list):
        return [_canonical(item) for item in value]
    return ("float", total_order(value)) if isinstance(value, float) else value
