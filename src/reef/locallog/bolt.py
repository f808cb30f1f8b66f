"""Reading bbolt files: pages, B+ trees and buckets, of which nothing is trusted.

    page   = id u64, flags u16, count u16, overflow u32, body; overflow more pages follow
    meta   = magic u32, version u32, page size u32, flags u32, root u64, sequence u64,
             freelist u64, high water u64, txid u64, checksum u64 (FNV-1a of what is before)

Pages 0 and 1 are metas, written in turns; the valid one with the higher txid is the state.
Every other page belongs to the tree of buckets, to the freelist, or to nobody. Which ones are
free follows from the tree, so the freelist is only ever written, for the Go library's sake:
files without one (`NoFreelistSync`) are read like all others.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, NoReturn

from reef.errors import CorruptionError, UnsupportedFormatError
from reef.locallog.vfs import File

__all__ = [
    "BRANCH",
    "BRANCH_ELEMENT",
    "BUCKET",
    "BUCKET_FLAG",
    "COUNT_MAX",
    "FREELIST",
    "LEAF",
    "LEAF_ELEMENT",
    "NO_FREELIST",
    "PAGE",
    "BoltReader",
    "Element",
    "Meta",
    "read_meta",
]

PAGE = struct.Struct("<QHHI")
META = struct.Struct("<IIIIQQQQQ")
LEAF_ELEMENT = struct.Struct("<IIII")
BRANCH_ELEMENT = struct.Struct("<IIQ")
BUCKET = struct.Struct("<QQ")
U64 = struct.Struct("<Q")
BRANCH, LEAF, META_PAGE, FREELIST = 1, 2, 4, 0x10
BUCKET_FLAG = 1
MAGIC = 0xED0CDAED
VERSION = 2
NO_FREELIST = (1 << 64) - 1
PAGE_SIZES = [1 << shift for shift in range(9, 25)]
COUNT_MAX = 0xFFFF
"""Of elements in a page. A freelist with this count has its true count as first number."""
DEPTH_MAX = 64
TXID_MAX = (1 << 64) - 1
"""A state that no commit could follow."""
FNV_OFFSET, FNV_PRIME = 0xCBF29CE484222325, 0x100000001B3


@dataclass(frozen=True, slots=True)
class Meta:
    """One of the two pages that say where everything is."""

    page_size: int
    root: int
    freelist: int
    high_water: int
    """The first page that was never used."""
    txid: int
    flags: int = 0
    sequence: int = 0

    def encode(self) -> bytes:
        """Return the whole page, which is number 0 or 1 by the txid."""
        body = META.pack(
            *(MAGIC, VERSION, self.page_size, self.flags, self.root, self.sequence),
            *(self.freelist, self.high_water, self.txid),
        )
        page = PAGE.pack(self.txid % 2, META_PAGE, 0, 0) + body + U64.pack(_fnv1a(body))
        return page.ljust(self.page_size, b"\0")


def _fnv1a(data: bytes) -> int:
    value = FNV_OFFSET
    for byte in data:
        value = (value ^ byte) * FNV_PRIME & 0xFFFFFFFFFFFFFFFF
    return value


def read_meta(file: File, name: str) -> Meta:
    """Return the newest valid meta; either page may be torn, not both."""
    first = _meta_at(file, name, 0)
    sizes = [first.page_size] if first else PAGE_SIZES
    second = next(filter(None, (_meta_at(file, name, size) for size in sizes)), None)
    found = [meta for meta in (first, second) if meta]
    if not found:
        raise CorruptionError(f"{name}: neither page 0 nor page 1 is a valid meta", object=name)
    return max(found, key=lambda meta: meta.txid)


def _meta_at(file: File, name: str, offset: int) -> Meta | None:
    data = file.read(PAGE.size + META.size + U64.size, offset)
    if len(data) < PAGE.size + META.size + U64.size:
        return None
    body = data[PAGE.size : PAGE.size + META.size]
    magic, version, page_size, flags, root, sequence, freelist, high, txid = META.unpack(body)
    if magic != MAGIC or U64.unpack_from(data, PAGE.size + META.size)[0] != _fnv1a(body):
        return None
    if version != VERSION:
        raise UnsupportedFormatError(
            f"{name} is a bbolt file of version {version}, this release reads {VERSION}"
        )
    if page_size not in PAGE_SIZES or (offset and offset != page_size) or txid == TXID_MAX:
        return None
    return Meta(page_size, root, freelist, high, txid, flags, sequence)


class Element(NamedTuple):
    """A key of a leaf, and what it leads to."""

    flags: int
    key: bytes
    value: bytes

    @property
    def is_bucket(self) -> bool:
        return bool(self.flags & BUCKET_FLAG)


class BoltReader:
    """Walks over the trees of one state of a file, and notes the pages that they take."""

    def __init__(self, file: File, meta: Meta, name: str) -> None:
        self._file = file
        self._name = name
        self.meta = meta
        self._size = file.size()
        self.pages: set[int] = set()
        """Of all trees that were walked."""
        if meta.high_water * meta.page_size > self._size:
            self._fail(0, f"{meta.high_water} pages are used, the file has {self._size} bytes")

    def elements(self, root: int) -> list[Element]:
        """Return what the leaves of a tree hold, in order."""
        found = list(self._walk(root, 0))
        keys = [element.key for element in found]
        if any(a >= b for a, b in pairwise(keys)):
            self._fail(root, "keys are not in order")
        return found

    def bucket(self, value: bytes) -> tuple[int, int, list[Element]]:
        """Return a bucket's root, sequence and elements; an inline one has root 0."""
        if len(value) < BUCKET.size:
            self._fail(self.meta.root, f"a bucket has {len(value)} bytes")
        root, sequence = BUCKET.unpack_from(value)
        if root:
            return root, sequence, self.elements(root)
        return 0, sequence, self._leaf(value[BUCKET.size :], self.meta.root)

    def note_pages(self, value: bytes) -> None:
        """Walk over a bucket whose content is nobody's business but its owner's."""
        for element in self.bucket(value)[2]:
            if element.is_bucket:
                self.note_pages(element.value)

    def freelist_pages(self) -> set[int]:
        """Return where the freelist lies."""
        return self._freelist()[1]

    def free_pages(self) -> set[int]:
        """Return what the freelist says."""
        data, pages = self._freelist()
        if not pages:
            return set()
        count, start = PAGE.unpack_from(data)[2], PAGE.size
        if count == COUNT_MAX:
            (count,), start = U64.unpack_from(data, start), start + U64.size
        if start + count * U64.size > len(data):
            self._fail(self.meta.freelist, f"has {count} pages in {len(data)} bytes")
        return set(struct.unpack_from(f"<{count}Q", data, start))

    def _freelist(self) -> tuple[bytes, set[int]]:
        if self.meta.freelist == NO_FREELIST:
            return b"", set()
        data, pages = self._page(self.meta.freelist)
        if PAGE.unpack_from(data)[1] != FREELIST:
            self._fail(self.meta.freelist, "is not a freelist")
        return data, pages

    def _walk(self, number: int, depth: int) -> Iterator[Element]:
        data, pages = self._page(number)
        if pages & self.pages or depth > DEPTH_MAX:
            self._fail(number, "is in the trees twice")
        self.pages |= pages
        flags = PAGE.unpack_from(data)[1]
        if flags == LEAF:
            yield from self._leaf(data, number)
        elif flags == BRANCH:
            for child in self._children(data, number):
                yield from self._walk(child, depth + 1)
        else:
            self._fail(number, f"flags {flags:#x}, expected a leaf or a branch")

    def _page(self, number: int) -> tuple[bytes, set[int]]:
        """Return a page with those that continue it, and their numbers."""
        size, high = self.meta.page_size, self.meta.high_water
        if not 2 <= number < high:
            self._fail(number, f"is not among the pages 2 to {high - 1}")
        data = self._file.read(size, number * size)
        found, _, _, overflow = PAGE.unpack_from(data)
        if found != number:
            self._fail(number, f"says that it is page {found}")
        if number + overflow >= high:
            self._fail(number, f"continues for {overflow} pages, beyond page {high - 1}")
        if overflow:
            data += self._file.read(size * overflow, (number + 1) * size)
        return data, set(range(number, number + overflow + 1))

    def _leaf(self, data: bytes, number: int) -> list[Element]:
        count = self._count(data, number, LEAF_ELEMENT.size)
        found = []
        for place in range(PAGE.size, PAGE.size + count * LEAF_ELEMENT.size, LEAF_ELEMENT.size):
            flags, pos, key_length, value_length = LEAF_ELEMENT.unpack_from(data, place)
            start, middle = place + pos, place + pos + key_length
            end = middle + value_length
            if end > len(data):
                self._fail(number, f"an element ends at {end} of {len(data)} bytes")
            found.append(Element(flags, data[start:middle], data[middle:end]))
        return found

    def _children(self, data: bytes, number: int) -> list[int]:
        count = self._count(data, number, BRANCH_ELEMENT.size)
        end = PAGE.size + count * BRANCH_ELEMENT.size
        return [child for _, _, child in BRANCH_ELEMENT.iter_unpack(data[PAGE.size : end])]

    def _count(self, data: bytes, number: int, element_bytes: int) -> int:
        if len(data) < PAGE.size:
            self._fail(number, f"has {len(data)} bytes")
        count: int = PAGE.unpack_from(data)[2]
        if PAGE.size + count * element_bytes > len(data):
            self._fail(number, f"has {count} elements in {len(data)} bytes")
        return count

    def _fail(self, number: int, what: str) -> NoReturn:
        offset = number * self.meta.page_size
        raise CorruptionError(
            f"{self._name}, page {number}: {what}", object=self._name, offset=offset
        )
