"""Jobs: plan (pure) → tasks (the same on any executor) → publish (one CAS by the driver).

Tasks take and return small picklable values and reach the bucket through a pickled store, so
that threads here and Spark elsewhere run the very same functions.
"""

from reef.jobs.fold import FoldReport, fold
from reef.jobs.sweep import SweepReport, sweep

__all__ = ["FoldReport", "SweepReport", "fold", "sweep"]
