"""`reef.open`: wires engine, jobs and background work together."""

import os
from typing import Any

from reef import stores
from reef.engine.database import Database
from reef.engine.registry import Registry
from reef.jobs.background import start_background

__all__ = ["open"]


def open(url: str | os.PathLike[str], **options: Any) -> Database:
    """Open the bucket at `url`: a directory, memory://, s3://bucket/prefix, az://… or gs://….

    Nothing is sent before it is used, and nothing written before something is made in it.
    `options` are those of `reef.stores.open`: for S3 `endpoint`, `region` and the like, for all
    `retry`, `meter`, `disk_cache` and others (docs/operations/stores.md).
    """
    store = stores.open(url, **options)
    return Database(store, start_background, Registry(store))
