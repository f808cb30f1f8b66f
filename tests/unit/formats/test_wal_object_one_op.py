"""A single put or delete has an encoder of its own: it must write the bytes of the general one."""

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reef.engine.rows.batch import Batch, encode_batch
from reef.formats.schema import DEFAULT_SCHEMA, Schema
from reef.formats.wal_object import OneOp, Ops, concat_ops, decode_ops, encode_ops

KEYS = st.binary(min_size=1, max_size=300)
VALUES = st.none() | st.binary(max_size=300)


@settings(deadline=None)  # Arrow imports pandas the first time
@given(KEYS, st.integers(1, 30_000), VALUES)
def test_its_record_has_the_same_bytes_as_its_columns(key, field, value):
    """Byte for byte: a reader of the log cannot see how a record was made."""
    op = OneOp(key, field, value)
    assert op.encode() == encode_ops(op) == encode_ops(op.columns())


@settings(deadline=None)
@given(KEYS, VALUES)
def test_it_decodes_to_the_written_values(key, value):
    """A put of bytes, or a delete without any column."""
    found = decode_ops(OneOp(key, 1, value).encode(), DEFAULT_SCHEMA, "x")
    assert found.key_list() == [key] == OneOp(key, 1, value).key_list()
    assert found.kinds.to_pylist() == [1 if value is None else 0]
    assert {n: a.to_pylist() for n, a in found.fields.items()} == (
        {} if value is None else {1: [value]}
    )


@settings(deadline=None)
@given(st.lists(st.tuples(KEYS, VALUES), min_size=2, max_size=5))
def test_several_are_joined_as_columns(rows):
    """A transaction's single writes become one batch, the same as if they came together."""
    together = Batch()
    for key, value in rows:
        together = together.delete(key) if value is None else together.put(key, value)
    one_by_one = concat_ops([OneOp(key, 1, value) for key, value in rows], DEFAULT_SCHEMA)
    assert encode_ops(one_by_one) == encode_batch(together, DEFAULT_SCHEMA, 1 << 20).record


def test_a_lone_put_or_delete_of_a_plain_namespace_takes_it():
    """And nothing else does: rows with columns, range deletes, two operations."""
    columns = Schema.of(pa.schema([("id", pa.binary()), ("amount", pa.int64())]))

    def made(batch, schema=DEFAULT_SCHEMA):
        return type(encode_batch(batch, schema, 1 << 20).ops)

    assert made(Batch().put("k", b"v")) is OneOp
    assert made(Batch().delete("k")) is OneOp
    assert made(Batch().delete("k"), columns) is Ops
    assert made(Batch().delete_range("a", "b")) is Ops
    assert made(Batch().put("k", b"v").delete("k")) is Ops
    assert made(Batch().put("k", b"v", ttl_s=1.0)) is Ops


@pytest.mark.parametrize("batch", [Batch().put("k", b"v" * 100), Batch().delete("k" * 100)])
def test_a_bound_on_the_size_holds_for_it_too(batch):
    """A record that is too large is refused, however it is encoded."""
    with pytest.raises(ValueError, match="exceeds batch_bytes_max=90"):
        encode_batch(batch, DEFAULT_SCHEMA, 90)
