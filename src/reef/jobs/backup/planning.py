"""Choose the state to restore from a backup set: one generation, and the log up to one LSN.

    no position   the backup that reaches furthest, up to its end
    lsn=n         the newest backup with a floor of at most n + 1, and the log up to n
    time=t        the newest backup that has folded nothing created after t, and the log up to the
                  first object that was created after t

The same rules as for time travel in the source (`reef.engine.history.as_of`).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from reef.engine.history.as_of import ReadTarget, read_target
from reef.errors import ErrorKind, InvalidInputError, NotFoundError
from reef.formats.backup import BackedUp, Backup
from reef.jobs.backup.archive import Archive, ArchivedLog, LogRange, joined


@dataclass(frozen=True, slots=True)
class Candidate:
    """A namespace in a backup."""

    backup: Backup
    member: BackedUp


@dataclass(frozen=True, slots=True)
class RestorePoint:
    """The state to restore."""

    backup: Backup
    member: BackedUp
    lsn: int
    log: LogRange


def position(lsn: int | None, time: Any) -> ReadTarget:
    """Return a requested position; InvalidInputError if there are two, or it is none."""
    if lsn is not None and time is not None:
        raise InvalidInputError(
            "lsn= and time= both name a point in time", kind=ErrorKind.INVALID_OPTION
        )
    if lsn is None and time is None:
        return ReadTarget()
    return read_target({"lsn": lsn} if time is None else {"time": time})


def candidates(
    archive: Archive, name: str, namespace: str | None, backup: str | None
) -> tuple[list[Candidate], ArchivedLog]:
    """Return the backups to restore `name` from, oldest first, and their log.

    They are of one incarnation of `namespace`: that of the newest backup, or of the one that is
    named. By default it is the namespace of the same name, or the only one that has backups.
    """
    members = [Candidate(one, member) for one in archive.backups() for member in one.namespaces]
    names = {one.member.namespace for one in members}
    if namespace is None:
        namespace = name if name in names or len(names) != 1 else names.pop()
    every = [one for one in members if one.member.namespace == namespace]
    chosen = [one for one in every if backup in (None, one.backup.id, one.backup.snapshot or None)]
    if not chosen:
        which = "" if backup is None else f" {backup}"
        known = ", ".join(sorted({one.backup.id for one in every})) or "none"
        raise NotFoundError(
            f"{archive.store.url} has no backup{which} of {namespace}; there are: {known}",
            hint="`reef backup list` shows all of them",
            namespace=namespace,
        )
    source = _source(chosen[-1])
    same = [one for one in every if _source(one) == source]
    return (same if backup is None else chosen[-1:]), archive.log(*source)


def _source(one: Candidate) -> tuple[str, str]:
    return one.backup.bucket, one.member.root


def choose(
    found: list[Candidate], log: ArchivedLog, target: ReadTarget, *, exact: bool = False
) -> RestorePoint:
    """Return the state of a target; NotFoundError if the backups do not cover it.

    `exact`: without a position, the state that was backed up, without the log shipped since.
    """
    if target.lsn is not None:
        return _at_lsn(found, log, target.lsn)
    if target.until_ms is not None:
        return _at_time(found, log, target.until_ms)
    if exact:
        return _point(found[-1], log, found[-1].member.last_lsn)
    best = max(found, key=lambda one: (log.reach(one.member.floor), one.member.floor))
    return _point(best, log, max(log.reach(best.member.floor), best.member.last_lsn))


def _point(one: Candidate, log: ArchivedLog, lsn: int) -> RestorePoint:
    log_range = LogRange(log, one.member.floor, lsn)
    return RestorePoint(one.backup, one.member, lsn, log_range)


def _at_lsn(found: list[Candidate], log: ArchivedLog, lsn: int) -> RestorePoint:
    fitting = [one for one in found if one.member.floor - 1 <= lsn <= log.reach(one.member.floor)]
    if not fitting:
        raise NotFoundError(
            f"the backups do not cover LSN {lsn} of {found[0].member.namespace}; "
            f"they cover {_ranges(found, log)}",
            kind=ErrorKind.NOT_FOUND,
            lsn=lsn,
        )
    return _point(max(fitting, key=_age), log, lsn)


def _age(one: Candidate) -> tuple[int, int]:
    return one.member.floor, one.member.generation


def _at_time(found: list[Candidate], log: ArchivedLog, until_ms: int) -> RestorePoint:
    fitting = [
        one
        for one in found
        if one.member.floor_at_ms is not None and one.member.floor_at_ms <= until_ms
    ]
    for one in sorted(fitting, key=_age, reverse=True):
        last = _last_before(found, one, log, until_ms)
        if last is not None:
            return _point(one, log, last)
    raise NotFoundError(
        f"the backups of {found[0].member.namespace} do not cover {_shown(until_ms)}; they cover "
        f"{', '.join(_times(found, log)) or 'no range of time'}",
        kind=ErrorKind.NOT_FOUND,
        hint="Without a time, the newest state that is covered is restored",
    )


def _last_before(
    found: list[Candidate], one: Candidate, log: ArchivedLog, until_ms: int
) -> int | None:
    """Return the last LSN before a time; None if the backups end before it.

    A later object shows that it is the last one; so does the time at which the end of the log was
    listed.
    """
    floor = one.member.floor
    last, end = floor - 1, log.reach(floor)
    covered_ms = _listed_ms(found, floor, end)
    for piece in LogRange(log, floor, end).pieces():
        covered_ms = max(covered_ms, piece.head.covered_ms)
        for slot in piece.head.slots:
            if slot.lsn > last and slot.created_at_ms > until_ms:
                return last
            last = max(last, slot.lsn)
    return end if until_ms <= covered_ms else None


def _listed_ms(found: list[Candidate], floor: int, end: int) -> int:
    """Return when a backup has listed the end of the log, up to an LSN."""
    ends = [one.member.covered_ms for one in found if floor - 1 <= one.member.last_lsn <= end]
    return max(ends, default=0)


def _ranges(found: list[Candidate], log: ArchivedLog) -> str:
    """Return the LSNs that can be restored, as text."""
    spans = sorted({(one.member.floor - 1, log.reach(one.member.floor)) for one in found})
    return ", ".join(f"{first} to {last}" for first, last in joined(spans))


def _times(found: list[Candidate], log: ArchivedLog) -> Iterator[str]:
    for one in found:
        start = one.member.floor_at_ms
        end = _listed_ms(found, one.member.floor, log.reach(one.member.floor))
        if start is not None and end:
            yield f"{_shown(start)} to {_shown(end)}"


def _shown(at_ms: int) -> str:
    return datetime.fromtimestamp(at_ms / 1000, UTC).isoformat(timespec="milliseconds")
