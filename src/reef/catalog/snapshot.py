"""Snapshots of a catalog, reads of their keys, and the leases that pin them.

A snapshot is made from a head without a request, since the head has the checkpoint's number and
sizes. It is plain data: `to_dict` and `from_dict` carry it to another process, where `session_at`
pins and reads it.

A view searches a key in the segments after the checkpoint, by their index, and then in the
checkpoint, of which only the block with the key is read.

A session pins a state in this order (H22):

    the newest head that is known here → lease → the head as it is now

A lease names the state w of the first head, and pins everything that any head from w on names: the
segments after w's checkpoint, and the checkpoints from that one on. The first head may be old: a
lease on an older state pins more, never less. Only a process that knows no head yet loads one for
it. Garbage collection lists the leases only after its plan is installed, so that either it sees the
lease, or the session sees a head that no longer names those objects. A margin is added to a lease's
term, for clocks that are cut to seconds.

Threads that race for one object only make each other fail (H25). So a process commits to one
catalog one at a time, and writes only a few leases and plans at a time (`CatalogLimits`). All
handles of a process on one address share these limits.

Nothing runs in the background unless requested: a session renews its lease with `heartbeat`, or
starts a `LeaseKeeper` (`reef.stores.leases`).
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any
from weakref import WeakValueDictionary

import msgspec

from reef.catalog.checkpoints import CheckpointMeta, CheckpointStore
from reef.catalog.head import CheckpointRef, HeadStore, KnownHead, open_register
from reef.catalog.segments import (
    BlobCache,
    CatalogSegment,
    CatalogSegmentStore,
    ChainIndex,
    ChainTip,
)
from reef.errors import InvalidInputError, UnavailableError
from reef.paths import CatalogNames
from reef.runtime import ConditionVariable, Runtime, leaf_lock
from reef.stores import RetryPolicy, Store
from reef.stores.leases import (
    UNREADABLE_TTL_MS,
    FoundLease,
    HeldLease,
    Lease,
    LeaseRecord,
    find_leases,
)
from reef.telemetry import Events, Metrics
from reef.types import KeyRange


@dataclass(frozen=True, slots=True)
class CatalogSnapshot:
    """One state of a catalog, with all that a reader needs to find its objects."""

    head_tag: str
    txn_id: int
    last_segment_seq: int
    checkpoint_seq: int | None
    checkpoint_id: str | None
    revision: int
    """Number of publishes of the head."""
    write_ids: tuple[str, ...]
    """Write ids of the last segments, oldest first."""
    checkpoint_bytes: int | None = None
    checkpoint_tail_bytes: int | None = None

    @classmethod
    def of(cls, known: KnownHead) -> "CatalogSnapshot":
        """Return the snapshot of a head."""
        head, checkpoint = known.head, known.head.checkpoint
        return cls(
            head_tag=known.version.tag,
            txn_id=head.last_txn_id,
            last_segment_seq=head.last_segment_seq,
            checkpoint_seq=checkpoint.seq if checkpoint else None,
            checkpoint_id=checkpoint.id if checkpoint else None,
            revision=head.revision,
            write_ids=head.recent,
            checkpoint_bytes=checkpoint.bytes if checkpoint else None,
            checkpoint_tail_bytes=checkpoint.tail_bytes if checkpoint else None,
        )

    @property
    def floor(self) -> int:
        """The last segment that is not needed to read this state."""
        return self.checkpoint_seq or 0

    @property
    def tip(self) -> ChainTip:
        return ChainTip(self.last_segment_seq, self.write_ids)

    @property
    def checkpoint(self) -> CheckpointRef | None:
        if self.checkpoint_id is None:
            return None
        sizes = (self.checkpoint_bytes or 0, self.checkpoint_tail_bytes or 0)
        # A checkpoint has the transaction id of its last segment.
        return CheckpointRef(self.checkpoint_id, self.floor, self.floor, *sizes)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, fit for JSON."""
        return {**asdict(self), "write_ids": list(self.write_ids)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "CatalogSnapshot":
        """Return the snapshot that `to_dict` converted."""
        try:
            return msgspec.convert(values, cls)
        except msgspec.ValidationError as error:
            raise InvalidInputError(f"not a snapshot of a catalog: {error}") from error


@dataclass(frozen=True, slots=True)
class CommitReceipt:
    """Identity of a commit, also of one whose outcome is unknown: see `Catalog.resolve`."""

    seq: int
    txn_id: int
    write_id: str
    base_write_id: str


class CatalogView:
    """Reads at one snapshot. Objects are fetched on demand."""

    def __init__(
        self, snapshot: CatalogSnapshot, segments: CatalogSegmentStore, checkpoints: CheckpointStore
    ) -> None:
        self.snapshot = snapshot
        self._segments = segments
        self._checkpoints = checkpoints
        self._loaded: ChainIndex | None = None

    def get(self, key: bytes) -> bytes | None:
        index = self._index()
        seq = index.find(key, self.snapshot.last_segment_seq)
        write_id = None if seq is None else index.write_id(seq)
        if seq is not None and write_id is not None:
            return self._segments.read(seq, write_id).records[key]
        checkpoint = self.snapshot.checkpoint
        return None if checkpoint is None else self._checkpoints.get(checkpoint, key)

    def scan(self, key_range: KeyRange) -> dict[bytes, bytes]:
        """Return the pairs of a range, sorted by key."""
        checkpoint = self.snapshot.checkpoint
        state = {} if checkpoint is None else dict(self._checkpoints.scan(checkpoint, key_range))
        index = self._index()
        changed = index.find_range(key_range, self.snapshot.last_segment_seq)
        named = [(seq, index.write_id(seq) or "") for seq in sorted(set(changed.values()))]
        segments = {segment.seq: segment for segment in self._segments.read_many(named)}
        changes = {key: segments[seq].records[key] for key, seq in changed.items()}
        return dict(sorted(apply_records(state, changes).items()))

    def checkpoint(self) -> CheckpointMeta | None:
        """Return the metadata of the snapshot's checkpoint, if it has one."""
        checkpoint = self.snapshot.checkpoint
        return None if checkpoint is None else self._checkpoints.meta(checkpoint)

    def segments(self) -> list[CatalogSegment]:
        """Return the segments after the checkpoint, oldest first."""
        return self._segments.chain(self.snapshot.tip, self.snapshot.floor)

    def _index(self) -> ChainIndex:
        if self._loaded is None:
            tip, floor = self.snapshot.tip, self.snapshot.floor
            is_empty = tip.last_seq == floor
            self._loaded = ChainIndex(floor) if is_empty else self._segments.index(tip, floor)
        return self._loaded


def apply_records(
    state: dict[bytes, bytes], records: Mapping[bytes, bytes | None]
) -> dict[bytes, bytes]:
    """Apply the records of a segment to a state, in place, and return it."""
    for key, value in records.items():
        if value is None:
            state.pop(key, None)
        else:
            state[key] = value
    return state


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """Objects that garbage collection retains, besides those that the head and live leases need.

    Segments are retained from the oldest retained checkpoint on, so that `session_at` can read
    every snapshot taken since then.
    """

    checkpoints_last: int = 2
    """Number of newest checkpoints that are retained."""
    checkpoints_min_age_s: float = 900.0
    """Younger checkpoints are retained too."""
    grace_s: float = 60.0
    """Time between the plan and the deletion, for readers without a lease."""
    lease_ttl_s: float = 60.0
    """How long a session lives without a heartbeat."""

    def __post_init__(self) -> None:
        if self.checkpoints_last < 1 or self.lease_ttl_s <= 0:
            raise InvalidInputError("checkpoints_last is at least 1, and lease_ttl_s above 0")
        if self.grace_s < 0 or self.checkpoints_min_age_s < 0:
            raise InvalidInputError("grace_s and checkpoints_min_age_s are not negative")


COMMITS_MAX = 1
OTHERS_MAX = 4


class Turnstile:
    """A counting semaphore of a runtime."""

    def __init__(self, runtime: Runtime, width: int) -> None:
        self._free = width
        self._turn: ConditionVariable = runtime.condition()

    @contextmanager
    def pass_through(self) -> Iterator[None]:
        """Hold one of the places during the block."""
        with self._turn:
            while self._free == 0:
                self._turn.wait()
            self._free -= 1
        try:
            yield
        finally:
            with self._turn:
                self._free += 1
                self._turn.notify()


class CatalogLimits:
    """Limits on concurrent writes to one catalog in one process."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.commits = Turnstile(runtime, COMMITS_MAX)
        self.leases = Turnstile(runtime, OTHERS_MAX)
        self.plans = Turnstile(runtime, OTHERS_MAX)


_shared: "WeakValueDictionary[tuple[int, int, str], CatalogLimits]" = WeakValueDictionary()
_lock = leaf_lock()


def limits_of(runtime: Runtime, address: str) -> CatalogLimits:
    """Return the limits of this process for a catalog; a fork starts with new ones."""
    with _lock:
        # The limits keep their runtime alive, so its id is not reused while they are shared.
        key = (id(runtime), runtime.process_id(), address)
        known = _shared.get(key)
        if known is None:
            known = _shared[key] = CatalogLimits(runtime)
        return known


class CatalogContext:
    """Stores and settings of one catalog, over a store whose conditional writes are known."""

    def __init__(
        self,
        store: Store,
        names: CatalogNames,
        *,
        cache: BlobCache | None,
        retention: Retention,
        backoff: RetryPolicy,
        metrics: Metrics,
        events: Events,
    ) -> None:
        self.store = store
        self.runtime = store.runtime
        self.names = names
        self.retention = retention
        self.backoff = backoff
        self.metrics = metrics
        self.events = events
        self.limits = limits_of(store.runtime, f"{store.url} {names.root}")
        self.heads = HeadStore(open_register(store, names.head, names.heads), store.runtime)
        self.plans = open_register(store, names.plan, names.plans)
        """The register of the garbage-collection plan."""
        self.segments = CatalogSegmentStore(store, names, cache)
        self.checkpoints = CheckpointStore(store, names, cache)

    def newest_seq(self) -> int:
        """Return the highest number of a segment or a checkpoint; 0 if there is none."""
        seqs = [each.seq for each in self.segments.list_segments()]
        seqs += [each.seq for each in self.checkpoints.list_checkpoints()]
        return max(seqs, default=0)

    def view(self, snapshot: CatalogSnapshot) -> CatalogView:
        return CatalogView(snapshot, self.segments, self.checkpoints)


# --- leases -------------------------------------------------------------------------

MARGIN_S = 5.0
PINS_MAX = 5


class SessionLease(LeaseRecord, frozen=True, kw_only=True):
    """The record of a session's lease."""

    snapshot_txn_id: int
    checkpoint_seq: int
    """Segments behind this one, and checkpoints from it on, are pinned."""


UNREADABLE = SessionLease(
    id="", owner="", ttl_ms=UNREADABLE_TTL_MS, snapshot_txn_id=0, checkpoint_seq=0
)
"""Substitute for a lease that cannot be decoded: it pins everything, for a day."""


def pin(context: CatalogContext, *, owner: str) -> tuple[KnownHead, HeldLease[SessionLease]]:
    """Return the newest head, and a lease that pins it."""
    before = context.heads.last or context.heads.load()
    for _ in range(PINS_MAX):
        lease = take_lease(context, CatalogSnapshot.of(before), owner)
        context.runtime.reach("catalog lease written")
        try:
            known = context.heads.load()
        except BaseException:
            lease.release()
            raise
        if known.head.checkpoint_seq >= before.head.checkpoint_seq:
            return known, lease
        lease.release()  # heads never go back: the catalog was lost, and this pins too little
        before = known
    raise UnavailableError("the head of the catalog goes back again and again")


def find_session_leases(context: CatalogContext, now_s: float) -> list[FoundLease[SessionLease]]:
    """Return all leases. `now_s` is the store's time, read before this is called."""
    margin_s = MARGIN_S + context.store.capabilities.clock_resolution_s
    return find_leases(context.store, context.names, UNREADABLE, now_s=now_s, margin_s=margin_s)


def take_lease(
    context: CatalogContext, snapshot: CatalogSnapshot, owner: str
) -> HeldLease[SessionLease]:
    """Write a lease on a snapshot."""
    record = SessionLease(
        id=context.runtime.ulid(),
        snapshot_txn_id=snapshot.txn_id,
        checkpoint_seq=snapshot.floor,
        owner=owner,
        ttl_ms=int(context.retention.lease_ttl_s * 1000),
    )
    gate = context.limits.leases.pass_through
    return HeldLease(Lease(context.store, context.names, record, subject="the catalog", gate=gate))
