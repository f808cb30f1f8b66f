"""Headers of WAL objects, without their records.

The sweep must know what kind an object in the log is, and a fence is as good as a batch to a
listing. A ranged GET of the first bytes tells. An object whose header cannot be read is
damaged, or from a newer release: nothing is known of it, so it is never collected.
"""

from dataclasses import dataclass
from enum import StrEnum

from reef.errors import CorruptionError, InvalidInputError, NotFoundError
from reef.formats.coding import ALIGNMENT, U32, Cursor, decode_msgpack
from reef.formats.frame import read_frame
from reef.formats.wal_object import HEAD, MAGIC, VERSION, WalHeader
from reef.paths import Namespace
from reef.stores import Store

__all__ = ["HeaderTask", "Missing", "Peeked", "run_header_task"]

FIRST_BYTES = 1024
"""The header of an object of some batches fits; a longer one costs a second request."""


class Missing(StrEnum):
    """Why there is no header."""

    GONE = "gone"
    """The slot was listed, and holds nothing now."""
    UNREADABLE = "unreadable"


Peeked = WalHeader | Missing


@dataclass(frozen=True, slots=True)
class HeaderTask:
    """Some slots, and how large their objects are."""

    store: Store
    namespace: Namespace
    slots: tuple[tuple[int, int], ...]


def run_header_task(task: HeaderTask) -> list[Peeked]:
    """Read the headers of a task's slots."""
    return task.store.runtime.gather([lambda slot=slot: _peek(task, *slot) for slot in task.slots])  # type: ignore[misc]


def _peek(task: HeaderTask, lsn: int, size: int) -> Peeked:
    key = task.namespace.wal_object(lsn)
    try:
        data = task.store.get_range(key, 0, min(size, FIRST_BYTES))
        whole = _header_end(data)
        if len(data) < whole <= size:
            data = task.store.get_range(key, 0, whole)
        return _decode(data, key, lsn)
    except NotFoundError:
        return Missing.GONE
    except (CorruptionError, InvalidInputError):  # the latter: shorter than it was listed
        return Missing.UNREADABLE


def _header_end(data: bytes) -> int:
    """Return where the header's frame ends, padding included."""
    if len(data) < HEAD.size + 8:
        return len(data)
    length: int = U32.unpack_from(data, HEAD.size)[0]
    end = HEAD.size + 8 + length
    return end + -end % ALIGNMENT


def _decode(data: bytes, key: str, lsn: int) -> Peeked:
    cursor = Cursor(data, key)
    magic, version, zero = HEAD.unpack(cursor.take(HEAD.size))
    if magic != MAGIC or version != VERSION or zero:
        return Missing.UNREADABLE
    header = decode_msgpack(read_frame(cursor, "the header"), WalHeader, key, HEAD.size)
    if not isinstance(header, WalHeader) or header.lsn != lsn:
        return Missing.UNREADABLE
    return header
