"""Column sets: every type there and back, and nothing trusted."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reef.errors import CorruptionError, InvalidInputError
from reef.formats.columns import ColumnSet, decode_columns, encode_columns
from reef.formats.schema import arrow_type, type_name
from tests.support.strategies import TYPES, arrays, same


@pytest.mark.parametrize("data_type", TYPES, ids=str)
@given(data=st.data())
def test_every_type_comes_back(data_type, data):
    """Values, nulls and nested lists survive, from slices too, and validate as Arrow data."""
    length = data.draw(st.integers(0, 20))
    array = data.draw(arrays(data_type, length))
    encoded = encode_columns(length, {7: array})
    rows, columns = decode_columns(encoded, {7: data_type}, "x")
    columns[7].validate(full=True)
    assert rows == length
    assert same(columns[7], array)


@pytest.mark.parametrize("data_type", TYPES, ids=str)
def test_type_names_are_reversible(data_type):
    """A column's type is stored by name."""
    assert arrow_type(type_name(data_type)) == data_type


OTHERS = [
    pa.float16(),
    pa.struct([("a", pa.float16())]),
    pa.large_string(),
    pa.dictionary(pa.int8(), pa.string()),
    pa.list_(pa.int8(), 2),
]


@pytest.mark.parametrize("data_type", OTHERS, ids=str)
def test_other_types_are_refused(data_type):
    """A type that Reef cannot store is named in the error."""
    with pytest.raises(InvalidInputError, match="not a column type"):
        type_name(data_type)
    with pytest.raises(InvalidInputError, match="not the name"):
        arrow_type("complex128")


def test_only_asked_for_columns_are_decoded():
    """Others are passed over."""
    encoded = encode_columns(2, {1: pa.array([1, 2]), 2: pa.array(["a", "b"])})
    assert decode_columns(encoded, {2: pa.string()}, "x")[1].keys() == {2}


def test_reading_copies_nothing():
    """The array's buffers are inside the bytes that were given."""
    encoded = encode_columns(3, {1: pa.array([1, 2, 3], pa.int64())})
    _, columns = decode_columns(encoded, {1: pa.int64()}, "x")
    whole = pa.py_buffer(encoded)
    buffer = columns[1].buffers()[1]
    assert whole.address <= buffer.address
    assert buffer.address + buffer.size <= whole.address + whole.size
    assert (buffer.address - whole.address) % 8 == 0


@given(data=st.data())
def test_mutated_bytes_never_break_the_process(data):
    """Any change gives an error or arrays that validate: never a crash, never a wild read."""
    data_type = data.draw(st.sampled_from(TYPES))
    length = data.draw(st.integers(0, 6))
    encoded = bytearray(encode_columns(length, {1: data.draw(arrays(data_type, length))}))
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(encoded) - 1))
        encoded[place] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(encoded)))
    for attempt in (bytes(encoded), bytes(encoded[:cut])):
        try:
            _, columns = decode_columns(attempt, {1: data_type}, "x")
        except CorruptionError:
            continue
        for array in columns.values():
            assert array.nbytes <= len(attempt) + 64


@given(data=st.data())
def test_a_slice_is_encoded_without_its_parent(data):
    """Groups are slices of larger arrays: no values around them are written."""
    data_type = data.draw(st.sampled_from(TYPES))
    array = data.draw(arrays(data_type, data.draw(st.integers(0, 9))))
    start = data.draw(st.integers(0, len(array)))
    part = array[start : data.draw(st.integers(start, len(array)))]
    alone = pa.concat_arrays([part, part[:0]])  # which begins at zero
    found = encode_columns(len(part), {1: part})
    assert found == encode_columns(len(part), {1: alone})
    assert same(decode_columns(found, {1: data_type}, "x")[1][1], part)


@pytest.mark.parametrize(
    ("around", "alone"),
    [([True, True], [True]), ([None, True], [None]), ([None, None, True], [None, None])],
    ids=str,
)
def test_the_spare_bits_of_a_bitmap_are_zero(around, alone):
    """A bitmap's last byte is shared with what comes behind: the same rows give the same bytes."""
    part = pa.array(around, pa.bool_())[: len(alone)]
    expected = encode_columns(len(alone), {1: pa.array(alone, pa.bool_())})
    assert encode_columns(len(part), {1: part}) == expected
    numbers = pa.array([None if value is None else 7 for value in around], pa.int8())[: len(alone)]
    validity = ColumnSet(encode_columns(len(alone), {1: numbers}), "x").buffers[1][1]
    assert validity is None or validity.to_pybytes() == b"\0"


@pytest.mark.parametrize("dtype", ["<i8", "<u4", "<u1"])
def test_numbers_of_numpy_are_encoded_like_those_of_arrow(dtype):
    """Also a slice of them, also none."""
    numbers = np.arange(9, dtype=dtype)
    for part in (numbers, numbers[2:5], numbers[:0]):
        found = encode_columns(len(part), {1: part})
        assert found == encode_columns(len(part), {1: pa.array(part)})
        columns = ColumnSet(found, "x")
        assert columns.numbers(1, np.dtype(dtype), pa.array(part).type).tolist() == part.tolist()


def test_numbers_that_may_be_null_or_are_too_few_take_the_careful_way():
    """Such a column raises the same error as Arrow: the fast path is for valid ones only."""
    found = encode_columns(3, {1: pa.array([1, None, 3], pa.int64())})
    assert np.isnan(ColumnSet(found, "x").numbers(1, np.dtype("<i8"), pa.int64())[1])
    short = encode_columns(3, {1: np.arange(2, dtype="<i8")})
    with pytest.raises(CorruptionError, match="16 bytes, 24 are needed"):
        ColumnSet(short, "x").numbers(1, np.dtype("<i8"), pa.int64())
