"""The model: rows of each life of a name, at every LSN, generation and time.

A life begins when the name is created and ends when it is created again: a drop that was undone
has changed nothing. Nothing of one life shows in another, so each has a history of its own.
"""

from dataclasses import dataclass, field
from datetime import UTC, datetime

Rows = dict[str, dict[str, object]]


@dataclass(frozen=True)
class State:
    """The rows after a commit."""

    lsn: int
    rows: Rows


@dataclass(frozen=True)
class Mark:
    """A time at which nothing was being written, the rows then, and where the log ended."""

    time: datetime
    rows: Rows
    end: int


@dataclass
class Kept:
    """A snapshot or a pinned reader, and the rows that it keeps."""

    handle: object
    rows: Rows
    life: int


@dataclass
class Life:
    """The history of a name from one creation to the next."""

    number: int
    columns: list[str]
    rows: Rows = field(default_factory=dict)
    states: list[State] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    ends: list[tuple[float, int]] = field(default_factory=list)
    """When the log was seen to end at an LSN."""
    collectable: int = 0
    """LSNs below may have been collected by a sweep."""
    is_swept: bool = False
    snapshots: dict[str, Kept] = field(default_factory=dict)
    keys: dict[str, int] = field(default_factory=dict)
    """Idempotency keys that are committed, and where."""
    loads: dict[str, tuple[int, object]] = field(default_factory=dict)
    """Idempotency keys of loads: where they are committed, and of what."""
    cursors: dict[str, int] = field(default_factory=dict)
    """Registered cursors, and up to where they have committed."""
    dropped_s: float | None = None
    purged: bool = False
    """Whether a sweep may have taken it, or a part of it, after a drop."""
    written: list[tuple[int, object]] = field(default_factory=list)
    """Each commit as a function of the rows below it, by the LSN at which it sorts."""
    late: set[int] = field(default_factory=set)
    """Commits of loads that sort at their begin: all their rows may have been beaten before."""
    _write: object = None

    def commit(self, lsn, rows, sorts=None):
        """Note the rows after a commit."""
        write = self._write or (lambda _: rows)
        self._write = None
        self.written.append((lsn if sorts is None else sorts, write))
        assert not self.states or lsn > self.states[-1].lsn, (
            f"LSN {lsn} was acknowledged after {self.states[-1].lsn}"
        )
        self.rows = rows
        self.states.append(State(lsn, rows))

    def at(self, lsn):
        """Return the rows as of an LSN."""
        return next((state.rows for state in reversed(self.states) if state.lsn <= lsn), {})

    def after(self, lsn):
        """Return the LSNs of the commits after one."""
        return [state.lsn for state in self.states if state.lsn > lsn]

    def mark(self, now_s, end):
        """Note that nothing happens at this time."""
        self.marks.append(Mark(datetime.fromtimestamp(now_s, UTC), self.rows, end))

    def swept(self, now_s, retained_s):
        """Note that a sweep may have collected the states that were superseded long ago."""
        old = [end for at_s, end in self.ends if at_s <= now_s - retained_s]
        self.collectable = max([self.collectable, *old])
        self.is_swept = True

    def upsert(self, rows):
        """Return the rows with some more, whole ones."""
        blank = dict.fromkeys(self.columns)
        new = {row["id"]: {"id": row["id"], **blank, **row} for row in rows}
        return self._written(lambda below: below | new)

    def patch(self, rows):
        """Return the rows with some columns changed of those that are there."""

        def patched(below):
            changed = dict(below)
            for row in rows:
                if row["id"] in changed:
                    changed[row["id"]] = changed[row["id"]] | row
            return changed

        return self._written(patched)

    def without_keys(self, keys):
        """Return the rows without some."""
        return self._written(lambda below: {k: row for k, row in below.items() if k not in keys})

    def without(self, start, end):
        """Return the rows that are not in a range."""
        return self._written(
            lambda below: {k: row for k, row in below.items() if not start <= k < end}
        )

    def backfill(self, rows, begin_lsn):
        """Return the rows with some that everything written since an LSN wins over."""
        self.upsert(rows)
        write, found = self._write, {}
        keys = {row["id"] for row in rows}
        for sorts, other in sorted([(begin_lsn, write), *self.written], key=lambda one: one[0]):
            if sorts >= begin_lsn:
                found = other(found)
        self._write = write
        others = {key: row for key, row in self.rows.items() if key not in keys}
        blank = dict.fromkeys(self.columns)  # a column may have been added since
        return others | {key: blank | row for key, row in found.items() if key in keys}

    def replaces(self):
        """Note that the next commit leaves nothing of the rows below it."""
        self._write = None

    def _written(self, write):
        """Return the rows after a write, and keep it for the commit."""
        self._write = write
        return write(self.rows)


def ordered(rows):
    """Return rows as a scan yields them."""
    return [rows[key] for key in sorted(rows)]


def apply_change(rows, change):
    """Apply a change to a copy of the rows."""
    if change.op == "delete_range":
        start, end = _bytes(change.key), _bytes(change.end_key)
        for key in [k for k in rows if start <= k.encode() and (not end or k.encode() < end)]:
            del rows[key]
    elif change.op == "delete":
        rows.pop(change.key, None)
    elif change.op == "put":
        rows[change.key] = {"id": change.key, **change.row}
    elif change.key in rows:
        rows[change.key] = rows[change.key] | change.row


def _bytes(key):
    return key.encode() if isinstance(key, str) else key or b""
