"""Makes the object of a record appear, for the writer that inserted it and for others (H23, H72).

`place` is the only way by which a source gets to a destination, for the winner of an insert, for
helpers and for recovery. Each COPY comes directly after two checks:

    1  GET the destination      the record's bytes     nothing is left to do
                                other bytes            never copied over: the record is superseded
                                nothing                continue
    2  read the record          gone, another's, committed: no copy
       and the incarnation      another one than before: begin again with check 1
    3  COPY the source          once: a COPY without a response is preceded by both checks, too

The checks are for a register that was restored from a backup. It has forgotten records, so that a
writer may hold a name which another writer has won since. A restore before check 2 is noticed, and
one after it is noticed by the commit, which is conditional on the record and on the incarnation.
One case remains: a COPY that is on its way while the register is restored *and* the name is
created again. A store without conditions takes it.

The insert was the durable point. So a record whose bytes are nowhere is reported, and stays:
"stuck". A record goes only where it counts for nothing: other bytes were first at its destination,
or its writer has withdrawn it (`reef.stores.two_phase.register`). Its source goes before it does,
since no copy can be made once the source is gone. All of this may be done by any number of helpers
at once, and by the first writer too.
"""

from collections.abc import Callable
from enum import StrEnum

from reef.errors import (
    CorruptionError,
    ErrorKind,
    InvalidInputError,
    NotFoundError,
    UnavailableError,
)
from reef.stores.base import Store
from reef.stores.two_phase.register import Record, Register, checksum_of, withdrawal_of
from reef.stores.wrappers.policies import Backoff, Retry, RetryPolicy

COPIES_MAX = 5
"""How often a source is copied, or put again by its writer, before the object counts as stuck."""

ADOPTIONS_MAX = 4
"""How often an incarnation may change within a check. One that changes with every statement, where
several servers take turns, shows nothing: the record and the destination decide alone.
"""


class Content(StrEnum):
    """The bytes at a record's destination."""

    MISSING = "missing"
    RIGHT = "right"
    OTHER = "other"


class Placement(StrEnum):
    """How a copy to the destination ended."""

    DONE = "done"
    """The record's bytes are at the destination."""
    TAKEN = "taken"
    """Other bytes are: the record is superseded, and gone."""
    MOVED = "moved"
    """The record is gone, another's, or committed by another process."""
    STUCK = "stuck"
    """Its bytes are nowhere: the name stays taken."""


class Finish(StrEnum):
    """The result for a record that was found unfinished."""

    FINISHED = "finished"
    DONE = "done"
    """Another process was quicker, or its writer had withdrawn it."""
    SUPERSEDED = "superseded"
    """Its destination has the bytes of another: the register was restored from a backup."""
    STUCK = "stuck"
    """Its bytes are nowhere: the name stays taken, and an operator has to investigate."""


FINISHES = {
    Placement.TAKEN: Finish.SUPERSEDED,
    Placement.MOVED: Finish.DONE,
    Placement.STUCK: Finish.STUCK,
}


class Finisher:
    """Finishes records of one bucket."""

    def __init__(self, store: Store, register: Register) -> None:
        self._store = store
        self._register = register
        # A copy is retried here, with its checks, and not below.
        self._unretried, self._policy = store, RetryPolicy(attempts_max=1)
        if isinstance(store, Retry):
            self._unretried, self._policy = store.inner, store.policy
        self._name = ""
        self._incarnation: str | None = None

    def prepare(self, register: Register | None = None) -> None:
        """Read the incarnation once, before anything is inserted: later ones are compared to it."""
        if self._incarnation is None:
            register = register or self._register
            self._name = register.name
            self._incarnation = register.incarnation()

    def finish(self, record: Record) -> Finish:
        """Finish a record; UnavailableError if store or register do not respond."""
        placed = self.place(record)
        if placed is not Placement.DONE:
            return FINISHES[placed]
        return Finish.FINISHED if self.seal(record) else Finish.DONE

    def place(self, record: Record, put_again: Callable[[], object] | None = None) -> Placement:
        """Copy the source to the destination, if both checks pass.

        The winner of the insert has the bytes, and puts its source again if that is gone;
        another process checks the source before the copy, and the destination after it.
        """
        self.prepare()
        backoff = Backoff(self._store.runtime, self._policy)
        missing, copies = False, 0
        while True:
            ended = self._check(record, helps=put_again is None, copies=copies)
            if ended is not None:
                return ended
            if missing and put_again is not None:  # and check again
                put_again()
                missing = False
                continue
            try:
                self._unretried.copy(record.source, record.destination)
                if put_again is not None:
                    return Placement.DONE
                copies += 1
            except NotFoundError:
                missing, copies = True, copies + 1
            except UnavailableError:
                if not backoff.wait():
                    raise

    def _check(self, record: Record, *, helps: bool, copies: int) -> Placement | None:
        """Return how it ended; None if the source may be copied now."""
        known = self._incarnation
        for _ in range(ADOPTIONS_MAX):
            content = self.content(record)
            if content is Content.RIGHT:
                return Placement.DONE
            if copies == COPIES_MAX or (copies and content is Content.OTHER):
                return Placement.STUCK  # copies come out wrong: nothing is thrown away
            if content is Content.OTHER:
                return self._supersede(record)
            if helps and not self._has_source(record):
                return self._without_source(record)
            now = self._register.holding(record.destination)
            if not _is_open(record, now.record):
                return Placement.MOVED
            if now.incarnation == known:
                break
            known = self._adopt(now.incarnation)
        return None

    def seal(self, record: Record) -> bool:
        """Set committed; only then is the source of no use. False if the record is another's.

        In another incarnation the object is checked again first: it may be another's by now.
        """
        for _ in range(ADOPTIONS_MAX):
            if self._register.commit_in(record, self._incarnation or ""):
                break
            now = self._register.holding(record.destination)
            holder = now.record
            if holder is None or holder.source != record.source:
                return False
            if self.content(record) is not Content.RIGHT:
                return False
            self._adopt(now.incarnation)
        else:
            self._register.commit(record)
        self._store.delete(record.source)
        return True

    def is_done(self, record: Record) -> bool:
        """Whether a record was finished, as the register has it now.

        Records go only after their objects, so one that is gone was finished, too.
        """
        return not _is_open(record, self._register.read_one(record.destination))

    def content(self, record: Record) -> Content:
        """Compare the bytes at the destination; a difference is read twice (H8)."""
        return self._compare(record.destination, record.checksum)

    def withdraw(self, record: Record) -> None:
        """Make an INSERT of this record, should it arrive later, count for nothing."""
        self._store.put(withdrawal_of(record.source), b"")
        self._store.delete(record.source)

    # --- records without an object ------------------------------------------------
    def _supersede(self, record: Record) -> Placement:
        """Remove a record whose destination has the bytes of another."""
        if self.is_done(record):
            return Placement.MOVED
        self._store.delete(record.source)
        self._register.delete([record])
        return Placement.TAKEN

    def _without_source(self, record: Record) -> Placement:
        if self.is_done(record):
            return Placement.MOVED
        # No copy can land any more: this is how the destination stays.
        content = self.content(record)
        if content is Content.RIGHT:
            return Placement.DONE
        if content is Content.OTHER:
            return self._supersede(record)
        if not self._is_withdrawn(record):
            return Placement.STUCK
        self._register.delete([record])
        return Placement.MOVED

    def _is_withdrawn(self, record: Record) -> bool:
        try:
            self._store.head(withdrawal_of(record.source))
        except NotFoundError:
            return False
        return True

    def _has_source(self, record: Record) -> bool:
        return self._compare(record.source, record.checksum) is Content.RIGHT

    def _compare(self, key: str, checksum: str) -> Content:
        for _ in range(2):
            try:
                body = self._store.get(key)
            except NotFoundError:
                return Content.MISSING
            if checksum_of(body) == checksum:
                return Content.RIGHT
        return Content.OTHER

    def _adopt(self, incarnation: str) -> str:
        """Continue with a register that was restored; one that was made again is refused."""
        name = self._register.current_name()
        if name != self._name:
            raise InvalidInputError(
                f"the register {self._name!r} was replaced by {name!r} while it is in use",
                kind=ErrorKind.OTHER_CAS,
                hint="Restore it from a backup; the page on two-phase says what to do without one",
            )
        self._incarnation = incarnation
        return incarnation


def _is_open(record: Record, holder: Record | None) -> bool:
    """Whether the holder of a destination is this record, not committed."""
    return holder is not None and holder.source == record.source and not holder.committed


def stuck_error(record: Record) -> CorruptionError:
    """Return the alarm for a record whose bytes are nowhere."""
    return CorruptionError(
        f"the register has object {record.destination}, with checksum {record.checksum}; neither "
        f"it nor its source {record.source} has those bytes",
        hint="They were removed by hand, or by something that is not Reef; the record is kept",
        object=record.destination,
        offset=0,
    )


def two_winners(record: Record, holder: Record) -> CorruptionError:
    """Return the alarm for a copy that may have replaced an acknowledged object."""
    return CorruptionError(
        f"object {record.destination} has the bytes of {record.source}, and the register says "
        f"that {holder.source} won: the register was restored while this writer was creating it",
        kind=ErrorKind.REGISTER_RESTORED,
        hint="Stop all writers, and follow the page on two-phase: a register that was restored",
        object=record.destination,
        expected=holder.checksum,
        found=record.checksum,
        offset=0,
    )
