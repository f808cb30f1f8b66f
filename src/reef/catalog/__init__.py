"""The catalog: a serializable key-value store for metadata, with many writers, on any bucket.

    catalog = reef.catalog.open("s3://bucket/prefix")
    with catalog.session_write() as session:
        session.put("user:1", b"alice")
        session.commit()
    catalog.transact(lambda session: session.put("hits", b"1"))

One small head, changed by compare-and-swap, determines the state. Each transaction is a segment
that names its predecessor; checkpoints compact them; leases pin the objects of open sessions; a
plan that all collectors share names the objects to delete. `open` opens a catalog at a URL; the
registry of a bucket is the one at the prefix `catalog`.
"""

import warnings
from typing import Any

from reef.catalog.catalog import BYTES, JSON, Catalog, ReadSession, ValueCodec, WriteSession
from reef.catalog.catalog import open_catalog as open
from reef.catalog.checkpoints import CheckpointMeta
from reef.catalog.segments import BlobCache, MemoryBlobCache
from reef.catalog.snapshot import CatalogSnapshot, CommitReceipt, Retention
from reef.catalog.upkeep import (
    CatalogCompactor,
    CompactionResult,
    GcPlan,
    GcResult,
    MaintenanceResult,
    SeqRange,
)
from reef.catalog.verify import CatalogProblem, CatalogReport
from reef.stores.leases import LeaseKeeper

__all__ = [
    "BYTES",
    "JSON",
    "BlobCache",
    "Catalog",
    "CatalogCompactor",
    "CatalogProblem",
    "CatalogReport",
    "CatalogSnapshot",
    "CheckpointMeta",
    "CommitReceipt",
    "CompactionResult",
    "GcPlan",
    "GcResult",
    "LeaseKeeper",
    "MaintenanceResult",
    "MemoryBlobCache",
    "ReadSession",
    "Retention",
    "SeqRange",
    "ValueCodec",
    "WriteSession",
    "open",
]

_RENAMED = {
    "Codec": "ValueCodec",
    "Collected": "GcResult",
    "Compacted": "CompactionResult",
    "Compactor": "CatalogCompactor",
    "Snapshot": "CatalogSnapshot",
    "Upkeep": "MaintenanceResult",
}


def __getattr__(name: str) -> Any:
    new_name = _RENAMED.get(name)
    if new_name is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn(
        f"reef.catalog.{name} is deprecated: use reef.catalog.{new_name}",
        DeprecationWarning,
        stacklevel=2,
    )
    return globals()[new_name]
