"""Schemas: made from what users have, growing without losing anything."""

import msgspec
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reef.errors import InvalidInputError, UnsupportedFormatError
from reef.formats.schema import (
    DEFAULT_SCHEMA,
    FIELDS_MAX,
    Field,
    Schema,
    arrow_type,
    cast_column,
    type_name,
)
from tests.support.strategies import TYPES, arrays, same

ID = pa.field("id", pa.string())


def schema_of(**columns):
    """Return a schema of these columns and a text key."""
    return Schema.of(pa.schema([ID, *columns.items()]))


# --- made from Arrow ----------------------------------------------------------------


def test_columns_are_numbered_from_one():
    """The key is number 0, whatever its position; the others count up in their order."""
    made = Schema.of(pa.schema([("b", pa.int8()), ID, ("a", pa.date32())]))
    assert made == Schema(
        1, Field(0, "id", "string"), (Field(1, "b", "int8"), Field(2, "a", "date"))
    )
    assert made.arrow() == pa.schema([ID, ("b", pa.int8()), ("a", pa.date32())])


@pytest.mark.parametrize("data_type", TYPES, ids=str)
def test_every_column_type_is_kept(data_type):
    """Zones, scales and lengths included; through the bytes of a manifest too."""
    made = schema_of(c=data_type)
    assert made.arrow().field("c").type == data_type
    assert msgspec.json.decode(msgspec.json.encode(made), type=Schema) == made


LAYOUTS = [
    (pa.large_string(), pa.string()),
    (pa.string_view(), pa.string()),
    (pa.large_binary(), pa.binary()),
    (pa.binary_view(), pa.binary()),
    (pa.large_list(pa.large_string()), pa.list_(pa.string())),
    (pa.dictionary(pa.int8(), pa.large_string()), pa.string()),
    (pa.list_(pa.dictionary(pa.int8(), pa.int16())), pa.list_(pa.int16())),
    (pa.decimal64(9, 2), pa.decimal128(9, 2)),
    (pa.list_(pa.field("x", pa.int8(), nullable=False)), pa.list_(pa.int8())),
]


@pytest.mark.parametrize(("given_type", "stored"), LAYOUTS, ids=str)
def test_other_layouts_become_the_plain_type(given_type, stored):
    """The same values have one type, however they were laid out."""
    assert schema_of(c=given_type).arrow().field("c").type == stored


@pytest.mark.parametrize(
    "key_type", [pa.large_string(), pa.string_view(), pa.dictionary(pa.int8(), pa.string())]
)
def test_keys_in_other_layouts_are_text_too(key_type):
    """A key column is normalised like any other."""
    assert Schema.of(pa.schema([("id", key_type)])).key == Field(0, "id", "string")


def test_the_key_can_have_another_name():
    """And may be declared as never null."""
    made = Schema.of(pa.schema([pa.field("k", pa.binary(), nullable=False)]), key="k")
    assert made.key == Field(0, "k", "binary")
    assert made.fields == ()


@pytest.mark.parametrize("data_type", [pa.int64(), pa.float64(), pa.binary(16)], ids=str)
def test_other_keys_are_refused_with_a_way_out(data_type):
    """Keys are bytes; tuples and numbers can be packed into them."""
    with pytest.raises(InvalidInputError, match=r"column id: .* got .*reef\.keys\.pack"):
        Schema.of(pa.schema([("id", data_type)]))


def nested(depth):
    """Return lists of lists."""
    return pa.list_(nested(depth - 1)) if depth else pa.int8()


UNSUPPORTED = [
    pa.float16(),
    pa.date64(),
    pa.duration("s"),
    pa.null(),
    pa.struct([]),
    pa.struct([("a", pa.int8()), ("a", pa.int8())]),
    pa.struct([("a", pa.list_(pa.float16()))]),
    pa.map_(pa.list_(pa.string()), pa.int8()),
    pa.map_(pa.string(), pa.duration("s")),
    nested(20),
    pa.binary(4),
    pa.decimal256(50, 2),
    pa.decimal128(5, -2),
    pa.list_(pa.int8(), 2),
    pa.list_(pa.float32(), 0),
    pa.list_view(pa.int8()),
]


@pytest.mark.parametrize("data_type", UNSUPPORTED, ids=str)
def test_types_that_cannot_be_stored_are_named(data_type):
    """The error has the column and its type."""
    with pytest.raises(InvalidInputError, match=r"column c: .* is not a column type") as caught:
        schema_of(c=data_type)
    assert str(data_type) in str(caught.value)
    assert caught.value.hint


def test_date64_comes_with_a_hint():
    """It could hold hours, which a date cannot."""
    with pytest.raises(InvalidInputError, match="date32"):
        schema_of(day=pa.date64())


BAD_NAMES = [
    ([ID, ("a", pa.int8()), ("a", pa.int8())], "column a is there twice"),
    ([ID, ("", pa.int8())], "empty name"),
    ([ID, ("_found", pa.bool_())], "column _found: names that begin with _"),
    ([("key", pa.string())], "no key column 'id', only key"),
    ([], "no key column 'id', only nothing"),
]


@pytest.mark.parametrize(("columns", "message"), BAD_NAMES)
def test_bad_names_are_refused(columns, message):
    """Each column has one name, none of Reef's own, and there is a key."""
    with pytest.raises(InvalidInputError, match=message):
        Schema.of(pa.schema(columns))


def test_an_invalid_schema_is_refused():
    """A dict of types is a common guess."""
    with pytest.raises(InvalidInputError, match=r"pyarrow\.Schema, got dict"):
        Schema.of({"id": pa.string()})


def test_too_many_columns_are_refused():
    """Numbers have 16 bits, half of them for touched flags."""
    many = pa.schema([ID, *((f"c{n}", pa.int8()) for n in range(FIELDS_MAX + 1))])
    with pytest.raises(InvalidInputError, match=f"at most {FIELDS_MAX}"):
        Schema.of(many)


def test_the_plain_shape_is_known():
    """Key and value, both bytes: `get` then returns bytes."""
    assert DEFAULT_SCHEMA.is_plain
    assert Schema.of(DEFAULT_SCHEMA.arrow()) == DEFAULT_SCHEMA
    assert not Schema.of(pa.schema([ID, ("value", pa.binary())])).is_plain
    assert not Schema.of(pa.schema([("id", pa.binary()), ("value", pa.string())])).is_plain
    assert not Schema.of(pa.schema([("id", pa.binary())])).is_plain


# --- growth -------------------------------------------------------------------------


def test_columns_are_added_behind_the_others():
    """Names keep their numbers and their order; new ones get new numbers."""
    before = schema_of(a=pa.int8(), b=pa.string())
    wanted = pa.schema([("new", pa.date32()), ("b", pa.string()), ("a", pa.int16()), ID])
    after = before.grown(wanted)
    assert after.id == 2
    assert after.fields == (
        Field(1, "a", "int16"),
        Field(2, "b", "string"),
        Field(3, "new", "date"),
    )
    assert after.fingerprint != before.fingerprint


@pytest.mark.parametrize("wanted", [lambda s: s, lambda s: pa.schema(list(s)[::-1])])
def test_the_same_schema_is_no_new_version(wanted):
    """Whatever the order and layout, nothing changed."""
    before = schema_of(a=pa.large_string(), b=pa.int8())
    assert before.grown(wanted(before.arrow())) is before


INTS = [pa.int8(), pa.int16(), pa.int32(), pa.int64()]
UINTS = [pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64()]
WIDER = {
    *((a, b) for n, a in enumerate(INTS) for b in INTS[n + 1 :]),
    *((a, b) for n, a in enumerate(UINTS) for b in UINTS[n + 1 :]),
    *((a, b) for n, a in enumerate(UINTS) for b in INTS[n + 1 :]),
    *((a, pa.float32()) for a in (*INTS[:2], *UINTS[:2])),
    *((a, pa.float64()) for a in (*INTS[:3], *UINTS[:3])),
    (pa.float32(), pa.float64()),
    (pa.decimal128(10, 2), pa.decimal128(20, 2)),
}
NUMBERS = sorted({t for pair in WIDER for t in pair}, key=str)
OTHERS = [
    pa.bool_(), pa.string(), pa.binary(), pa.date32(), pa.timestamp("us"), pa.timestamp("ns"),
    pa.timestamp("us", "UTC"), pa.decimal128(20, 4), pa.list_(pa.int8()),
    pa.list_(pa.float32(), 3), pa.list_(pa.float32(), 4),
]  # fmt: skip


@pytest.mark.parametrize("old", NUMBERS + OTHERS, ids=str)
@pytest.mark.parametrize("new", NUMBERS + OTHERS, ids=str)
def test_only_lossless_changes_are_growth(old, new):
    """Of all pairs of types: equal, wider, or an error that names the column and both types."""
    before, wanted = schema_of(c=old), schema_of(c=new)
    if old == new:
        assert before.grown(wanted.arrow()) is before
    elif (old, new) in WIDER:
        assert before.grown(wanted.arrow()) == Schema(2, wanted.key, wanted.fields)
    else:
        names = rf"column c: .*{type_name(old).split('(')[0].split('[')[0]}.* would lose data"
        with pytest.raises(InvalidInputError, match=names):
            before.grown(wanted.arrow())


@pytest.mark.parametrize(("old", "new"), sorted(WIDER, key=str), ids=str)
@given(data=st.data())
def test_old_data_reads_as_the_wider_type(old, new, data):
    """Each value is the same number before and after, in lists too; nulls stay."""
    wide = arrow_type(schema_of(c=old).grown(pa.schema([ID, ("c", new)])).fields[0].type)
    items = data.draw(arrays(old, 5)) if not pa.types.is_decimal(old) else pa.array([None], old)
    assert cast_column(items, wide).type == new
    assert same(cast_column(items, wide).cast(old), items)
    nested = pa.array([items.to_pylist(), None, []], pa.list_(old))
    assert same(cast_column(nested, pa.list_(new)).cast(pa.list_(old)), nested)


def test_lists_and_vectors_widen_with_their_values():
    """The length of a vector stays."""
    before = schema_of(l=pa.list_(pa.list_(pa.int8())), v=pa.list_(pa.float32(), 2))
    after = before.grown(
        schema_of(l=pa.list_(pa.list_(pa.int64())), v=pa.list_(pa.float64(), 2)).arrow()
    )
    assert [field.type for field in after.fields] == ["list<list<int64>>", "vector<float64, 2>"]
    old = pa.array([[1.5, 2.5], None], pa.list_(pa.float32(), 2))
    assert cast_column(old, after.fields[1].arrow).to_pylist() == [[1.5, 2.5], None]


def test_a_column_that_is_gone_is_refused():
    """To drop is to lose data, and so is to rename."""
    before = schema_of(amount=pa.int8())
    with pytest.raises(InvalidInputError, match=r"column amount is missing: .* would lose data"):
        before.grown(pa.schema([ID, ("total", pa.int8())]))


def test_the_key_never_changes():
    """Neither its name nor its type: stored keys cannot change."""
    with pytest.raises(InvalidInputError, match="no key column 'id'"):
        schema_of().grown(pa.schema([("k", pa.string())]))
    with pytest.raises(InvalidInputError, match="column id: a change from string to binary"):
        schema_of().grown(pa.schema([("id", pa.binary())]))


def test_a_new_column_can_be_null():
    """Rows from before it have none."""
    with pytest.raises(InvalidInputError, match="column n: a new column must be nullable"):
        schema_of().grown(pa.schema([ID, pa.field("n", pa.int8(), nullable=False)]))


@pytest.mark.parametrize(
    "stored",
    ["interval", "decimal(99, 0)", "vector<float32, 99999999999>", "list<" * 9999 + ">" * 9999],
    ids=lambda stored: stored[:20],
)
def test_a_type_of_a_newer_release_asks_for_an_upgrade(stored):
    """It was stored, and not given by the caller: valid bytes that this release cannot read."""
    schema = Schema(1, Field(0, "id", "binary"), (Field(1, "when", stored),))
    for read in (schema.types, schema.arrow):
        with pytest.raises(UnsupportedFormatError, match=r"column when has the type .*Upgrade"):
            read()


def test_casting_to_the_same_type_costs_nothing():
    """The array itself comes back."""
    array = pa.array([1, 2], pa.int8())
    assert cast_column(array, pa.int8()) is array
