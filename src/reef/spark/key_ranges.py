"""Key ranges: assign each row of a load to a partition by its key.

Spark's `repartitionByRange` samples whole rows, and so computes all of them once more. Here the
check of a load has taken a sample in its pass over the rows: the distinct keys with the lowest
hashes, a fair choice that needs no row count, and that tasks make and merge within bounds. The
bounds between partitions become one expression, a tree of comparisons, that Spark evaluates during
the shuffle.

Keys are compared as bytes. Spark's own partitioning remains for loads whose keys were not sampled,
and for very many partitions.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

PARTITIONS_MAX = 512
"""Larger trees are more than Spark compiles into one method."""
SAMPLED = pa.schema([("hash", pa.int64()), ("key", pa.binary())])


def column_of(df: Any, name: str) -> Any:
    """Return a column by its name, whatever is in it: dots, backticks."""
    return df["`" + name.replace("`", "``") + "`"]


def numbered(df: Any) -> Any:
    """Return the same columns, named by their places.

    Spark reads a name with a dot as a path, and takes names that differ only in case for one.
    """
    return df.toDF(*map(str, range(len(df.columns))))


def by_ranges(df: Any, key: str, partitions: int, sample: Sequence[bytes] | None) -> Any:
    """Return the same rows, each range of keys in one partition; without a sample by Spark's."""
    if partitions == 1:
        return df.repartition(1)
    column = column_of(df, key).cast("binary")
    bounds: list[bytes] = []
    if sample and partitions <= PARTITIONS_MAX:
        bounds = bounds_of(sample, partitions)
    if not bounds:
        return df.repartitionByRange(partitions, column)
    return df.repartitionById(len(bounds) + 1, range_of(column, bounds))


def range_of(column: Any, bounds: Sequence[bytes]) -> Any:
    """Return an expression for the number of a key's range: that of the last bound up to it."""
    from pyspark.sql import functions as fn

    def place(low: int, high: int) -> Any:
        """Return the number, which is one of low to high."""
        if low == high:
            return fn.lit(low)
        middle = (low + high) // 2
        return fn.when(column < fn.lit(bounds[middle]), place(low, middle)).otherwise(
            place(middle + 1, high)
        )

    return place(0, len(bounds))


@dataclass(frozen=True, slots=True)
class KeySample:
    """All distinct keys whose hash is below a limit, in the order of their hashes."""

    rows: pa.Table
    """`hash` and `key`."""
    below: int | None = None
    """None if there was no reason to drop any."""

    @classmethod
    def empty(cls) -> "KeySample":
        return cls(SAMPLED.empty_table())

    def add(self, batch: pa.RecordBatch) -> "KeySample":
        """Add rows; those without a key do not count."""
        rows = pa.Table.from_batches([batch]).cast(SAMPLED).drop_null()
        return self.merge(KeySample(_below(rows, self.below)))

    def merge(self, other: "KeySample") -> "KeySample":
        """Return the sample of both: the lower limit holds for all keys."""
        limits = [limit for limit in (self.below, other.below) if limit is not None]
        below = min(limits, default=None)
        rows = pa.concat_tables([_below(self.rows, below), _below(other.rows, below)])
        return KeySample(rows.group_by(SAMPLED.names).aggregate([]), below)

    def cut(self, keys_max: int, bytes_max: int) -> "KeySample":
        """Lower the limit until the sample is within its bounds."""
        rows = self.rows.sort_by("hash").combine_chunks()
        sizes = pc.cumulative_sum(pc.binary_length(rows["key"]))
        fitting = pc.sum(pc.less_equal(sizes, bytes_max)).as_py() or 0
        kept = min(keys_max, max(1, fitting))
        if rows.num_rows <= kept:
            return KeySample(rows, self.below)
        return KeySample(rows.slice(0, kept), rows["hash"][kept].as_py())

    def to_list(self) -> list[bytes]:
        keys: list[bytes] = self.rows["key"].to_pylist()
        return keys


def _below(rows: pa.Table, limit: int | None) -> pa.Table:
    return rows if limit is None else rows.filter(pc.less(rows["hash"], limit))


def bounds_of(sample: Iterable[bytes], partitions: int) -> list[bytes]:
    """Return keys that cut a sample into even parts: the first of each part but the first one.

    >>> bounds_of([b"d", b"a", b"c", b"b"], 2)
    [b'c']
    """
    ordered = sorted(set(sample))
    if len(ordered) < 2:
        return []
    cuts = [len(ordered) * part // partitions for part in range(1, partitions)]
    found = [ordered[cut] for cut in cuts if cut]
    return found[:1] + [later for earlier, later in pairwise(found) if later != earlier]
