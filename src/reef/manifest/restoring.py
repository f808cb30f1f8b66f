"""Namespaces that are restored from a backup (protocols §8). Pure.

Its segments are copied, and the log up to the chosen LSN is folded, before the first manifest is
created. The log itself is not restored. LSNs, epochs and write ids of the source would otherwise
be valid in both, so the numbers of the restored namespace begin far behind them.
"""

import msgspec

from reef.formats.manifest import Manifest, Successor
from reef.manifest.branching import as_successor

RESTORED_LSNS = 1_000_000_000
"""LSNs left out behind a restored state, and more than were lost: the position of a reader of the
lost log is never valid in the restored one (H48)."""
RESTORED_EPOCHS = 1_000_000


def restored_manifest(state: Manifest, now_ms: int) -> Manifest:
    """Return the first manifest of a namespace that is restored; the publisher stamps it.

    `state` has everything folded. Its log is not restored: positions, epochs and write ids of the
    lost namespace mean nothing here. The dedup window and the marks of streams stay, so that a
    batch that was committed before does not count again. Jobs that were open have lost their
    segments.
    """
    base = state.wal_floor + RESTORED_LSNS
    return Manifest(
        generation=1,
        write_id="",
        published_at_ms=0,
        schemas=state.schemas,
        writer_epoch=state.writer_epoch + RESTORED_EPOCHS,
        compactor_epoch=state.compactor_epoch + RESTORED_EPOCHS,
        max_parallel_writes=state.max_parallel_writes,
        wal_floor=base,
        wal_base=base,
        wal_id_last_seen=base - 1,
        segments=state.segments,
        dedup=state.dedup,
        dedup_keys_max=state.dedup_keys_max,
        stream_marks=state.stream_marks,
        stream_lineages=state.stream_lineages,
        dropped_lsn=state.dropped_lsn,
        dropped_expired_ms=state.dropped_expired_ms,
        sums=state.sums,
        grace_ms=max(state.grace_ms, state.grace_before_ms),
        created_at_ms=now_ms,
        indexes=state.indexes,
    )


def restored_successor(first: Manifest, successor: Successor) -> Manifest:
    """Return the first manifest of a restored namespace that replaces a dropped one.

    Its log begins behind both: the dropped one may have been restored itself.
    """
    base = max(first.wal_base, successor.wal_base)
    return msgspec.structs.replace(
        as_successor(first, successor), wal_floor=base, wal_base=base, wal_id_last_seen=base - 1
    )
