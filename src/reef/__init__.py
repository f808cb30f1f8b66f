"""Reef: a storage engine whose only durable state is a bucket.

Names are imported on first use, so that importing a part of Reef, as the tasks of a Spark job do,
does not load all of it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any
from warnings import warn

from reef._version import __version__

if TYPE_CHECKING:
    # `reef.polars`, `reef.spark` and `reef.testing` are not here: they need extra packages, and
    # are imported by the programs that use them.
    from reef import aio as aio
    from reef import catalog, jobs, keys, stores
    from reef import config as config
    from reef import errors as errors
    from reef import locallog as locallog
    from reef import telemetry as telemetry
    from reef import types as types
    from reef.api import open
    from reef.engine.handles.database import Database
    from reef.engine.handles.local_writer import LocalWriter
    from reef.engine.handles.pinned import PinnedReader
    from reef.engine.handles.reader import Reader
    from reef.engine.handles.transaction import Condition, Transaction, absent, equals, present
    from reef.engine.handles.writer import Writer
    from reef.engine.history.as_of import AsOf
    from reef.engine.history.change_rows import Change
    from reef.engine.history.changes import ChangeCursor
    from reef.engine.history.snapshots import Snapshot
    from reef.engine.local.stream import LocalReceipt
    from reef.engine.rows.batch import Batch
    from reef.engine.rows.merges import Operand, add, max_, min_, union
    from reef.engine.search.specs import (
        IndexDefinition,
        filter_index,
        text_index,
        vector_index,
    )
    from reef.engine.stats import NamespaceInfo
    from reef.errors import (
        ClosedError,
        ConditionFailedError,
        ConflictError,
        CorruptionError,
        ErrorKind,
        FencedError,
        InternalError,
        InvalidInputError,
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
    "ErrorKind",
    "FencedError",
    "IndexDefinition",
    "InternalError",
    "InvalidInputError",
    "LocalReceipt",
    "LocalWriter",
    "NamespaceInfo",
    "NotFoundError",
    "Operand",
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
    "add",
    "catalog",
    "equals",
    "filter_index",
    "jobs",
    "keys",
    "max_",
    "min_",
    "open",
    "present",
    "stores",
    "text_index",
    "union",
    "vector_index",
]

_MODULES = {
    "reef.api": ("open",),
    "reef.engine.rows.batch": ("Batch",),
    "reef.engine.handles.transaction": ("Condition", "Transaction", "absent", "equals", "present"),
    "reef.engine.handles.database": ("Database",),
    "reef.engine.handles.pinned": ("PinnedReader",),
    "reef.engine.handles.reader": ("Reader",),
    "reef.engine.handles.writer": ("Writer",),
    "reef.engine.history.as_of": ("AsOf",),
    "reef.engine.history.change_rows": ("Change",),
    "reef.engine.history.changes": ("ChangeCursor",),
    "reef.engine.history.snapshots": ("Snapshot",),
    "reef.engine.local.stream": ("LocalReceipt",),
    "reef.engine.handles.local_writer": ("LocalWriter",),
    "reef.engine.rows.merges": ("Operand", "add", "max_", "min_", "union"),
    "reef.engine.search.specs": ("IndexDefinition", "filter_index", "text_index", "vector_index"),
    "reef.engine.stats": ("NamespaceInfo",),
    "reef.errors": ("ErrorKind", *(name for name in __all__ if name.endswith("Error"))),
    "reef.types": ("Receipt",),
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names}
_RENAMED = {"Info": "NamespaceInfo", "Kind": "ErrorKind"}
"""Names of earlier releases, which still work with a DeprecationWarning."""
_PARTS = {
    *("aio", "catalog", "config", "errors", "jobs", "keys"),
    *("locallog", "polars", "spark", "stores", "telemetry", "testing", "types"),
}


if not TYPE_CHECKING:  # type checkers would otherwise accept any misspelt name

    def __getattr__(name: str) -> Any:
        if name in _PARTS:
            return import_module(f"{__name__}.{name}")
        if name in _RENAMED:
            warn(f"reef.{name} is now reef.{_RENAMED[name]}", DeprecationWarning, stacklevel=2)
            name = _RENAMED[name]
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    """Return the public names."""
    return sorted({*__all__, *_PARTS, *(name for name in globals() if name.startswith("__"))})
