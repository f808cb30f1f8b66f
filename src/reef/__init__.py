"""Reef: a storage engine whose only durable state is a bucket.

Names are imported when they are asked for: whoever needs a part of Reef, as the tasks of a Spark
job do, does not wait for all of it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from reef._version import __version__

if TYPE_CHECKING:
    # `reef.spark` and `reef.testing` are not here: whoever uses them imports them, since their
    # packages are extras.
    from reef import aio as aio
    from reef import catalog, jobs, keys, stores
    from reef import config as config
    from reef import errors as errors
    from reef import locallog as locallog
    from reef import telemetry as telemetry
    from reef import types as types
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
    from reef.engine.local.receipts import LocalReceipt
    from reef.engine.local.writer import LocalWriter
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
    "LocalReceipt",
    "LocalWriter",
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
    "catalog",
    "equals",
    "jobs",
    "keys",
    "open",
    "present",
    "stores",
]

_HOMES = {
    "AsOf": "reef.engine.history.moments",
    "Batch": "reef.engine.batch",
    "Change": "reef.engine.history.change_rows",
    "ChangeCursor": "reef.engine.history.cursor",
    "ClosedError": "reef.errors",
    "Condition": "reef.engine.conditions",
    "ConditionFailedError": "reef.errors",
    "ConflictError": "reef.errors",
    "CorruptionError": "reef.errors",
    "Database": "reef.engine.database",
    "FencedError": "reef.errors",
    "Info": "reef.engine.info",
    "InternalError": "reef.errors",
    "InvalidInputError": "reef.errors",
    "Kind": "reef.errors",
    "LocalReceipt": "reef.engine.local.receipts",
    "LocalWriter": "reef.engine.local.writer",
    "NotFoundError": "reef.errors",
    "OutcomeUnknownError": "reef.errors",
    "PinnedReader": "reef.engine.history.pinned",
    "Reader": "reef.engine.reader",
    "Receipt": "reef.types",
    "ReefError": "reef.errors",
    "Snapshot": "reef.engine.history.snapshots",
    "Transaction": "reef.engine.transactions",
    "UnavailableError": "reef.errors",
    "UnsupportedFormatError": "reef.errors",
    "Writer": "reef.engine.writer",
    "absent": "reef.engine.conditions",
    "equals": "reef.engine.conditions",
    "open": "reef.api",
    "present": "reef.engine.conditions",
}
_PARTS = {
    *("aio", "catalog", "config", "errors", "jobs", "keys"),
    *("locallog", "spark", "stores", "telemetry", "testing", "types"),
}


if not TYPE_CHECKING:  # a checker that saw it would take any name for one of ours, misspelt or not

    def __getattr__(name: str) -> Any:
        if name in _PARTS:
            return import_module(f"{__name__}.{name}")
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    """Show what is meant for users, and not what this module needs for itself."""
    return sorted({*__all__, *_PARTS, *(name for name in globals() if name.startswith("__"))})
