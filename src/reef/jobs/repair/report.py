"""The report of a repair: problems, actions, and exactly which rows are lost."""

from dataclasses import asdict, dataclass, field
from typing import Any

from reef.formats.manifest import SegmentEntry
from reef.jobs.verify.chain import Problem


@dataclass(frozen=True, slots=True)
class LostLsn:
    """An LSN that is skipped: its object is damaged or missing."""

    lsn: int
    object: str
    kind: str | None
    """The kind of the object; None if it cannot be read."""
    batches: int | None
    """How many batches are lost with it; None if that is unknown."""
    rows: int | None
    idempotency_keys: tuple[str, ...] = ()
    """Keys of lost batches: sending such a batch again applies it."""
    saved_rows: int = 0
    """Rows of intact batches in it: they are in a segment now."""
    history_only: bool = False
    """Whether it was folded before: only views of older generations lack its rows."""

    @property
    def is_loss(self) -> bool:
        """Whether the newest state may lack rows."""
        return not self.history_only and (self.batches is None or self.batches > 0)


@dataclass(frozen=True, slots=True)
class LostRange:
    """Keys whose rows are lost, both ends included; `rows` if the index has their number."""

    first_key: bytes
    last_key: bytes
    rows: int | None = None


@dataclass(frozen=True, slots=True)
class LostSegment:
    """A damaged or missing segment, and the rows that could not be recovered."""

    id: str
    object: str
    min_key: bytes
    max_key: bytes
    lsn_min: int
    lsn_max: int
    rows: int
    saved_rows: int
    """From its own intact groups, from the log, or from the segments it was merged from."""
    ranges: tuple[LostRange, ...]
    tombstones_lost: bool = False
    """Whether range deletes are lost: rows that they hid below this segment may reappear."""
    history_only: bool = False
    """Whether only older generations and snapshots name it, not the head."""

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
    """Everything that is lost."""

    lsns: tuple[LostLsn, ...] = ()
    segments: tuple[LostSegment, ...] = ()
    generations: tuple[int, ...] = ()
    """Generations that can no longer be read."""
    snapshots: tuple[str, ...] = ()
    """By name, or id."""
    cursors: tuple[str, ...] = ()
    since_generation: int | None = None
    """If the head was damaged: snapshots, cursors and settings made later are lost."""

    holes: tuple[str, ...] = ()
    """If the state was derived from segments and log: LSNs and keys without any object."""

    drop: bool = False
    """Whether the registry lists the namespace as dropped: the repair makes it live again."""

    @property
    def rows_of_the_newest_state(self) -> bool:
        """Whether the newest state may lack rows."""
        if self.holes:
            return True
        lsns = any(lost.is_loss for lost in self.lsns)
        return lsns or any(lost.is_loss for lost in self.segments)


@dataclass(frozen=True, slots=True)
class RepairReport:
    """The problems that a repair found and its actions, or in a dry run the planned ones."""

    namespace: str
    applied: bool
    generation: int
    """Generation of the head after the repair."""
    problems: tuple[Problem, ...]
    actions: tuple[str, ...]
    quarantined: tuple[str, ...]
    lost: Lost = field(default_factory=Lost)
    unrepaired: tuple[Problem, ...] = ()
    """Problems that no repair can solve."""

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON values; keys as text, other bytes escaped."""
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
