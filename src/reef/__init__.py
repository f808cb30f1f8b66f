"""Reef: a storage engine whose only durable state is a bucket."""

from reef._version import __version__
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

__all__ = [
    "ClosedError",
    "ConditionFailedError",
    "ConflictError",
    "CorruptionError",
    "FencedError",
    "InternalError",
    "InvalidInputError",
    "Kind",
    "NotFoundError",
    "OutcomeUnknownError",
    "ReefError",
    "UnavailableError",
    "UnsupportedFormatError",
    "__version__",
]
