"""The head: the one document that decides what the catalog holds.

It names the newest checkpoint and the end of the chain of segments behind it. Each segment names
the one before it, so that the head's `write_id` names the whole history. The last write ids are
listed too (`recent`): a reader fetches the segments it needs all at once, and a writer that lost
an answer finds itself without a walk. Every publication raises `revision`; commits raise
`last_segment_seq` and `last_txn_id` by one, compactions put a checkpoint in. Nothing of it ever
goes back, which is what leases and collection rely on.
"""

from dataclasses import dataclass

import msgspec

from reef.catalog.documents import decode_document, encode_document
from reef.catalog.register import Register, Swap, Version
from reef.catalog.segment_format import Segment
from reef.formats.coding import corrupt, unsupported
from reef.runtime import Runtime, leaf_lock
from reef.stores.fetch import read_again

__all__ = ["CheckpointRef", "Head", "HeadStore", "KnownHead", "with_checkpoint", "with_segment"]

FORMAT = 1
RECENT_MIN = 64
"""So many write ids stay in the head, whether or not a checkpoint has them."""
RECENT_MAX = 256
"""Beyond this, older segments are found by a listing."""


class CheckpointRef(msgspec.Struct, frozen=True):
    """Where a checkpoint is, and what must be known to read a key of it in two requests."""

    id: str
    seq: int
    """The last segment that is folded into it."""
    txn_id: int
    bytes: int
    tail_bytes: int


class Head(msgspec.Struct, frozen=True):
    """The content of HEAD."""

    version: int = FORMAT
    revision: int = 0
    last_segment_seq: int = 0
    last_txn_id: int = 0
    write_id: str = ""
    """Of the last segment."""
    recent: tuple[str, ...] = ()
    """Write ids of the last segments, oldest first; the last one is `write_id`."""
    checkpoint: CheckpointRef | None = None
    nonce: str = ""
    """No two heads have equal bytes (H5)."""

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

    head: Head
    version: Version


def with_segment(head: Head, segment: Segment, nonce: str) -> Head:
    """Return the head after a segment."""
    since_checkpoint = segment.seq - head.checkpoint_seq
    kept = min(max(RECENT_MIN, since_checkpoint), RECENT_MAX)
    return msgspec.structs.replace(
        head,
        revision=head.revision + 1,
        last_segment_seq=segment.seq,
        last_txn_id=segment.txn_id,
        write_id=segment.write_id,
        recent=(*head.recent, segment.write_id)[-kept:],
        nonce=nonce,
    )


def with_checkpoint(head: Head, checkpoint: CheckpointRef, nonce: str) -> Head:
    """Return the head after a compaction."""
    kept = max(RECENT_MIN, head.last_segment_seq - checkpoint.seq)
    return msgspec.structs.replace(
        head,
        revision=head.revision + 1,
        checkpoint=checkpoint,
        recent=head.recent[-kept:],
        nonce=nonce,
    )


def encode_head(head: Head) -> bytes:
    """Return the object's bytes."""
    return encode_document(head)


def decode_head(data: bytes, name: str) -> Head:
    """Return the head, checked."""
    head = decode_document(data, Head, name)
    if head.version > FORMAT:
        raise unsupported(name, "head of a catalog", head.version, FORMAT)
    _check(head, name)
    return head


def _check(head: Head, name: str) -> None:
    last = head.recent[-1] if head.recent else ""
    if last != head.write_id or len(head.recent) > head.last_segment_seq:
        raise corrupt(name, 0, f"the last write id is {head.write_id!r}, listed is {last!r}")
    if not 0 <= head.checkpoint_seq <= head.last_segment_seq:
        raise corrupt(
            name,
            0,
            f"a checkpoint of segment {head.checkpoint_seq}, the last is {head.last_segment_seq}",
        )


class HeadStore:
    """Loads and publishes the head, and remembers the newest one it has seen."""

    def __init__(self, register: Register, runtime: Runtime) -> None:
        self._register = register
        self._runtime = runtime
        self._lock = leaf_lock()
        self._last: KnownHead | None = None
        self._notes = 0
        """How often it was set."""

    @property
    def last(self) -> KnownHead | None:
        """The newest head that was seen here, without looking again."""
        return self._last

    def load(self) -> KnownHead:
        """Return the newest head; an empty one if there is none yet."""
        notes = self._notes
        return self._seen(read_again(self._load), notes)

    def _load(self) -> KnownHead:
        version = self._register.load()
        head = Head() if version.body is None else decode_head(version.body, version.name)
        return KnownHead(head, version)

    def publish(self, known: KnownHead, head: Head) -> tuple[Swap, KnownHead]:
        """Put a head in the place of a known one."""
        swap, version = self._register.swap(known.version, encode_head(head))
        if swap is not Swap.LANDED:
            return swap, known
        return swap, self._seen(KnownHead(head, version))

    def nonce(self) -> str:
        return self._runtime.ulid()

    def trim(self, now_s: float) -> int:
        """Remove superseded heads, where each has a number of its own."""
        return self._register.trim(now_s)

    def replace(self, version: Version, head: Head) -> Swap:
        """Put a head in the place of whatever a version holds, damaged or not."""
        return self._register.swap(version, encode_head(head))[0]

    def version(self) -> Version:
        """Return the newest version, not decoded."""
        return self._register.load()

    def _seen(self, known: KnownHead, notes: int = -1) -> KnownHead:
        """Remember a head. Answers overtake each other, so an older one is not, unless no other
        was seen since it was asked for: then the catalog was lost, and begun again.
        """
        with self._lock:
            last = self._last
            newer = last is None or last.head.revision <= known.head.revision
            if newer or notes == self._notes:
                self._last, self._notes = known, self._notes + 1
        return known
