"""Whether two manifests show the same rows: every version that a full scan gives out, summed up.

A version is known by its key, LSN, sequence and kind; the bytes of its columns are covered by
the checksums of their blocks. The sum depends neither on how rows are spread over segments nor on
what of them is still in the log.
"""

from dataclasses import dataclass

import numpy as np

from reef.engine.history.moments import History, Moment
from reef.engine.reading.cache import ByteCache
from reef.engine.reading.segments import SegmentStore
from reef.formats.filter import hash_keys
from reef.formats.manifest import Manifest
from reef.formats.set_hash import EMPTY, SetHash, set_hash
from reef.paths import Namespace
from reef.stores import Store
from reef.types import KeyRange

__all__ = ["RowSum", "sum_rows"]

CACHE_BYTES = 64 << 20
LSN_FACTOR = 0x9E3779B97F4A7C15


@dataclass(frozen=True, slots=True)
class RowSum:
    """How many rows there are, and what they sum up to."""

    rows: int
    hash: SetHash


def sum_rows(
    store: Store, names: Namespace, manifest: Manifest, last_lsn: int, now_ms: int
) -> RowSum:
    """Scan all that a manifest and the log up to an LSN show at a time."""
    segments = SegmentStore(store, names, ByteCache(CACHE_BYTES))
    tail = History(store, names, segments).replay(Moment(manifest, last_lsn), manifest)
    count, total = 0, EMPTY
    for rows in tail.view().scan(KeyRange(), now_ms):
        lsns = rows.lsns.astype(np.uint64) * np.uint64(LSN_FACTOR)
        total += set_hash(hash_keys(rows.keys) ^ lsns, rows.seqs, rows.kinds)
        count += len(rows)
    return RowSum(count, total)
