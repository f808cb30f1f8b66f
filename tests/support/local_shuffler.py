"""A shuffler in this process: what a fold on Spark does, without Spark."""

from itertools import pairwise

import pyarrow as pa


class LocalShuffler:
    """Runs tasks one after another, and sorts shuffled rows in memory."""

    def parallelism(self):
        return 2

    def map(self, run, tasks):
        return [run(task) for task in tasks]

    def shuffle(self, job):
        """Return the results of `write`, by range."""
        batches = [batch for task in job.tasks for batch in job.read(task)]
        rows = pa.Table.from_batches(batches, job.columns)
        order = [("key", "ascending"), ("lsn", "descending"), ("seq", "descending")]
        rows = rows.sort_by(order).combine_chunks()
        bounds = [b"", *job.cuts, None]
        written = {}
        for place, (low, high) in enumerate(pairwise(bounds)):
            keys = rows.column("key").to_pylist()
            mine = [low <= key and (high is None or key < high) for key in keys]
            if any(mine):
                part = rows.filter(pa.array(mine))
                written[place] = job.write(job.plan, place, iter(part.to_batches()))
        return written
