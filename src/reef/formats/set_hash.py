"""The set hash: what a set of versions sums up to, in any order.

Each version (key hash, sequence, kind) is mixed to 128 bits; the hash of a set is the sum.
So it does not depend on order or on how rows are spread over files, and can be subtracted:
a job's outputs equal its inputs, less what it dropped, plus what it made.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from reef.formats.filter import Hashes

__all__ = ["EMPTY", "SetHash", "set_hash"]

MASK = (1 << 64) - 1
ROUNDS = ((0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9), (0xD1B54A32D192ED03, 0x94D049BB133111EB))


@dataclass(frozen=True, slots=True)
class SetHash:
    """Two sums modulo 2⁶⁴."""

    high: int = 0
    low: int = 0

    def __add__(self, other: "SetHash") -> "SetHash":
        return SetHash(self.high + other.high & MASK, self.low + other.low & MASK)

    def __sub__(self, other: "SetHash") -> "SetHash":
        return SetHash(self.high - other.high & MASK, self.low - other.low & MASK)

    def __str__(self) -> str:
        return f"{self.high:016x}{self.low:016x}"

    @classmethod
    def parse(cls, text: str) -> "SetHash":
        if len(text) != 32:
            raise ValueError(f"{text!r} is not a set hash")
        return cls(int(text[:16], 16), int(text[16:], 16))


EMPTY = SetHash()


def set_hash(
    key_hashes: Hashes, sequences: npt.NDArray[np.uint32], kinds: npt.NDArray[np.uint8]
) -> SetHash:
    """Return the hash of these versions."""
    version = key_hashes ^ (sequences.astype(np.uint64) << np.uint64(8) | kinds.astype(np.uint64))
    sums = [int(_mix(version, *numbers).sum(dtype=np.uint64)) for numbers in ROUNDS]
    return SetHash(*sums)


def _mix(values: Hashes, step: int, factor: int) -> Hashes:
    mixed = values + np.uint64(step)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(factor)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(ROUNDS[1][1])
    return mixed ^ (mixed >> np.uint64(31))
