"""The methods of a table, without a session: the options that they set."""

import datetime

import pyarrow as pa
import pytest

import reef
import reef.spark
from tests.spark.data import Planned, folded


@pytest.fixture
def table():
    """A table of no session: nothing is loaded here."""
    return reef.spark.table(None, "./nowhere", "t")


def test_conditions_may_be_tuples(table, db, url):
    """As in a scan: one, several, or a list of them; they exclude groups, as texts do."""
    folded(db, "t", 100)
    asked = table.where(("n", ">=", 10), ("n", "<", 20))
    asked = asked.where([("id", "not in", ["k0000012", "it's"]), ("text", "is not null")])
    asked = asked.where("n != 15").where(
        ("at", "<", datetime.datetime(2030, 1, 1, tzinfo=datetime.UTC))
    )
    assert not asked.filters
    found = Planned(url, "t", where=" AND ".join(asked.conditions)).rows()
    assert sorted(row["n"] for row in found.values()) == [10, 11, 13, 14, 16, 17, 18, 19]


def test_alternatives_keep_together_among_further_conditions(table, db, url):
    """A text with OR is one condition: those added later apply to all of its alternatives."""
    folded(db, "t", 100)
    asked = table.where("n < 3 OR n BETWEEN 50 AND 51").where(("n", "not between", [1, 50]))
    found = Planned(url, "t", where=" AND ".join(asked.conditions)).rows()
    assert sorted(row["n"] for row in found.values()) == [0, 51]


@pytest.mark.parametrize(
    "value", [b"\x00'", "it's", 1.5, -3, True, datetime.date(2024, 2, 29), float("-inf")]
)
def test_every_value_of_a_tuple_survives_as_text(table, value):
    """A literal is parsed back to the same value."""
    from reef.engine.where.parser import parse_text, parse_tuples

    given = ('odd "name"', "=", value)
    (text,) = table.where(given).conditions
    said, meant = parse_text(text), parse_tuples([given])
    assert (said.column, said.op, said.values) == (meant.column, meant.op, meant.values)


def test_a_condition_that_is_none_changes_nothing(table):
    """An empty text and an empty list are no conditions."""
    assert table.where("", " ", []).where("n > 5").conditions == ("n > 5",)


def test_values_that_are_no_condition_are_refused_at_once(table):
    """Without a bucket, and with the place."""
    for wrong in (("n", "~", 5), ("n",), [5], "n >"):
        with pytest.raises(reef.InvalidInputError):
            table.where(wrong)


def test_a_choice_of_no_columns_is_refused(table, db, url):
    """Rows without columns are nothing that Spark could count."""
    with pytest.raises(reef.InvalidInputError, match="at least one column"):
        table.select()
    db.create("t", pa.schema([("id", pa.string())]))
    with pytest.raises(reef.InvalidInputError, match="names no column"):
        Planned(url, "t", columns="[]")


def test_keys_that_are_no_text(table, db, url):
    """Composite keys, in ranges and by themselves; the last call counts."""
    keys = [reef.keys.pack(("user", n)) for n in range(-300, 300, 50)] + [b"\xff\xff"]
    db.create("t", pa.schema([("id", pa.binary()), ("n", pa.int64())]))
    with db.writer("t") as writer:
        writer.upsert([{"id": key, "n": n} for n, key in enumerate(keys)])

    def found(asked):
        return list(Planned(url, "t", **asked.options).rows())

    assert found(table.range("a").range(keys[1], keys[4])) == keys[1:4]
    assert found(table.range(keys[1], keys[4]).range("a")) == []
    assert found(table.range(prefix=b"\xff")) == keys[-1:]
    assert found(table.keys(["no"]).keys([b"\xff\xff", keys[2], "text"])) == [keys[2], keys[-1]]


def test_values_that_are_no_list_of_keys_are_refused(table):
    """A text alone would be the keys of its letters."""
    for wrong in ("k001", b"k001", [5]):
        with pytest.raises(reef.InvalidInputError, match=r"a list|text or bytes"):
            table.keys(wrong)


def test_secrets_are_not_shown():
    """A notebook prints the last value of a cell."""
    shown = repr(reef.spark.table(None, "s3://bucket/here", "t", secret_access_key="hush"))
    assert "hush" not in shown
    assert "s3://bucket/here" in shown
