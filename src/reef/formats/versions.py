"""Versions: rows with the LSN and sequence at which they were written, column by column.

The one shape in which rows move through the engine: what a memtable gives out, what a
segment's group decodes to, what merges take and return. Sorted by key, and for one key
the newest first.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from reef.formats.schema import Schema

__all__ = ["RangeTombstone", "Versions", "concat_versions"]


@dataclass(frozen=True, slots=True, order=True)
class RangeTombstone:
    """All keys in [start, end) were deleted at this LSN and sequence."""

    start: bytes
    end: bytes
    lsn: int
    seq: int


@dataclass(frozen=True, slots=True)
class Versions:
    """Equally long columns. `kinds` are those of `OpKind`, without range deletes."""

    keys: pa.Array
    lsns: npt.NDArray[np.int64]
    seqs: npt.NDArray[np.uint32]
    kinds: npt.NDArray[np.uint8]
    fields: Mapping[int, pa.Array]
    expires_at_ms: pa.Array | None = None
    touched: Mapping[int, pa.Array] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.keys)

    def slice(self, start: int, end: int) -> "Versions":
        """Return the rows [start, end), without copying."""
        return Versions(
            self.keys[start:end],
            self.lsns[start:end],
            self.seqs[start:end],
            self.kinds[start:end],
            {number: array[start:end] for number, array in self.fields.items()},
            None if self.expires_at_ms is None else self.expires_at_ms[start:end],
            {number: array[start:end] for number, array in self.touched.items()},
        )

    def take(self, places: npt.NDArray[np.int64]) -> "Versions":
        """Return the rows at these places, in that order."""
        chosen = pa.array(places)
        return Versions(
            self.keys.take(chosen),
            self.lsns[places],
            self.seqs[places],
            self.kinds[places],
            {number: array.take(chosen) for number, array in self.fields.items()},
            None if self.expires_at_ms is None else self.expires_at_ms.take(chosen),
            {number: array.take(chosen) for number, array in self.touched.items()},
        )


def concat_versions(parts: Sequence[Versions], schema: Schema) -> Versions:
    """Return all rows, one part after the other; columns that a part lacks are null there."""
    if len(parts) == 1:
        return parts[0]
    types = schema.types()
    return Versions(
        pa.concat_arrays([part.keys for part in parts]),
        np.concatenate([part.lsns for part in parts]),
        np.concatenate([part.seqs for part in parts]),
        np.concatenate([part.kinds for part in parts]),
        _concat_columns([(len(p), p.fields) for p in parts], types),
        _concat_expiry(parts),
        _concat_columns([(len(p), p.touched) for p in parts], dict.fromkeys(types, pa.bool_())),
    )


def _concat_columns(
    parts: Sequence[tuple[int, Mapping[int, pa.Array]]], types: Mapping[int, pa.DataType]
) -> dict[int, pa.Array]:
    present = {number for _, columns in parts for number in columns}
    return {
        number: pa.concat_arrays(
            _filled(
                (columns.get(number) for _, columns in parts), (n for n, _ in parts), types[number]
            )
        )
        for number in sorted(present)
    }


def _concat_expiry(parts: Sequence[Versions]) -> pa.Array | None:
    if all(part.expires_at_ms is None for part in parts):
        return None
    return pa.concat_arrays(
        _filled((part.expires_at_ms for part in parts), (len(p) for p in parts), pa.int64())
    )


def _filled(
    arrays: Iterable[pa.Array | None], lengths: Iterable[int], data_type: pa.DataType
) -> list[pa.Array]:
    return [
        pa.nulls(length, data_type) if array is None else array
        for array, length in zip(arrays, lengths, strict=True)
    ]
