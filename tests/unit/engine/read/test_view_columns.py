"""Which columns a read may ask for."""

import pyarrow as pa
import pytest

import reef
from reef.errors import InvalidInputError


@pytest.fixture
def writer():
    """Give a writer of a table with one row."""
    db = reef.open("memory://")
    db.create("t", schema=pa.schema([("id", pa.string()), ("a", pa.int64())]))
    writer = db.writer("t")
    writer.upsert([{"id": "x", "a": 1}])
    return writer


READS = {
    "get": lambda writer, columns: writer.get("x", columns=columns),
    "get_many": lambda writer, columns: writer.get_many(["x"], columns=columns),
    "scan": lambda writer, columns: list(writer.scan(columns=columns)),
    "scan_arrow": lambda writer, columns: writer.scan_arrow(columns=columns).read_all(),
}
WRONG = ["a", b"a", {"a"}, {"a": 1}, 5, {"a": 1}.keys(), ["nope"], [5], [["a"]], [None], ["a", "a"]]


@pytest.mark.parametrize("columns", WRONG, ids=repr)
@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_values_that_are_no_list_of_columns_are_refused(writer, read, columns):
    """In every read, and never as an error of Python's own."""
    with pytest.raises(InvalidInputError, match="column"):
        read(writer, columns)


@pytest.mark.parametrize("columns", [["a"], ("a",)])
def test_lists_and_tuples_of_names_are_taken(writer, columns):
    """Each read gives just these."""
    assert writer.get("x", columns=columns) == {"a": 1}
    assert list(writer.scan(columns=columns)) == [("x", {"a": 1})]
