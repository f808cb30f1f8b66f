"""`reef.open`: wires engine, jobs and background work together."""

import os
from typing import Any

from reef import stores
from reef.config import BackgroundSettings
from reef.engine.handles.database import Database
from reef.engine.handles.writer import Worker, Writer
from reef.engine.registry import Registry


def open(url: str | os.PathLike[str], **options: Any) -> Database:
    """Open the bucket at `url`: a directory, memory://, s3://bucket/prefix, az://… or gs://….

    Nothing is sent before it is used, and nothing written before something is made in it.
    `options` are those of `reef.stores.open`: for S3 `endpoint`, `region` and the like, for all
    `retry`, `meter`, `disk_cache` and others (docs/operations/stores.md).
    """
    store = stores.open(url, **options)
    return Database(store, _start_worker, Registry(store))


def _start_worker(db: Database, writer: Writer, settings: BackgroundSettings) -> Worker:
    """Start the background work of a writer; its jobs are loaded only then."""
    from reef.jobs.background import start_background

    return start_background(db, writer, settings)
