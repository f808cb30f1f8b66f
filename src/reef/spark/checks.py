"""Pre-flight: what can be said of a load before anything is written.

Names and types are compared with the namespace, a few rows are converted for real, and one pass
over the key column counts rows, null keys and keys of a length that cannot be. From the rows'
number and width follows how many partitions the load gets. Whether a key comes twice is seen
only when rows are sorted: the load then stops before its commit.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import pyarrow as pa

from reef.config import IngestSettings
from reef.engine.database import Database
from reef.errors import InvalidInputError, Kind
from reef.formats.batch import KEY_BYTES_MAX
from reef.spark.options import Place
from reef.spark.ranges import column_of, numbered
from reef.spark.session import check_running, parallelism
from reef.spark.target import Target, find_target

__all__ = ["Preflight", "check_load", "count_partitions", "raise_if_bad"]

SAMPLE_ROWS = 1000
PARTITION_BYTES_MIN = 16 << 20
"""Smaller ones are not worth a task each."""
PARTITIONS_MAX = 10_000


@dataclass(frozen=True, slots=True)
class Preflight:
    """What was found before anything was written."""

    namespace: str
    creates: bool
    """Whether the namespace is yet to be made."""
    columns: tuple[str, ...]
    rows: int | None
    """None where the pass over the keys was left out."""
    null_keys: int
    bad_length_keys: int
    longest_key: int
    bytes: int | None
    """About as many as the rows have in memory, by a sample."""
    partitions: int
    problems: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def check_load(
    db: Database,
    place: Place,
    df: Any,
    *,
    order_by: str | None = None,
    key: str | None = None,
    vectors: Mapping[str, int] | None = None,
    partitions: int | None = None,
    segment_bytes: int | None = None,
    count: bool = True,
) -> tuple[Target, Preflight]:
    """Look at a load; raises for columns that do not fit, and tells the rest."""
    check_running(df.sparkSession)
    columns = df.schema
    target = find_target(
        db, place.namespace, columns, order_column=order_by, key=key, vectors=vectors
    )
    sample: pa.Table = df.limit(SAMPLE_ROWS).toArrow()
    problems = _try(target, sample)
    counted = _count(df, target.schema.key.name) if count else _Counted(None, 0, 0, 0)
    problems += counted.problems(target.schema.key.name)
    size = None
    if counted.rows is not None:
        size = counted.rows * sample.nbytes // max(1, sample.num_rows)
    if partitions is None:
        wanted = segment_bytes or IngestSettings().segment_bytes
        partitions = count_partitions(size, wanted, parallelism(df.sparkSession))
    return target, Preflight(
        place.namespace.name,
        target.make is not None,
        tuple(columns.names),
        counted.rows,
        counted.null_keys,
        counted.bad_length,
        counted.longest,
        size,
        partitions,
        tuple(problems),
    )


def raise_if_bad(checks: Preflight) -> None:
    """Raise if there is something that no load can take."""
    if checks.problems:
        raise InvalidInputError(
            f"{checks.namespace} cannot be loaded: {'; '.join(checks.problems)}",
            kind=Kind.INVALID_KEY if checks.null_keys or checks.bad_length_keys else None,
            hint="Nothing was written",
        )


def count_partitions(size: int | None, segment_bytes: int, parallelism: int) -> int:
    """Return how many parts a load gets: segments of the wanted size, and no idle core.

    >>> count_partitions(580 << 20, 256 << 20, 2), count_partitions(1 << 20, 256 << 20, 8)
    (4, 1)
    """
    if size is None:
        return 2 * parallelism
    wanted = max(1, -(-size // segment_bytes))
    enough = max(1, size // PARTITION_BYTES_MIN)
    rounds = -(-wanted // parallelism)
    return min(PARTITIONS_MAX, enough, rounds * parallelism)


# --- looking --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Counted:
    rows: int | None
    null_keys: int
    bad_length: int
    longest: int

    def problems(self, key: str) -> list[str]:
        found = []
        if self.null_keys:
            found.append(f"column {key}: {self.null_keys} keys are null")
        if self.bad_length:
            found.append(
                f"column {key}: {self.bad_length} keys do not have 1 to {KEY_BYTES_MAX} bytes, "
                f"the longest has {self.longest}"
            )
        return found


def _count(df: Any, key: str) -> _Counted:
    """One pass over the keys alone: sources that have columns read no others."""
    from pyspark.sql import functions as fn

    rows = numbered(df)
    column = column_of(rows, str(df.columns.index(key)))
    length = fn.octet_length(column)
    wrong = (length < 1) | (length > KEY_BYTES_MAX)
    (row,) = rows.select(
        fn.count(fn.lit(1)).alias("rows"),
        fn.count(fn.when(column.isNull(), 1)).alias("null_keys"),
        fn.count(fn.when(wrong, 1)).alias("bad_length"),
        fn.coalesce(fn.max(length), fn.lit(0)).alias("longest"),
    ).collect()
    return _Counted(row["rows"], row["null_keys"], row["bad_length"], row["longest"])


def _try(target: Target, sample: pa.Table) -> list[str]:
    """Convert a few rows as the tasks will; a null key is counted elsewhere."""
    key = target.schema.key.name
    sample = sample.filter(sample.column(key).is_valid()).combine_chunks()
    if not sample.num_rows:
        return []
    try:
        target.rows.versions(sample)
    except InvalidInputError as error:
        return [] if error.kind is Kind.INVALID_KEY else [error.message]
    return []
