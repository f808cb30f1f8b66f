"""Arguments that jobs share: a database, an executor, and a place for files.

Checked before a job begins: the usual mistakes are the URL of a bucket for the database that
`reef.open` returns, and a SparkSession for an executor.
"""

import os
from typing import Any

from reef import stores
from reef.engine.handles.database import Database
from reef.errors import ErrorKind, InvalidInputError
from reef.stores import Store


def check_arguments(db: Any, executor: Any = None) -> None:
    """Raise InvalidInputError unless these are a database and, if one is given, an executor."""
    if not isinstance(db, Database):
        raise InvalidInputError(
            f"expected a database, found {type(db).__name__} {db!r:.80}",
            kind=ErrorKind.INVALID_OPTION,
            hint="Pass what reef.open(url) returns",
        )
    check_executor(executor)


def check_executor(executor: Any) -> None:
    """Raise InvalidInputError unless tasks can be passed to an executor; None is the default."""
    if executor is not None and not callable(getattr(executor, "map", None)):
        raise InvalidInputError(
            f"expected an executor, found {type(executor).__name__} {executor!r:.80}",
            kind=ErrorKind.INVALID_OPTION,
            hint="Pass reef.spark.executor(spark), or nothing for the threads of this process",
        )


def open_files(place: str | os.PathLike[str] | Store) -> Store:
    """Return the store of a directory or URL; an open store is returned as it is."""
    if isinstance(place, Store):
        return place
    if not isinstance(place, str | os.PathLike):
        raise InvalidInputError(
            f"expected a directory or the URL of a bucket, found {type(place).__name__} "
            f"{place!r:.80}",
            kind=ErrorKind.INVALID_OPTION,
        )
    return stores.open(os.fspath(place))
