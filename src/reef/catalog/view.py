"""A view: keys and ranges of one snapshot.

    newest segment → … → first segment after the checkpoint → checkpoint

The segments are fetched once, all together; a key is looked up in them from the newest to the
oldest, and then in the checkpoint, of which only the block that the key lies in is read.
"""

from collections.abc import Mapping

from reef.catalog.checkpoint_format import CheckpointMeta
from reef.catalog.checkpoints import CheckpointStore
from reef.catalog.segment_format import Segment
from reef.catalog.segments import SegmentStore
from reef.catalog.snapshot import Snapshot
from reef.types import KeyRange

__all__ = ["View", "laid_over"]


class View:
    """Reads at one snapshot. Nothing is fetched before it is asked for."""

    def __init__(
        self, snapshot: Snapshot, segments: SegmentStore, checkpoints: CheckpointStore
    ) -> None:
        self.snapshot = snapshot
        self._segments = segments
        self._checkpoints = checkpoints
        self._loaded: list[Segment] | None = None

    def get(self, key: bytes) -> bytes | None:
        for segment in reversed(self.segments()):
            if key in segment.records:
                return segment.records[key]
        checkpoint = self.snapshot.checkpoint
        return None if checkpoint is None else self._checkpoints.get(checkpoint, key)

    def scan(self, wanted: KeyRange) -> dict[bytes, bytes]:
        """Return the pairs of a range; in order."""
        checkpoint = self.snapshot.checkpoint
        pairs = [] if checkpoint is None else self._checkpoints.scan(checkpoint, wanted)
        state = dict(pairs)
        for segment in self.segments():
            state = laid_over(state, segment.records, wanted)
        return dict(sorted(state.items()))

    def checkpoint(self) -> CheckpointMeta | None:
        """Return what the snapshot's checkpoint says of itself, if it has one."""
        checkpoint = self.snapshot.checkpoint
        return None if checkpoint is None else self._checkpoints.meta(checkpoint)

    def segments(self) -> list[Segment]:
        """Return the segments after the checkpoint, oldest first."""
        if self._loaded is None:
            self._loaded = self._segments.chain(self.snapshot.chain, self.snapshot.floor)
        return self._loaded


def laid_over(
    state: dict[bytes, bytes], records: Mapping[bytes, bytes | None], wanted: KeyRange
) -> dict[bytes, bytes]:
    """Return the state after some records, as far as they lie in a range; changes it in place."""
    for key, value in records.items():
        if not wanted.has(key):
            continue
        if value is None:
            state.pop(key, None)
        else:
            state[key] = value
    return state
