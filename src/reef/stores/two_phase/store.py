"""`TwoPhase`: a store that creates by a register, and does everything else by itself.

`create` goes through five steps (protocols §9, H23, H72):

    0  HEAD the destination: an object that is there exists, whether the register knows it or not
    1  PUT the bytes at a source of their own
    2  INSERT the record: this decides, and from here on the object is durable
    3  check destination and record again, and COPY the source: from here on all readers see it
    4  set the record to committed, on condition that the register still has it
    5  delete the source

CREATED is reported only after step 4, and EXISTS only when the winner's record is finished, so that
readers of the bucket, who need no register, see everything that was acknowledged. A commit that
does not respond leaves CREATED as it is: the object can be read. One that finds no such record was
overtaken by a restore of the register, or by a deletion; `_decide` returns its outcome.

An insert without a response is settled by reading the record: its source shows whose it is. One
that may still land is withdrawn before a definite result (`reef.stores.two_phase.register`).
A crash anywhere leaves either a source that nothing names, or a record that the next writer, helper
or recovery finishes.

A name is freed in an order that leaves no way back: the record is set to committed, then the
source goes, then the object, then the record. Once the source is gone no copy of it can land, so
that a paused helper cannot bring back a deleted object, or overwrite its successor. A crash there
leaves a committed record whose object is gone: the next `create` of the name removes it.

**Recovery and collection** finish records and remove the leftovers of crashes. `recover` runs on
every opening for writing, for the namespace that is opened, and for the whole bucket by `reef store
recover URL`. It may run at any time, concurrently with writers and other recoveries: it does what
every loser of a race does (`reef.stores.two_phase.finishing`). A record whose bytes are nowhere is
reported, and stays.

`after_restore` is for an operator who has restored the register from a backup (H72), with all
writers stopped:

    1  begin an incarnation    creations that began before the restore notice it at their commit
    2  delete the sources that no record names    a forgotten writer's COPY finds nothing to copy
    3  recover                 records of the backup are finished, or superseded by existing objects

`collect` is for the sweep (H23, H24); the caller knows the collected boundary: the log numbers and
generations that no root needs.

- A temporary object is removed when it is old and its destination is decided: the record there
  names another source, or is committed. A source that no record names is kept while its destination
  is open, however old it is: its writer may only be paused, and its insert may yet win. Below the
  collected boundary no insert can win any more, and it is removed.
- A record is removed when its destination is below the collected boundary and has no object. A
  record without an object above the boundary is either in progress or an alarm; one with an object
  keeps the name taken. Deleting an object deletes its record, so these are the leftovers of a crash
  in between.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

from reef.errors import (
    CorruptionError,
    ErrorKind,
    InvalidInputError,
    NotFoundError,
    ReefError,
    UnavailableError,
)
from reef.stores.base import ObjectInfo, Outcome, Part, Store, WriteResult, check_key
from reef.stores.two_phase.finishing import (
    Content,
    Finish,
    Finisher,
    Placement,
    stuck_error,
    two_winners,
)
from reef.stores.two_phase.register import (
    Record,
    Register,
    RetryingRegister,
    destination_of,
    is_temporary,
    new_record,
    same_attempt,
)
from reef.stores.wrappers.base import Wrapper
from reef.stores.wrappers.policies import Backoff, RetryPolicy


@dataclass(frozen=True, slots=True)
class _Claim:
    """The result of an insert."""

    holder: Record | None
    """The record that holds the destination; None if it is unknown."""
    doubt: Exception | None = None
    """Set if an insert had no response, and may still land."""


class TwoPhase(Wrapper):
    """Wraps the retrying store, inside the read-back: unknown outcomes are sent again."""

    def __init__(self, inner: Store, register: Register, policy: RetryPolicy | None = None) -> None:
        super().__init__(inner)
        self.policy = policy or RetryPolicy()
        # If-Match would need a register of versions; the engine does without (docs/adr/0013).
        self.capabilities = replace(inner.capabilities, create_only=True, if_match=False)
        self.register = RetryingRegister(register, self.runtime, self.policy)
        self.finisher = Finisher(inner, self.register)
        self._in_doubt: dict[str, list[Record]] = {}
        """Records of this process whose INSERT had no response, until their names are decided."""

    def __reduce__(self) -> tuple[Any, ...]:
        return TwoPhase, (self.inner, self.register.inner, self.policy)

    @property
    def cas(self) -> str:
        return self.register.name

    # --- create -------------------------------------------------------------------
    def create(self, key: str, body: bytes) -> WriteResult:
        self._check_name(key)
        if self._is_there(key):
            return self._settle_inserts(key, WriteResult(Outcome.EXISTS))
        with suppress(UnavailableError):  # then the insert finds out
            self.finisher.prepare(self.register.inner)
        record = new_record(self.runtime, key, body)
        self.inner.put(record.source, body)
        claim = self._claim(record)
        if claim.doubt is not None:
            self._in_doubt.setdefault(key, []).append(record)
        if claim.holder is None:
            return WriteResult(Outcome.UNKNOWN, cause=claim.doubt)
        if claim.holder.source == record.source:
            result = self._complete(record, body)
        else:
            result = self._help(record, claim.holder, claim.doubt)
        return self._settle_inserts(key, result)

    def _claim(self, record: Record) -> _Claim:
        """Insert until it is clear whose the destination is.

        The source stays where it is while there is doubt: an insert that lands late names it.
        """
        backoff = Backoff(self.runtime, self.policy)
        doubt: Exception | None = None
        while True:
            try:
                if self.register.insert(record):
                    return _Claim(record, doubt)
                holder = self.register.read_one(record.destination)
                if holder is not None:
                    if not self._free_if_deleted(holder):
                        return _Claim(holder, doubt)
                    continue
            except UnavailableError as error:
                doubt = error
            except ReefError:
                if doubt is None:
                    self._drop(record.source)
                    raise
                return _Claim(None, doubt)
            if not backoff.wait():
                return _Claim(None, doubt)

    def _free_if_deleted(self, holder: Record) -> bool:
        """Whether the holder's object was deleted; takes its record away, if so."""
        if not holder.committed or self._is_there(holder.destination):
            return False
        self.inner.delete(holder.source)
        if self._is_there(holder.destination):  # a copy that was under way came first
            return False
        self.register.delete([holder])
        return True

    def _complete(self, record: Record, body: bytes) -> WriteResult:
        """Steps 3 to 5, of the winner."""
        try:
            placed = self._copy(record, body)
            if placed is Placement.TAKEN:
                return WriteResult(Outcome.EXISTS)
            if placed is Placement.STUCK:
                raise UnavailableError(
                    f"the source {record.source} vanishes before it can be copied",
                    object=record.destination,
                )
            if placed is Placement.MOVED:
                return self._decide(record)
        except CorruptionError:
            raise
        except ReefError as error:  # the record is durable: the next process copies
            return WriteResult(Outcome.UNKNOWN, cause=error)
        return self._seal(record)

    def _copy(self, record: Record, body: bytes) -> Placement:
        return self.finisher.place(record, lambda: self.inner.put(record.source, body))

    def _seal(self, record: Record) -> WriteResult:
        """Steps 4 and 5: CREATED unless the register has given the name to another."""
        try:
            is_sealed = self.finisher.seal(record)
        except ReefError as error:  # readable is enough; the rest is left to recovery
            if error.kind is ErrorKind.OTHER_CAS:
                return WriteResult(Outcome.UNKNOWN, cause=error)
            is_sealed = True
        try:
            return WriteResult(Outcome.CREATED) if is_sealed else self._decide(record)
        except UnavailableError as error:
            return WriteResult(Outcome.UNKNOWN, cause=error)

    def _decide(self, record: Record) -> WriteResult:
        """Return the outcome if the register no longer has the record as it was inserted."""
        holder = self.register.read_one(record.destination)
        if holder is not None and holder.source != record.source:
            return self._yield_to(record, holder)
        content = self.finisher.content(record)
        if holder is None or holder.committed:
            self._drop(record.source)
        if content is Content.OTHER:  # also if committed: DynamoDB commits, and compares then
            return WriteResult(Outcome.EXISTS)
        if content is Content.RIGHT or (holder is not None and holder.committed):
            return WriteResult(Outcome.CREATED)
        gone = UnavailableError(
            f"the register has no record of {record.destination} any more: the object was deleted "
            "meanwhile, or the register was restored from a backup",
            object=record.destination,
        )
        return WriteResult(Outcome.UNKNOWN, cause=gone)

    def _yield_to(self, record: Record, holder: Record) -> WriteResult:
        """Another has the name, after a restore or a deletion. Our bytes may be there, or not."""
        self._drop(record.source)
        is_ours = holder.checksum != record.checksum and (
            self.finisher.content(record) is Content.RIGHT
        )
        if is_ours and holder.committed:
            raise two_winners(record, holder)
        result = self._help(record, holder, None)
        # A record that finds our bytes at its destination is superseded by them.
        is_ours = is_ours and self.finisher.content(record) is Content.RIGHT
        return WriteResult(Outcome.CREATED) if is_ours else result

    def _help(self, record: Record, holder: Record, doubt: Exception | None) -> WriteResult:
        """Finish the winner's record: EXISTS is reported when readers can see the object."""
        if doubt is None:
            self._drop(record.source)
        if not holder.committed:
            try:
                finish = self.finisher.finish(holder)
            except UnavailableError as error:
                if doubt is None:
                    raise
                return WriteResult(Outcome.UNKNOWN, cause=error)
            if finish is Finish.STUCK:
                raise stuck_error(holder)
        return WriteResult(Outcome.EXISTS)

    def _settle_inserts(self, key: str, result: WriteResult) -> WriteResult:
        """Withdraw the inserts of this name that had no response, before a definite result.

        One of them could land after the name was deleted, and bring back bytes that its writer
        knows to be gone.
        """
        if result.outcome is Outcome.UNKNOWN or key not in self._in_doubt:
            return result
        records = self._in_doubt.pop(key, [])
        try:
            holder = self.register.read_one(key)
            for record in records:
                if holder is None or holder.source != record.source or holder.committed:
                    self.finisher.withdraw(record)
        except ReefError as error:
            self._in_doubt.setdefault(key, []).extend(records)
            if result.landed:  # the object is there; only a deletion makes it matter
                return result
            return WriteResult(Outcome.UNKNOWN, cause=error)
        return result

    def _drop(self, source: str) -> None:
        with suppress(UnavailableError):  # collected later
            self.inner.delete(source)

    def _is_there(self, key: str) -> bool:
        try:
            self.inner.head(key)
        except NotFoundError:
            return False
        return True

    def replace(self, key: str, body: bytes, tag: str) -> WriteResult:
        raise InvalidInputError(
            f"{self.url} with a register has create-only writes, and no If-Match",
            kind=ErrorKind.UNSUPPORTED_BY_STORE,
            object=check_key(key),
        )

    # --- delete -------------------------------------------------------------------
    def delete_many(self, keys: Sequence[str]) -> None:
        """Object first, record last; in between the name is taken, and empty."""
        records = self.register.read([check_key(key) for key in keys]) if keys else []
        for record in records:
            if not record.committed:
                self.register.commit(record)  # a helper that is finishing it finds it done
        if records:
            self.inner.delete_many([record.source for record in records])
        self.inner.delete_many(keys)
        if records:
            self.register.delete(records)

    # --- names --------------------------------------------------------------------
    def list(self, prefix: str = "", start_after: str = "") -> Iterator[ObjectInfo]:
        return _without_temporary(self.inner.list(prefix, start_after))

    def put(self, key: str, body: bytes) -> str | None:
        return self.inner.put(self._check_name(key), body)

    def upload(self, key: str, parts: Iterable[bytes]) -> int:
        return self.inner.upload(self._check_name(key), parts)

    def copy(self, source: str, target: str) -> None:
        self.inner.copy(source, self._check_name(target))

    def _compose(self, key: str, parts: Sequence[Part]) -> int:
        return self.inner.compose(self._check_name(key), parts)

    def _check_name(self, key: str) -> str:
        if is_temporary(check_key(key)):
            raise InvalidInputError(
                f"key {key!r} is named like a temporary object of a two-phase write",
                kind=ErrorKind.INVALID_KEY,
                object=key,
            )
        return key


def _without_temporary(infos: Iterable[ObjectInfo]) -> Iterator[ObjectInfo]:
    return (info for info in infos if not is_temporary(info.key))


def find_two_phase(store: Store) -> TwoPhase | None:
    """Return the two-phase store among the wrappers of a store, if there is one."""
    while isinstance(store, Wrapper):
        if isinstance(store, TwoPhase):
            return store
        store = store.inner
    return None


@dataclass(frozen=True, slots=True)
class RegisterRecovery:
    """The records that a recovery found unfinished, by their results: destinations."""

    finished: tuple[str, ...] = ()
    done: tuple[str, ...] = ()
    """Finished by another process meanwhile."""
    stuck: tuple[Record, ...] = ()
    """Their bytes are nowhere. Never deleted by itself."""
    superseded: tuple[Record, ...] = ()
    """Their destinations have other bytes, of a creation that a restored register forgot."""
    sources_removed: tuple[str, ...] = ()
    """After a restore: temporary objects that no record names."""

    def to_dict(self) -> dict[str, Any]:
        """Return all fields, without those of restores while they are empty."""
        fields = asdict(self)
        restored = ("superseded", "sources_removed")
        return {name: value for name, value in fields.items() if value or name not in restored}


def recover(store: Store, prefix: str = "") -> RegisterRecovery:
    """Finish all records below a prefix; does nothing on a store without a register."""
    two_phase = find_two_phase(store)
    if two_phase is None:
        return RegisterRecovery()
    ended: dict[Finish, list[Record]] = {finish: [] for finish in Finish}
    for record in two_phase.register.all(prefix, unfinished=True):
        ended[two_phase.finisher.finish(record)].append(record)
    return RegisterRecovery(
        tuple(record.destination for record in ended[Finish.FINISHED]),
        tuple(record.destination for record in ended[Finish.DONE]),
        tuple(ended[Finish.STUCK]),
        tuple(ended[Finish.SUPERSEDED]),
    )


def after_restore(store: Store) -> RegisterRecovery:
    """Recover a bucket whose register was restored from a backup; no writer may be open."""
    two_phase = find_two_phase(store)
    if two_phase is None:
        return RegisterRecovery()
    two_phase.register.begin_incarnation()
    sources = {
        info.key: destination
        for info in two_phase.inner.list()
        if (destination := destination_of(info.key)) is not None
    }
    records = two_phase.register.read(sorted(set(sources.values())))
    named = {record.destination: record.source for record in records}
    removed = tuple(
        source
        for source, destination in sources.items()
        if not same_attempt(named.get(destination, ""), source)
    )
    if removed:
        two_phase.inner.delete_many(removed)
    return replace(recover(store), sources_removed=removed)


# --- collection -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Leftovers:
    """The leftovers that were removed, or would be."""

    temporaries: tuple[str, ...] = ()
    records: tuple[str, ...] = ()
    """Their destinations."""


def collect(
    store: Store,
    prefix: str,
    *,
    is_below: Callable[[str], bool],
    older_than_s: float,
    apply: bool,
) -> Leftovers:
    """Remove leftovers below a prefix; nothing on a store without a register.

    `is_below` returns whether a destination is below the collected boundary.
    """
    two_phase = find_two_phase(store)
    if two_phase is None:
        return Leftovers()
    # Records before objects: an object of a record that is finished by now is in the listing.
    records = {record.destination: record for record in two_phase.register.all(prefix)}
    infos = list(two_phase.inner.list(prefix))
    sources = tuple(_old_sources(two_phase, infos, is_below, older_than_s))
    there = {info.key for info in infos}
    gone = tuple(key for key in records if key not in there and is_below(key))
    if apply:
        two_phase.inner.delete_many(sources)
        two_phase.delete_many(gone)
    return Leftovers(sources, gone)


def _old_sources(
    two_phase: TwoPhase,
    infos: list[ObjectInfo],
    is_below: Callable[[str], bool],
    older_than_s: float,
) -> Iterator[str]:
    temporary = {i.key: key for i in infos if (key := destination_of(i.key)) is not None}
    if not temporary:
        return
    latest_s = two_phase.now() - older_than_s - two_phase.capabilities.clock_resolution_s
    old = [info.key for info in infos if info.key in temporary and info.last_modified_s < latest_s]
    # Read now: decided once is decided for ever.
    destinations = sorted({temporary[key] for key in old})
    records = {record.destination: record for record in two_phase.register.read(destinations)}
    for source in old:
        destination = temporary[source]
        if _is_useless(source, records.get(destination), below=is_below(destination)):
            yield source


def _is_useless(source: str, record: Record | None, *, below: bool) -> bool:
    """Whether no process will ever copy from a source."""
    if record is None:
        return below
    return not same_attempt(record.source, source) or record.committed
