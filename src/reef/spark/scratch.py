"""Scratch space of a task: where Spark keeps its own.

Spark gives each executor disks for what does not fit into memory, tells its Python processes
which they are, and empties them when the executor goes, however it goes. A task that spills
there fills no small `/tmp`, and leaves nothing behind when it is killed.
"""

import os
from tempfile import TemporaryDirectory

__all__ = ["scratch_folder"]

LOCAL_DIRS = "SPARK_LOCAL_DIRS"


def scratch_folder() -> TemporaryDirectory[str]:
    """Return a new folder, which goes with its block; outside of Spark, where the system says."""
    given = filter(None, os.environ.get(LOCAL_DIRS, "").split(","))
    place = next((folder for folder in given if os.access(folder, os.W_OK | os.X_OK)), None)
    return TemporaryDirectory(prefix="reef-", dir=place)
