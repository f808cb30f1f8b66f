"""Reef: a storage engine whose only durable state is a bucket."""

from reef import jobs, keys, stores
from reef._version import __version__
from reef.api import open
from reef.engine.batch import Batch
from reef.engine.conditions import Condition, absent, equals, present
from reef.engine.database import Database
from reef.engine.history.change_rows import Change
from reef.engine.history.cursor import ChangeCursor
from reef.engine.history.moments import AsOf
from reef.engine.history.pinned import PinnedReader
from reef.engine.history.snapshots import Snapshot
from reef.engine.info import Info
from reef.engine.reader import Reader
from reef.engine.transactions import Transaction
from reef.engine.writer import Writer
from reef.errors import (
    ClosedError,
    ConditionFailedError,
    ConflictError,
    CorruptionError,
    FencedError,
    InternalError,
    InvalidInputError,
    Kind,
    NotFoundError,
    OutcomeUnknownError,
    ReefError,
    UnavailableError,
    UnsupportedFormatError,
)
from reef.types import Receipt

__all__ = [
    "AsOf",
    "Batch",
    "Change",
    "ChangeCursor",
    "ClosedError",
    "Condition",
    "ConditionFailedError",
    "ConflictError",
    "CorruptionError",
    "Database",
    "FencedError",
    "Info",
    "InternalError",
    "InvalidInputError",
    "Kind",
    "NotFoundError",
    "OutcomeUnknownError",
    "PinnedReader",
    "Reader",
    "Receipt",
    "ReefError",
    "Snapshot",
    "Transaction",
    "UnavailableError",
    "UnsupportedFormatError",
    "Writer",
    "__version__",
    "absent",
    "equals",
    "jobs",
    "keys",
    "open",
    "present",
    "stores",
]
