"""Reads `where=`: text or tuples in, conditions out, not yet checked against a schema.

    where      = [ condition { AND condition } ]
    condition  = column ( = | == | != | <> | < | <= | > | >= ) literal
               | column [ NOT ] IN ( [ literal { , literal } ] )
               | column IS [ NOT ] NULL
               | column LIKE 'prefix%'
    column     = name | "any name, "" for a quote"
    literal    = 5 | -1.5e3 | 'text, '' for a quote' | X'00ff' | TRUE | FALSE | [-]INFINITY
               | DATE '2024-01-31' | TIMESTAMP '2024-01-31 12:00:00.5+02:00'

Keywords may be written in any case. Anything else is an error that shows where it stands.
The same as Python values: `[("amount", ">", 5), ("id", "in", ["a", "b"]), ("note", "is null")]`.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from enum import StrEnum
from typing import Any, NamedTuple, NoReturn

from reef.engine.where.literals import Literal, UnfitError, literal_of, parse_date, parse_moment
from reef.errors import InvalidInputError

__all__ = ["Op", "Place", "RawCondition", "parse_text", "parse_tuples", "quote_name"]

ALLOWED = (
    "Join conditions by AND; each is: column =, !=, <, <=, > or >= literal, "
    "column [NOT] IN (literals), column IS [NOT] NULL, or column LIKE 'prefix%'"
)
RESERVED = frozenset(("AND", "OR", "NOT", "IN", "IS", "NULL", "LIKE", "BETWEEN", "TRUE", "FALSE"))
NULL_HINT = "NULL is equal to nothing: write IS NULL or IS NOT NULL"
SHOWN_CHARS = 48
TOKEN = re.compile(
    r"""(?P<space>\s+)
      | (?P<number>[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?|[+-]INFINITY\b)
      | (?P<bytes>X'[^']*')
      | (?P<string>'(?:[^']|'')*')
      | (?P<name>"(?:[^"]|"")+")
      | (?P<word>[^\W\d]\w*)
      | (?P<mark><=|>=|<>|!=|==|[=<>(),])""",
    re.VERBOSE | re.IGNORECASE,
)


class Op(StrEnum):
    """What a condition asks of a column."""

    EQ = "="
    NE = "!="
    LT = "<"
    LE = "<="
    GT = ">"
    GE = ">="
    IN = "IN"
    NOT_IN = "NOT IN"
    IS_NULL = "IS NULL"
    NOT_NULL = "IS NOT NULL"
    LIKE = "LIKE"


COMPARISONS = {
    **{op.value: op for op in (Op.EQ, Op.NE, Op.LT, Op.LE, Op.GT, Op.GE)},
    "==": Op.EQ,
    "<>": Op.NE,
}


@dataclass(frozen=True, slots=True)
class Place:
    """Where a condition stands: at an offset of a text, or as the n-th tuple."""

    text: str | None
    offset: int

    def error(self, what: str, hint: str = ALLOWED) -> InvalidInputError:
        """Return the error for what stands here; a text is shown with a caret."""
        if self.text is None:
            return InvalidInputError(f"where, condition {self.offset}: {what}", hint=hint)
        first = max(0, self.offset - SHOWN_CHARS)
        shown = re.sub(r"\s", " ", self.text[first : self.offset + SHOWN_CHARS])
        caret = " " * (self.offset - first) + "^"
        return InvalidInputError(
            f"where, offset {self.offset}: {what}",
            hint=f"{hint}\n  {shown}\n  {caret}",
            offset=self.offset,
        )


@dataclass(frozen=True, slots=True)
class RawCondition:
    """A condition as it was said."""

    column: str
    op: Op
    values: tuple[Literal, ...]
    place: Place


class _Token(NamedTuple):
    kind: str
    text: str
    offset: int

    @property
    def keyword(self) -> str:
        return self.text.upper() if self.kind in ("word", "mark") else ""


def parse_text(text: str) -> list[RawCondition]:
    """Return the conditions of a text; none for an empty one."""
    parser = _Parser(text)
    conditions: list[RawCondition] = []
    while parser.next.kind != "end":
        if conditions:
            parser.expect("AND", "AND expected between conditions")
        conditions.append(parser.condition())
    return conditions


def quote_name(name: str) -> str:
    """Return a column's name as it must stand in a text."""
    match = TOKEN.fullmatch(name)
    if match and match.lastgroup == "word" and name.upper() not in RESERVED:
        return name
    return '"' + name.replace('"', '""') + '"'


def _tokens(text: str) -> list[_Token]:
    tokens, offset = [], 0
    while offset < len(text):
        match = TOKEN.match(text, offset)
        if match is None:
            unclosed = "a quote that is not closed" if text[offset] in "'\"" else "not understood"
            raise Place(text, offset).error(f"{text[offset]!r} is {unclosed}")
        if match.lastgroup != "space":
            tokens.append(_Token(str(match.lastgroup), match[0], offset))
        offset = match.end()
    return [*tokens, _Token("end", "", len(text))]


class _Parser:
    """Walks over the tokens of one text."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = _tokens(text)[::-1]

    @property
    def next(self) -> _Token:
        return self._tokens[-1]

    def take(self) -> _Token:
        return self._tokens.pop() if len(self._tokens) > 1 else self.next

    def took(self, keyword: str) -> bool:
        """Step over a keyword, if it is the next one."""
        found = self.next.keyword == keyword
        if found:
            self.take()
        return found

    def expect(self, keyword: str, what: str) -> None:
        if not self.took(keyword):
            self.fail(f"{what}, found {_shown(self.next)}")

    def fail(self, what: str, hint: str = ALLOWED) -> NoReturn:
        raise Place(self._text, self.next.offset).error(what, hint)

    def condition(self) -> RawCondition:
        place = Place(self._text, self.next.offset)
        column = self._column()
        op = COMPARISONS.get(self.next.text)
        if op is not None:
            self.take()
            return RawCondition(column, op, (self._literal(),), place)
        if self.took("IS"):
            op = Op.NOT_NULL if self.took("NOT") else Op.IS_NULL
            self.expect("NULL", "NULL expected")
            return RawCondition(column, op, (), place)
        if self.took("LIKE"):
            return RawCondition(column, Op.LIKE, (self._literal(),), place)
        op = Op.NOT_IN if self.took("NOT") else Op.IN
        if not self.took("IN"):
            self._refuse_operator()
        return RawCondition(column, op, self._list(), place)

    def _column(self) -> str:
        token = self.next
        if token.kind == "name":
            return self.take().text[1:-1].replace('""', '"')
        if token.kind == "word" and token.keyword not in RESERVED:
            self.take()
            if self.next.keyword == "(":
                self.fail(f"{token.text}(…) is a function; there are none")
            return token.text
        if token.keyword == "(":
            self.fail("parentheses stand only after IN")
        self.fail(f"the name of a column expected, found {_shown(token)}")

    def _refuse_operator(self) -> NoReturn:
        if self.next.keyword == "BETWEEN":
            self.fail("BETWEEN is not supported", "Write column >= low AND column <= high")
        self.fail(f"a comparison, IN, IS or LIKE expected, found {_shown(self.next)}")

    def _list(self) -> tuple[Literal, ...]:
        self.expect("(", "( expected after IN")
        values: list[Literal] = []
        while not self.took(")"):
            if values:
                self.expect(",", ", or ) expected")
            values.append(self._literal())
        return tuple(values)

    def _literal(self) -> Literal:
        token = self.next
        try:
            value = self._value(token)
        except UnfitError as error:
            self.fail(str(error))
        self.take()
        return value

    def _value(self, token: _Token) -> Literal:
        """Return the value of a literal, whose last token stays the next one."""
        if token.kind == "number":
            return _number(token.text)
        if token.kind == "string":
            return _unquoted(token.text)
        if token.kind == "bytes":
            return _bytes(token.text[2:-1])
        if token.keyword in ("DATE", "TIMESTAMP") and self._tokens[-2].kind == "string":
            parse = parse_date if token.keyword == "DATE" else parse_moment
            self.take()
            return parse(_unquoted(self.next.text))
        if token.keyword == "NULL":
            self.fail("a comparison with NULL never matches", NULL_HINT)
        words: dict[str, Literal] = {"TRUE": True, "FALSE": False, "INFINITY": float("inf")}
        if token.keyword in words:
            return words[token.keyword]
        if token.kind in ("word", "name") and token.keyword not in RESERVED:
            quoted = "columns are compared with literals, and texts stand in single quotes"
            self.fail(f"a literal expected, found {_shown(token)}: {quoted}")
        self.fail(f"a literal expected, found {_shown(token)}")


def _shown(token: _Token) -> str:
    return token.text if token.kind != "end" else "the end"


def _unquoted(text: str) -> str:
    return text[1:-1].replace("''", "'")


def _number(text: str) -> Decimal | float:
    if text[1:].upper() == "INFINITY":
        return float(text)
    try:
        return Decimal(text)
    except InvalidOperation:
        raise UnfitError(f"{text} is beyond all numbers") from None


def _bytes(text: str) -> bytes:
    if not re.fullmatch(r"(?:[0-9a-fA-F]{2})*", text):
        raise UnfitError(f"X'{text}' does not consist of pairs of hexadecimal digits")
    return bytes.fromhex(text)


# --- the same from Python values ----------------------------------------------------

TUPLE_HINT = 'Conditions are a list of tuples such as ("amount", ">", 5) or ("id", "in", ["a"])'
WORDS = {
    **COMPARISONS,
    **{op.value.lower(): op for op in (Op.IN, Op.NOT_IN, Op.LIKE, Op.IS_NULL, Op.NOT_NULL)},
    "is": Op.IS_NULL,
    "is not": Op.NOT_NULL,
}


def parse_tuples(conditions: Sequence[Any]) -> list[RawCondition]:
    """Return the conditions of a list of tuples."""
    return [_from_tuple(Place(None, n), given) for n, given in enumerate(conditions)]


def _from_tuple(place: Place, given: Any) -> RawCondition:
    if not isinstance(given, tuple | list) or not 2 <= len(given) <= 3:
        raise place.error(f"a tuple of column, operator and value expected: {given!r}", TUPLE_HINT)
    column, word, *rest = given
    op = WORDS.get(" ".join(word.lower().split())) if isinstance(word, str) else None
    if not isinstance(column, str) or op is None:
        raise place.error(f"{word!r} of {column!r} is not an operator of a column", TUPLE_HINT)
    if op in (Op.IS_NULL, Op.NOT_NULL):
        if rest and rest[0] is not None:
            raise place.error(f"{word!r} takes no value, got {rest[0]!r}", TUPLE_HINT)
        return RawCondition(column, op, (), place)
    if not rest:
        raise place.error(f"{word!r} of column {column} needs a value", TUPLE_HINT)
    values = _listed(place, rest[0]) if op in (Op.IN, Op.NOT_IN) else rest
    if any(value is None for value in values):
        raise place.error(f"column {column} is compared with None, which never matches", NULL_HINT)
    try:
        return RawCondition(column, op, tuple(map(literal_of, values)), place)
    except UnfitError as error:
        raise place.error(f"column {column}: {error}", TUPLE_HINT) from None


def _listed(place: Place, values: Any) -> list[Any]:
    if isinstance(values, str | bytes) or not hasattr(values, "__iter__"):
        raise place.error(f"a list of values expected, got {values!r}", TUPLE_HINT)
    return list(values.to_pylist() if hasattr(values, "to_pylist") else values)
