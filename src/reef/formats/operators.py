"""Merge operators: how a merge changes a column, and for which types each operator is defined.

A merge names for each column that it touches one operator of a closed list and an operand:

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

from enum import IntEnum

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Codes = npt.NDArray[np.uint8]


class Operator(IntEnum):
    """How a version changes a column; the numbers are those of stored rows."""

    NONE = 0
    SET = 1
    ADD = 2
    MAX = 3
    MIN = 4
    UNION = 5


NAMES = {operator.name.lower(): operator for operator in Operator if operator > Operator.SET}
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
