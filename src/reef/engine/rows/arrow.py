"""Arrow arrays as a column's exact type: whole arrays at a time, and only where nothing is lost.

Which types go together is decided by kind, before any value is looked at. Within a kind the
values decide: an integer too large for its column, a float with a fraction in a column of
integers, nanoseconds in a column of microseconds do not fit. The one thing that is rounded is
a float64 in a float32 column, since Python and numpy know little else; what would become
infinite does not fit. Text and bytes do not mix, nor do moments with and without a zone, and
nulls fit everywhere.

Buffers are trusted to be what the Arrow format says, except that text is checked to be UTF-8:
what is committed here is read for years, by programs that check it.
"""

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from reef.formats.schema import FLOATS, normal_type

__all__ = ["MISFITS", "Misfit", "fit_array", "fit_numpy", "is_list", "kind_of", "may_fit"]

FITS = {
    "bool": {"bool"},
    "integer": {"integer", "float", "decimal"},
    "float": {"integer", "float"},
    "decimal": {"integer", "decimal"},
    "text": {"text"},
    "bytes": {"bytes"},
    "date": {"date"},
    "timestamp": {"timestamp"},
}
"""Which kinds of values a column of some kind may be given."""


class Misfit(ValueError):
    """A value that its column cannot hold; whoever knows row and column tells the user."""


MISFITS = (pa.ArrowException, ValueError, TypeError, ArithmeticError)
"""What conversions raise, ours and Arrow's, when a value does not fit."""


def fit_array(array: pa.Array, target: pa.DataType) -> pa.Array:
    """Return the array as `target`, or raise one of MISFITS."""
    array = _unwrapped(array)
    if array.null_count == len(array):
        return pa.nulls(len(array), target)
    if not may_fit(array.type, target):
        raise Misfit(f"{array.type} is not {target}")
    fitted = _cast(array, target)
    _check_finite(array, fitted)
    _check_content(fitted)
    return fitted


def fit_numpy(values: npt.NDArray[np.generic], target: pa.DataType) -> pa.Array:
    """Return a numpy array as `target`; two dimensions are lists of equal length."""
    if not values.dtype.isnative:
        values = values.astype(values.dtype.newbyteorder("="))
    if values.ndim == 2:
        flat = pa.array(values.reshape(-1))
        return fit_array(pa.FixedSizeListArray.from_arrays(flat, values.shape[1]), target)
    array = pa.array(values)
    if pa.types.is_timestamp(target) and pa.types.is_timestamp(array.type):
        # numpy knows no zones: its moments are UTC where the column has one.
        array = array.cast(pa.timestamp(array.type.unit, target.tz))
    return fit_array(array, target)


def is_list(data_type: pa.DataType) -> bool:
    """Whether values of this type are lists, of any or of fixed length."""
    types = pa.types
    return bool(
        types.is_list(data_type)
        or types.is_large_list(data_type)
        or types.is_fixed_size_list(data_type)
    )


def kind_of(data_type: pa.DataType) -> str:
    """Return the kind of a type's values; empty if columns never hold it."""
    types = pa.types
    data_type = normal_type(data_type)
    kinds = {
        "bool": types.is_boolean,
        "integer": types.is_integer,
        "float": types.is_floating,
        "decimal": types.is_decimal,
        "text": types.is_string,
        "bytes": lambda t: types.is_binary(t) or types.is_fixed_size_binary(t),
        "date": types.is_date,
        "timestamp": types.is_timestamp,
    }
    return next((kind for kind, holds in kinds.items() if holds(data_type)), "")


def may_fit(source: pa.DataType, target: pa.DataType) -> bool:
    """Whether some values of one type can be those of another; which ones, they decide."""
    if pa.types.is_null(source):
        return True
    if is_list(target):
        return is_list(source) and may_fit(source.value_type, target.value_type)
    if pa.types.is_timestamp(target) and pa.types.is_timestamp(source):
        return (source.tz is None) == (target.tz is None)
    return kind_of(source) in FITS[kind_of(target)]


def _unwrapped(array: pa.Array) -> pa.Array:
    """Return the values themselves, without dictionary, runs or a type that extends another."""
    if isinstance(array, pa.ExtensionArray):
        return _unwrapped(array.storage)
    if isinstance(array, pa.DictionaryArray):
        words = _unwrapped(array.dictionary)
        return words.cast(normal_type(words.type)).take(array.indices)
    if isinstance(array, pa.RunEndEncodedArray):
        return _unwrapped(pc.run_end_decode(array))
    return array


def _cast(array: pa.Array, target: pa.DataType) -> pa.Array:
    if array.type.equals(target, check_metadata=True):  # the names inside lists count
        return array
    if pa.types.is_decimal(target) and pa.types.is_integer(array.type):
        # By way of all digits of an integer: Arrow would judge the type, not the values.
        array = array.cast(pa.decimal128(20, 0))
    return array.cast(target)


def _leaves(array: pa.Array) -> pa.Array:
    """Return the values inside lists of any depth."""
    while is_list(array.type):
        array = array.flatten()
    return array


def _check_finite(given: pa.Array, fitted: pa.Array) -> None:
    before, after = _leaves(given), _leaves(fitted)
    if (after.type, before.type) == FLOATS and _infinities(before) != _infinities(after):
        raise Misfit("a number out of the range of float32")


def _infinities(array: pa.Array) -> int:
    return int(pc.sum(pc.is_inf(array)).as_py() or 0)


def _check_content(array: pa.Array) -> None:
    """Refuse vectors with holes and text that is not UTF-8."""
    while is_list(array.type):
        is_vector = pa.types.is_fixed_size_list(array.type)
        array = array.flatten()
        if is_vector and array.null_count:
            raise Misfit("a vector with a null inside")
    if pa.types.is_string(array.type):
        array.validate(full=True)
