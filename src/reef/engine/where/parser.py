"""Parser of `where=`: text or tuples to a tree of predicates, not yet checked against a schema.

    where      = [ either ]
    either     = both { OR both }
    both       = negated { AND negated }
    negated    = { NOT } ( "(" either ")" | TRUE | FALSE | condition )
    condition  = column ( = | == | != | <> | < | <= | > | >= ) literal
               | column [ NOT ] BETWEEN literal AND literal
               | column [ NOT ] IN ( [ literal { , literal } ] )
               | column [ NOT ] LIKE 'prefix%'
               | column IS [ NOT ] NULL
    column     = name | "any name, "" for a quote" | `any name, `` for a backtick`
    literal    = 5 | -1.5e3 | 'text, '' for a quote' | X'00ff' | TRUE | FALSE | [-]INFINITY
               | DATE '2024-01-31' | TIMESTAMP '2024-01-31 12:00:00.5+02:00' | TIME '12:00'

Keywords are case-insensitive. Anything else is an error that shows its position.
The same as Python values: `[("amount", ">", 5), ("id", "in", ["a", "b"]), ("note", "is null")]`.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from enum import StrEnum
from typing import Any, NamedTuple, NoReturn, TypeVar

from reef.engine.where.literals import (
    Literal,
    LiteralError,
    literal_of,
    literal_text,
    parse_clock,
    parse_date,
    parse_timestamp,
)
from reef.errors import InvalidInputError

ALLOWED = (
    "Join conditions by AND, OR, NOT and parentheses; each is: column =, !=, <, <=, > or >= "
    "literal, column [NOT] BETWEEN literal AND literal, column [NOT] IN (literals), "
    "column [NOT] LIKE 'prefix%', or column IS [NOT] NULL"
)
FIELD_HINT = "Conditions are on whole columns; SQL has the fields of structs: db.sql, reef sql"
DEPTH_MAX = 100
"""Most nested parentheses; deeper ones would exhaust the stack."""
RESERVED = frozenset(("AND", "OR", "NOT", "IN", "IS", "NULL", "LIKE", "BETWEEN", "TRUE", "FALSE"))
NULL_HINT = "NULL is equal to nothing: write IS NULL or IS NOT NULL"
SHOWN_CHARS = 48
TOKEN = re.compile(
    r"""(?P<space>\s+)
      | (?P<number>[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?|[+-]INFINITY\b)
      | (?P<bytes>X'[^']*')
      | (?P<string>'(?:[^']|'')*')
      | (?P<name>"(?:[^"]|"")+"|`(?:[^`]|``)+`)
      | (?P<word>[^\W\d]\w*)
      | (?P<mark><=|>=|<>|!=|==|[=<>(),])""",
    re.VERBOSE | re.IGNORECASE,
)


TIMES: dict[str, Callable[[str], Literal]] = {
    "DATE": parse_date,
    "TIMESTAMP": parse_timestamp,
    "TIME": parse_clock,
}
"""Parsers of literals with a type in front of them, by its name."""


class Op(StrEnum):
    """The operator of a predicate.

    NOT < is >= except for NaN, which is neither below nor above a number: only floats have it.
    """

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
    NOT_LIKE = "NOT LIKE"
    NOT_LT = "NOT <"
    NOT_LE = "NOT <="
    NOT_GT = "NOT >"
    NOT_GE = "NOT >="


COMPARISONS = {
    **{op.value: op for op in (Op.EQ, Op.NE, Op.LT, Op.LE, Op.GT, Op.GE)},
    "==": Op.EQ,
    "<>": Op.NE,
}


@dataclass(frozen=True, slots=True)
class SourcePosition:
    """The position of a predicate: an offset in text, the index of a tuple, or an expression."""

    text: str | None
    offset: int | None

    def error(self, what: str, hint: str = ALLOWED) -> InvalidInputError:
        """Return an error at this position; text is shown with a caret."""
        if self.text is None:
            return InvalidInputError(f"where, condition {self.offset}: {what}", hint=hint)
        if self.offset is None:
            return InvalidInputError(f"where, {self.text}: {what}", hint=hint)
        first = max(0, self.offset - SHOWN_CHARS)
        shown = re.sub(r"\s", " ", self.text[first : self.offset + SHOWN_CHARS])
        caret = " " * (self.offset - first) + "^"
        return InvalidInputError(
            f"where, offset {self.offset}: {what}",
            hint=f"{hint}\n  {shown}\n  {caret}",
            offset=self.offset,
        )


@dataclass(frozen=True, slots=True)
class RawPredicate:
    """A predicate as it was written."""

    column: str
    op: Op
    values: tuple[Literal, ...]
    place: SourcePosition


@dataclass(frozen=True, slots=True)
class RawExpression:
    """A pyarrow expression that Arrow evaluates; never below a negation."""

    columns: tuple[str, ...] | None
    """None means all."""
    data: bytes
    """The expression, serialized."""
    place: SourcePosition


@dataclass(frozen=True, slots=True)
class RawNot:
    """A negation."""

    part: "Raw"


@dataclass(frozen=True, slots=True)
class RawAnd:
    """A conjunction; an empty one is true."""

    parts: "tuple[Raw, ...]"


@dataclass(frozen=True, slots=True)
class RawOr:
    """A disjunction; an empty one is false."""

    parts: "tuple[Raw, ...]"


Raw = RawPredicate | RawExpression | RawNot | RawAnd | RawOr
TRUE, FALSE = RawAnd(()), RawOr(())


class _Token(NamedTuple):
    kind: str
    text: str
    offset: int

    @property
    def keyword(self) -> str:
        return self.text.upper() if self.kind in ("word", "mark") else ""


def parse_text(text: str) -> Raw:
    """Parse text; an empty one is true."""
    parser = _Parser(text)
    if parser.next.kind == "end":
        return TRUE
    parsed = parser.either()
    if parser.next.kind != "end":
        parser.fail(f"expected AND or OR between conditions, found {_format_token(parser.next)}")
    return parsed


def quote_name(name: str) -> str:
    """Format the name of a column, quoted if necessary."""
    match = TOKEN.fullmatch(name)
    if match and match.lastgroup == "word" and name.upper() not in RESERVED:
        return name
    return '"' + name.replace('"', '""') + '"'


def _tokens(text: str) -> list[_Token]:
    tokens: list[_Token] = []
    offset = 0
    while offset < len(text):
        match = TOKEN.match(text, offset)
        if match is None:
            unclosed = "an unclosed quote" if text[offset] in "'\"`" else "not understood"
            hint = FIELD_HINT if text[offset] == "." and tokens else ALLOWED
            raise SourcePosition(text, offset).error(f"{text[offset]!r} is {unclosed}", hint)
        if match.lastgroup != "space":
            tokens.append(_Token(str(match.lastgroup), match[0], offset))
        offset = match.end()
    return [*tokens, _Token("end", "", len(text))]


class _Parser:
    """Recursive-descent parser over the tokens of one text."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = _tokens(text)[::-1]

    @property
    def next(self) -> _Token:
        return self._tokens[-1]

    def take(self) -> _Token:
        return self._tokens.pop() if len(self._tokens) > 1 else self.next

    def took(self, keyword: str) -> bool:
        """Consume a keyword if it is the next token."""
        found = self.next.keyword == keyword
        if found:
            self.take()
        return found

    def expect(self, keyword: str, what: str) -> None:
        if not self.took(keyword):
            self.fail(f"{what}, found {_format_token(self.next)}")

    def fail(self, what: str, hint: str = ALLOWED) -> NoReturn:
        raise SourcePosition(self._text, self.next.offset).error(what, hint)

    def either(self, depth: int = 0) -> Raw:
        """Parse conditions joined by OR."""
        if depth > DEPTH_MAX:
            self.fail(f"parentheses are nested more than {DEPTH_MAX} deep")
        parts = [self._both(depth)]
        while self.took("OR"):
            parts.append(self._both(depth))
        return _join_parts(RawOr, parts)

    def _both(self, depth: int) -> Raw:
        parts = [self._parse_not(depth)]
        while self.took("AND"):
            parts.append(self._parse_not(depth))
        return _join_parts(RawAnd, parts)

    def _parse_not(self, depth: int) -> Raw:
        negated = False
        while self.took("NOT"):
            negated = not negated
        part: Raw
        if self.took("("):
            part = self.either(depth + 1)
            self.expect(")", "expected AND, OR or )")
        elif self.next.keyword in ("TRUE", "FALSE"):
            part = TRUE if self.take().keyword == "TRUE" else FALSE
        else:
            part = self._condition()
        return RawNot(part) if negated else part

    def _condition(self) -> Raw:
        place = SourcePosition(self._text, self.next.offset)
        column = self._column()
        op = COMPARISONS.get(self.next.text)
        if op is not None:
            self.take()
            return RawPredicate(column, op, (self._literal(),), place)
        if self.took("IS"):
            op = Op.NOT_NULL if self.took("NOT") else Op.IS_NULL
            self.expect("NULL", "expected NULL")
            return RawPredicate(column, op, (), place)
        negated = self.took("NOT")
        if self.took("LIKE"):
            op = Op.NOT_LIKE if negated else Op.LIKE
            return RawPredicate(column, op, (self._literal(),), place)
        if self.took("BETWEEN"):
            between = self._between(column, place)
            return RawNot(between) if negated else between
        if not self.took("IN"):
            self.fail(
                f"expected a comparison, BETWEEN, IN, IS or LIKE, found {_format_token(self.next)}"
            )
        return RawPredicate(column, Op.NOT_IN if negated else Op.IN, self._list(), place)

    def _between(self, column: str, place: SourcePosition) -> RawAnd:
        low = RawPredicate(column, Op.GE, (self._literal(),), place)
        self.expect("AND", "expected AND between the bounds of BETWEEN")
        return RawAnd((low, RawPredicate(column, Op.LE, (self._literal(),), place)))

    def _column(self) -> str:
        token = self.next
        if token.kind == "name":
            quoted = self.take().text
            return quoted[1:-1].replace(2 * quoted[0], quoted[0])
        if token.kind == "word" and token.keyword not in RESERVED:
            self.take()
            if self.next.keyword == "(":
                self.fail(f"{token.text}(…) is a function; there are none")
            return token.text
        self.fail(f"expected the name of a column, found {_format_token(token)}")

    def _list(self) -> tuple[Literal, ...]:
        self.expect("(", "expected ( after IN")
        values: list[Literal] = []
        while not self.took(")"):
            if values:
                self.expect(",", "expected , or )")
            values.append(self._literal())
        return tuple(values)

    def _literal(self) -> Literal:
        token = self.next
        try:
            value = self._value(token)
        except LiteralError as error:
            self.fail(str(error))
        self.take()
        return value

    def _value(self, token: _Token) -> Literal:
        """Return the value of a literal, leaving its last token as the next one."""
        if token.kind == "number":
            return _number(token.text)
        if token.kind == "string":
            return _unquote(token.text)
        if token.kind == "bytes":
            return _bytes(token.text[2:-1])
        if token.keyword in TIMES and self._tokens[-2].kind == "string":
            parse = TIMES[token.keyword]
            self.take()
            return parse(_unquote(self.next.text))
        if token.keyword == "NULL":
            self.fail("a comparison with NULL never matches", NULL_HINT)
        words: dict[str, Literal] = {"TRUE": True, "FALSE": False, "INFINITY": float("inf")}
        if token.keyword in words:
            return words[token.keyword]
        if token.kind in ("word", "name") and token.keyword not in RESERVED:
            quoted = "columns are compared with literals, and text is in single quotes"
            self.fail(f"expected a literal, found {_format_token(token)}: {quoted}")
        self.fail(f"expected a literal, found {_format_token(token)}")


J = TypeVar("J", RawAnd, RawOr)


def _join_parts(kind: type[J], parts: list[Raw]) -> Raw:
    return parts[0] if len(parts) == 1 else kind(tuple(parts))


def _format_token(token: _Token) -> str:
    return token.text if token.kind != "end" else "the end"


def _unquote(text: str) -> str:
    return text[1:-1].replace("''", "'")


def _number(text: str) -> Decimal | float:
    if text[1:].upper() == "INFINITY":
        return float(text)
    try:
        return Decimal(text)
    except InvalidOperation:
        raise LiteralError(f"{text} is out of range") from None


def _bytes(text: str) -> bytes:
    if not re.fullmatch(r"(?:[0-9a-fA-F]{2})*", text):
        raise LiteralError(f"X'{text}' does not consist of pairs of hexadecimal digits")
    return bytes.fromhex(text)


# --- tuples -------------------------------------------------------------------------

TUPLE_HINT = 'Conditions are a list of tuples such as ("amount", ">", 5) or ("id", "in", ["a"])'
WORDS = {
    **COMPARISONS,
    **{
        op.value.lower(): op
        for op in (Op.IN, Op.NOT_IN, Op.LIKE, Op.NOT_LIKE, Op.IS_NULL, Op.NOT_NULL)
    },
    "is": Op.IS_NULL,
    "is not": Op.NOT_NULL,
}


def parse_tuples(conditions: Sequence[Any]) -> Raw:
    """Parse a list of tuples, all of which must match."""
    parts = [_from_tuple(SourcePosition(None, n), given) for n, given in enumerate(conditions)]
    return _join_parts(RawAnd, parts)


def _from_tuple(place: SourcePosition, given: Any) -> Raw:
    if not isinstance(given, tuple | list) or not 2 <= len(given) <= 3:
        raise place.error(
            f"expected a tuple of column, operator and value, got {given!r}", TUPLE_HINT
        )
    column, word, *rest = given
    word_text = " ".join(word.lower().split()) if isinstance(word, str) else ""
    if word_text in ("between", "not between") and isinstance(column, str):
        return _range_of(place, column, rest, negated=word_text != "between")
    op = WORDS.get(word_text)
    if not isinstance(column, str) or op is None:
        raise place.error(f"{word!r} of {column!r} is not an operator of a column", TUPLE_HINT)
    if op in (Op.IS_NULL, Op.NOT_NULL):
        if rest and rest[0] is not None:
            raise place.error(f"{word!r} takes no value, got {rest[0]!r}", TUPLE_HINT)
        return RawPredicate(column, op, (), place)
    if not rest:
        raise place.error(f"{word!r} of column {column} needs a value", TUPLE_HINT)
    values = _list_values(place, rest[0]) if op in (Op.IN, Op.NOT_IN) else rest
    return _with_values(place, column, op, values)


def _with_values(place: SourcePosition, column: str, op: Op, values: Sequence[Any]) -> RawPredicate:
    if any(value is None for value in values):
        raise place.error(f"column {column} is compared with None, which never matches", NULL_HINT)
    try:
        return RawPredicate(column, op, tuple(map(literal_of, values)), place)
    except LiteralError as error:
        raise place.error(f"column {column}: {error}", TUPLE_HINT) from None


def _range_of(place: SourcePosition, column: str, rest: list[Any], *, negated: bool) -> Raw:
    bounds = _list_values(place, rest[0]) if rest else []
    if len(bounds) != 2:
        raise place.error(f"BETWEEN of column {column} takes a list of two values", TUPLE_HINT)
    low, high = bounds
    between = RawAnd(
        (
            _with_values(place, column, Op.GE, [low]),
            _with_values(place, column, Op.LE, [high]),
        )
    )
    return RawNot(between) if negated else between


def _list_values(place: SourcePosition, values: Any) -> list[Any]:
    if isinstance(values, str | bytes) or not hasattr(values, "__iter__"):
        raise place.error(f"expected a list of values, got {values!r}", TUPLE_HINT)
    return list(values.to_pylist() if hasattr(values, "to_pylist") else values)


# --- formatting ---------------------------------------------------------------------


def raw_text(raw: Raw) -> str:
    """Format a filter as text that parses to the same."""
    if isinstance(raw, RawPredicate):
        return _predicate_text(raw)
    if isinstance(raw, RawNot):
        return f"NOT ({raw_text(raw.part)})"
    if isinstance(raw, RawExpression):
        raise raw.place.error("only Arrow understands this expression; it has no text form")
    if not raw.parts:
        return "TRUE" if isinstance(raw, RawAnd) else "FALSE"
    if isinstance(raw, RawOr):
        return "(" + " OR ".join(map(raw_text, raw.parts)) + ")"
    return " AND ".join(map(raw_text, raw.parts))


def _predicate_text(condition: RawPredicate) -> str:
    words = [quote_name(condition.column), condition.op.value]
    literals = [literal_text(value) for value in condition.values]
    if condition.op in (Op.IN, Op.NOT_IN):
        return " ".join([*words, f"({', '.join(literals)})"])
    return " ".join([*words, *literals])
