"""What verify can find, as values: kinds, severities, and where each thing lies.

An *error* is an object that somebody needs and cannot have. A *warning* is damage that takes
nothing from anyone, and that a repair clears away. *Info* is for those who look around: orphans,
condemned keys, what an earlier repair gave up. Only the first two are problems.
"""

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from reef.errors import ReefError

__all__ = ["Problem", "ProblemKind", "Severity", "problem_of"]


class Severity(StrEnum):
    """How bad it is."""

    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class ProblemKind(StrEnum):
    """What was found, as a stable word. Append only."""

    MANIFEST_DAMAGED = "manifest_damaged"
    MANIFEST_MISSING = "manifest_missing"
    MANIFEST_DISAGREES = "manifest_disagrees"
    """Sound by itself, but not what the manifests around it say."""
    WAL_DAMAGED = "wal_damaged"
    WAL_MISSING = "wal_missing"
    SEGMENT_DAMAGED = "segment_damaged"
    SEGMENT_MISSING = "segment_missing"
    SEGMENT_DISAGREES = "segment_disagrees"
    """Its bytes are sound, but not what the manifest says of them."""
    LEASE_DAMAGED = "lease_damaged"
    UNSUPPORTED = "unsupported"
    """Written by a newer release: nothing can be said of it."""
    LEASE_LAPSED = "lease_lapsed"
    ORPHAN = "orphan"
    CONDEMNED = "condemned"
    SKIPPED = "skipped"
    """Damaged, and given up by an earlier repair."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that was found."""

    kind: ProblemKind
    object: str
    message: str
    severity: Severity = Severity.ERROR
    offset: int | None = None
    lsn: int | None = None
    generation: int | None = None
    segment: str | None = None

    @property
    def is_missing(self) -> bool:
        """Whether an object was not there: it may have been swept, so it is looked at twice."""
        return self.kind in (
            ProblemKind.MANIFEST_MISSING,
            ProblemKind.WAL_MISSING,
            ProblemKind.SEGMENT_MISSING,
        )

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def problem_of(kind: ProblemKind, error: ReefError, key: str, **where: Any) -> Problem:
    """Return an error as something that was found."""
    offset = error.context.get("offset")
    return Problem(kind, key, error.message, offset=offset, **where)
