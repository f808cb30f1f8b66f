"""All buckets that an exploration has come to, and what each request makes of each.

A bucket is told from another by the names, bytes and dates of its objects, and goes by a number.
What a request does to a bucket is worked out once, by `MemoryStore`, and looked up from then on.
"""

from dataclasses import dataclass
from typing import Any

from reef.errors import ReefError
from reef.stores.base import Outcome
from reef.stores.memory import MemoryStore, _Object
from reef.testing.choices import ScriptedChoices
from reef.testing.scheduler import Owner, Scheduler
from reef.testing.simulated_runtime import SimulatedRuntime
from reef.testing.states import BLIND, Footprint, Request, digest, summary

__all__ = ["Answers", "Buckets", "ContentBucket", "Objects", "Requests"]

Objects = dict[str, _Object]


class ContentBucket(MemoryStore):
    """A bucket whose tags are made of the bytes, and whose contents can be taken and set."""

    def __init__(self, **options: Any) -> None:
        super().__init__("memory://explored", **options)

    @property
    def objects(self) -> Objects:
        return dict(self._objects)

    def load(self, objects: Objects) -> None:
        """Be a bucket with these objects; the dict is this bucket's from now on."""
        self._objects = objects
        self._keys = sorted(objects)

    def _store(self, key: str, body: bytes) -> str:
        super()._store(key, body)
        tag = f'"{digest(body).hex()}"'
        self._objects[key] = _Object(bytes(body), tag, self._objects[key].written_s)
        return tag


class Answers:
    """All that was ever answered, by number."""

    def __init__(self) -> None:
        self._numbers: dict[bytes, int] = {}
        self.summaries: list[bytes] = []
        self.values: list[Any] = []

    def number(self, answer: object) -> int:
        short = summary(answer)
        number = self._numbers.setdefault(short, len(self.values))
        if number == len(self.values):
            self.summaries.append(short)
            self.values.append(answer)
        return number


@dataclass(frozen=True, slots=True)
class _Bucket:
    objects: Objects
    phase: int
    """Which footprint is true."""
    private: list[bool]
    fixed: frozenset[str]
    """Names of objects that will stay as they are."""
    fixed_but_for_one: frozenset[str]
    """Names of objects that nobody but the deleter takes away."""


class Requests:
    """All requests that were ever sent, by number."""

    def __init__(self, footprint: Footprint) -> None:
        later = footprint.deleter
        self.footprints = [footprint, *([later[1]] if later else [])]
        self._numbers: dict[Request, int] = {}
        self.values: list[Request] = []
        self.private: list[list[bool]] = [[] for _ in self.footprints]
        self.single: list[bool] = []
        """Whether it touches one object, and leaves it as it is if there is one."""

    def number(self, request: Request) -> int:
        number = self._numbers.setdefault(request, len(self.values))
        if number == len(self.values):
            self.values.append(request)
            for footprint, private in zip(self.footprints, self.private, strict=True):
                private.append(footprint.private(request.key))
            self.single.append(request.method in ("get_tagged", "get_range", "head", "create"))
        return number


class Buckets:
    """The buckets by number; `apply` gives the next bucket and the answer."""

    def __init__(self, requests: Requests, answers: Answers) -> None:
        self._clock = Scheduler(ScriptedChoices())
        self._requests = requests
        self._answers = answers
        self._store = ContentBucket()  # on this one requests are worked out
        self._store.runtime = SimulatedRuntime(self._clock, Owner("bucket"), 0, lambda *_: None)
        self._known: list[_Bucket] = []
        self._numbers: dict[tuple[int, frozenset[tuple[str, str, float]]], int] = {}
        self._done: dict[tuple[int, int, float], tuple[int, int]] = {}
        self._later: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._known)

    def number(self, objects: Objects, phase: int = 0) -> int:
        """Return the number of a bucket with these objects, of which a footprint is true."""
        footprint = self._requests.footprints[phase]
        kept = {key: found for key, found in objects.items() if not footprint.ignored(key)}
        contents = frozenset((key, found.tag, found.written_s) for key, found in kept.items())
        number = self._numbers.setdefault((phase, contents), len(self._known))
        if number == len(self._known):
            fixed = [
                frozenset(key for key, found in kept.items() if rule.immutable(key, found.body))
                for rule in (footprint, self._requests.footprints[-1])
            ]
            self._known.append(_Bucket(kept, phase, self._requests.private[phase], *fixed))
        return number

    def later(self, number: int) -> int:
        """Return the same bucket, with the footprint that is true from now on."""
        later = self._later.get(number)
        if later is None:
            later = self._later[number] = self.number(self._known[number].objects, phase=1)
        return later

    def objects(self, number: int) -> Objects:
        return dict(self._known[number].objects)

    def apply(self, number: int, request: int, now_s: float) -> tuple[int, int]:
        """Return the bucket after a request, and the number of its answer."""
        done = self._done.get((number, request, now_s))
        if done is None:
            self._clock.now_s = now_s
            done = self._apply(number, self._requests.values[request])
            self._done[number, request, now_s] = done
        return done

    def _apply(self, number: int, request: Request) -> tuple[int, int]:
        phase = self._known[number].phase
        ignored = request.method != "list" and self._requests.footprints[phase].ignored(request.key)
        if ignored and request.method not in BLIND:
            raise RuntimeError(f"{request.what}: an object that is said to be ignored")
        self._store.load({} if ignored else self.objects(number))
        answer: object
        try:
            answer = request.apply(self._store)
        except ReefError as error:
            answer = error
        if request.writes and not ignored:
            number = self.number(self._store.objects, phase)
        return number, self._answers.number(answer)

    def is_free(self, number: int, request: int, *, deleter: bool = False) -> bool:
        """Whether the order of this call makes no difference to anybody else."""
        bucket = self._known[number]
        if bucket.private[request]:
            return True
        fixed = bucket.fixed_but_for_one if deleter else bucket.fixed
        return self._requests.single[request] and self._requests.values[request].key in fixed

    # --- the tables behind --------------------------------------------------------
    def private(self, number: int, request: int) -> bool:
        return self._known[number].private[request]

    def what(self, request: int) -> str:
        return self._requests.values[request].what

    def conflict(self, request: int) -> Outcome:
        """Return what a spurious refusal says."""
        return self._requests.values[request].conflict or Outcome.UNKNOWN

    def answer(self, answer: object) -> int:
        return self._answers.number(answer)
