"""Index blocks of a segment: built next to the rows, addressed by row ordinal (u32)."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

INDEX_ROWS_MIN = 1024


class IndexKind(StrEnum):
    """What an index is for."""

    FILTER = "filter"
    VECTOR = "vector"
    TEXT = "text"


class IndexSpec(msgspec.Struct, frozen=True, omit_defaults=True):
    """An index of a namespace, as its manifest names it."""

    kind: IndexKind
    column: int
    """The number of the column in the schema."""
    options: dict[str, str | int | float | bool] = {}
    """Metric, language, stemming, positions, by kind."""
    centroids: str = ""
    """Id of a vector index's centroid object; empty until it is trained."""
    home: str | None = None
    """The root of the namespace that has the centroid object, if it is another one: a branch."""

    @property
    def rows_min(self) -> int:
        """Segments with fewer rows get no index: searching them row by row is as fast."""
        return int(self.options.get("rows_min", INDEX_ROWS_MIN))

    def serves(self, other: "IndexSpec") -> bool:
        """Whether an index that was built for this spec can be used for another one."""
        mine, theirs = ({**s.options, "rows_min": 0} for s in (self, other))
        return (self.kind, self.column, self.centroids) == (
            other.kind,
            other.column,
            other.centroids,
        ) and mine == theirs


@dataclass(frozen=True, slots=True)
class IndexParts:
    """An index of one segment."""

    directory: bytes
    """Small: stored in the segment's tail, so that one tail GET plans the search."""
    data: bytes | Sequence[bytes]
    """Stored between the groups and the tail. Each independently readable range of it carries its
    own crc32c."""


class IndexBuilder(Protocol):
    """Builds one index of one segment from rows in segment order."""

    def add(self, first_ordinal: int, column: pa.Array, valid: npt.NDArray[np.bool_]) -> None:
        """Add the rows from an ordinal on; those that are not valid are not indexed."""

    def finish(self) -> IndexParts:
        """Return the index of all rows that were added."""


class BuildableIndex(Protocol):
    """A spec with everything that builders of it need."""

    @property
    def spec(self) -> IndexSpec: ...

    def builder(self, data_type: pa.DataType) -> IndexBuilder | None:
        """Return a builder for the index of one segment; None if it cannot be built yet."""
