"""Loads with `live_wins`, step by step: begun, staged and committed apart."""

from dataclasses import replace

import numpy as np

from reef.engine.rows.input import to_ops
from reef.formats.wal_object import OpKind
from reef.jobs import BulkJob
from reef.jobs.ingest.job import sorted_rows, staged_rows


class Backfill:
    """A load that has begun, and commits when it is given its rows."""

    def __init__(self, db, namespace, **options):
        self.job = BulkJob(db, namespace, live_wins=True, **options)
        self.begin_lsn = self.job.begin_lsn

    def commit(self, rows, kind=OpKind.PUT, **options):
        """Stage rows and commit them; return the LSN of the ingest."""
        is_delete = kind is OpKind.DELETE
        ops = to_ops(rows, self.job.schema, kind=OpKind.PUT if is_delete else kind)
        versions = sorted_rows(staged_rows(ops))
        if is_delete:
            kinds = np.full(len(versions), OpKind.DELETE, np.uint8)
            versions = replace(versions, kinds=kinds, fields={})
        staged = self.job.staging.stage([versions])
        return self.job.commit(staged, **options).lsn

    def abort(self):
        self.job.abort()
