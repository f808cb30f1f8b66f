"""Keys of `get_many` as Arrow arrays, and as columns of data frames."""

import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

import reef

FORMS = {
    "text": pa.array(["a", "x", "b"]),
    "bytes": pa.array([b"a", b"x", b"b"]),
    "large text": pa.array(["a", "x", "b"], pa.large_string()),
    "views": pa.array(["a", "x", "b"], pa.string_view()),
    "a dictionary": pa.array(["a", "x", "b"]).dictionary_encode(),
    "chunks": pa.chunked_array([["a", "x"], ["b"]]),
    "polars": pl.Series(["a", "x", "b"]),
    "pandas": pd.Series(["a", "x", "b"]),
}


@pytest.fixture
def writer():
    """Give a writer of a table with two rows."""
    with reef.open("memory://") as db, db.writer("t", background=False) as writer:
        writer.put("a", b"1")
        writer.put("b", b"2")
        yield writer


@pytest.mark.parametrize("form", FORMS)
def test_keys_are_arrow_arrays(writer, form):
    """Of text or bytes, in any layout; also in a transaction."""
    assert writer.get_many(FORMS[form])["_found"].to_pylist() == [True, False, True]
    with writer.transaction() as tx:
        assert tx.get_many(FORMS[form])["value"].to_pylist() == [b"1", None, b"2"]


@pytest.mark.parametrize("keys", [pa.array([1, 2]), pa.array(["a", None])], ids=["int", "null"])
def test_other_arrays_are_refused(writer, keys):
    """Numbers and nulls are not keys."""
    with pytest.raises(reef.InvalidInputError, match="key") as caught:
        writer.get_many(keys)
    assert caught.value.kind is reef.ErrorKind.INVALID_KEY
