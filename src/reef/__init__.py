"""Reef: a storage engine whose only durable state is a bucket."""

from reef._version import __version__
from reef.api import open
from reef.engine.batch import Batch
from reef.engine.database import Database
from reef.engine.reader import Reader
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
    "Batch",
    "ClosedError",
    "ConditionFailedError",
    "ConflictError",
    "CorruptionError",
    "Database",
    "FencedError",
    "InternalError",
    "InvalidInputError",
    "Kind",
    "NotFoundError",
    "OutcomeUnknownError",
    "Reader",
    "Receipt",
    "ReefError",
    "UnavailableError",
    "UnsupportedFormatError",
    "Writer",
    "__version__",
    "open",
]
