"""What a local log holds that is not in the bucket: looked at without owning the log.

Without a store this goes by what the log has noted of its uploads, which may lag behind by a
second or so, or by a crash; with one, by what the bucket says, which is exact.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from reef.engine.local import words
from reef.engine.local.entries import decode_entry
from reef.engine.local.identity import (
    IDENTITY,
    UPLOADED,
    LogIdentity,
    read_identity,
    stream_of,
)
from reef.engine.local.marks import read_marks
from reef.engine.local.position import Position, find_position
from reef.engine.log import Log
from reef.errors import InvalidInputError
from reef.locallog import LogEntry
from reef.locallog.inspecting import check_is_log, dump_entries
from reef.locallog.metastore import read_meta_store
from reef.locallog.vfs import OS_FILES, FileSystem
from reef.manifest.head import locate
from reef.manifest.streams import StreamHistory
from reef.runtime import REAL, Runtime
from reef.stores import Store

__all__ = ["PendingReport", "find_pending", "identity_of", "read_pending"]

NS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class PendingReport:
    """What is on a disk only."""

    path: str
    namespace: str
    url: str
    """Where the bucket was when the log was last opened."""
    asked_bucket: bool
    """Whether the bucket was asked; otherwise it may have more than the log knows of."""
    forked: bool
    """Whether a copy of the log has uploaded other entries under the same numbers."""
    uploaded_index: int
    batches: int
    operations: int
    bytes: int
    first_index: int
    last_index: int
    oldest: str | None
    """When the first of them was written."""
    newest: str | None
    oldest_age_s: float | None
    newest_age_s: float | None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def identity_of(path: str, *, files: FileSystem = OS_FILES) -> tuple[LogIdentity, int]:
    """Return whose local log this is, and up to where it knows of its uploads."""
    check_is_log(files, path)
    stable = read_meta_store(files, path)[1]
    identity = read_identity(stable.get(IDENTITY), path)
    if identity is None:
        raise InvalidInputError(f"{path} is a log, but no writer's: it names no namespace")
    return identity, max(int.from_bytes(stable.get(UPLOADED, b""), "little"), identity.base)


def find_pending(
    path: str, *, store: Store | None = None, files: FileSystem = OS_FILES
) -> tuple[Position, Iterator[LogEntry]]:
    """Return up to which entry all is uploaded, and the entries behind that."""
    identity, noted = identity_of(path, files=files)

    def entries(first: int) -> Iterator[LogEntry]:
        return (entry for entry in dump_entries(path, files=files) if entry.index >= first)

    position = Position(identity.id, noted, StreamHistory())
    if store is not None:
        heads = locate(store, identity.namespace)
        head = heads.found.manifest
        if identity.is_known and identity.stream not in head.stream_marks:
            raise words.foreign(identity, path, store.url)
        rules = read_marks(Log(store, heads.names), head)
        position = find_position(
            entries, lambda name: rules.history(stream_of(name)), identity.id, noted
        )
    return position, entries(position.uploaded + 1)


def read_pending(
    path: str,
    *,
    store: Store | None = None,
    files: FileSystem = OS_FILES,
    runtime: Runtime = REAL,
) -> PendingReport:
    """Return what is not uploaded: how much, which entries, how old."""
    identity, _ = identity_of(path, files=files)
    position, entries = find_pending(path, store=store, files=files)
    batches = operations = size = 0
    first: LogEntry | None = None
    last: LogEntry | None = None
    for entry in entries:
        first, last = first or entry, entry
        batches, size = batches + 1, size + len(entry.data)
        operations += decode_entry(entry, path).header.ops
    now_ns = runtime.wall_ns()
    return PendingReport(
        path,
        identity.namespace,
        identity.url,
        store is not None,
        position.is_forked,
        position.uploaded,
        batches,
        operations,
        size,
        first.index if first else 0,
        last.index if last else 0,
        str(first.appended_at) if first else None,
        str(last.appended_at) if last else None,
        round((now_ns - first.appended_at.unix_ns) / NS, 3) if first else None,
        round((now_ns - last.appended_at.unix_ns) / NS, 3) if last else None,
    )
