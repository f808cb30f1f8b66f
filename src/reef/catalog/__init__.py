"""The catalog: a serializable key-value store for metadata, with many writers, on any bucket.

    catalog = reef.catalog.open("s3://bucket/prefix")
    with catalog.session_write() as session:
        session.put("user:1", b"alice")
        session.commit()
    catalog.transact(lambda session: session.put("hits", b"1"))

One small head, changed by compare-and-swap, decides what there is. Transactions are segments, each
naming the one before it; checkpoints fold them; leases keep what sessions read; a plan that all
collectors share says what goes. `open` roots a catalog at a URL; the registry of a bucket is the
one at the prefix `catalog`.
"""

from reef.catalog.cache import BlobCache, MemoryBlobCache
from reef.catalog.catalog import Catalog
from reef.catalog.catalog import open_catalog as open
from reef.catalog.checkpoint_format import CheckpointMeta
from reef.catalog.collection import Collected
from reef.catalog.compactor import Compacted, Compactor, Upkeep
from reef.catalog.gc_plan import GcPlan, SeqRange
from reef.catalog.keeper import LeaseKeeper
from reef.catalog.sessions import ReadSession, WriteSession
from reef.catalog.settings import BYTES, JSON, Codec, Retention
from reef.catalog.snapshot import CommitReceipt, Snapshot
from reef.catalog.verify import CatalogProblem, CatalogReport

__all__ = [
    "BYTES",
    "JSON",
    "BlobCache",
    "Catalog",
    "CatalogProblem",
    "CatalogReport",
    "CheckpointMeta",
    "Codec",
    "Collected",
    "CommitReceipt",
    "Compacted",
    "Compactor",
    "GcPlan",
    "LeaseKeeper",
    "MemoryBlobCache",
    "ReadSession",
    "Retention",
    "SeqRange",
    "Snapshot",
    "Upkeep",
    "WriteSession",
    "open",
]
