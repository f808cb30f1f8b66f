"""What Reef asks of a register: a table of records in a database with transactions.

Five statements, each atomic and durable when it is answered:

    insert   if there is no record of that destination           who won
    read     the records of some destinations, as of now          who won, and how far it is
    commit   the record of this destination and this source       its object is there
    delete   the records of these destinations and sources        its object is gone
    page     records by destination, in the order of their bytes  for recovery and collection

An `UnavailableError` from a statement that writes may mean that it took effect all the same;
every one of them may be said again. A register may serve many buckets: its records are kept
apart by `scope`, which is the bucket's URL unless told otherwise.

A register has an id, drawn when it is made: a register that was lost and made again is another
one, and its writers are refused, since it does not know who won before. A register that is
restored from a backup keeps its id, and forgets records all the same. Its `incarnation` shows
that (H72): a value that is compared by each creation, before the copy and again with the commit.

    part                          changes with
    a record in scope RESERVED    `begin_incarnation`: `reef store recover --restored`
    a witness of the database     a restore by the database's own means, as far as it shows one

The record is an ordinary one, so that registers of older releases get theirs at the first use,
without a change to their tables. Older releases neither read nor change it.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from reef.errors import InvalidInputError, Kind, UnavailableError
from reef.runtime import Runtime
from reef.stores.two_phase.record import Record
from reef.stores.wrappers.retry import Backoff, RetryPolicy

__all__ = ["INCARNATION", "PAGE", "RESERVED", "Holding", "Patient", "Register", "end_of"]

T = TypeVar("T")

PAGE = 500
"""Records in one answer."""
RESERVED = "reef-register"
"""The scope of records about the register itself."""
INCARNATION = "incarnation"
"""The destination of the record whose source is the incarnation."""


@dataclass(frozen=True, slots=True)
class Holding:
    """Who holds a destination, and in which incarnation of the register."""

    record: Record | None
    incarnation: str


class Register(ABC):
    """Records of one bucket. Safe for threads and forks; picklable where it can be shared."""

    scope: str

    @property
    @abstractmethod
    def name(self) -> str:
        """The kind of database, the register's own id, and the scope: equal for equal records."""

    def current_name(self) -> str:
        """Return the name as the database has it now; `name` may be remembered."""
        return self.name

    @abstractmethod
    def insert(self, record: Record) -> bool:
        """Add a record; False if the destination has one, be it this very one."""

    @abstractmethod
    def read(self, destinations: Sequence[str]) -> list[Record]:
        """Return the records that there are, in any order."""

    @abstractmethod
    def commit(self, record: Record) -> None:
        """Say that the object is at the destination; nothing if the record is another one now."""

    @abstractmethod
    def delete(self, records: Sequence[Record]) -> None:
        """Remove records, each only if it still has the same source."""

    @abstractmethod
    def page(self, prefix: str, start_after: str, *, unfinished: bool) -> list[Record]:
        """Return up to PAGE records after a destination; only those not committed, if asked."""

    # --- incarnations -------------------------------------------------------------
    def incarnation(self) -> str:
        """Return the incarnation, as of now; empty for a register that has none."""
        return ""

    def holding(self, destination: str) -> Holding:
        """Return a destination's record and the incarnation, as of now."""
        return Holding(self.read_one(destination), self.incarnation())

    def commit_in(self, record: Record, incarnation: str) -> bool:
        """Commit; False unless this very record is committed now, in this incarnation."""
        self.commit(record)
        now = self.holding(record.destination)
        is_there = now.record is not None and now.record.source == record.source
        return is_there and now.incarnation == incarnation

    def begin_incarnation(self) -> str:
        """Draw a new incarnation, after a restore; return it."""
        raise InvalidInputError(
            f"{self!r} has no incarnations", kind=Kind.UNSUPPORTED_BY_STORE, scope=self.scope
        )

    def all(self, prefix: str = "", *, unfinished: bool = False) -> Iterator[Record]:
        """Yield the records whose destinations begin with `prefix`, in order."""
        last = ""
        while found := self.page(prefix, last, unfinished=unfinished):
            yield from found
            last = found[-1].destination

    def read_one(self, destination: str) -> Record | None:
        return next(iter(self.read([destination])), None)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} for {self.scope}>"


class Patient(Register):
    """A register that is asked again while it does not answer; an insert is asked once."""

    def __init__(self, inner: Register, runtime: Runtime, policy: RetryPolicy) -> None:
        self.inner = inner
        self.scope = inner.scope
        self._runtime = runtime
        self._policy = policy

    @property
    def name(self) -> str:
        return self._try(lambda: self.inner.name)

    def current_name(self) -> str:
        return self._try(self.inner.current_name)

    def incarnation(self) -> str:
        return self._try(self.inner.incarnation)

    def holding(self, destination: str) -> Holding:
        return self._try(lambda: self.inner.holding(destination))

    def commit_in(self, record: Record, incarnation: str) -> bool:
        return self._try(lambda: self.inner.commit_in(record, incarnation))

    def begin_incarnation(self) -> str:
        return self._try(self.inner.begin_incarnation)

    def insert(self, record: Record) -> bool:
        return self.inner.insert(record)

    def read(self, destinations: Sequence[str]) -> list[Record]:
        return self._try(lambda: self.inner.read(destinations))

    def commit(self, record: Record) -> None:
        self._try(lambda: self.inner.commit(record))

    def delete(self, records: Sequence[Record]) -> None:
        self._try(lambda: self.inner.delete(records))

    def page(self, prefix: str, start_after: str, *, unfinished: bool) -> list[Record]:
        return self._try(lambda: self.inner.page(prefix, start_after, unfinished=unfinished))

    def _try(self, call: Callable[[], T]) -> T:
        backoff = Backoff(self._runtime, self._policy)
        while True:
            try:
                return call()
            except UnavailableError:
                if not backoff.wait():
                    raise

    def __repr__(self) -> str:
        return repr(self.inner)


def end_of(prefix: str) -> str:
    """Return what sorts after every key with this prefix: no key has this character."""
    return prefix + "\U0010ffff"
