"""The language of `where=`: valid filters, invalid filters, and their errors."""

import datetime as dt
import math
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from reef.engine.where import Op, Predicate, Where, parse
from reef.errors import InvalidInputError
from tests.unit.engine.where.test_where import MANY


@pytest.mark.parametrize(
    ("where", "canonical"),
    [
        ("amount>5", "amount > 5.0"),
        ("amount == -1.5e3", "amount = -1500.0"),
        ("amount <> +.5", "amount != 0.5"),
        ("amount < infinity and amount > -INFINITY", "amount < INFINITY AND amount > -INFINITY"),
        ("count > 5.5", "count >= 6"),
        ("count >= 5.5", "count >= 6"),
        ("count < 5.5", "count <= 5"),
        ("count <= -5.5", "count <= -6"),
        ("count = 5.5", "count IN ()"),
        ("count != 5.5", "count IS NOT NULL"),
        ("count IN (3, 1, 5.5, 1.0)", "count IN (1, 3)"),
        ("count NOT IN (5.5)", "count IS NOT NULL"),
        ("count in (7)", "count = 7"),
        ("small < 300", "small <= 127"),
        ("small > 300", "small IN ()"),
        ("small > -1e999999", "small >= -128"),
        ("small < 1e-999999", "small <= 0"),
        ("single = 0.1", "single = 0.10000000149011612"),
        ("single > 1e300", "single >= INFINITY"),
        ("single <= -1e300", "single <= -INFINITY"),
        ("price = 1.5", "price = 1.50"),
        ("price > 1.505", "price >= 1.51"),
        ("price < 1e12", "price <= 99999999.99"),
        ("price = 1e-999999", "price IN ()"),
        ("note = 'it''s'", "note = 'it''s'"),
        ("note Like '5\\%\\_\\\\%'", "note LIKE '5\\%\\_\\\\%'"),
        ("note LIKE 'abc'", "note = 'abc'"),
        ("note LIKE '%'", "note IS NOT NULL"),
        ("data = x'00Ff'", "data = X'00ff'"),
        ("data = 'é'", "data = X'c3a9'"),
        ("data LIKE 'é%'", "data LIKE 'é%'"),
        ("open = TRUE", "open = TRUE"),
        ("open IN (true, false)", "open IN (FALSE, TRUE)"),
        ("day >= DATE '2024-02-29'", "day >= DATE '2024-02-29'"),
        ("day > '2024-02-29'", "day > DATE '2024-02-29'"),
        ("day > TIMESTAMP '2024-02-29 12:00'", "day >= DATE '2024-03-01'"),
        ("date = DATE '0001-01-01'", "date = DATE '0001-01-01'"),
        ("at = TIMESTAMP '2024-01-01 00:00:00'", "at = TIMESTAMP '2024-01-01 00:00:00'"),
        ("at < timestamp '1969-12-31T23:59:59.5'", "at < TIMESTAMP '1969-12-31 23:59:59.5'"),
        ("at > TIMESTAMP '2024-01-01 00:00:00.0000005'",
         "at >= TIMESTAMP '2024-01-01 00:00:00.000001'"),
        ("at = DATE '2024-01-01'", "at = TIMESTAMP '2024-01-01 00:00:00'"),
        ("seen > TIMESTAMP '2024-01-01 00:00:00.000000001+02:00'",
         "seen > TIMESTAMP '2023-12-31 22:00:00.000000001+00:00'"),
        ("seen > TIMESTAMP '2024-01-01 00:00:00Z'", "seen > TIMESTAMP '2024-01-01 00:00:00+00:00'"),
        ("seen > '2024-01-01 00:00'", "seen > TIMESTAMP '2024-01-01 00:00:00+00:00'"),
        ("seen < '9999-01-01'", "seen <= TIMESTAMP '2262-04-11 23:47:16.854775807+00:00'"),
        ("seen < '1000-01-01'", "seen IN ()"),
        ("tags is null AND embedding is not null", "tags IS NULL AND embedding IS NOT NULL"),
        ('"odd name" = 1 AND "IN" = 2', '"odd name" = 1 AND "IN" = 2'),
        ("`odd name` = 1 AND `amount` = 2", '"odd name" = 1 AND amount = 2.0'),
        ('"amount" = 1\n  AND\tid = \'a\'', "amount = 1.0 AND id = 'a'"),
        ("  ", ""),
        ("amount > 5 OR id = 'a'", "amount > 5.0 OR id = 'a'"),
        ("(amount > 5)", "amount > 5.0"),
        ("((amount > 5) AND (id = 'a'))", "amount > 5.0 AND id = 'a'"),
        ("count = 1 OR count = 2 AND open = TRUE", "count = 1 OR count = 2 AND open = TRUE"),
        ("(count = 1 OR count = 2) AND open = TRUE", "(count = 1 OR count = 2) AND open = TRUE"),
        ("count = 1 OR (count = 2 OR count = 3)", "count = 1 OR count = 2 OR count = 3"),
        ("count BETWEEN 1.5 AND 3", "count >= 2 AND count <= 3"),
        ("count NOT BETWEEN 1 AND 3", "count < 1 OR count > 3"),
        ("NOT count = 1", "count != 1"),
        ("NOT NOT count > 1", "count > 1"),
        ("NOT count > 1.5", "count <= 1"),
        ("NOT count = 1.5", "count IS NOT NULL"),
        ("NOT count != 1.5", "count IN ()"),
        ("NOT small > 300", "small <= 127"),
        ("NOT count IN (1, 2)", "count NOT IN (1, 2)"),
        ("NOT note LIKE 'a%'", "note NOT LIKE 'a%'"),
        ("note NOT LIKE 'a'", "note != 'a'"),
        ("note NOT LIKE '%'", "note IN ()"),
        ("NOT note IS NULL", "note IS NOT NULL"),
        ("NOT amount < 5", "NOT amount < 5.0"),
        ("not not not amount >= 5", "NOT amount >= 5.0"),
        ("NOT (count < 1 OR open = TRUE AND id = 'a')",
         "count >= 1 AND (open != TRUE OR id != 'a')"),
        ("NOT single > 1e300", "NOT single >= INFINITY"),
        ("TRUE", ""),
        ("FALSE", "FALSE"),
        ("count = 1 OR TRUE", ""),
        ("count = 1 AND NOT TRUE", "FALSE"),
        ("count = 1 OR FALSE AND id = 'a'", "count = 1"),
        ("price BETWEEN 1.005 AND 2", "price >= 1.01 AND price <= 2.00"),
        ("day BETWEEN DATE '2024-01-01' AND '2024-12-31'",
         "day >= DATE '2024-01-01' AND day <= DATE '2024-12-31'"),
    ],
)  # fmt: skip
def test_valid_filters(where, canonical):
    """Each form of the language, and the text that it comes down to."""
    found = parse(where, MANY)
    assert str(found) == canonical
    assert parse(canonical, MANY) == found


@pytest.mark.parametrize(
    ("where", "offset", "said"),
    [
        ("lower(id) = 'a'", 5, "lower(…) is a function"),
        ("amount > count", 9, "found count: columns are compared with literals"),
        ('amount > "count"', 9, "single quotes"),
        ("5 < amount", 0, "expected the name of a column, found 5"),
        ("amount > 5 id = 'a'", 11, "expected AND or OR between conditions, found id"),
        ("(amount > 5", 11, "expected AND, OR or ), found the end"),
        ("amount > 5)", 10, "expected AND or OR between conditions, found )"),
        ("()", 1, "expected the name of a column, found )"),
        ("NOT", 3, "expected the name of a column, found the end"),
        ("amount > 5 OR OR id = 'a'", 14, "expected the name of a column, found OR"),
        ("(" * 200 + "amount > 5" + ")" * 200, 101, "nested more than 100 deep"),
        ("amount BETWEEN 1 OR 2", 17, "expected AND between the bounds of BETWEEN, found OR"),
        ("amount BETWEEN 1 AND NULL", 21, "IS NULL"),
        ("amount NOT > 5", 11, "expected a comparison, BETWEEN, IN, IS or LIKE, found >"),
        ("count > 1 OR nothing = 1", 13, "there is no column 'nothing'"),
        ("NOT (count > 1 OR count = 'x')", 18, "column count is int32, compared with 'x'"),
        ("amount", 6, "expected a comparison, BETWEEN, IN, IS or LIKE, found the end"),
        ("amount >", 8, "expected a literal, found the end"),
        ("amount > 5 AND", 14, "expected the name of a column, found the end"),
        ("amount = NULL", 9, "IS NULL"),
        ("count IN (1, NULL)", 13, "IS NULL"),
        ("count IN (1 2)", 12, "expected , or ), found 2"),
        ("count IN 1", 9, "expected ( after IN"),
        ("count IN (1", 11, "expected , or ), found the end"),
        ("note = 'a", 7, "an unclosed quote"),
        ("note = a.b", 8, "'.' is not understood"),
        ("amount > 5; DROP", 10, "';' is not understood"),
        ("amount IS 5", 10, "expected NULL, found 5"),
        ("data = X'0'", 7, "hexadecimal"),
        ("day = DATE '2024-02-30'", 11, "is not a date"),
        ("at = TIMESTAMP 'noon'", 15, "is not a time"),
        ("day = DATE 5", 6, "expected a literal, found DATE"),
        ("amount = 1e99999999999999999999", 9, "out of range"),
        ("nothing = 1", 0, 'The columns are id, amount, count, small'),
        ("id = 'a' AND Amount > 5", 13, "there is no column 'Amount'"),
        ("count = 'five'", 0, "column count is int32, compared with 'five'"),
        ("open = 1", 0, "column open is bool, compared with 1"),
        ("count = TRUE", 0, "column count is int32, compared with TRUE"),
        ("note = 5", 0, "column note is string, compared with 5"),
        ("note = X'00'", 0, "column note is string, compared with X'00'"),
        ("day = 5", 0, "column day is date, compared with 5"),
        ("at = TIMESTAMP '2024-01-01 00:00:00Z'", 0, "a time with a zone"),
        ("day = 'someday'", 0, "'someday' is not a time"),
        ("tags = 'a'", 0, "column tags is list<string>, which cannot be compared"),
        ("embedding IN (1)", 0, "IS NULL and IS NOT NULL"),
        ("note LIKE '%a'", 0, "only a prefix and one % at its end"),
        ("note LIKE 'a_c%'", 0, "only a prefix"),
        ("note LIKE 'a%%'", 0, "only a prefix"),
        ("note LIKE 'a\\'", 0, "only a prefix"),
        ("note LIKE 5", 0, "LIKE compares"),
        ("count LIKE '5%'", 0, "LIKE compares"),
        ("seen = '0001-01-01 00:00:00+05:00'", 0, "years 1 to 9999"),
    ],
)  # fmt: skip
def test_invalid_filters(where, offset, said):
    """The error names the problem and the valid forms, and marks the position with a caret."""
    with pytest.raises(InvalidInputError) as caught:
        parse(where, MANY)
    message = str(caught.value)
    assert said in message
    assert caught.value.context["offset"] == offset
    shown, caret = message.splitlines()[-2:]
    if len(where) < 48:
        assert shown[2:] == where
        assert caret == " " * (2 + offset) + "^"


@given(st.text() | st.text("amount id'\"()<>=!,.%5-X AND IN NULL"))
@example("amount = " + "9" * 10_000)
@example("count = 1e999999999")
@example("count = 1e-999999999")
@example("price = 1e-999999999")
@example("amount = 1e-999999999")
@example("id = '" + "a" * 1000)
def test_no_text_gives_another_error(text):
    """Any text is understood, or refused with InvalidInputError."""
    try:
        where = parse(text, MANY)
    except InvalidInputError:
        return
    assert parse(str(where), MANY) == where


def test_a_long_text_is_shown_in_part():
    """The caret is below the place, however long and broken the text is."""
    with pytest.raises(InvalidInputError) as caught:
        parse("amount > 5\nAND " * 50 + "oops", MANY)
    shown, caret = str(caught.value).splitlines()[-2:]
    assert shown[caret.index("^") - 4 : caret.index("^")] == "oops"
    assert len(shown) < 110


@pytest.mark.parametrize(
    ("where", "canonical"),
    [
        ([("amount", ">", 5), ("id", "in", ["b", "a"])], "amount > 5.0 AND id IN ('a', 'b')"),
        ([("id", "NOT  In", {"a"})], "id != 'a'"),
        ([("note", "is null"), ("note", "is not", None)], "note IS NULL AND note IS NOT NULL"),
        ([("note", "like", "a%")], "note LIKE 'a%'"),
        ([("note", "not like", "a%")], "note NOT LIKE 'a%'"),
        ([("count", "between", [1, 2]), ("open", "=", True)],
         "count >= 1 AND count <= 2 AND open = TRUE"),
        ([("count", "not between", (1, 2))], "count < 1 OR count > 2"),
        ([("count", "=", np.int64(5))], "count = 5"),
        ([("count", "in", np.array([5, 6]))], "count IN (5, 6)"),
        ([("count", "in", pa.array([5, 6]))], "count IN (5, 6)"),
        ([("price", "=", 0.1)], "price = 0.10"),
        ([("price", "<", Decimal("inf"))], "price <= 99999999.99"),
        ([("data", "=", bytearray(b"a"))], "data = X'61'"),
        ([("day", "=", dt.date(2024, 1, 1))], "day = DATE '2024-01-01'"),
        ([["open", "==", True]], "open = TRUE"),
        ([], ""),
    ],
)  # fmt: skip
def test_conditions_as_python_values(where, canonical):
    """Tuples say the same as text."""
    assert str(parse(where, MANY)) == canonical


@pytest.mark.parametrize(
    ("where", "said"),
    [
        (("amount", ">", 5), "condition 0: expected a tuple of column, operator and value"),
        ([("amount", ">")], "condition 0: '>' of column amount needs a value"),
        ([("amount", "=", 1), ("amount", "~", 5)], "condition 1: '~' of 'amount'"),
        ([(5, "=", 5)], "'=' of 5"),
        ([("amount", None, 5)], "None of 'amount'"),
        ([("amount", "=", None)], "IS NULL"),
        ([("amount", "in", [1, None])], "IS NULL"),
        ([("amount", "in", "abc")], "expected a list of values"),
        ([("amount", "in", 5)], "expected a list of values"),
        ([("amount", "is", 5)], "takes no value"),
        ([("amount", "=", math.nan)], "NaN equals no value"),
        ([("amount", "=", Decimal("nan"))], "NaN equals no value"),
        ([("amount", "=", object())], "is not a literal"),
        ([("amount", "=", "five")], "column amount is float64, compared with 'five'"),
        ([("note", "=", "\ud800")], "UTF-8"),
        ([("nothing", "=", 5)], "The columns are"),
        ([("count", "between", [1])], "takes a list of two values"),
        ([("count", "between", [1, None])], "IS NULL"),
        ({"amount": 5}, "str or a list of tuples or a pyarrow expression, got dict"),
        (5, "str or a list of tuples or a pyarrow expression, got int"),
    ],
)  # fmt: skip
def test_wrong_tuples(where, said):
    """The error names the condition by its number."""
    with pytest.raises(InvalidInputError) as caught:
        parse(where, MANY)
    assert said in str(caught.value)


def test_columns_are_named_once():
    """The columns that a scan must read for the conditions, in their order."""
    where = parse("count > 1 AND id > 'a' AND count < 9", MANY)
    assert where.columns == ("count", "id")
    assert Where().columns == ()


def test_conditions_are_values():
    """A condition compares and hashes by its text."""
    where = parse("count > 1", MANY)
    assert where == Where((Predicate("count", 2, "int32", False, Op.GT, (1,)),))
    assert len({where, parse("count > 1.0", MANY)}) == 1
