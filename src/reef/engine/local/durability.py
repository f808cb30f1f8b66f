"""`durability="local"`, as `db.writer` is asked for it: which directory, and what it means."""

import os
from dataclasses import dataclass, replace

from reef.config import WriterSettings
from reef.engine.local.opening import LocalOpening, TakeRole
from reef.engine.local.writer import LocalWriter
from reef.errors import InvalidInputError, Kind
from reef.locallog import LocalLog
from reef.locallog.frames import ENTRY_BYTES_MAX
from reef.locallog.vfs import FileSystem
from reef.paths import Namespace
from reef.stores import Store

__all__ = ["LocalDurability"]

ENTRY_HEADER_BYTES = 8192
"""What an entry may need beside its batch, the longest idempotency key included."""


@dataclass(frozen=True, slots=True)
class LocalDurability:
    """Acknowledge when a write is in this directory."""

    path: str
    reapply: bool
    files: FileSystem

    @classmethod
    def of(
        cls,
        durability: str,
        path: str | os.PathLike[str] | None,
        *,
        reapply: bool,
        files: FileSystem,
    ) -> "LocalDurability | None":
        """Return what was asked for; None for the bucket alone."""
        if durability not in ("object", "local"):
            raise _refused(f"durability={durability!r} is neither 'object' nor 'local'")
        if durability == "object":
            if path is not None or reapply:
                raise _refused("a local log is for durability='local'")
            return None
        if path is None or not os.fspath(path):
            raise _refused("durability='local' needs local_log, the path of a directory")
        return cls(os.fspath(path), reapply, files)

    def settings(self, wanted: WriterSettings) -> WriterSettings:
        """Return what a writer behind this directory goes by: uploads are not cut into pieces."""
        if wanted.ack != "prefix":
            raise _refused("a local log is uploaded in order: ack='prefix'")
        return replace(
            wanted,
            batch_bytes_max=min(wanted.batch_bytes_max, ENTRY_BYTES_MAX - ENTRY_HEADER_BYTES),
            group_bytes_max=max(wanted.group_bytes_max, wanted.upload_bytes),
            queue_bytes_max=max(wanted.queue_bytes_max, 2 * wanted.upload_bytes),
        )

    def open(
        self, store: Store, namespace: Namespace, wanted: WriterSettings, take_role: TakeRole
    ) -> LocalWriter:
        """Open a writer with this directory in front of the bucket."""
        log = LocalLog(
            self.path, wanted.local_segment_bytes, files=self.files, runtime=store.runtime
        )
        try:
            opening = LocalOpening(store, namespace, wanted, self.reapply)
            front, outcomes, recovery = opening.open(log, take_role)
            return LocalWriter(namespace, front, outcomes, wanted, recovery)
        except BaseException:
            log.close()
            raise


def _refused(why: str) -> InvalidInputError:
    return InvalidInputError(why, kind=Kind.INVALID_OPTION)
