"""Tuple keys: order, round trip, ranges, refusals, and the bytes of the format page."""

import math
import pickle
import re
from collections import namedtuple
from datetime import UTC, datetime, timedelta, timezone
from enum import IntEnum
from pathlib import Path
from uuid import UUID

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from reef import keys
from reef.errors import ErrorKind, InvalidInputError
from reef.formats.wal_object import KEY_BYTES_MAX
from reef.types import KeyRange
from tests.golden.samples import dump

PAGE = (Path(__file__).parent.parent.parent / "docs" / "format" / "keys.md").read_text()

RANKS = (type(None), bytes, str, (int, float), bool, datetime, UUID, tuple)
ZONES = st.integers(-14 * 60, 14 * 60).map(lambda m: timezone(timedelta(minutes=m)))
TIMESTAMPS = st.datetimes(
    datetime(1, 1, 2), datetime(9999, 12, 30), timezones=ZONES, allow_imaginary=False
)
NUMBERS = st.one_of(
    st.integers(),
    st.integers(-300, 300),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.floats(-300, 300).map(lambda x: round(x * 4) / 4),
    st.builds(lambda n, off: 2**n + off, st.integers(0, 200), st.integers(-1, 1)),
    st.builds(lambda n, off: -(2**n) + off, st.integers(0, 200), st.integers(-1, 1)),
    st.builds(lambda n: float(2**n), st.integers(0, 200)),
)
SCALARS = st.one_of(
    st.none(),
    st.binary(max_size=6),
    st.lists(st.sampled_from([0, 1, 0xFE, 0xFF]), max_size=4).map(bytes),
    st.text(max_size=6),
    st.text(alphabet="\0a\uffff\U0001f600", max_size=4),
    NUMBERS,
    st.booleans(),
    TIMESTAMPS,
    st.uuids(),
)
ELEMENTS = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3).map(tuple), max_leaves=6)
TUPLES = st.lists(ELEMENTS, max_size=4).map(tuple)


def place(value):
    """Return something that Python compares as the page says values compare."""
    if isinstance(value, tuple):
        return (7, [place(item) for item in value])
    if isinstance(value, bool):
        return (4, value)
    if isinstance(value, int | float):
        if isinstance(value, float) and math.isnan(value):
            return (3, True, 0, 0)
        return (3, False, value, isinstance(value, float))
    rank = next(r for r, kind in enumerate(RANKS) if isinstance(value, kind))
    if isinstance(value, datetime):
        value = value.astimezone(UTC)
    return (rank, value if value is not None else 0)


def same(left, right):
    """Whether two values are equal, of the same type, all the way down; NaN equals NaN."""
    if type(left) is not type(right):
        return False
    if isinstance(left, tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return left == right or (left != left and right != right)


def check_strict(data):
    """Check that bytes are refused with their offset, or are what `pack` writes."""
    try:
        values = keys.unpack(data)
    except InvalidInputError as error:
        offset, message = error.context["offset"], str(error)
    else:
        assert keys.pack(values) == data
        return
    assert 0 <= offset <= len(data)
    assert f"offset {offset}: " in message


@given(TUPLES, TUPLES)
@example((2,), (2.0,))
@example((2.0,), (2.5,))
@example((-2,), (-2.0,))
@example((-2.5,), (-2,))
@example((2**53,), (float(2**53),))
@example((2**53 + 1,), (float(2**53),))
@example((10**300,), (1e300,))
@example((math.nan,), (math.inf,))
@example((math.inf,), (10**400,))
@example((b"a",), (b"a\0",))
@example((b"a", b"b"), (b"a\0b",))
@example(((), 1), ((None,),))
def test_bytes_sort_as_tuples_do(left, right):
    """pack(a) < pack(b) exactly when a comes before b; equal keys are equal tuples."""
    packed = keys.pack(left), keys.pack(right)
    assert (packed[0] < packed[1]) == (place(left) < place(right))
    assert (packed[0] == packed[1]) == (place(left) == place(right))


@given(NUMBERS, NUMBERS)
def test_numbers_share_one_scale(left, right):
    """Ints and floats sort by exact value; an int comes before its equal float."""
    assert (keys.pack((left,)) < keys.pack((right,))) == (place(left) < place(right))


@given(TUPLES)
def test_tuples_come_back(values):
    """Equal, and of the same types."""
    assert same(keys.unpack(keys.pack(values)), values)


@given(TUPLES, TUPLES)
@example((b"a",), (b"a\0",))
@example((b"a",), (b"a", None))
@example((), (1,))
@example((5,), (5.0,))
@example((1,), ((1,),))
def test_a_range_has_what_begins_with_its_prefix(prefix, values):
    """A key is in range(p) exactly when its tuple begins with p."""
    start, end = keys.range(prefix)
    for candidate in (values, prefix + values):
        begins = place(candidate[: len(prefix)]) == place(prefix)
        assert (start <= keys.pack(candidate) < end) == begins
        assert KeyRange(start, end).touches(*[keys.pack(candidate)] * 2) == begins


@given(st.binary(max_size=40))
@example(b"\x58" * 5000)
@example(b"\x2a\x01")
@example(b"\x2a\x02")
@example(b"\x2c\x00\x01")
@example(b"\x34\x00\x01\x05\x01")
@example(b"\x34\xff\xff")
@example(b"\x34\x00\xff" + b"\xff" * 255 + b"\x02")
@example(b"\x33" + b"\xff" * 8 + b"\x02")
@example(b"\x2b\x03\x7f\xf8" + bytes(6))
@example(b"\x48" + b"\xff" * 8)
@example(b"\x18\xed\xa0\x80\x00")
def test_foreign_bytes_are_refused_or_exact(data):
    """Whatever unpack accepts, pack would write; the rest is InvalidInputError with an offset."""
    check_strict(data)


@given(TUPLES, st.data())
def test_damaged_keys_are_refused_or_exact(values, data):
    """A key with a byte changed, cut out or added gives no other exception either."""
    key = bytearray(keys.pack(values) or b"\x08")
    at = data.draw(st.integers(0, len(key) - 1))
    with_one = data.draw(st.sampled_from([slice(at, at + 1), slice(at, at)]))
    key[with_one] = data.draw(st.binary(max_size=1))
    check_strict(bytes(key))


def test_minus_zero_is_zero():
    """Equal floats are one key; the int zero is another one."""
    assert keys.pack((-0.0,)) == keys.pack((0.0,)) != keys.pack((0,))
    assert math.copysign(1, keys.unpack(keys.pack((-0.0,)))[0]) == 1


def test_times_are_points_in_time():
    """The zone does not matter, the microsecond does, from year 1 to year 9999."""
    berlin = datetime(2024, 1, 1, 1, tzinfo=timezone(timedelta(hours=1)))
    assert keys.pack((berlin,)) == keys.pack((datetime(2024, 1, 1, tzinfo=UTC),))
    (back,) = keys.unpack(keys.pack((berlin,)))
    assert (back, back.tzinfo) == (berlin, UTC)
    for timestamp in (datetime.min.replace(tzinfo=UTC), datetime.max.replace(tzinfo=UTC)):
        assert keys.unpack(keys.pack((timestamp,))) == (timestamp,)


@pytest.mark.parametrize("values", [[1, "a"], (1, ["a", []])], ids=["outer", "nested"])
def test_lists_become_tuples(values):
    """A list is taken as a tuple."""
    assert keys.unpack(keys.pack(values)) in {(1, "a"), (1, ("a", ()))}


def test_subclasses_become_their_base():
    """An IntEnum is an int, a namedtuple a tuple."""
    color = IntEnum("color", "RED")
    pair = namedtuple("pair", "a b")
    (red, both) = keys.unpack(keys.pack((color.RED, pair(1, 2))))
    assert same((red, both), (1, (1, 2)))


class Stamp(datetime):
    nanosecond = 7


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (datetime(2024, 1, 1), "no time zone"),
        (datetime(1, 1, 1, tzinfo=timezone(timedelta(hours=1))), "years 1 to 9999"),
        (datetime(9999, 12, 31, 23, tzinfo=timezone(timedelta(hours=-9))), "years 1 to 9999"),
        (Stamp(2024, 1, 1, tzinfo=UTC), "nanoseconds"),
        (object(), "object is not a type of keys"),
        (bytearray(b"a"), "bytearray is not a type of keys"),
        ("\ud800", "UTF-8"),
        (1 << 8 * 65_536, "65535"),
        ((1, {}), "dict is not a type of keys"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_values_that_no_key_can_hold_are_refused(value, said):
    """The error names the element and the reason."""
    with pytest.raises(InvalidInputError, match=said) as caught:
        keys.pack(("a", value))
    assert "element 1" in str(caught.value)
    assert caught.value.kind is ErrorKind.INVALID_KEY
    assert pickle.loads(pickle.dumps(caught.value)).context == {"element": 1}


@pytest.mark.parametrize("value", ["text", b"bytes", 5, None, {"a": 1}], ids=repr)
def test_only_tuples_are_packed(value):
    """A bare value is no tuple, least of all a text of characters."""
    with pytest.raises(InvalidInputError, match="expected a tuple"):
        keys.pack(value)


@pytest.mark.parametrize("value", ["text", 5, None, bytearray(b"\x08")], ids=repr)
def test_only_bytes_are_unpacked(value):
    """Anything else is the caller's mistake, said as such."""
    with pytest.raises(InvalidInputError, match="packed key is bytes"):
        keys.unpack(value)


def test_a_key_has_a_largest_length():
    """The longest is 65,535 bytes, packed; the error names the limit."""
    assert keys.KEY_BYTES_MAX == KEY_BYTES_MAX
    longest = keys.pack((b"x" * (KEY_BYTES_MAX - 2),))
    assert len(longest) == KEY_BYTES_MAX
    assert keys.unpack(longest) == (b"x" * (KEY_BYTES_MAX - 2),)
    for call, value in (
        (keys.pack, (b"x" * (KEY_BYTES_MAX - 1),)),
        (keys.unpack, longest + b"\x08"),
        (keys.range, (b"x" * (KEY_BYTES_MAX - 2),)),
    ):
        with pytest.raises(InvalidInputError, match="65535"):
            call(value)


def test_nesting_has_a_bound():
    """32 levels, in both directions; a list that holds itself ends there too."""
    deep = ()
    for _ in range(keys.DEPTH_MAX):
        deep = (deep,)
    assert keys.unpack(keys.pack(deep)) == deep
    endless = []
    endless.append(endless)
    for value in ((deep,), endless):
        with pytest.raises(InvalidInputError, match="32 deep"):
            keys.pack(value)
    with pytest.raises(InvalidInputError, match="offset 32: tuples"):
        keys.unpack(b"\x58" * 100)


def test_the_dump_on_the_page_equals_the_written_bytes():
    """Byte for byte, and it is read for ever."""
    values = ("user", 42, -2.5, (None, b"\0"), True)
    assert dump(keys.pack(values)) in PAGE
    rows = re.findall(r"^[0-9a-f]{4}  ((?:[0-9a-f]{2} ?){1,16})", PAGE, re.MULTILINE)
    assert keys.unpack(bytes.fromhex("".join(rows))) == values


def test_the_values_on_the_page_equal_the_written_bytes():
    """Each row of the table, in both directions."""
    rows = re.findall(r"^\| `(.+)` \| `([0-9a-f ]+)` \|$", PAGE, re.MULTILINE)
    assert len(rows) > 20
    for text, packed in rows:
        value = eval(text)
        assert keys.pack((value,)).hex(" ") == packed
        assert same(keys.unpack(bytes.fromhex(packed)), (value,))
