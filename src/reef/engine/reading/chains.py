"""Chains: the patches of a key, one over the other, down to what they were laid over.

The memtable keeps for each patch the row below it. To shorten chains, those of many keys are
gone down at once: one step for all keys is one pass over a list in C, and what must not be laid
over each other is found by comparing arrays. Nothing is done key by key, so that a table of
patches costs a few calls whenever it makes many chains long at once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat

import numpy as np
import numpy.typing as npt

from reef.engine.reading.arena import Arena, Numbers

__all__ = ["NONE", "Chains", "Floors", "go_down"]

NONE = -1
"""Stands for no row."""
STEPS = 18
"""After so many steps down, look who has arrived: a chain that has just become long has about
as many rows."""

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Floors:
    """For each key the LSN and sequence at which a chain ends, whatever lies below."""

    lsns: Numbers
    seqs: Numbers


@dataclass(frozen=True, slots=True)
class Chains:
    """Rows of several keys: those of one key side by side, the newest first."""

    rows: Numbers
    owners: Numbers
    """The places of the rows' keys among those that were asked for."""
    lsns: Numbers
    unfinished: Numbers
    """Keys whose chains go on below, because there were too many rows."""

    def of(self, chosen: Mask) -> tuple[Numbers, Numbers]:
        """Return some of the rows, and their owners."""
        return self.rows[chosen], self.owners[chosen]


def go_down(
    heads: Sequence[int], under: Mapping[int, int], arena: Arena, floors: Floors, most: int
) -> Chains:
    """Return the rows from some keys' newest ones down to their floors: about `most`, at most."""
    left, at = np.arange(len(heads), dtype=np.int64), list(heads)
    found: list[tuple[Numbers, Numbers, Numbers]] = []
    count = 0
    while len(left) and count < most:
        levels = [at]
        for _ in range(STEPS):
            levels.append(list(map(under.get, levels[-1], repeat(NONE))))
        below = np.array(levels.pop(), np.int64)
        rows, owners = np.array(levels, np.int64).T.ravel(), np.repeat(left, STEPS)
        there = rows != NONE
        lsns, seqs = arena.stamps(rows[there])
        above = _is_above(lsns, seqs, owners[there], floors)
        there[there] = above
        found.append((rows[there], owners[there], lsns[above]))
        count += len(lsns)
        going_on = there.reshape(len(left), STEPS)[:, -1] & (below != NONE)
        left, at = left[going_on], below[going_on].tolist()
    return _side_by_side(found, left)


def _is_above(lsns: Numbers, seqs: Numbers, owners: Numbers, floors: Floors) -> Mask:
    ends, at = floors.lsns[owners], floors.seqs[owners]
    above: Mask = (lsns > ends) | ((lsns == ends) & (seqs > at))
    return above


def _side_by_side(found: Sequence[tuple[Numbers, Numbers, Numbers]], unfinished: Numbers) -> Chains:
    rows, owners, lsns = (np.concatenate(part) for part in zip(*found, strict=True))
    order = np.argsort(owners, kind="stable")
    return Chains(rows[order], owners[order], lsns[order], unfinished)
