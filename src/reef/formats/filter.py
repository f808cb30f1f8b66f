"""The id filter: tells for certain that a segment does not have a key.

A split-block bloom filter over 64-bit xxh3: the upper half of the hash picks a block of
eight 32-bit words, the lower half sets one bit in each, after multiplication with the
word's own odd number. One cache line per look-up, and building it is a few vector
operations.
"""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

__all__ = ["KeyFilter", "build_filter", "hash_key", "hash_keys"]

Hashes = npt.NDArray[np.uint64]
BITS_PER_KEY = 12
"""About 4 keys in 1,000 that are not there look as if they were."""
WORDS = 8
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

hash_key = xxhash.xxh3_64_intdigest


def hash_keys(keys: pa.Array | Iterable[bytes]) -> Hashes:
    """Return the hashes of many keys; the loop over them runs in C."""
    listed = keys.to_pylist() if isinstance(keys, pa.Array) else list(keys)
    return np.fromiter(map(hash_key, listed), dtype=np.uint64, count=len(listed))


def build_filter(hashes: Hashes) -> bytes:
    """Return the filter's bytes for the keys with these hashes."""
    blocks = max(1, -(-len(hashes) * BITS_PER_KEY // (BLOCK_BYTES * 8)))
    words = np.zeros(blocks * WORDS, dtype=np.uint32)
    places = _block_of(hashes, blocks) * np.uint64(WORDS)
    low = hashes.astype(np.uint32)
    for word in range(WORDS):
        bits = np.uint32(1) << (low * ODD[word] >> np.uint32(27))
        np.bitwise_or.at(words, (places + np.uint64(word)).astype(np.intp), bits)
    return words.astype("<u4").tobytes()


def _block_of(hashes: Hashes, blocks: int) -> Hashes:
    return (hashes >> np.uint64(32)) * np.uint64(blocks) >> np.uint64(32)


class KeyFilter:
    """A filter as it was read from a segment."""

    def __init__(self, data: bytes) -> None:
        if not data or len(data) % BLOCK_BYTES:
            raise ValueError(f"{len(data)} bytes are not a filter")
        self._data = bytes(data)
        self._words = np.frombuffer(self._data, dtype="<u4")
        self._blocks = len(data) // BLOCK_BYTES

    def may_have(self, key_hash: int) -> bool:
        """Whether the segment may have a key with this hash; False is certain."""
        start = ((key_hash >> 32) * self._blocks >> 32) * WORDS
        low = key_hash & 0xFFFFFFFF
        words = self._words
        return all(
            int(words[start + place]) >> ((low * odd & 0xFFFFFFFF) >> 27) & 1
            for place, odd in enumerate(ODD_NUMBERS)
        )

    def may_have_many(self, hashes: Hashes) -> npt.NDArray[np.bool_]:
        """The same for many at once."""
        places = (_block_of(hashes, self._blocks) * np.uint64(WORDS)).astype(np.intp)
        low = hashes.astype(np.uint32)
        found = np.ones(len(hashes), dtype=bool)
        for word in range(WORDS):
            bits = self._words[places + word] >> (low * ODD[word] >> np.uint32(27))
            found &= (bits & np.uint32(1)).astype(bool)
        return found
