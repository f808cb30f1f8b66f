"""The head: the document that determines the state of a catalog.

It names the newest checkpoint and the last segment. Each segment names its predecessor, so the
head's `write_id` identifies the whole history. The last write ids are listed too (`recent`): a
reader fetches the segments it needs in parallel, and a writer without a response finds its own
segment without a walk. Every publish increments `revision`; a commit increments
`last_segment_seq` and `last_txn_id` by one, a compaction sets the checkpoint. None of them ever
decreases, which leases and garbage collection rely on.

Head and garbage-collection plan are documents: JSON with a checksum in front, readable by people.

    {"crc32c":"0f3a5c77","document":{…}}

The checksum covers the bytes of the inner object, and the bytes around it are fixed, so every
flipped bit is detected.

Both are stored in registers, which change by compare-and-swap only. Where the store has If-Match,
a register is one object, replaced by tag; every body has a nonce, so that no tag repeats (H5).
Elsewhere each version is an object of its own, created by a process that read the one before:

    If-Match     HEAD.json                    replace(tag)
    numbered     heads/00000000000000000007   create(8)

A swap has three outcomes. LANDED: this version is, or was, the newest. LOST: another one came
first. UNKNOWN: it may have landed, or may land later; only a later version shows which. `trim`
removes old numbers long after they were superseded. A slow create could then land on a number
that was removed, so one that took more than half of that time is UNKNOWN too (H14).
"""

import re
from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

import msgspec

from reef.catalog.segments import CatalogSegment
from reef.errors import UNDECODABLE, NotFoundError, UnavailableError
from reef.formats.coding import corrupt, crc32c, unsupported
from reef.runtime import Runtime, Stopwatch, leaf_lock
from reef.stores import Outcome, Store
from reef.stores.base import reread_if_damaged

# --- documents ----------------------------------------------------------------------

OPENING = re.compile(rb'\{"crc32c":"([0-9a-f]{8})","document":')
OPENING_BYTES = 32
D = TypeVar("D", bound=msgspec.Struct)


def encode_document(document: msgspec.Struct) -> bytes:
    """Encode a document with its checksum."""
    inner = msgspec.json.encode(document)
    return b'{"crc32c":"%08x","document":%s}' % (crc32c(inner), inner)


def decode_document(data: bytes, kind: type[D], name: str) -> D:
    """Decode a document; CorruptionError with the offset of the damage."""
    opening = OPENING.match(data)
    if opening is None:
        raise corrupt(name, 0, f"expected the start of a document, found {data[:OPENING_BYTES]!r}")
    inner = data[OPENING_BYTES:-1]
    if data[-1:] != b"}" or len(data) <= OPENING_BYTES + 1:
        raise corrupt(name, len(data), "the end of the document is missing")
    if f"{crc32c(inner):08x}".encode() != opening[1]:
        raise corrupt(name, OPENING_BYTES, "checksum of the document does not match")
    try:
        return msgspec.json.decode(inner, type=kind)
    except UNDECODABLE as error:
        raise corrupt(name, OPENING_BYTES, f"not a {kind.__name__}: {error}") from error


# --- registers ----------------------------------------------------------------------

RETAINED_S = 900.0
"""Minimum time that a superseded number is kept."""
RETAINED_MIN = 16
"""Superseded numbers that are kept, whatever their age."""
LISTINGS_MAX = 5


class Swap(StrEnum):
    """Outcome of a compare-and-swap."""

    LANDED = "landed"
    LOST = "lost"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Version:
    """Content of a register when it was read; without a body if it was empty."""

    body: bytes | None
    name: str
    """The object that holds it."""
    tag: str
    """The tag or the number that a swap builds upon; empty without a body."""
    read_at: Stopwatch
    """Started before the request that read it was sent."""


class CasRegister(ABC):
    """One small document, read and swapped."""

    @abstractmethod
    def load(self) -> Version:
        """Return the newest version."""

    @abstractmethod
    def swap(self, version: Version, body: bytes) -> tuple[Swap, Version]:
        """Replace a version by `body`; an error means that nothing was written."""

    def trim(self, now_s: float) -> int:
        """Remove versions that were superseded long ago; return their number."""
        return 0


def open_register(store: Store, name: str, numbered: str) -> CasRegister:
    """Return the register `name`, or the one below the prefix `numbered` without If-Match."""
    if store.capabilities.if_match:
        return _TaggedRegister(store, name)
    return _NumberedRegister(store, numbered)


class _TaggedRegister(CasRegister):
    """One object, replaced by its tag."""

    def __init__(self, store: Store, name: str) -> None:
        self._store = store
        self._name = name

    def load(self) -> Version:
        read_at = self._store.runtime.stopwatch()
        try:
            stored = self._store.get_tagged(self._name)
        except NotFoundError:
            return Version(None, self._name, "", read_at)
        if stored.tag is None:
            raise UnavailableError(f"{self._store.url} returned no tag of {self._name}")
        return Version(stored.body, self._name, stored.tag, read_at)

    def swap(self, version: Version, body: bytes) -> tuple[Swap, Version]:
        read_at = self._store.runtime.stopwatch()
        if version.body is None:
            result = self._store.create(self._name, body)
        else:
            result = self._store.replace(self._name, body, version.tag)
        if result.landed and result.tag is not None:
            return Swap.LANDED, Version(body, self._name, result.tag, read_at)
        # A store that returns no tag leaves the outcome to the next read.
        known = result.outcome in (Outcome.EXISTS, Outcome.CHANGED)
        return (Swap.LOST if known else Swap.UNKNOWN), version


class _NumberedRegister(CasRegister):
    """One object per version; the highest number is the newest."""

    def __init__(self, store: Store, prefix: str) -> None:
        self._store = store
        self._prefix = prefix
        self._known = 0
        """The highest number seen: listings begin there."""

    def load(self) -> Version:
        for _ in range(LISTINGS_MAX):
            read_at = self._store.runtime.stopwatch()
            numbers = self._numbers(self._known - 1)
            if not numbers and self._known:  # the newest is never removed: all of it was lost
                self._known = 0
                continue
            if not numbers:
                return Version(None, self._prefix, "", read_at)
            try:
                name = self._name(numbers[-1])
                newest = Version(self._store.get(name), name, str(numbers[-1]), read_at)
            except NotFoundError:  # superseded and removed meanwhile
                continue
            self._known = max(self._known, numbers[-1])
            return newest
        raise UnavailableError(
            f"versions below {self._prefix} are removed faster than they can be read",
            object=self._prefix,
        )

    def swap(self, version: Version, body: bytes) -> tuple[Swap, Version]:
        if version.read_at.elapsed_s() > RETAINED_S / 2:
            newest = self.load()
            if newest.tag != version.tag:
                return Swap.LOST, newest
            version = newest
        sent_at = self._store.runtime.stopwatch()
        number = int(version.tag or 0) + 1
        name = self._name(number)
        result = self._store.create(name, body)
        if result.outcome is Outcome.EXISTS:
            return Swap.LOST, version
        if not result.landed or version.read_at.elapsed_s() > RETAINED_S / 2:
            return Swap.UNKNOWN, version
        self._known = max(self._known, number)
        return Swap.LANDED, Version(body, name, str(number), sent_at)

    def trim(self, now_s: float) -> int:
        infos = list(self._store.list(self._prefix))[:-RETAINED_MIN]
        old = [info.key for info in infos if now_s - info.last_modified_s > RETAINED_S]
        if old:
            self._store.delete_many(old)
        return len(old)

    def _name(self, number: int) -> str:
        return f"{self._prefix}{number:020}"

    def _numbers(self, after: int) -> list[int]:
        start = self._name(after) if after > 0 else ""
        names = [info.key.rsplit("/", 1)[-1] for info in self._store.list(self._prefix, start)]
        return [int(name) for name in names if name.isdigit()]


# --- the head -----------------------------------------------------------------------

FORMAT = 1
RECENT_MIN = 64
"""Write ids that the head lists at least, whether or not a checkpoint covers them."""
RECENT_MAX = 256
"""Write ids that it lists at most; older segments are found by a listing."""


class CheckpointRef(msgspec.Struct, frozen=True):
    """A checkpoint, with the sizes that a key lookup in two requests needs."""

    id: str
    seq: int
    """The last segment that it contains."""
    txn_id: int
    bytes: int
    tail_bytes: int


class CatalogHead(msgspec.Struct, frozen=True):
    """Content of the head document."""

    version: int = FORMAT
    revision: int = 0
    last_segment_seq: int = 0
    last_txn_id: int = 0
    write_id: str = ""
    """Write id of the last segment."""
    recent: tuple[str, ...] = ()
    """Write ids of the last segments, oldest first; the last one is `write_id`."""
    checkpoint: CheckpointRef | None = None
    nonce: str = ""
    """Makes the bytes of every head different (H5)."""

    @property
    def checkpoint_seq(self) -> int:
        return self.checkpoint.seq if self.checkpoint else 0

    @property
    def checkpoint_id(self) -> str | None:
        return self.checkpoint.id if self.checkpoint else None

    @property
    def recent_from(self) -> int:
        """The number of the first segment whose write id is listed."""
        return self.last_segment_seq - len(self.recent) + 1


@dataclass(frozen=True, slots=True)
class KnownHead:
    """A head, and the version of the register that holds it."""

    head: CatalogHead
    version: Version


def with_segment(head: CatalogHead, segment: CatalogSegment) -> CatalogHead:
    """Return the head after a commit."""
    since_checkpoint = segment.seq - head.checkpoint_seq
    kept = min(max(RECENT_MIN, since_checkpoint), RECENT_MAX)
    return msgspec.structs.replace(
        head,
        revision=head.revision + 1,
        last_segment_seq=segment.seq,
        last_txn_id=segment.txn_id,
        write_id=segment.write_id,
        recent=(*head.recent, segment.write_id)[-kept:],
    )


def with_checkpoint(head: CatalogHead, checkpoint: CheckpointRef) -> CatalogHead:
    """Return the head after a compaction."""
    kept = max(RECENT_MIN, head.last_segment_seq - checkpoint.seq)
    return msgspec.structs.replace(
        head, revision=head.revision + 1, checkpoint=checkpoint, recent=head.recent[-kept:]
    )


def decode_head(data: bytes, name: str) -> CatalogHead:
    """Decode and check a head."""
    head = decode_document(data, CatalogHead, name)
    if head.version > FORMAT:
        raise unsupported(name, "head of a catalog", head.version, FORMAT)
    last = head.recent[-1] if head.recent else ""
    if last != head.write_id or len(head.recent) > head.last_segment_seq:
        raise corrupt(name, 0, f"the last write id is {head.write_id!r}, listed is {last!r}")
    if not 0 <= head.checkpoint_seq <= head.last_segment_seq:
        raise corrupt(
            name,
            0,
            f"a checkpoint of segment {head.checkpoint_seq}, the last is {head.last_segment_seq}",
        )
    return head


class HeadStore:
    """Loads and publishes the head, and caches the newest one it has seen. Thread-safe."""

    def __init__(self, register: CasRegister, runtime: Runtime) -> None:
        self.register = register
        self._runtime = runtime
        self._lock = leaf_lock()
        self._last: KnownHead | None = None
        self._updates = 0
        """Number of changes of `_last`."""

    @property
    def last(self) -> KnownHead | None:
        """The newest head that was seen here, without a request."""
        return self._last

    def load(self) -> KnownHead:
        """Return the newest head; empty if there is none yet."""
        updates = self._updates
        return self._remember(reread_if_damaged(self._load), updates)

    def _load(self) -> KnownHead:
        version = self.register.load()
        head = CatalogHead() if version.body is None else decode_head(version.body, version.name)
        return KnownHead(head, version)

    def publish(self, known: KnownHead, head: CatalogHead) -> tuple[Swap, KnownHead]:
        """Replace a known head."""
        head, swap, version = self._swap(known.version, head)
        if swap is not Swap.LANDED:
            return swap, known
        return swap, self._remember(KnownHead(head, version))

    def replace(self, version: Version, head: CatalogHead) -> Swap:
        """Replace the content of a version, even if it is damaged."""
        return self._swap(version, head)[1]

    def _swap(self, version: Version, head: CatalogHead) -> tuple[CatalogHead, Swap, Version]:
        head = msgspec.structs.replace(head, nonce=self._runtime.ulid())
        return head, *self.register.swap(version, encode_document(head))

    def _remember(self, known: KnownHead, updates: int = -1) -> KnownHead:
        """Cache a head. Responses overtake each other, so an older head is ignored, unless no
        other was cached since its request: then the catalog was lost and created again.
        """
        with self._lock:
            last = self._last
            newer = last is None or last.head.revision <= known.head.revision
            if newer or updates == self._updates:
                self._last, self._updates = known, self._updates + 1
        return known
