"""The key filter: proves that a segment does not have a key.

A split-block bloom filter over 64-bit xxh3: the upper half of the hash picks a block of
eight 32-bit words, the lower half sets one bit in each, after multiplication with the
word's own odd number. One cache line per lookup, and building it is a few vector
operations.
"""

import struct
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from reef import kernel

Hashes = npt.NDArray[np.uint64]
BITS_PER_KEY = 12
"""About 4 in 1,000 absent keys are false positives."""
WORDS = 8
BLOCKS_AT_ONCE = 1 << 14
ROOM_MIN = 1024
BLOCK_BYTES = 4 * WORDS
ODD = np.array(
    [
        0x9E3779B1,
        0x85EBCA77,
        0xC2B2AE3D,
        0x27D4EB2F,
        0x165667B1,
        0xD6E8FEB9,
        0xA5CB9243,
        0x5851F42D,
    ],
    dtype=np.uint32,
)
ODD_NUMBERS = [int(odd) for odd in ODD]
EIGHT = struct.Struct("<8I")

hash_key = xxhash.xxh3_64_intdigest


def hash_keys(keys: pa.Array | Iterable[bytes]) -> Hashes:
    """Return the hashes of many keys; the loop over them runs in C."""
    listed = keys.to_pylist() if isinstance(keys, pa.Array) else list(keys)
    return np.fromiter(map(hash_key, listed), dtype=np.uint64, count=len(listed))


class FilterBuilder:
    """Takes hashes as they come, eight bytes for each, and makes a filter of them at the end.

    In the order of their hashes keys come block by block, so that a stretch of blocks is made at
    a time, with a byte for each bit, which is then packed: fast, and in little memory.
    """

    def __init__(self) -> None:
        self._hashes: Hashes = np.empty(ROOM_MIN, dtype=np.uint64)
        self._count = 0

    def add(self, hashes: Hashes) -> None:
        """Remember the hashes of some keys."""
        end = self._count + len(hashes)
        if end > len(self._hashes):
            # Grows in place: large arrays are moved by the kernel, page by page.
            self._hashes.resize(max(end, 2 * len(self._hashes)), refcheck=False)
        self._hashes[self._count : end] = hashes
        self._count = end

    def build(self) -> bytes:
        """Return the filter's bytes."""
        blocks = max(1, -(-self._count * BITS_PER_KEY // (BLOCK_BYTES * 8)))
        ordered = self._hashes[: self._count]
        ordered.sort()
        return b"".join(
            _stretch(ordered, blocks, first, min(first + BLOCKS_AT_ONCE, blocks))
            for first in range(0, blocks, BLOCKS_AT_ONCE)
        )


def _stretch(ordered: Hashes, blocks: int, first: int, end: int) -> bytes:
    """Return the blocks [first, end) of a filter."""
    bounds = [_first_hash(block, blocks) for block in (first, end) if block < blocks]
    low, high = [*np.searchsorted(ordered, bounds), len(ordered)][:2]
    inside = ordered[low:high]
    starts = (_block_of(inside, blocks) - np.uint64(first)).astype(np.intp) * (BLOCK_BYTES * 8)
    return _pack_bits(inside.astype(np.uint32), starts, end - first)


def _first_hash(block: int, blocks: int) -> np.uint64:
    """Return the smallest hash that belongs to a block."""
    return np.uint64(-(-(block << 32) // blocks) << 32)


def _pack_bits(low: npt.NDArray[np.uint32], starts: npt.NDArray[np.intp], blocks: int) -> bytes:
    bits = np.zeros(blocks * BLOCK_BYTES * 8, dtype=np.uint8)
    for word in range(WORDS):
        bits[starts + 32 * word + (low * ODD[word] >> np.uint32(27))] = 1
    return np.packbits(bits, bitorder="little").tobytes()


def _block_of(hashes: Hashes, blocks: int) -> Hashes:
    return (hashes >> np.uint64(32)) * np.uint64(blocks) >> np.uint64(32)


FEW = 64
"""So many keys are looked up one by one: a step over an array costs more."""


class KeyFilter:
    """A filter as it was read from a segment."""

    def __init__(self, data: bytes) -> None:
        if not data or len(data) % BLOCK_BYTES:
            raise ValueError(f"{len(data)} bytes are not a filter")
        self.data = bytes(data)
        self._words = np.frombuffer(self.data, dtype="<u4")
        self._blocks = len(data) // BLOCK_BYTES

    def may_have(self, key_hash: int) -> bool:
        """Whether the segment may have a key with this hash; False is certain."""
        if (native := kernel.native) is not None:
            may_have: bool = native.may_have(self.data, key_hash)
            return may_have
        start = ((key_hash >> 32) * self._blocks >> 32) * BLOCK_BYTES
        low = key_hash & 0xFFFFFFFF
        for word, odd in zip(EIGHT.unpack_from(self.data, start), ODD_NUMBERS, strict=True):
            if not word >> ((low * odd & 0xFFFFFFFF) >> 27) & 1:
                return False
        return True

    def may_have_many(self, hashes: Hashes) -> npt.NDArray[np.bool_]:
        """The same for many at once."""
        if len(hashes) <= FEW and kernel.native is not None:
            return np.array([self.may_have(one) for one in hashes.tolist()], bool)
        places = (_block_of(hashes, self._blocks) * np.uint64(WORDS)).astype(np.intp)
        low = hashes.astype(np.uint32)
        found = np.ones(len(hashes), dtype=bool)
        for word in range(WORDS):
            bits = self._words[places + word] >> (low * ODD[word] >> np.uint32(27))
            found &= (bits & np.uint32(1)).astype(bool)
        return found


def may_have_each(filters: Sequence[KeyFilter], hashes: Hashes) -> npt.NDArray[np.bool_]:
    """Return by filter which hashes it may have."""
    each = getattr(kernel.native, "may_have_each", None)  # earlier builds do not have it
    if each is not None:
        data = each([one.data for one in filters], hashes)
        return np.frombuffer(data, bool).reshape(len(filters), len(hashes))
    found = [one.may_have_many(hashes) for one in filters]
    return np.array(found, bool).reshape(len(filters), len(hashes))
