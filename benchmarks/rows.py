"""The rows of the benchmarks, in the form that each engine likes best.

    plain   a key of 16 bytes, a value of 100, half of it noise: compresses to about 60 %
    wide    the same key and 12 columns: a vector of 64 floats, six numbers, five short texts

Key-value engines store a wide row as one value of the same bytes, which they need not decode.
"""

from collections.abc import Iterator, Sequence
from functools import cached_property

import numpy as np
import pyarrow as pa

VECTOR = 64
NUMBERS, TEXTS = 6, 5


def key(number: int) -> bytes:
    """Return a key of 16 bytes."""
    return b"user-%011d" % number


class Rows:
    """So many rows in random order."""

    def __init__(self, count: int, *, wide: bool = False) -> None:
        self.count, self.wide = count, wide
        self._chance = np.random.default_rng(count)
        self.order: list[int] = self._chance.permutation(count).tolist()
        self.keys = [key(number) for number in self.order]
        self.table = self._wide_table() if wide else self._plain_table()
        self.bytes = self.table.nbytes

    @cached_property
    def values(self) -> list[bytes]:
        """Each row as one value."""
        if not self.wide:
            values: list[bytes] = self.table["value"].to_pylist()
            return values
        columns = [_bytes_of(self.table[name]) for name in self.table.column_names[1:]]
        return [b"".join(row) for row in zip(*columns, strict=True)]

    def pairs(self, start: int, count: int) -> Iterator[tuple[bytes, bytes]]:
        """Return keys and values of some rows; they begin again after the last one."""
        first = start % self.count
        end = min(first + count, self.count)
        return zip(self.keys[first:end], self.values[first:end], strict=True)

    def slice(self, start: int, count: int) -> pa.Table:
        """Return the same rows as a table."""
        first = start % self.count
        return self.table.slice(first, min(count, self.count - first))

    # --- which keys are asked for -------------------------------------------------------
    def uniform(self, count: int) -> list[bytes]:
        """Return keys at random, each as likely as any other."""
        return self._keys_at(self._chance.integers(0, self.count, count))

    def zipf(self, count: int) -> list[bytes]:
        """Return keys of which few are asked for very often (exponent 1.1)."""
        return self._keys_at((self._chance.zipf(1.1, count) - 1) % self.count)

    def missing(self, count: int) -> list[bytes]:
        """Return keys between others that have no row."""
        return [found[:-1] + b"x" for found in self.uniform(count)]

    def _keys_at(self, places: Sequence[int]) -> list[bytes]:
        return [self.keys[place] for place in np.asarray(places).tolist()]

    # --- columns ------------------------------------------------------------------------
    def _plain_table(self) -> pa.Table:
        half = self._chance.integers(0, 256, (self.count, 50), dtype=np.uint8)
        data = np.concatenate([half, half], axis=1).tobytes()
        offsets = np.arange(0, 100 * self.count + 1, 100, dtype=np.int32)
        buffers = [None, pa.py_buffer(offsets.tobytes()), pa.py_buffer(data)]
        values = pa.Array.from_buffers(pa.binary(), self.count, buffers)
        return pa.table({"id": pa.array(self.keys, pa.binary()), "value": values})

    def _wide_table(self) -> pa.Table:
        vectors = pa.array(self._chance.random(self.count * VECTOR, np.float32))
        columns: dict[str, pa.Array] = {
            "id": pa.array(self.keys, pa.binary()),
            "vector": pa.FixedSizeListArray.from_arrays(vectors, VECTOR),
        }
        for number in range(NUMBERS):
            columns[f"n{number}"] = pa.array(self._chance.integers(0, 1 << 40, self.count))
        for number in range(TEXTS):
            words = self._chance.integers(0, 100_003, self.count).tolist()
            columns[f"t{number}"] = pa.array([f"text {word} {number}" for word in words])
        return pa.table(columns)


def _bytes_of(column: pa.ChunkedArray) -> list[bytes]:
    """Return the values of a column as the bytes that they take."""
    array = column.combine_chunks()
    if pa.types.is_string(array.type):
        return [text.encode() for text in array.to_pylist()]
    if pa.types.is_fixed_size_list(array.type):
        array = array.flatten()
    data = array.to_numpy().tobytes()
    width = len(data) // len(column)
    return [data[at : at + width] for at in range(0, len(data), width)]
