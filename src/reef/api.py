"""`reef.open`: wires engine, jobs and background work together."""

from typing import Any

from reef import stores
from reef.engine.database import Database
from reef.engine.registry import Registry
from reef.jobs.background import start_background

__all__ = ["open"]


def open(url: str, **options: Any) -> Database:
    """Open the bucket at `url`: a directory, memory:// or s3://bucket/prefix.

    Nothing is written before a writer is opened. `options` are those of `reef.stores.open`.
    """
    store = stores.open(url, **options)
    return Database(store, start_background, Registry(store))
