"""The plan of a collection: what will go, and when, for everybody to see.

One document per catalog, changed by compare-and-swap, so that several collectors work on one
plan. Segments are named by ranges of numbers, not one by one. `set_hash` sums up the names of
all that the plan means: before anything is deleted they are listed again, and if they do not add
up to the same, the plan is given up and made anew.

What a plan has once condemned stays condemned, even if it is given up: another collector may be
in the middle of deleting it. So the document remembers from where on states are kept.
"""

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

import msgspec

from reef.catalog.checkpoint_format import pair_hash
from reef.catalog.documents import decode_document, encode_document
from reef.catalog.register import Register, Swap, Version
from reef.errors import ConflictError, CorruptionError
from reef.formats.coding import unsupported
from reef.runtime import Runtime
from reef.stores.fetch import read_again

__all__ = ["GcPlan", "GcPlanStore", "KnownPlan", "SeqRange", "names_hash"]

FORMAT = 1
SWAPS_MAX = 10


class SeqRange(msgspec.Struct, frozen=True):
    """Segments from `start` to `end`, both included."""

    start: int
    end: int


class GcPlan(msgspec.Struct, frozen=True):
    """What one collection will delete; an empty one deletes nothing."""

    version: int = FORMAT
    against_head_tag: str = ""
    """The head that it was computed from."""
    not_before: int = 0
    """When deletion may begin: milliseconds by the store's clock."""
    delete_segments: tuple[SeqRange, ...] = ()
    delete_checkpoints: tuple[str, ...] = ()
    make_checkpoints: tuple[str, ...] = ()
    """What the head must hold, or have moved past, before anything goes."""
    set_hash: str = ""
    """Of the names of all that goes."""
    objects: int = 0
    retained_from: int = 0
    """The largest `needs` of all plans so far: states that begin below it are given up for good,
    whatever became of the plan that did so. A reset leaves it."""
    nonce: str = ""

    @property
    def is_empty(self) -> bool:
        return not self.delete_segments and not self.delete_checkpoints

    @property
    def needs(self) -> int:
        """From which segment on a state may begin that needs nothing of this.

        A state whose checkpoint ends with segment 10 needs that checkpoint, and none up to 10.
        """
        after = [int(each.split("-")[0]) + 1 for each in self.delete_checkpoints]
        return max([*(each.end for each in self.delete_segments), *after], default=0)


def names_hash(keys: Iterable[str]) -> str:
    """Return the set hash of object names."""
    return str(pair_hash((key.encode(), b"") for key in keys))


@dataclass(frozen=True, slots=True)
class KnownPlan:
    """A plan, and the version of the register that holds it."""

    plan: GcPlan
    version: Version


class GcPlanStore:
    """Loads and swaps the plan."""

    def __init__(self, register: Register, runtime: Runtime) -> None:
        self._register = register
        self._runtime = runtime

    def load(self) -> KnownPlan:
        """Return the plan; an empty one if there is none."""
        return read_again(lambda: _known(self._register.load()))

    def swap(self, known: KnownPlan, plan: GcPlan) -> KnownPlan | None:
        """Put a plan in the place of another; None if that is not certain."""
        plan = msgspec.structs.replace(
            plan,
            retained_from=max(known.plan.retained_from, plan.needs),
            nonce=self._runtime.ulid(),
        )
        swap, version = self._register.swap(known.version, encode_document(plan))
        return KnownPlan(plan, version) if swap is Swap.LANDED else None

    def reset(self, known: KnownPlan) -> bool:
        """Empty the plan, so that the next one can be made."""
        return self.swap(known, GcPlan()) is not None

    def give_up(self, before_seq: int) -> None:
        """Empty the plan, damaged or not, and give up all states that begin before a segment."""
        for _ in range(SWAPS_MAX):
            version = self._register.load()
            kept = 0
            with suppress(CorruptionError):
                kept = _known(version).plan.retained_from
            plan = GcPlan(retained_from=max(kept, before_seq), nonce=self._runtime.ulid())
            if self._register.swap(version, encode_document(plan))[0] is Swap.LANDED:
                return
        raise ConflictError(
            f"the plan of the catalog was changed by others {SWAPS_MAX} times in a row",
            hint="Try again when less is going on",
        )

    def trim(self, now_s: float) -> int:
        """Remove superseded plans, where each has a number of its own."""
        return self._register.trim(now_s)


def _known(version: Version) -> KnownPlan:
    if version.body is None:
        return KnownPlan(GcPlan(), version)
    plan = decode_document(version.body, GcPlan, version.name)
    if plan.version > FORMAT:
        raise unsupported(version.name, "plan of a catalog", plan.version, FORMAT)
    return KnownPlan(plan, version)
