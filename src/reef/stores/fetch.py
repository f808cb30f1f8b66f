"""Reads an object and decodes it, as one step that can be tried again.

A checksum that fails on bytes from a network may be the network's fault or the object's.
Reading once more tells: damage at rest comes back, a bad transfer does not (H8). A cache in
between would give the same bytes again, so it is told to forget them first.
"""

from collections.abc import Callable
from typing import TypeVar

from reef.errors import CorruptionError
from reef.stores.base import Store

__all__ = ["fetch", "read_again"]

T = TypeVar("T")
ATTEMPTS_MAX = 3


def fetch(store: Store, key: str, decode: Callable[[bytes], T]) -> T:
    """Return the decoded object; CorruptionError only if it is damaged every time."""
    return read_again(lambda: decode(store.get(key)))


def read_again(read: Callable[[], T], forget: Callable[[], None] = lambda: None) -> T:
    """Return what `read` fetches and decodes, fetched again where its checksum is wrong."""
    for attempt in range(1, ATTEMPTS_MAX + 1):
        try:
            return read()
        except CorruptionError:
            forget()
            if attempt == ATTEMPTS_MAX:
                raise
    raise AssertionError("the loop returns or raises")
