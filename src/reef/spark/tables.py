"""Tables: the pleasant way to read, from a session that is in hand.

    events = reef.spark.table(spark, "s3://bucket/prefix", "events")
    df = events.where("amount > 5 AND id LIKE 'a%'").select("id", "amount").df()

Text, or tuples, are conditions of Reef: they decide what is read at all. A column expression is
Spark's business, and is applied to what was read. Each `df()` loads anew, so it sees the newest
rows, and no plan is ever shared between two different questions.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from reef.engine.rows.out import EXPIRES_AT, unknown_column
from reef.engine.where.literals import literal_text
from reef.engine.where.parser import Op, RawCondition, parse_text, parse_tuples, quote_name
from reef.errors import InvalidInputError, Kind
from reef.spark.meter import TaskMeter
from reef.spark.ranges import column_of, numbered

__all__ = ["Table", "table"]


@dataclass(frozen=True, slots=True)
class Table:
    """A question to a namespace. Never changes: each method returns another one."""

    spark: Any
    url: str
    namespace: str
    options: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Not shown: the store's may be secret."""
    conditions: tuple[str, ...] = ()
    filters: tuple[Any, ...] = ()
    columns: tuple[str, ...] | None = None

    def where(self, *conditions: Any) -> "Table":
        """Keep the rows that match all of these: Reef's conditions, as text or tuples, or columns
        of Spark's.
        """
        ours = [_condition(c) for c in conditions if isinstance(c, str | tuple | list)]
        filters = [c for c in conditions if not isinstance(c, str | tuple | list)]
        return replace(
            self,
            conditions=(*self.conditions, *filter(None, ours)),
            filters=(*self.filters, *filters),
        )

    def select(self, *columns: str) -> "Table":
        """Read only these columns, in this order."""
        if not columns:
            raise _bad("no column is chosen", "Name some, or leave select away")
        for name in columns:
            if not isinstance(name, str):
                raise _bad(f"a column is chosen by its name, got {name!r}")
        return replace(self, columns=columns)

    def range(
        self,
        start: bytes | str | None = None,
        end: bytes | str | None = None,
        prefix: bytes | str | None = None,
    ) -> "Table":
        """Read the keys of [start, end), or those that begin with `prefix`."""
        asked = self
        for name, bound in (("start", start), ("end", end), ("prefix", prefix)):
            if bound is not None:
                (text,), is_hex = _texts([bound])
                asked = asked._either(name, text, is_hex)
        return asked

    def keys(self, keys: Iterable[bytes | str]) -> "Table":
        """Read these keys."""
        if isinstance(keys, str | bytes):
            raise _bad(f"keys are a list, got {keys!r}", "Such as keys([…])")
        texts, is_hex = _texts(keys)
        return self._either("keys", json.dumps(texts), is_hex)

    def as_of(
        self,
        *,
        generation: int | None = None,
        snapshot: Any = None,
        time: datetime | None = None,
    ) -> "Table":
        """Read a past moment; without it, the newest."""
        given = {
            "generation": generation,
            "snapshot": getattr(snapshot, "id", snapshot),
            "asOfTime": None if time is None else time.isoformat(),
        }
        return self.option(**{n: str(value) for n, value in given.items() if value is not None})

    def option(self, **options: Any) -> "Table":
        """Set options of the data source by their names."""
        words = {name: _word(value) for name, value in options.items()}
        return replace(self, options={**self.options, **words})

    def meter(self, meter: TaskMeter) -> "Table":
        """Count there what the tasks ask of the bucket."""
        return self.option(meter=meter.option)

    def df(self) -> Any:
        """Load it: an ordinary DataFrame, of the newest moment unless `as_of` names another."""
        options = {**self.options, "namespace": self.namespace}
        if self.conditions:
            options["where"] = " AND ".join(self.conditions)
        if self.columns is not None and not self.filters:  # Spark may filter by others
            options["columns"] = json.dumps(list(self.columns))
        found = self.spark.read.format("reef").options(**options).load(self.url)
        if self.columns is not None and self.filters and EXPIRES_AT in self.columns:
            options["columns"] = json.dumps([*found.columns, EXPIRES_AT])
            found = self.spark.read.format("reef").options(**options).load(self.url)
        for condition in self.filters:
            found = found.filter(condition)
        if self.columns is not None and self.filters:
            return _chosen(found, self.columns)
        return found

    def _either(self, name: str, value: str, is_hex: bool) -> "Table":
        """Set an option that can be said in two ways, in one of them."""
        said, other = (f"{name}Hex", name) if is_hex else (name, f"{name}Hex")
        rest = {known: word for known, word in self.options.items() if known != other}
        return replace(self, options={**rest, said: value})


def table(spark: Any, url: str, namespace: str, **store_options: Any) -> Table:
    """Return a table of a bucket; `store_options` are those of `reef.open`."""
    options = {f"store.{name}": _word(value) for name, value in store_options.items()}
    return Table(spark, str(url), namespace, options)


def _condition(given: Any) -> str:
    """Return conditions as text, which is how options say them; checked as far as they can be."""
    if isinstance(given, str):
        parse_text(given)
        return given.strip()
    tuples = given if isinstance(given, list) else [given]
    return " AND ".join(map(_said, parse_tuples(tuples)))


def _said(condition: RawCondition) -> str:
    words = [quote_name(condition.column), condition.op.value]
    literals = [literal_text(value) for value in condition.values]
    if condition.op in (Op.IN, Op.NOT_IN):
        return " ".join([*words, f"({', '.join(literals)})"])
    return " ".join([*words, *literals])


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _texts(keys: Iterable[bytes | str]) -> tuple[list[str], bool]:
    """Return keys as options say them, and whether that is in hexadecimal digits."""
    given = list(keys)
    for key in given:
        if not isinstance(key, str | bytes):
            raise _bad(f"a key is text or bytes, got {key!r}", "Make others with reef.keys.pack")
    try:
        return [key if isinstance(key, str) else key.decode() for key in given], False
    except UnicodeDecodeError:  # such as keys of reef.keys.pack
        return [(key.encode() if isinstance(key, str) else key).hex() for key in given], True


def _chosen(df: Any, columns: Sequence[str]) -> Any:
    """Return some columns by their exact names, as the option `columns` does."""
    for place, name in enumerate(columns):
        if name not in df.columns:
            raise unknown_column(name, df.columns)
        if name in columns[:place]:
            raise InvalidInputError(f"column {name} is asked for twice", column=name)
    places = [str(df.columns.index(name)) for name in columns]
    rows = numbered(df)
    return rows.select(*(column_of(rows, place) for place in places)).toDF(*columns)


def _bad(message: str, hint: str = "") -> InvalidInputError:
    return InvalidInputError(message, kind=Kind.INVALID_OPTION, hint=hint)
