"""Sessions: reads at one state, and changes that are applied atomically or not at all.

A session pins its state by a lease (`reef.catalog.snapshot`). A write session stages its changes in
memory and includes them in its own reads; it records every key and every range that it read, so
that `commit` detects whether any of them has changed since. Without `commit` nothing changes.

A session is used by one thread at a time. One that is garbage-collected without `commit` or `end`
issues a ResourceWarning: its lease delays garbage collection until it expires.
"""

import warnings
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import msgspec

from reef.catalog.commit import ConflictSet, commit
from reef.catalog.compaction import compact_if_due
from reef.catalog.gc import load_plan
from reef.catalog.head import KnownHead
from reef.catalog.snapshot import (
    CatalogContext,
    CatalogSnapshot,
    CatalogView,
    CommitReceipt,
    SessionLease,
    apply_records,
    take_lease,
)
from reef.errors import (
    UNDECODABLE,
    ClosedError,
    ConflictError,
    CorruptionError,
    ErrorKind,
    InvalidInputError,
    NotFoundError,
)
from reef.stores.leases import HeldLease, LeaseKeeper
from reef.types import KeyRange

Key = bytes | str
KEY_BYTES_MAX = 65_535
RECORD_BYTES = 16
SEGMENT_BYTES_MAX = 64 << 20
T = TypeVar("T")


class ValueCodec(Protocol):
    """Encodes values to bytes, and decodes them."""

    def encode(self, value: Any) -> bytes: ...
    def decode(self, data: bytes) -> Any: ...


class _BytesCodec:
    """Values are bytes."""

    def encode(self, value: Any) -> bytes:
        if not isinstance(value, bytes):
            raise InvalidInputError(
                f"a value is bytes, got {type(value).__name__}",
                hint="Open the catalog with codec=reef.catalog.JSON for other values",
            )
        return value

    def decode(self, data: bytes) -> Any:
        return data

    def __reduce__(self) -> str:
        return "BYTES"


class _JsonCodec:
    """Values are JSON documents."""

    def encode(self, value: Any) -> bytes:
        try:
            return msgspec.json.encode(value)
        except (TypeError, ValueError) as error:
            raise InvalidInputError(f"the value is not JSON: {error}") from error

    def decode(self, data: bytes) -> Any:
        try:
            return msgspec.json.decode(data)
        except UNDECODABLE as error:
            raise CorruptionError(
                f"a value is not JSON: {error}", hint="It was written with another codec"
            ) from error

    def __reduce__(self) -> str:
        return "JSON"


BYTES: ValueCodec = _BytesCodec()
JSON: ValueCodec = _JsonCodec()


def as_key(key: Key) -> bytes:
    """Return a key's bytes; text is UTF-8."""
    try:
        encoded = key.encode() if isinstance(key, str) else key
    except UnicodeEncodeError as error:
        raise InvalidInputError(
            f"the key is not text: {error}", kind=ErrorKind.INVALID_KEY
        ) from error
    if not isinstance(encoded, bytes) or not 1 <= len(encoded) <= KEY_BYTES_MAX:
        raise InvalidInputError(
            f"a key is text or bytes, 1 to {KEY_BYTES_MAX:,} of them, got {key!r:.80}",
            kind=ErrorKind.INVALID_KEY,
        )
    return encoded


def incomplete(txn_id: int, error: NotFoundError) -> CorruptionError:
    """Return the error for a missing object that no garbage collection may have deleted."""
    return CorruptionError(
        f"the state of transaction {txn_id} is incomplete: {error.message}",
        hint="Run `reef catalog verify`",
        **error.context,
    )


class _Session:
    """Base of both kinds: a pinned state, and its lease."""

    def __init__(
        self,
        context: CatalogContext,
        codec: ValueCodec,
        view: CatalogView,
        lease: HeldLease[SessionLease],
    ) -> None:
        self._context = context
        self._codec = codec
        self._view = view
        self._lease = lease
        self._ended = False

    @property
    def snapshot(self) -> CatalogSnapshot:
        """The state that is read."""
        return self._view.snapshot

    @property
    def ended(self) -> bool:
        """Whether it was committed or ended."""
        return self._ended

    def __repr__(self) -> str:
        state = "ended" if self._ended else "open"
        return f"<{type(self).__name__} at transaction {self.snapshot.txn_id}, {state}>"

    # --- reading ------------------------------------------------------------------
    def get(self, key: Key) -> Any:
        """Return the value, or None."""
        value = self._read(as_key(key))
        return None if value is None else self._codec.decode(value)

    def scan(self) -> list[tuple[bytes, Any]]:
        """Return all pairs, sorted by key."""
        return self.scan_range()

    def scan_range(
        self, start: Key | None = None, end: Key | None = None, *, prefix: Key | None = None
    ) -> list[tuple[bytes, Any]]:
        """Return the pairs from `start` up to, not including, `end`."""
        pairs = self._read_range(KeyRange.of(start, end, prefix))
        return [(key, self._codec.decode(value)) for key, value in pairs.items()]

    def _read(self, key: bytes) -> bytes | None:
        return self._read_pinned(lambda: self._view.get(key))

    def _read_range(self, key_range: KeyRange) -> dict[bytes, bytes]:
        return self._read_pinned(lambda: self._view.scan(key_range))

    def _read_pinned(self, read: Callable[[], T]) -> T:
        """Run a read; an object may be missing only if the lease has expired."""
        self._check_open()
        try:
            return read()
        except NotFoundError as error:
            if not self._lease.expired:
                raise incomplete(self.snapshot.txn_id, error) from error
            raise ConflictError(
                f"transaction {self.snapshot.txn_id} was garbage-collected: {error.message}",
                kind=ErrorKind.COLLECTED,
                hint="The session's lease has expired: begin another session and keep it alive",
            ) from error

    # --- the lease ----------------------------------------------------------------
    def heartbeat(self) -> None:
        """Renew the lease now; ConflictError if it is lost."""
        self._check_open()
        self._lease.heartbeat()

    def start_lease_keeper(self) -> LeaseKeeper:
        """Renew the lease from a thread, until the keeper is shut down or the session ends."""
        self._check_open()
        return self._lease.renew_in_background()

    keep_alive = start_lease_keeper

    def end(self) -> None:
        """Release the state; changes that were staged and not committed are dropped."""
        if not self._ended:
            self._ended = True
            self._lease.release()

    def _check_open(self) -> None:
        if self._ended:
            raise ClosedError("this catalog session has ended", hint="Begin another one")

    def __enter__(self: T) -> T:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def __del__(self) -> None:
        # No lock and no request: a finalizer runs in any thread, at any time.
        if not getattr(self, "_ended", True):
            warnings.warn(
                f"a {type(self).__name__} of a catalog was dropped without end() or commit()",
                ResourceWarning,
                source=self,
                stacklevel=2,
            )


class ReadSession(_Session):
    """Reads one state as long as its lease is alive."""


class WriteSession(_Session):
    """Reads one state, stages changes, and commits them together."""

    def __init__(
        self,
        context: CatalogContext,
        codec: ValueCodec,
        view: CatalogView,
        lease: HeldLease[SessionLease],
        base: KnownHead,
        *,
        auto_compact: bool = True,
    ) -> None:
        super().__init__(context, codec, view, lease)
        self._base = base
        self._auto_compact = auto_compact
        self._staged: dict[bytes, bytes | None] = {}
        self._staged_bytes = 0
        self._reads = ConflictSet()

    # --- staging ------------------------------------------------------------------
    def put(self, key: Key, value: Any) -> None:
        """Stage a value for a key."""
        self._stage(as_key(key), self._codec.encode(value))

    def delete(self, key: Key) -> None:
        """Stage the deletion of a key, which need not exist."""
        self._stage(as_key(key), None)

    def get_local(self, key: Key) -> Any:
        """Return the value that is staged for a key; None without one, or for a deletion."""
        staged = self._staged.get(as_key(key))
        return None if staged is None else self._codec.decode(staged)

    def scan_local(
        self, start: Key | None = None, end: Key | None = None, *, prefix: Key | None = None
    ) -> list[tuple[bytes, Any]]:
        """Return the staged pairs of a range; the value of a deletion is None."""
        staged = self._staged_in(KeyRange.of(start, end, prefix))
        return [
            (key, None if value is None else self._codec.decode(value))
            for key, value in sorted(staged.items())
        ]

    def _stage(self, key: bytes, value: bytes | None) -> None:
        self._check_open()
        staged_bytes = self._staged_bytes + _record_bytes(key, value)
        if key in self._staged:
            staged_bytes -= _record_bytes(key, self._staged[key])
        if staged_bytes > SEGMENT_BYTES_MAX:
            raise InvalidInputError(
                f"a catalog session stages at most {SEGMENT_BYTES_MAX:,} bytes",
                hint="A catalog is for metadata: store data in a namespace, and its name here",
            )
        self._staged[key], self._staged_bytes = value, staged_bytes

    def _staged_in(self, key_range: KeyRange) -> dict[bytes, bytes | None]:
        return {key: value for key, value in self._staged.items() if key_range.has(key)}

    # --- reading ------------------------------------------------------------------
    def _read(self, key: bytes) -> bytes | None:
        self._check_open()
        if key in self._staged:
            return self._staged[key]
        self._reads.keys.add(key)
        return super()._read(key)

    def _read_range(self, key_range: KeyRange) -> dict[bytes, bytes]:
        self._check_open()
        self._reads.ranges.append(key_range)
        pairs = apply_records(super()._read_range(key_range), self._staged_in(key_range))
        return dict(sorted(pairs.items()))

    # --- the end ------------------------------------------------------------------
    def commit(self) -> CommitReceipt:
        """Apply the changes atomically, and end the session.

        ConflictError: another transaction changed a key that was read or written here, and
        nothing was changed. OutcomeUnknownError: `Catalog.resolve(error.receipt)` decides it.
        """
        self._check_open()
        try:
            if not self._staged:  # every read was valid at the snapshot
                head = self._base.head
                return CommitReceipt(
                    head.last_segment_seq, head.last_txn_id, head.write_id, head.write_id
                )
            conflicts = ConflictSet(self._reads.keys | self._staged.keys(), self._reads.ranges)
            receipt = commit(self._context, self._base, conflicts, self._staged, self._lease.id)
        finally:
            self.end()
        if self._auto_compact:
            compact_if_due(self._context, receipt.seq)
        return receipt


def _record_bytes(key: bytes, value: bytes | None) -> int:
    return len(key) + len(value or b"") + RECORD_BYTES


def pin_at(
    context: CatalogContext, snapshot: CatalogSnapshot, *, owner: str
) -> HeldLease[SessionLease]:
    """Return a lease on an older snapshot; NotFoundError if it is, or may be, garbage-collected.

    The lease is written first, and then the plan is loaded, which may have discarded the state.
    """
    lease = take_lease(context, snapshot, owner)
    context.runtime.reach("catalog lease written")
    try:
        _check_retained(context, snapshot)
    except BaseException:
        lease.release()
        raise
    return lease


def _check_retained(context: CatalogContext, snapshot: CatalogSnapshot) -> None:
    retained_from = load_plan(context).plan.retained_from
    if snapshot.floor < retained_from:
        raise NotFoundError(
            f"the state of transaction {snapshot.txn_id} was garbage-collected: it begins with "
            f"segment {snapshot.floor}, the oldest retained is {retained_from}",
            kind=ErrorKind.COLLECTED,
            hint="Take a new snapshot, and keep a session open on it",
        )
