"""Sessions: reads at one state, and changes that become visible all at once, or not at all.

A session pins its state by a lease, in the order that makes it safe: the head that is known, the
lease, then the head that is used. A write session stages its changes in memory and sees them in
its own reads; it remembers every key and every range that it read, so that `commit` finds out
whether any of it has changed since. Who ends without `commit` has changed nothing.

A session belongs to one thread at a time. One that is dropped without `commit` or `end` says so
with a ResourceWarning: its lease holds collection back until it lapses.
"""

import warnings
from collections.abc import Callable
from typing import Any, TypeVar

from reef.catalog.commit import Footprint, commit
from reef.catalog.head import KnownHead
from reef.catalog.keeper import HeldLease, LeaseKeeper
from reef.catalog.parts import Parts
from reef.catalog.settings import Codec
from reef.catalog.snapshot import CommitReceipt, Snapshot
from reef.catalog.view import View, laid_over
from reef.errors import (
    ClosedError,
    ConflictError,
    CorruptionError,
    InvalidInputError,
    Kind,
    NotFoundError,
)
from reef.types import KeyRange

__all__ = ["Key", "ReadSession", "WriteSession", "as_key", "incomplete"]

Key = bytes | str
KEY_BYTES_MAX = 65_535
RECORD_BYTES = 16
SEGMENT_BYTES_MAX = 64 << 20
T = TypeVar("T")


def as_key(key: Key) -> bytes:
    """Return a key's bytes; text is UTF-8."""
    try:
        encoded = key.encode() if isinstance(key, str) else key
    except UnicodeEncodeError as error:
        raise InvalidInputError(f"the key is not text: {error}", kind=Kind.INVALID_KEY) from error
    if not isinstance(encoded, bytes) or not 1 <= len(encoded) <= KEY_BYTES_MAX:
        raise InvalidInputError(
            f"a key is text or bytes, 1 to {KEY_BYTES_MAX:,} of them, got {key!r:.80}",
            kind=Kind.INVALID_KEY,
        )
    return encoded


def incomplete(txn_id: int, error: NotFoundError) -> CorruptionError:
    """Return what it means that an object is gone which nobody may have collected."""
    return CorruptionError(
        f"the state of transaction {txn_id} is incomplete: {error.message}",
        hint="Run `reef catalog verify`",
        **error.context,
    )


class _Session:
    """What both kinds have in common: a pinned state, and a lease on it."""

    def __init__(self, parts: Parts, codec: Codec, view: View, lease: HeldLease) -> None:
        self._parts = parts
        self._codec = codec
        self._view = view
        self._lease = lease
        self._ended = False

    @property
    def snapshot(self) -> Snapshot:
        """The state that is read."""
        return self._view.snapshot

    @property
    def ended(self) -> bool:
        """Whether it was committed, or given up."""
        return self._ended

    def __repr__(self) -> str:
        state = "ended" if self._ended else "open"
        return f"<{type(self).__name__} at transaction {self.snapshot.txn_id}, {state}>"

    # --- reading ------------------------------------------------------------------
    def get(self, key: Key) -> Any:
        """Return the value, or None."""
        found = self._read(as_key(key))
        return None if found is None else self._codec.decode(found)

    def scan(self) -> list[tuple[bytes, Any]]:
        """Return all pairs, in the order of their keys."""
        return self.scan_range()

    def scan_range(
        self, start: Key | None = None, end: Key | None = None, *, prefix: Key | None = None
    ) -> list[tuple[bytes, Any]]:
        """Return the pairs from `start` up to, not including, `end`."""
        found = self._read_range(KeyRange.of(start, end, prefix))
        return [(key, self._codec.decode(value)) for key, value in found.items()]

    def _read(self, key: bytes) -> bytes | None:
        return self._pinned(lambda: self._view.get(key))

    def _read_range(self, wanted: KeyRange) -> dict[bytes, bytes]:
        return self._pinned(lambda: self._view.scan(wanted))

    def _pinned(self, read: Callable[[], T]) -> T:
        """What is read never changes; it can only be gone, if the lease has lapsed."""
        self._check_open()
        try:
            return read()
        except NotFoundError as error:
            if not self._lease.lapsed:
                raise incomplete(self.snapshot.txn_id, error) from error
            raise ConflictError(
                f"the state of transaction {self.snapshot.txn_id} was collected: {error.message}",
                kind=Kind.COLLECTED,
                hint="The session's lease has lapsed: begin another, and keep it alive",
            ) from error

    # --- the lease ----------------------------------------------------------------
    def heartbeat(self) -> None:
        """Renew the lease now; ConflictError if it is lost."""
        self._check_open()
        self._lease.heartbeat()

    def start_lease_keeper(self) -> LeaseKeeper:
        """Renew the lease from a thread, until the keeper is shut down or the session ends."""
        self._check_open()
        return LeaseKeeper(self._lease, self._parts.runtime)

    keep_alive = start_lease_keeper

    def end(self) -> None:
        """Give up the state; what was staged and not committed is dropped."""
        if not self._ended:
            self._ended = True
            self._lease.release()

    def _check_open(self) -> None:
        if self._ended:
            raise ClosedError("this session of a catalog has ended", hint="Begin another one")

    def __enter__(self: T) -> T:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def __del__(self) -> None:
        # No lock is taken and nothing is sent here: a finalizer runs wherever it likes.
        if not getattr(self, "_ended", True):
            warnings.warn(
                f"a {type(self).__name__} of a catalog was dropped without end() or commit()",
                ResourceWarning,
                source=self,
                stacklevel=2,
            )


class ReadSession(_Session):
    """Reads one state for as long as its lease lives."""


class WriteSession(_Session):
    """Reads one state, stages changes, and commits them together."""

    def __init__(
        self, parts: Parts, codec: Codec, view: View, lease: HeldLease, base: KnownHead
    ) -> None:
        super().__init__(parts, codec, view, lease)
        self._base = base
        self._staged: dict[bytes, bytes | None] = {}
        self._staged_bytes = 0
        self._reads = Footprint()

    # --- staging ------------------------------------------------------------------
    def put(self, key: Key, value: Any) -> None:
        """Set a key's value, once this is committed."""
        self._stage(as_key(key), self._codec.encode(value))

    def delete(self, key: Key) -> None:
        """Remove a key, once this is committed; one that is not there is fine."""
        self._stage(as_key(key), None)

    def get_local(self, key: Key) -> Any:
        """Return what is staged for a key; None if nothing is, or its deletion."""
        staged = self._staged.get(as_key(key))
        return None if staged is None else self._codec.decode(staged)

    def scan_local(
        self, start: Key | None = None, end: Key | None = None, *, prefix: Key | None = None
    ) -> list[tuple[bytes, Any]]:
        """Return what is staged in a range; None for deletions."""
        wanted = KeyRange.of(start, end, prefix)
        return [
            (key, None if value is None else self._codec.decode(value))
            for key, value in sorted(self._staged.items())
            if wanted.has(key)
        ]

    def _stage(self, key: bytes, value: bytes | None) -> None:
        self._check_open()
        staged_bytes = self._staged_bytes + _record_bytes(key, value)
        if key in self._staged:
            staged_bytes -= _record_bytes(key, self._staged[key])
        if staged_bytes > SEGMENT_BYTES_MAX:
            raise InvalidInputError(
                f"a session of a catalog stages up to {SEGMENT_BYTES_MAX:,} bytes",
                hint="A catalog is for metadata: keep the data in a namespace, and its name here",
            )
        self._staged[key], self._staged_bytes = value, staged_bytes

    # --- reading ------------------------------------------------------------------
    def _read(self, key: bytes) -> bytes | None:
        self._check_open()
        if key in self._staged:
            return self._staged[key]
        self._reads.keys.add(key)
        return super()._read(key)

    def _read_range(self, wanted: KeyRange) -> dict[bytes, bytes]:
        self._check_open()
        self._reads.ranges.append(wanted)
        found = super()._read_range(wanted)
        return dict(sorted(laid_over(found, self._staged, wanted).items()))

    # --- the end ------------------------------------------------------------------
    def commit(self) -> CommitReceipt:
        """Make the changes visible, all at once, and end the session.

        ConflictError: others changed what was read or written here; nothing was changed.
        OutcomeUnknownError: it may be committed; `Catalog.resolve(error.receipt)` tells.
        """
        self._check_open()
        try:
            if not self._staged:  # all that was read was true at the snapshot
                head = self._base.head
                return CommitReceipt(
                    head.last_segment_seq, head.last_txn_id, head.write_id, head.write_id
                )
            footprint = Footprint(self._reads.keys | self._staged.keys(), self._reads.ranges)
            return commit(self._parts, self._base, footprint, self._staged, self._lease.id)
        finally:
            self.end()


def _record_bytes(key: bytes, value: bytes | None) -> int:
    return len(key) + len(value or b"") + RECORD_BYTES
