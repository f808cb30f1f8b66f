"""`where=` as a pyarrow expression: which parts exclude groups, and which only rows."""

import datetime as dt
import math
import pickle
from decimal import Decimal

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from reef.engine.where import ArrowFilter, parse
from reef.errors import InvalidInputError
from tests.unit.engine.where.test_where import MANY, index_of, schema_of

NULL = pa.scalar(None, pa.bool_())
NOON = dt.datetime(2024, 1, 1, 12)


@pytest.mark.parametrize(
    ("expression", "canonical"),
    [
        (pc.field("amount") > 5, "amount > 5.0"),
        (pc.scalar(5) > pc.field("amount"), "amount < 5.0"),
        (pc.field("count") <= 5.5, "count <= 5"),
        (pc.field("price") == Decimal("1.5"), "price = 1.50"),
        (pc.field("day") >= dt.date(2024, 1, 1), "day >= DATE '2024-01-01'"),
        (pc.field("at") < pa.scalar(NOON, pa.timestamp("us")),
         "at < TIMESTAMP '2024-01-01 12:00:00'"),
        (pc.field("seen") < pa.scalar(1, pa.timestamp("ns", "UTC")),
         "seen < TIMESTAMP '1970-01-01 00:00:00.000000001+00:00'"),
        (pc.field("note") == "it's", "note = 'it''s'"),
        (pc.starts_with(pc.field("note"), "5%'"), "note LIKE '5\\%''%'"),
        (pc.field("open"), "open = TRUE"),
        (~pc.field("open"), "open != TRUE"),
        (pc.field("note").is_null(), "note IS NULL"),
        (~pc.field("note").is_valid(), "note IS NULL"),
        (pc.field("count").isin([2, 1]), "count IS NOT NULL AND count IN (1, 2)"),
        (~pc.field("count").isin([2, 1]), "count IS NULL OR count NOT IN (1, 2)"),
        (pc.field("count").isin([1, None]), "count IS NULL OR count IS NOT NULL AND count = 1"),
        ((pc.field("count") > 1) & ((pc.field("id") == "a") | ~(pc.field("open") == True)),  # noqa: E712
         "count > 1 AND (id = 'a' OR open != TRUE)"),
        (pc.if_else(pc.field("count").is_valid(), pc.field("count").isin([1, 2]), NULL),
         "count IN (1, 2)"),
        (~pc.if_else(pc.field("count").is_valid(), pc.field("count").isin([1, 2]), NULL),
         "count NOT IN (1, 2)"),
        (pc.field("single") > 0.5, "single > 0.5"),
        (pc.scalar(True), ""),
        ((pc.field("count") > 1) & pc.scalar(False), "FALSE"),
    ],
)  # fmt: skip
def test_expressions_become_conditions(expression, canonical):
    """What `where` can say is converted as a whole, and excludes groups as text does."""
    where = parse(expression, MANY)
    assert str(where) == canonical
    assert parse(canonical, MANY) == where


@pytest.mark.parametrize(
    "expression",
    [
        pc.field("count") + 1 > 5,
        pc.field("count") == pc.field("amount"),
        pc.field("amount") == pa.scalar(math.nan),
        pc.if_else(pc.field("count").is_valid(), pc.field("count").isin([1, None]), NULL),
        pc.if_else(pc.field("amount").is_valid(), pc.field("count").isin([1]), NULL),
        pc.field("count").cast(pa.int64()) == 5,
        pc.field("amount").is_null(nan_is_null=True),
        pc.starts_with(pc.field("note"), "a", ignore_case=True),
        pc.field("count").isin([1, 2]) | (pc.field("count") * 2 == 8),
        pc.field("note") == pa.scalar(None, pa.string()),
    ],
    ids=str,
)
def test_other_expressions_are_evaluated_by_arrow(expression):
    """Their rows are those of Arrow, and a filter with them can be pickled."""
    where = parse(expression, MANY)
    assert [type(condition) for condition in where.conditions] == [ArrowFilter]
    batch = pa.record_batch(
        {
            "id": ["a", "b", "c", "d"],
            "count": pa.array([4, 5, None, 1], pa.int32()),
            "amount": [4.0, math.nan, None, 1.5],
            "note": ["A", "b", None, "a"],
            "open": [True, None, False, True],
        }
    )
    copy = pickle.loads(pickle.dumps(where))
    assert copy == where
    keys = batch.select(["id"])
    assert keys.filter(copy.mask(batch)).equals(batch.filter(expression).select(["id"]))
    assert set(where.columns) < {"id", "count", "amount", "note", "open"}


def test_the_rest_of_a_conjunction_still_excludes_groups():
    """Arithmetic excludes no group, but the comparison next to it does."""
    schema = schema_of(pa.int64(), key="string")
    where = parse((pc.field("c1") > 20) & (pc.field("c1") * 2 == 80), schema)
    batch = pa.record_batch({"id": ["a", "b", "c"], "c1": [10, 31, 40]})
    assert where.groups(index_of(batch, schema), schema).tolist() == [False, True, True]
    assert where.mask(batch).to_pylist() == [False, False, True]


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        (pc.field("nothing") > 5, "there is no column 'nothing'"),
        (pc.field("nothing") + 1 > 5, "there is no column 'nothing'"),
        (pc.field("note") > 5, "where, (note > 5)"),
        (pc.field("count") + 1, "not a condition"),
        (pc.field("tags", "x") == 1, "where,"),
    ],
)
def test_an_expression_that_cannot_be_evaluated(expression, message):
    """The error is raised before anything is read, and shows the expression."""
    with pytest.raises(InvalidInputError) as caught:
        parse(expression, MANY)
    assert message in str(caught.value)


def test_many_alternatives_are_no_deep_tree():
    """A chain of thousands of OR, as programs build it, is one list of alternatives."""
    expression = pc.field("count") == 0
    for number in range(1, 3000):
        expression |= pc.field("count") == number
    (alternatives,) = parse(expression, MANY).conditions
    assert len(alternatives.parts) == 3000
