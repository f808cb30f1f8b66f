"""Snapshots: one state of a catalog, named so that it can be read here or elsewhere.

A snapshot is taken from a head and costs nothing beside it: the head knows the checkpoint's
number and size, so that none is downloaded. It is plain data; `to_dict` and `from_dict` carry it
to another process, where `session_at` takes a lease on it and reads on.
"""

from dataclasses import asdict, dataclass
from typing import Any

import msgspec

from reef.catalog.head import CheckpointRef, KnownHead
from reef.catalog.segments import Chain
from reef.errors import InvalidInputError

__all__ = ["CommitReceipt", "Snapshot"]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a reader has to know of one state."""

    head_tag: str
    txn_id: int
    last_segment_seq: int
    checkpoint_seq: int | None
    checkpoint_id: str | None
    revision: int
    """How many publications the head had had."""
    write_ids: tuple[str, ...]
    """Of the last segments, oldest first."""
    checkpoint_bytes: int | None = None
    checkpoint_tail_bytes: int | None = None

    @classmethod
    def of(cls, known: KnownHead) -> "Snapshot":
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
        """The last segment that need not be there to read this state."""
        return self.checkpoint_seq or 0

    @property
    def chain(self) -> Chain:
        return Chain(self.last_segment_seq, self.write_ids)

    @property
    def checkpoint(self) -> CheckpointRef | None:
        if self.checkpoint_id is None:
            return None
        sizes = (self.checkpoint_bytes or 0, self.checkpoint_tail_bytes or 0)
        # A checkpoint is of the transaction that its last segment holds.
        return CheckpointRef(self.checkpoint_id, self.floor, self.floor, *sizes)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, fit for JSON."""
        return {**asdict(self), "write_ids": list(self.write_ids)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Snapshot":
        """Return the snapshot that `to_dict` was made of."""
        try:
            return msgspec.convert(values, cls)
        except msgspec.ValidationError as error:
            raise InvalidInputError(f"not a snapshot of a catalog: {error}") from error


@dataclass(frozen=True, slots=True)
class CommitReceipt:
    """Where a commit stands, or would stand: what `Catalog.resolve` needs."""

    seq: int
    txn_id: int
    write_id: str
    base_write_id: str
