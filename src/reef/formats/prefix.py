"""Takes a common prefix off many keys and puts it back, by arithmetic on their buffers.

Keys of one length, the usual case, are a table of bytes: whole columns of it are cut off or
added. Keys of several lengths go through Arrow's join, or, since `binary_slice` in pyarrow 26
fails on sliced arrays, through a mask over their bytes.
"""

from functools import lru_cache

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

__all__ = ["add_prefix", "strip_prefix"]

Bytes = npt.NDArray[np.uint8]
Offsets = npt.NDArray[np.int32]


def strip_prefix(keys: pa.Array, length: int) -> pa.Array:
    """Return the keys without their first `length` bytes, which all of them have."""
    offsets, data = _parts(keys)
    width = _common_width(offsets)
    if width is not None:
        rest = np.ascontiguousarray(data.reshape(len(keys), width)[:, length:])
        return _of_width(rest, width - length)
    shift = np.arange(len(offsets), dtype=np.int32) * np.int32(length)
    kept = np.ones(len(data), dtype=bool)
    kept[(offsets[:-1].astype(np.int64)[:, None] + np.arange(length)).ravel()] = False
    return _binary(offsets - shift, data[kept])


def add_prefix(keys: pa.Array, prefix: bytes) -> pa.Array:
    """Return the keys with `prefix` in front of each."""
    offsets, data = _parts(keys)
    width = _common_width(offsets)
    if width is None:
        return pc.binary_join_element_wise(_scalar(prefix), keys, _scalar(b""))
    # Repeating bytes is faster than writing a few of them into each row of a table.
    repeated = bytearray((prefix + bytes(width)) * len(keys))
    joined = np.frombuffer(repeated, dtype=np.uint8).reshape(len(keys), len(prefix) + width)
    joined[:, len(prefix) :] = data.reshape(len(keys), width)
    return _of_width(joined, len(prefix) + width)


def _parts(keys: pa.Array) -> tuple[Offsets, Bytes]:
    """Return offsets from 0 and the bytes that they point to."""
    _, offsets_buffer, data_buffer = keys.buffers()
    end = keys.offset + len(keys) + 1
    offsets = np.frombuffer(offsets_buffer, dtype=np.int32, count=end)[keys.offset :]
    first, last = int(offsets[0]), int(offsets[-1])
    if data_buffer is None:
        data = np.zeros(0, dtype=np.uint8)
    else:
        data = np.frombuffer(data_buffer, dtype=np.uint8)[first:last]
    return (offsets - first if first else offsets), data


def _common_width(offsets: Offsets) -> int | None:
    """Return the length that all keys have; None if they differ."""
    if len(offsets) < 2:
        return None
    width, count = int(offsets[1]), len(offsets) - 1
    if int(offsets[-1]) != width * count:
        return None
    return width if (offsets == _even(count, width)).all() else None


def _scalar(value: bytes) -> pa.Scalar:
    """`pa.scalar` would import pandas, where it is installed, to see whether this is its."""
    offsets = np.array([0, len(value)], dtype=np.int32)
    return _binary(offsets, np.frombuffer(value, dtype=np.uint8))[0]


def _of_width(table: Bytes, width: int) -> pa.Array:
    return _binary(_even(len(table), width), table.ravel())


@lru_cache(maxsize=64)
def _even(count: int, width: int) -> Offsets:
    """Return the offsets of so many keys of one length: neighbouring groups share them."""
    offsets = np.arange(count + 1, dtype=np.int32) * np.int32(width)
    offsets.flags.writeable = False
    return offsets


def _binary(offsets: Offsets, data: Bytes) -> pa.Array:
    buffers = [None, pa.py_buffer(offsets.astype(np.int32, copy=False)), pa.py_buffer(data)]
    return pa.Array.from_buffers(pa.binary(), len(offsets) - 1, buffers, null_count=0)
