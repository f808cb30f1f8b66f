"""Points of a stream: which entry was committed last, told apart from any other with its number.

An index alone does not identify an entry: copies of a local log number on from the same place. The
epoch of the writer that appended it does, because a bucket hands out every epoch once; the digest
covers the entry and all entries before it.
"""

import msgspec

__all__ = ["Lineage", "StreamPoint"]


class StreamPoint(msgspec.Struct, frozen=True, array_like=True):
    """One entry of a stream: `[epoch, index, digest]`."""

    epoch: int
    """Of the writer that appended the entry, which may be older than the one that uploaded it."""
    index: int
    digest: bytes
    """Of the entry and of all before it, 16 bytes."""


Lineage = tuple[StreamPoint, ...]
"""The last committed entry of each epoch, in ascending order of both."""
