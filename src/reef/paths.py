"""Every object name, built and parsed here and nowhere else.

Names below `store/` belong to the store layer: what the bucket remembers of itself.
Namespaces and the catalog get theirs with the code that writes them.
"""

__all__ = ["cas_verdict", "clock", "probe_object"]


def cas_verdict() -> str:
    """Return the name of the record of how this bucket does compare-and-swap."""
    return "store/cas.json"


def probe_object(probe_id: str, name: str) -> str:
    """Return a name that only one run of the probe uses; deleted when it ends."""
    return f"store/probe/{probe_id}/{name}"


def clock() -> str:
    """Return the name of the object whose date tells the store's time."""
    return "store/clock"
