"""Ranges of keys: which partition of a load each row belongs to.

Spark's own `repartitionByRange` samples whole rows, and so reads or computes all of them once
more. Here a pass over the keys alone takes the sample: those with the lowest hashes, which is
fair, needs no idea of how many there are, and holds no more than it returns. The bounds between
partitions become one expression, a tree of comparisons, that Spark evaluates while it shuffles.

Keys are compared as bytes, whatever the collation of their column. Spark's own way remains for
loads whose keys were not looked at, and for very many partitions.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

__all__ = ["bounds_of", "by_ranges", "column_of", "numbered", "range_of", "sample_keys"]

SAMPLED_PER_PARTITION = 200
"""Partitions are then even to within about a tenth."""
PARTITIONS_MAX = 512
"""Larger trees are more than Spark compiles into one method."""


def column_of(df: Any, name: str) -> Any:
    """Return a column by its name, whatever is in it: dots, backticks."""
    return df["`" + name.replace("`", "``") + "`"]


def numbered(df: Any) -> Any:
    """Return the same columns, named by their places.

    Spark reads a name with a dot as a path, and takes names that differ only in case for one.
    """
    return df.toDF(*map(str, range(len(df.columns))))


def by_ranges(df: Any, key: str, partitions: int, *, sample: bool) -> Any:
    """Return the same rows, each range of keys in one partition."""
    if partitions == 1:
        return df.repartition(1)
    column = column_of(df, key).cast("binary")
    bounds: list[bytes] = []
    if sample and partitions <= PARTITIONS_MAX:
        bounds = bounds_of(sample_keys(df, key, SAMPLED_PER_PARTITION * partitions), partitions)
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


def sample_keys(df: Any, key: str, count: int) -> list[bytes]:
    """Return about `count` keys, chosen by their hashes; all if there are no more."""
    from pyspark.sql import functions as fn

    column = column_of(df, key).cast("binary")
    hashed = df.select(column.alias("key"), fn.xxhash64(column).alias("hash"))
    lowest = hashed.where("key IS NOT NULL").orderBy("hash").limit(count)
    return [bytes(row["key"]) for row in lowest.select("key").collect()]


def bounds_of(sample: list[bytes], partitions: int) -> list[bytes]:
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
