"""Upkeep of a bucket's registry: whoever writes to it keeps its chain of segments short.

A process that has just started reads every segment since the last checkpoint, one GET each. So
after a few of them whoever made the last one folds them, and collects what is left over.
"""

from reef.catalog import Catalog

__all__ = ["COMPACT_AFTER", "keep_short"]

COMPACT_AFTER = 16


def keep_short(catalog: Catalog) -> None:
    """Compact and collect, if there is enough for it: one GET if there is not."""
    snapshot = catalog.snapshot()
    if snapshot.last_segment_seq - snapshot.floor >= COMPACT_AFTER:
        catalog.compactor().compact_and_gc()
