"""What deaths leave beside a catalog's names, on a store that creates by a register.

A source that was put and never copied, a record whose object is gone: other stores have neither.
They go when their number is decided: segments up to the head's checkpoint, heads and plans up to
the newest, since nobody will create those any more (`reef.stores.two_phase.collecting`).
"""

from reef.catalog.parts import Parts
from reef.paths import catalog_object
from reef.stores.two_phase import collect, find_two_phase

__all__ = ["remove_leftovers"]

OLD_S = 24 * 3600.0


def remove_leftovers(parts: Parts) -> int:
    """Remove old sources and records of this catalog; return how many."""
    if find_two_phase(parts.store) is None:
        return 0
    known = parts.heads.load()
    plan = parts.plans.load()
    names = parts.names
    decided = {
        names.segments: known.head.checkpoint_seq,
        names.heads: int(known.version.tag or 0),
        names.plans: int(plan.version.tag or 0),
    }
    found = [
        collect(
            parts.store,
            prefix,
            is_below=lambda key, last=last: _number_of(key) <= last,  # type: ignore[misc]
            older_than_s=OLD_S,
            apply=True,
        )
        for prefix, last in decided.items()
    ]
    return sum(len(one.temporaries) + len(one.records) for one in found)


def _number_of(key: str) -> int:
    """Return the number that a name has; that of a foreign one is above all."""
    named = catalog_object(key)
    if named is not None:
        return named[0]
    last = key.rsplit("/", 1)[-1]
    return int(last) if last.isdigit() else 1 << 64
