"""What a repair says: what was found, what it does about it, and exactly what is lost."""

from dataclasses import asdict, dataclass, field
from typing import Any

from reef.formats.manifest import SegmentEntry
from reef.jobs.verify_problems import Problem

__all__ = ["Lost", "LostLsn", "LostRange", "LostSegment", "RepairReport"]


@dataclass(frozen=True, slots=True)
class LostLsn:
    """An LSN that is given up: its object is damaged, or gone."""

    lsn: int
    object: str
    kind: str | None
    """What it was; None where nothing of it can be read."""
    batches: int | None
    """How many batches are lost with it; None where nobody can tell."""
    rows: int | None
    idempotency_keys: tuple[str, ...] = ()
    """Of lost batches: sending one again writes it."""
    saved_rows: int = 0
    """Of batches in it that were sound: they are in a segment now."""
    history_only: bool = False
    """Whether it was folded before: only views of older generations lack it."""

    @property
    def is_loss(self) -> bool:
        """Whether the newest state may lack something."""
        return not self.history_only and (self.batches is None or self.batches > 0)


@dataclass(frozen=True, slots=True)
class LostRange:
    """Keys whose rows are lost, both ends included; rows where the index tells how many."""

    first_key: bytes
    last_key: bytes
    rows: int | None = None


@dataclass(frozen=True, slots=True)
class LostSegment:
    """A segment that is damaged or gone, and how much of it could not be had elsewhere."""

    id: str
    object: str
    min_key: bytes
    max_key: bytes
    lsn_min: int
    lsn_max: int
    rows: int
    saved_rows: int
    """Of its own sound groups, from the log, or from the segments that it was made of."""
    ranges: tuple[LostRange, ...]
    tombstones_lost: bool = False
    """Whether range deletes are lost: what they hid below this segment may show again."""
    history_only: bool = False
    """Whether the head does not name it: only older generations and snapshots do."""

    @property
    def rows_lost(self) -> int:
        return max(0, self.rows - self.saved_rows) if self.ranges else 0

    @property
    def is_loss(self) -> bool:
        return not self.history_only and (bool(self.ranges) or self.tombstones_lost)

    @classmethod
    def of(cls, entry: SegmentEntry, key: str, **facts: Any) -> "LostSegment":
        return cls(
            entry.id,
            key,
            entry.min_key,
            entry.max_key,
            entry.lsn_min,
            entry.lsn_max,
            entry.rows,
            **facts,
        )


@dataclass(frozen=True, slots=True)
class Lost:
    """Everything that is gone or given up."""

    lsns: tuple[LostLsn, ...] = ()
    segments: tuple[LostSegment, ...] = ()
    generations: tuple[int, ...] = ()
    """Cannot be read any more, as they were."""
    snapshots: tuple[str, ...] = ()
    """By name, or id."""
    cursors: tuple[str, ...] = ()
    since_generation: int | None = None
    """Where the head was damaged: snapshots, cursors and settings made after this one are lost."""

    holes: tuple[str, ...] = ()
    """Where the state was derived from segments and log: what nothing is left of."""

    @property
    def rows_of_the_newest_state(self) -> bool:
        """Whether the newest state may lack rows."""
        if self.holes:
            return True
        lsns = any(lost.is_loss for lost in self.lsns)
        return lsns or any(lost.is_loss for lost in self.segments)


@dataclass(frozen=True, slots=True)
class RepairReport:
    """What a repair found and did, or in a dry run would do."""

    namespace: str
    applied: bool
    generation: int
    """Of the head, after the repair."""
    problems: tuple[Problem, ...]
    actions: tuple[str, ...]
    quarantined: tuple[str, ...]
    lost: Lost = field(default_factory=Lost)
    unrepaired: tuple[Problem, ...] = ()
    """What no repair can do anything about."""

    def to_dict(self) -> dict[str, Any]:
        """Return it as values that JSON knows; keys as text, other bytes escaped."""
        facts: dict[str, Any] = _plain(asdict(self))
        facts["lost"]["rows_of_the_newest_state"] = self.lost.rows_of_the_newest_state
        for place, segment in enumerate(self.lost.segments):
            facts["lost"]["segments"][place]["rows_lost"] = segment.rows_lost
        return facts


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode(errors="backslashreplace")
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value
