"""Takes a common prefix off many keys and puts it back, by arithmetic on their buffers.

Arrow's own kernels for this either copy row by row or fail on sliced arrays
(`binary_slice` in pyarrow 26), so the offsets are shifted and the bytes masked here.
"""

import numpy as np
import numpy.typing as npt
import pyarrow as pa

__all__ = ["add_prefix", "strip_prefix"]

Bytes = npt.NDArray[np.uint8]
Offsets = npt.NDArray[np.int32]


def strip_prefix(keys: pa.Array, length: int) -> pa.Array:
    """Return the keys without their first `length` bytes, which all of them have."""
    offsets, data = _parts(keys)
    shift = np.arange(len(offsets), dtype=np.int32) * np.int32(length)
    kept = np.ones(len(data), dtype=bool)
    kept[_places(offsets[:-1], length)] = False
    return _binary(offsets - shift, data[kept])


def add_prefix(keys: pa.Array, prefix: bytes) -> pa.Array:
    """Return the keys with `prefix` in front of each."""
    offsets, data = _parts(keys)
    shift = np.arange(len(offsets), dtype=np.int32) * np.int32(len(prefix))
    longer = offsets + shift
    joined = np.empty(int(longer[-1]), dtype=np.uint8)
    at_front = np.zeros(len(joined), dtype=bool)
    places = _places(longer[:-1], len(prefix))
    at_front[places] = True
    joined[places] = np.tile(np.frombuffer(prefix, dtype=np.uint8), len(keys))
    joined[~at_front] = data
    return _binary(longer, joined)


def _parts(keys: pa.Array) -> tuple[Offsets, Bytes]:
    """Return offsets from 0 and the bytes that they point to."""
    _, offsets_buffer, data_buffer = keys.buffers()
    end = keys.offset + len(keys) + 1
    offsets = np.frombuffer(offsets_buffer, dtype=np.int32, count=end)[keys.offset :]
    if data_buffer is None:
        return offsets - offsets[0], np.zeros(0, dtype=np.uint8)
    data = np.frombuffer(data_buffer, dtype=np.uint8)[offsets[0] : offsets[-1]]
    return offsets - offsets[0], data


def _places(starts: Offsets, length: int) -> npt.NDArray[np.int64]:
    """Return the places of the `length` bytes from each start."""
    return (starts.astype(np.int64)[:, None] + np.arange(length)).ravel()


def _binary(offsets: Offsets, data: Bytes) -> pa.Array:
    buffers = [None, pa.py_buffer(offsets.astype(np.int32)), pa.py_buffer(data)]
    return pa.Array.from_buffers(pa.binary(), len(offsets) - 1, buffers, null_count=0)
