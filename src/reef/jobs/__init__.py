"""Jobs: plan (pure) → tasks (the same on any executor) → publish (one CAS by the driver).

Tasks take and return small picklable values and reach the bucket through a pickled store, so
that threads here and Spark elsewhere run the very same functions.
"""

from reef.jobs.compact import Compactor, CompactReport, compact
from reef.jobs.export import ExportReport, export
from reef.jobs.fold import FoldReport, fold
from reef.jobs.health import HealthReport, health
from reef.jobs.imports import ImportProgress, ImportReport, import_files
from reef.jobs.ingest import BulkJob, IngestReport, ingest
from reef.jobs.rebuild import RebuildReport, rebuild
from reef.jobs.repair import RepairReport, repair
from reef.jobs.sweep import SweepReport, sweep
from reef.jobs.verify import Problem, ProblemKind, Severity, VerifyReport, verify

__all__ = [
    "BulkJob",
    "CompactReport",
    "Compactor",
    "ExportReport",
    "FoldReport",
    "HealthReport",
    "ImportProgress",
    "ImportReport",
    "IngestReport",
    "Problem",
    "ProblemKind",
    "RebuildReport",
    "RepairReport",
    "Severity",
    "SweepReport",
    "VerifyReport",
    "compact",
    "export",
    "fold",
    "health",
    "import_files",
    "ingest",
    "rebuild",
    "repair",
    "sweep",
    "verify",
]
