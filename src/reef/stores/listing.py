"""A listing in progress, and where it may begin.

A client that lists whole folders sees more than was asked for. `Listing` passes on what
was, and counts the requests that it took, so that the meter can tell what is billed.

`start_of` makes a listing begin at its prefix: the offset is the largest text below it,
so that the first page already holds what is wanted.
"""

from collections.abc import Callable, Iterator, Sequence

from reef.errors import InvalidInputError
from reef.stores.base import ObjectInfo, check_key

__all__ = ["Listing", "start_of"]

HIGHEST = "\U0010ffff"
LOWEST_IN_KEYS = " "


class Listing(Iterator[ObjectInfo]):
    """The objects with a prefix and after a key, out of pages that hold others too."""

    def __init__(
        self,
        pages: Callable[[], Iterator[Sequence[ObjectInfo]]],
        prefix: str,
        start_after: str,
        *,
        are_sorted: bool = True,
    ) -> None:
        self.requests = 0
        """Sent so far; one that failed is among them."""
        self._prefix, self._start_after = prefix, start_after
        infos = self._pull(pages)
        self._infos = self._stopping(infos) if are_sorted else self._sorting(infos)

    def __next__(self) -> ObjectInfo:
        while True:
            info = next(self._infos)
            # Some servers ignore start-after: every key is judged here as well.
            if info.key > self._start_after and info.key.startswith(self._prefix):
                return info

    def _pull(self, pages: Callable[[], Iterator[Sequence[ObjectInfo]]]) -> Iterator[ObjectInfo]:
        """Count each page, the one that fails too; the end after the last page is not one."""
        self.requests, received = 1, 0
        stream = pages()
        while True:
            try:
                page = next(stream, None)
            except Exception:
                self.requests = received + 1
                raise
            if page is None:
                return
            received += 1
            self.requests = received
            yield from page

    def _stopping(self, infos: Iterator[ObjectInfo]) -> Iterator[ObjectInfo]:
        """Ask for no page past the prefix."""
        for info in infos:
            if info.key > self._prefix and not info.key.startswith(self._prefix):
                return
            yield info

    def _sorting(self, infos: Iterator[ObjectInfo]) -> Iterator[ObjectInfo]:
        """The first object is known when the last page has come."""
        yield from sorted(infos, key=lambda info: info.key)


def start_of(prefix: str, start_after: str) -> str | None:
    """Return an offset that skips as much as can be skipped, or None.

    >>> start_of("wal/01", "")[:-1], start_of("wal/01", "wal/015"), start_of("wal/", "")
    ('wal/00', 'wal/015', None)
    """
    offsets = [_below(prefix)]
    if _is_key(start_after):
        offsets.append(start_after)
    return max(offsets) or None


def _below(prefix: str) -> str:
    """Return a text that sorts below all keys with this prefix, and above the others'.

    The client sends it as a path: it must not begin with a slash or hold two in a row,
    and control characters do not survive the XML of the answer.
    """
    if not prefix or prefix.endswith("/"):
        return ""  # a folder is where the client begins anyway
    head, last = prefix[:-1], prefix[-1]
    if last == LOWEST_IN_KEYS:
        return head.rstrip("/")
    before = chr(ord(last) - 1)
    if before == "/" and (not head or head.endswith("/")):
        before = "."
    return head + before + HIGHEST


def _is_key(text: str) -> bool:
    try:
        check_key(text)
    except InvalidInputError:
        return False
    return True
