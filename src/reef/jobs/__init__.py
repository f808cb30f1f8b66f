"""Jobs: plan (pure) → tasks (the same on any executor) → publish (one CAS by the driver).

Tasks take and return small picklable values and access the bucket through a pickled store, so that
threads here and Spark tasks run the same functions.

Names are imported on first use: a process that needs one job does not load all of them.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any
from warnings import warn

if TYPE_CHECKING:
    from reef.jobs.backup.job import BackupReport, backup
    from reef.jobs.backup.restore import (
        BackupCheck,
        RestoreReport,
        list_backups,
        restore,
        verify_backup,
    )
    from reef.jobs.compact.job import Compactor, CompactReport, compact
    from reef.jobs.fold.job import FoldReport, fold
    from reef.jobs.health import HealthReport, health
    from reef.jobs.indexes import IndexReport, build_indexes
    from reef.jobs.ingest.job import BulkJob, IngestReport, ingest
    from reef.jobs.purge.job import PurgeReport, RemainingObject, purge
    from reef.jobs.purge.scan import Pin
    from reef.jobs.rebuild import RebuildReport, rebuild
    from reef.jobs.repair.job import repair
    from reef.jobs.repair.report import RepairReport
    from reef.jobs.sweep.job import SweepReport, sweep
    from reef.jobs.transfer.export import ExportReport, export
    from reef.jobs.transfer.import_ import ImportProgress, ImportReport, import_
    from reef.jobs.verify.chain import Problem, ProblemKind, Severity
    from reef.jobs.verify.job import VerifyReport, verify

__all__ = [
    "BackupCheck",
    "BackupReport",
    "BulkJob",
    "CompactReport",
    "Compactor",
    "ExportReport",
    "FoldReport",
    "HealthReport",
    "ImportProgress",
    "ImportReport",
    "IndexReport",
    "IngestReport",
    "Pin",
    "Problem",
    "ProblemKind",
    "PurgeReport",
    "RebuildReport",
    "RemainingObject",
    "RepairReport",
    "RestoreReport",
    "Severity",
    "SweepReport",
    "VerifyReport",
    "backup",
    "build_indexes",
    "compact",
    "export",
    "fold",
    "health",
    "import_",
    "ingest",
    "list_backups",
    "purge",
    "rebuild",
    "repair",
    "restore",
    "sweep",
    "verify",
    "verify_backup",
]

_MODULES = {
    "reef.jobs.backup.job": (
        "BackupReport",
        "backup",
    ),
    "reef.jobs.backup.restore": (
        "RestoreReport",
        "restore",
        "BackupCheck",
        "list_backups",
        "verify_backup",
    ),
    "reef.jobs.compact.job": (
        "Compactor",
        "CompactReport",
        "compact",
    ),
    "reef.jobs.fold.job": (
        "FoldReport",
        "fold",
    ),
    "reef.jobs.health": (
        "HealthReport",
        "health",
    ),
    "reef.jobs.indexes": (
        "IndexReport",
        "build_indexes",
    ),
    "reef.jobs.ingest.job": (
        "BulkJob",
        "IngestReport",
        "ingest",
    ),
    "reef.jobs.purge.job": (
        "PurgeReport",
        "RemainingObject",
        "purge",
    ),
    "reef.jobs.purge.scan": ("Pin",),
    "reef.jobs.rebuild": (
        "RebuildReport",
        "rebuild",
    ),
    "reef.jobs.repair.job": ("repair",),
    "reef.jobs.repair.report": ("RepairReport",),
    "reef.jobs.sweep.job": (
        "SweepReport",
        "sweep",
    ),
    "reef.jobs.transfer.export": (
        "ExportReport",
        "export",
    ),
    "reef.jobs.transfer.import_": (
        "ImportProgress",
        "ImportReport",
        "import_",
    ),
    "reef.jobs.verify.chain": (
        "Problem",
        "ProblemKind",
        "Severity",
    ),
    "reef.jobs.verify.job": (
        "VerifyReport",
        "verify",
    ),
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names}
_RENAMED = {"import_files": "import_"}
"""Names of earlier releases, which still work with a DeprecationWarning."""


class _Jobs(ModuleType):
    """This package; a job hides the subpackage of the same name, whichever is loaded first."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _HOMES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Jobs

if not TYPE_CHECKING:  # type checkers would otherwise accept any misspelt name

    def __getattr__(name: str) -> Any:
        if name in _RENAMED:
            new = _RENAMED[name]
            warn(f"reef.jobs.{name} is now reef.jobs.{new}", DeprecationWarning, stacklevel=2)
            name = new
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    """Return the public names."""
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
