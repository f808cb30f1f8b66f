"""Options of the data source: text in, checked values out.

Spark hands over names in lower case and values as text. An option that is not known is an
error, since a misspelt `where` would otherwise read everything. What the store needs goes in
with `store.` in front: `option("store.endpoint", …)` is `reef.open(url, endpoint=…)`. Keys that
are no text, such as those of `reef.keys.pack`, are said in hexadecimal digits (`startHex`).
"""

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any

from reef import stores
from reef.engine.history.moments import AsOf, Wanted
from reef.engine.history.snapshots import resolve_snapshot
from reef.errors import InvalidInputError, Kind
from reef.manifest.head import HeadFinder, locate
from reef.paths import Namespace
from reef.stores import Store
from reef.types import KeyRange

if TYPE_CHECKING:
    from reef.engine.database import Database

__all__ = ["Place", "ReadOptions"]

STORE = "store."
HADOOP_PATH = re.compile(r"^file:/(?!/)")
"""How Spark and Hadoop spell the URL of a directory."""
TABLE_PROPERTY = "option.namespace"
"""There while Spark makes a table in its catalog; later reads and writes get no options at all."""
VIEW_HINT = (
    "Use CREATE TEMPORARY VIEW … USING reef OPTIONS (path '…', namespace '…'), or a DataFrame"
)
NOT_TEXT = ("runtime", "retry", "faults", "meter", "metrics")
"""What `reef.stores.open` takes, and no text can say."""
READING = (
    "generation",
    "snapshot",
    "asOfTime",
    "start",
    "end",
    "prefix",
    "startHex",
    "endHex",
    "prefixHex",
    "columns",
    "where",
    "keys",
    "keysHex",
    "splitBytes",
    "leaseSeconds",
    "meter",
)
SPLIT_BYTES = 32 << 20
"""Stored bytes of a partition: some seconds of work."""
LEASE_S = 3600.0
"""After the last task of a read, a sweep waits for no longer than this."""
LEASE_MIN_S = 5.0


@dataclass(frozen=True, slots=True)
class Place:
    """Which namespace of which bucket: what reading and writing have in common."""

    url: str
    namespace: Namespace
    store_options: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, options: Mapping[str, str]) -> "Place":
        given = {name.lower(): value for name, value in options.items()}
        if not given or TABLE_PROPERTY in given:
            raise _bad("Spark hands no options of its catalog's tables to Python", VIEW_HINT)
        if "paths" in given:
            raise _bad(
                "a bucket has one path, several were given", "Load each, and join with union"
            )
        for name, example in (("path", '.load("s3://bucket/prefix")'), ("namespace", "events")):
            if not given.get(name):
                raise _bad(f"the option {name!r} is missing", f"Such as {example}")
        words = {n.removeprefix(STORE): v for n, v in given.items() if n.startswith(STORE)}
        for name in NOT_TEXT:
            if name in words:
                raise _bad(f"the option '{STORE}{name}' cannot be given as text")
        return cls(given["path"], Namespace(given["namespace"]), words)

    def open(self) -> Store:
        """Open the store; InvalidInputError if other processes could not."""
        url = HADOOP_PATH.sub("file:///", self.url)
        store = stores.open(url, **self.store_options)  # type: ignore[arg-type]
        if not store.capabilities.shared:
            raise _bad(
                f"{self.url} lives in the memory of one process, and Spark has many",
                "Use a directory or a bucket",
            )
        return store

    def database(self) -> "Database":
        """Open the bucket, with its registry; nothing works in the background."""
        from reef.engine.database import Database  # tasks that read do without
        from reef.engine.registry import Registry

        store = self.open()
        return Database(store, registry=Registry(store))


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """What a read is asked for."""

    place: Place
    generation: int | None = None
    snapshot: str | None = None
    as_of_time: datetime | None = None
    range: KeyRange = field(default_factory=KeyRange)
    columns: tuple[str, ...] | None = None
    where: str | None = None
    keys: tuple[bytes | str, ...] | None = None
    split_bytes: int = SPLIT_BYTES
    lease_s: float = LEASE_S
    meter: int | None = None
    """The id of an accumulator, which counts what the tasks do."""

    @classmethod
    def of(cls, options: Mapping[str, str]) -> "ReadOptions":
        """Return what these options say; InvalidInputError names a wrong one."""
        place = Place.of(options)
        given = known_options(options, READING, "read")
        moments = [name for name in ("generation", "snapshot", "asOfTime") if name in given]
        if len(moments) > 1:
            raise _bad(f"the options {' and '.join(map(repr, moments))} both name a moment")
        return cls(
            place,
            _number(given, "generation", 1),
            given.get("snapshot"),
            _time(given),
            KeyRange.of(*(_bound(given, name) for name in ("start", "end", "prefix"))),
            _names(given),
            given.get("where"),
            _keys(given),
            _number(given, "splitBytes", 1) or SPLIT_BYTES,
            _seconds(given),
            _number(given, "meter", 0),
        )

    def wanted(self, store: Store) -> tuple[HeadFinder, Wanted]:
        """Return the chain, and the point in time to read; nothing at all is the newest."""
        name = self.place.namespace.name
        if self.snapshot is not None:
            heads, entry = resolve_snapshot(store, name, self.snapshot)
            return heads, Wanted(entry.generation)
        if self.as_of_time is not None:
            return locate(store, name), AsOf(time=self.as_of_time).wanted()
        return locate(store, name), Wanted(self.generation)


def known_options(options: Mapping[str, str], names: Collection[str], what: str) -> dict[str, str]:
    """Return the options of a read or a write by their proper names; Spark does not keep case."""
    proper = {name.lower(): name for name in (*names, "namespace", "path")}
    given = {}
    for name, value in options.items():
        if name.lower().startswith(STORE):
            continue
        if name.lower() not in proper:
            raise _bad(
                f"there is no option {name!r} for a {what}",
                f"There are: namespace, {', '.join(names)}, and {STORE}… for the store",
            )
        given[proper[name.lower()]] = value
    return given


def _number(given: Mapping[str, str], name: str, lowest: int) -> int | None:
    text = given.get(name)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and int(text) >= lowest):
        raise _bad(f"the option {name}={text!r} is not a number from {lowest} on")
    return int(text)


def _seconds(given: Mapping[str, str]) -> float:
    text = given.get("leaseSeconds", str(LEASE_S))
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not LEASE_MIN_S <= seconds < 1e7:
        raise _bad(f"the option leaseSeconds={text!r} is not a number from {LEASE_MIN_S:g} on")
    return seconds


def _time(given: Mapping[str, str]) -> datetime | None:
    text = given.get("asOfTime")
    if text is None:
        return None
    try:
        time = datetime.fromisoformat(text)
    except ValueError as error:
        raise _bad(f"the option asOfTime={text!r} is not a time: {error}") from error
    AsOf(time=time)  # which wants a time zone
    return time


def _names(given: Mapping[str, str]) -> tuple[str, ...] | None:
    """Return the columns: names between commas, or a JSON list where names have commas."""
    text = given.get("columns")
    if text is None:
        return None
    names = tuple(name.strip() for name in text.split(","))
    if text.lstrip().startswith("["):
        names = _texts("columns", text)
    if not names:
        raise _bad("the option columns names no column", "Leave it away for all of them")
    if not all(names):
        raise _bad(f"the option columns={text!r} has an empty name")
    return names


def _bound(given: Mapping[str, str], name: str) -> bytes | str | None:
    digits = _one_of(given, name, f"{name}Hex")
    return given.get(name) if digits is None else _unhexed(f"{name}Hex", digits)


def _keys(given: Mapping[str, str]) -> tuple[bytes | str, ...] | None:
    digits = _one_of(given, "keys", "keysHex")
    if digits is not None:
        return tuple(_unhexed("keysHex", item) for item in _texts("keysHex", digits))
    return _texts("keys", given["keys"]) if "keys" in given else None


def _one_of(given: Mapping[str, str], name: str, other: str) -> str | None:
    """Return what the other way to say something says, if it is the one that was used."""
    if name in given and other in given:
        raise _bad(f"the options {name!r} and {other!r} say the same in two ways")
    return given.get(other)


def _unhexed(name: str, digits: str) -> bytes:
    try:
        return bytes.fromhex(digits)
    except ValueError:
        raise _bad(f"the option {name}: {digits!r} is not pairs of hexadecimal digits") from None


def _texts(name: str, text: str) -> tuple[str, ...]:
    try:
        found: Any = json.loads(text)
    except json.JSONDecodeError as error:
        raise _bad(f"the option {name} is not JSON: {error}") from error
    if not isinstance(found, list) or not all(isinstance(item, str) for item in found):
        raise _bad(f"the option {name} is not a JSON list of texts", 'Such as ["a", "b"]')
    return tuple(found)


def _bad(message: str, hint: str = "") -> InvalidInputError:
    return InvalidInputError(message, kind=Kind.INVALID_OPTION, hint=hint)
