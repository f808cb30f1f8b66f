"""Tables on Spark: reads by a builder, changes by methods that users of Delta know.

    events = reef.spark.table(spark, "s3://bucket/prefix", "events")
    df = events.where("amount > 5 AND id LIKE 'a%'").select("id", "amount").df()

    meter = reef.spark.TaskMeter(spark)
    events.where("amount > 5").meter(meter).df().count()
    meter.counts    # {"tasks": 4, "rows": 120, "get.requests": 9, "get.bytes": 81920, …}

Conditions as text or tuples are Reef's: they decide which groups are read. Column expressions are
applied by Spark to the rows. Each `df()` loads again, so it returns the newest rows.

Tasks that fail report no counts. The counts of planning arrive with the first task, under names
that begin with `planning.`.

    orders = reef.spark.ReefTable.for_name(spark, "reef.default.orders", conflict_retries=5)
    orders.update("state = 'new'", {"state": "'open'", "n": col("n") + 1})
    orders.delete("amount < 0")
    (
        orders.merge(updates, "orders.id = source.id")
        .when_matched_update({"amount": "source.amount"})
        .when_not_matched_insert()
        .when_not_matched_by_source_delete("orders.state = 'old'")
        .execute()
    )
    orders.restore(snapshot="monday")

Each method of a `ReefTable` is one SQL statement and one commit. Conditions and values are SQL text
or Spark columns; in a merge, the target has the name of the table, and the source the name
`source`.

A statement fails with ConflictError, and changes nothing, if rows that it depends on were written
after the snapshot that it has read. With `conflict_retries` it runs again, on the newest snapshot.
A DataFrame of the same table is a snapshot of its own: as the source of a merge it may be older.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, TypeVar

from pyspark.accumulators import Accumulator
from pyspark.errors import PySparkException
from pyspark.sql import functions as fn

from reef.engine.rows.convert import EXPIRES_AT, unknown_column
from reef.engine.where.parser import TRUE, RawOr, parse_text, parse_tuples, raw_text
from reef.errors import ConflictError, ErrorKind, InvalidInputError
from reef.runtime import REAL
from reef.spark.session import CATALOG, Counts, CountsSum, is_remote
from reef.spark.source import register
from reef.spark.staging import column_of, numbered


class TaskMeter:
    """Counts the requests of the tasks of some reads, on the driver."""

    def __init__(self, spark: Any) -> None:
        if is_remote(spark):
            raise InvalidInputError(
                "Spark Connect has no accumulators, which the counts need",
                kind=ErrorKind.INVALID_OPTION,
                hint="Count in a session of its own, without Connect",
            )
        # Spark passes accumulators only to sources that were registered.
        register(spark)
        self._sum: Accumulator[Counts] = spark.sparkContext.accumulator({}, CountsSum())

    @property
    def option(self) -> str:
        """The value of the option `meter`."""
        return str(self._sum.aid)

    @property
    def counts(self) -> Counts:
        """The counts since the last reset."""
        return dict(self._sum.value)

    def bytes_read(self, *, planning: bool = False) -> int:
        """Return the bytes that tasks have read, with or without those of planning."""
        counts = self.counts
        return counts.get("get.bytes", 0) + planning * counts.get("planning.get.bytes", 0)

    def reset(self) -> None:
        self._sum.value = {}


@dataclass(frozen=True, slots=True)
class Table:
    """A query on a namespace. Immutable: each method returns a new one."""

    spark: Any
    url: str
    namespace: str
    options: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Not in the repr: options of the store may be secret."""
    conditions: tuple[str, ...] = ()
    filters: tuple[Any, ...] = ()
    columns: tuple[str, ...] | None = None

    def where(self, *conditions: Any) -> "Table":
        """Keep the rows that match all conditions: Reef's, as text or tuples, or Spark columns."""
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
            raise _bad("select needs at least one column", "Omit select to read all columns")
        for name in columns:
            if not isinstance(name, str):
                raise _bad(f"select takes names of columns, got {name!r}")
        return replace(self, columns=columns)

    def range(
        self,
        start: bytes | str | None = None,
        end: bytes | str | None = None,
        prefix: bytes | str | None = None,
    ) -> "Table":
        """Read the keys of [start, end), or those that begin with `prefix`."""
        query = self
        for name, bound in (("start", start), ("end", end), ("prefix", prefix)):
            if bound is not None:
                (text,), is_hex = _texts([bound])
                query = query._either(name, text, is_hex)
        return query

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
        """Read an earlier state; the newest without it."""
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
        """Count the requests of the tasks in a meter."""
        return self.option(meter=meter.option)

    def df(self) -> Any:
        """Load a DataFrame of the newest rows, or of the state that `as_of` names."""
        options = {**self.options, "namespace": self.namespace}
        if self.conditions:
            options["where"] = " AND ".join(self.conditions)
        if self.columns is not None and not self.filters:  # Spark may filter by others
            options["columns"] = json.dumps(list(self.columns))
        df = self.spark.read.format("reef").options(**options).load(self.url)
        if self.columns is not None and self.filters and EXPIRES_AT in self.columns:
            options["columns"] = json.dumps([*df.columns, EXPIRES_AT])
            df = self.spark.read.format("reef").options(**options).load(self.url)
        for condition in self.filters:
            df = df.filter(condition)
        if self.columns is not None and self.filters:
            return _select(df, self.columns)
        return df

    def _either(self, name: str, value: str, is_hex: bool) -> "Table":
        """Set one of two options that exclude each other."""
        chosen, other = (f"{name}Hex", name) if is_hex else (name, f"{name}Hex")
        rest = {known: word for known, word in self.options.items() if known != other}
        return replace(self, options={**rest, chosen: value})


def table(spark: Any, url: str, namespace: str, **store_options: Any) -> Table:
    """Return a table of a bucket; `store_options` are those of `reef.open`."""
    options = {f"store.{name}": _word(value) for name, value in store_options.items()}
    return Table(spark, str(url), namespace, options)


def _condition(given: Any) -> str:
    """Return conditions as the text of an option; the syntax is checked."""
    if isinstance(given, str):
        text = given.strip()
        return f"({text})" if isinstance(parse_text(text), RawOr) else text
    raw = parse_tuples(given if isinstance(given, list) else [given])
    return "" if raw == TRUE else raw_text(raw)


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _texts(keys: Iterable[bytes | str]) -> tuple[list[str], bool]:
    """Return keys as text, and whether it is in hexadecimal digits."""
    given = list(keys)
    for key in given:
        if not isinstance(key, str | bytes):
            raise _bad(f"a key is text or bytes, got {key!r}", "Make others with reef.keys.pack")
    try:
        return [key if isinstance(key, str) else key.decode() for key in given], False
    except UnicodeDecodeError:  # such as keys of reef.keys.pack
        return [(key.encode() if isinstance(key, str) else key).hex() for key in given], True


def _select(df: Any, columns: Sequence[str]) -> Any:
    """Return some columns by their exact names, as the option `columns` does."""
    for place, name in enumerate(columns):
        if name not in df.columns:
            raise unknown_column(name, df.columns)
        if name in columns[:place]:
            raise InvalidInputError(f"column {name} is selected twice", column=name)
    places = [str(df.columns.index(name)) for name in columns]
    rows = numbered(df)
    return rows.select(*(column_of(rows, place) for place in places)).toDF(*columns)


def _bad(message: str, hint: str = "") -> InvalidInputError:
    return InvalidInputError(message, kind=ErrorKind.INVALID_OPTION, hint=hint)


Assignments = Mapping[str, Any]
Result = TypeVar("Result")
SOURCE = "source"
CATALOGS = "spark.sql.catalog."
CONFLICT = "reef.errors.ConflictError: "
PAUSE_S = 0.05
"""Before the first retry; twice as long before each further one, up to `PAUSE_MAX_S`."""
PAUSE_MAX_S = 5.0


@dataclass(frozen=True, slots=True)
class ReefTable:
    """A table of a Reef catalog. Holds no state: each method reads the newest snapshot."""

    spark: Any
    name: str
    """The table's name in SQL: catalog.default.table."""
    conflict_retries: int = 0

    @classmethod
    def for_name(
        cls,
        spark: Any,
        name: str,
        namespace: str | None = None,
        *,
        conflict_retries: int = 0,
        **store_options: Any,
    ) -> "ReefTable":
        """Return a table of a catalog; Spark's AnalysisException if there is none.

        With a namespace, `name` is the URL of its bucket, as for `for_path`.
        """
        if namespace is not None:
            return cls.for_path(
                spark, name, namespace, conflict_retries=conflict_retries, **store_options
            )
        if store_options:
            raise _bad(f"{', '.join(store_options)}: a catalog has its own options of the store")
        found = cls(spark, name, conflict_retries)
        found._catalog_and_namespace()
        spark.table(name)
        return found

    @classmethod
    def for_path(
        cls,
        spark: Any,
        url: str,
        namespace: str,
        *,
        conflict_retries: int = 0,
        **store_options: Any,
    ) -> "ReefTable":
        """Return a namespace of a bucket, by way of a catalog that is added to the session."""
        given = {"url": str(url), **{f"store.{n}": _word(v) for n, v in store_options.items()}}
        catalog = f"reef_{hashlib.sha256(repr(sorted(given.items())).encode()).hexdigest()[:16]}"
        spark.conf.set(f"{CATALOGS}{catalog}", CATALOG)
        for option, value in given.items():
            spark.conf.set(f"{CATALOGS}{catalog}.{option}", value)
        return cls.for_name(
            spark, f"{catalog}.default.`{namespace}`", conflict_retries=conflict_retries
        )

    def to_df(self, version: int | str | None = None, timestamp: datetime | None = None) -> Any:
        """Return the rows as a DataFrame: the newest, or those of an earlier state.

        A version is a generation or the name of a snapshot.
        """
        reader = self.spark.read
        if version is not None:
            reader = reader.option("versionAsOf", str(version))
        if timestamp is not None:
            reader = reader.option("timestampAsOf", timestamp.isoformat())
        return reader.table(self.name)

    def update(self, condition: Any = None, set: Any = None, where: Any = None) -> None:
        """Set columns of the rows that match a condition, of all rows without one.

        The forms are `update(condition, set)`, `update(set, where)`, and those with names.
        """
        if isinstance(condition, Mapping):
            condition, set = set, condition
        condition = _one_condition(condition, where)
        if not isinstance(set, Mapping) or not set:
            raise _bad("update needs columns to set", 'Such as update("n > 5", {"n": "n + 1"})')
        if _are_texts(condition, *set.values()):
            assignments = ", ".join(f"{_quote(name)} = {value}" for name, value in set.items())
            suffix = "" if condition is None else f" WHERE {condition}"
            self._run(lambda: self.spark.sql(f"UPDATE {self.name} SET {assignments}{suffix}"))
        else:
            self._merge_one(condition).when_matched_update(set).execute()

    def delete(self, condition: Any = None, where: Any = None) -> None:
        """Delete the rows that match a condition, all rows without one."""
        condition = _one_condition(condition, where)
        if _are_texts(condition):
            suffix = "" if condition is None else f" WHERE {condition}"
            self._run(lambda: self.spark.sql(f"DELETE FROM {self.name}{suffix}"))
        else:
            self._merge_one(condition).when_matched_delete().execute()

    def merge(self, source: Any, on: Any, *, source_alias: str = SOURCE) -> "Merge":
        """Begin a merge of a DataFrame; add clauses, then `execute` it.

        `on` is a condition, or the name of a column that both sides have.
        """
        if isinstance(on, str) and on in source.columns:
            on = f"{self.name}.{_quote(on)} = {_quote(source_alias)}.{_quote(on)}"
        return Merge(self, source.alias(source_alias), _column(on))

    def history(self, limit: int | None = None) -> Any:
        """Return the commits that the log still has, newest first, as a DataFrame.

        Each has its LSN, its time, which `restore` and `to_df` take, the operation (write, append,
        load, replace), the writer or job, idempotency keys, rows and bytes.
        """
        found = self.spark.table(f"{self.name}.history").orderBy(fn.desc("lsn"))
        return found if limit is None else found.limit(limit)

    def restore(
        self,
        to: Any = None,
        *,
        generation: int | None = None,
        snapshot: Any = None,
        time: datetime | None = None,
    ) -> None:
        """Make the rows those of an earlier state again, in one commit.

        `to` is a generation, a time, or a snapshot or its name; or one of them is given by name.
        Concurrent writes before that commit are undone, those after it stay. Rows keep their
        expiry; columns that were added since are null.
        """
        if [to, generation, snapshot, time].count(None) != 3:
            raise _bad("restore takes exactly one of generation, snapshot and time")
        if isinstance(to, int):
            generation = to
        elif isinstance(to, datetime):
            time = to
        elif to is not None:
            snapshot = to
        past = self._table().as_of(generation=generation, snapshot=snapshot, time=time)
        columns = past.df().columns
        rows = past.select(*columns, EXPIRES_AT).df()
        store = {n: v for n, v in past.options.items() if n.startswith("store.")}
        options = {"namespace": past.namespace, **store}
        rows.write.format("reef").options(**options).mode("overwrite").save(past.url)

    # --- inside -------------------------------------------------------------------
    def _merge_one(self, condition: Any) -> "Merge":
        """Return a merge with one row, in which a condition is about the target alone."""
        one = self.spark.range(1).toDF("_one_row")
        return self.merge(one, fn.lit(True) if condition is None else condition)

    def _catalog_and_namespace(self) -> tuple[str, str]:
        parts = self.name.replace("`", "").split(".")
        if len(parts) != 3:
            raise _bad(f"{self.name!r} is not the name of a table", "Such as reef.default.orders")
        return parts[0], parts[2]

    def _table(self) -> Table:
        catalog, namespace = self._catalog_and_namespace()
        prefix = f"{CATALOGS}{catalog}."
        given = {n.removeprefix(prefix): v for n, v in self.spark.conf.getAll.items()}
        store = {n: v for n, v in given.items() if n.startswith("store.")}
        return table(self.spark, given["url"], namespace).option(**store)

    def _run(self, statement: Callable[[], Result]) -> Result:
        """Run a statement; again after a conflict, as often as the table allows."""
        for attempt in range(self.conflict_retries + 1):
            try:
                return statement()
            except PySparkException as error:
                if CONFLICT not in str(error):
                    raise
                if attempt == self.conflict_retries:
                    message = str(error).split(CONFLICT, 1)[1].split(" SQLSTATE")[0].strip()
                    raise ConflictError(message, table=self.name) from error
            REAL.sleep(REAL.uniform(0.5, 1) * min(PAUSE_MAX_S, PAUSE_S * 2**attempt))
        raise AssertionError("unreachable")


@dataclass(frozen=True, slots=True)
class Merge:
    """A merge that is being built. Immutable: each method returns a new one.

    The clauses of a kind are tried in their order. Without columns, an update or insert sets all of
    them from the columns of the source with the same names.
    """

    table: ReefTable
    source: Any
    on: Any
    clauses: tuple[Callable[[Any], Any], ...] = field(default=(), repr=False)

    def when_matched_update(self, set: Assignments | None = None, condition: Any = None) -> "Merge":
        """Set columns of a row that a row of the source matches."""
        return self._with(
            lambda merge: _assign(merge.whenMatched(*_given(condition)), "update", set)
        )

    def when_matched_delete(self, condition: Any = None) -> "Merge":
        """Delete a row that a row of the source matches."""
        return self._with(lambda merge: merge.whenMatched(*_given(condition)).delete())

    def when_not_matched_insert(
        self, values: Assignments | None = None, condition: Any = None
    ) -> "Merge":
        """Insert a row of the source that matches no row."""
        return self._with(
            lambda merge: _assign(merge.whenNotMatched(*_given(condition)), "insert", values)
        )

    def when_not_matched_by_source_update(
        self, set: Assignments | None = None, condition: Any = None
    ) -> "Merge":
        """Set columns of a row that no row of the source matches."""
        return self._with(
            lambda merge: _assign(merge.whenNotMatchedBySource(*_given(condition)), "update", set)
        )

    def when_not_matched_by_source_delete(self, condition: Any = None) -> "Merge":
        """Delete a row that no row of the source matches."""
        return self._with(lambda merge: merge.whenNotMatchedBySource(*_given(condition)).delete())

    def execute(self) -> None:
        """Run the merge; ConflictError if it still conflicts after all retries."""
        if not self.clauses:
            raise _bad("a merge needs a clause", "Such as when_matched_update()")
        self.table._run(self._execute)

    def _execute(self) -> None:
        merge = self.source.mergeInto(self.table.name, self.on)
        for clause in self.clauses:
            merge = clause(merge)
        merge.merge()

    def _with(self, clause: Callable[[Any], Any]) -> "Merge":
        return replace(self, clauses=(*self.clauses, clause))


def _assign(clause: Any, action: str, values: Assignments | None) -> Any:
    if values is None:
        return getattr(clause, f"{action}All")()
    return getattr(clause, action)({name: _column(value) for name, value in values.items()})


def _one_condition(condition: Any, where: Any) -> Any:
    """Return the condition, which may be given by either name."""
    if condition is not None and where is not None:
        raise _bad("a condition is given once, as the first argument or as where")
    found = where if condition is None else condition
    if isinstance(found, Mapping):
        raise _bad("a condition is SQL text or a Spark column", 'Such as "n > 5"')
    return found


def _given(condition: Any) -> tuple[Any, ...]:
    return () if condition is None else (_column(condition),)


def _column(value: Any) -> Any:
    return fn.expr(value) if isinstance(value, str) else value


def _are_texts(*values: Any) -> bool:
    return all(value is None or isinstance(value, str) for value in values)


def _quote(name: str) -> str:
    return f"`{name.replace('`', '``')}`"
