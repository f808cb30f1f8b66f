"""Where a simulation's decisions come from.

Every "who goes next", "does this die here" and "how long does that take" is asked of one
`Choices`. Asked of a seed, it gives one random history; asked of a script, it replays an
exact one, and `reef.testing.explore` walks through all of them.
"""

import random  # noqa: TID251 - a seeded generator is the point here
from abc import ABC, abstractmethod
from collections.abc import Sequence

__all__ = ["Choices", "ScriptedChoices", "SeededChoices"]


class Choices(ABC):
    """Answers to the questions of a simulation."""

    @abstractmethod
    def pick(self, count: int) -> int:
        """Return one of 0 … count − 1."""

    @abstractmethod
    def chance(self, probability: float) -> bool:
        """Whether something happens that does so with this probability."""

    @abstractmethod
    def uniform(self, low: float, high: float) -> float: ...

    @abstractmethod
    def random_bytes(self, count: int) -> bytes: ...


class SeededChoices(Choices):
    """One seed, one history."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def pick(self, count: int) -> int:
        return self._random.randrange(count)

    def chance(self, probability: float) -> bool:
        return probability > 0.0 and self._random.random() < probability

    def uniform(self, low: float, high: float) -> float:
        return self._random.uniform(low, high)

    def random_bytes(self, count: int) -> bytes:
        return self._random.randbytes(count)


class ScriptedChoices(Choices):
    """The first decisions are given; from there on the first option is taken each time.

    `taken` and `widths` record what was chosen and among how many, so that the next
    script can be made from them. Times never vary: order alone is explored.
    """

    def __init__(self, script: Sequence[int] = ()) -> None:
        self._script = script
        self.taken: list[int] = []
        self.widths: list[int] = []
        self._drawn = 0

    def pick(self, count: int) -> int:
        place = len(self.taken)
        option = self._script[place] if place < len(self._script) else 0
        if not 0 <= option < count:
            raise ValueError(f"decision {place} is {option}, but there are {count} options")
        self.taken.append(option)
        self.widths.append(count)
        return option

    def chance(self, probability: float) -> bool:
        if probability <= 0.0:
            return False
        return self.pick(2) == 1

    def uniform(self, low: float, high: float) -> float:
        return low

    def random_bytes(self, count: int) -> bytes:
        self._drawn += 1
        return self._drawn.to_bytes(count, "big")
