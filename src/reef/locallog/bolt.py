"""bbolt files: pages, B+ trees and buckets.

    page   = id u64, flags u16, count u16, overflow u32, body; overflow more pages follow
    meta   = magic u32, version u32, page size u32, flags u32, root u64, sequence u64,
             freelist u64, high water u64, txid u64, checksum u64 (FNV-1a of the fields before)

Pages 0 and 1 are metas, written in turns; the valid one with the higher txid is the state.
Every other page belongs to the tree of buckets, to the freelist, or is unused. The reader
trusts none of them. Free pages follow from the tree, so the freelist is only written, for the
Go library; files without one (`NoFreelistSync`) are read like all others.

A commit never writes to a page that the state before it uses. Its order makes it atomic: grow
the file if needed, write new pages, sync, write the other meta page, sync. A power failure in
between leaves the old meta valid, and all pages that it leads to whole. Trees here are small (a
few keys, one of which may be large), so a bucket that changed is rewritten as a whole; others
keep their pages.
"""

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple, NoReturn

from reef.errors import CorruptionError, UnsupportedFormatError
from reef.files import File

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
"""Elements in a page. A freelist with this count has its true count as first number."""
DEPTH_MAX = 64
TXID_MAX = (1 << 64) - 1
"""A meta with this txid cannot be followed by a commit."""
FNV_OFFSET, FNV_PRIME = 0xCBF29CE484222325, 0x100000001B3


@dataclass(frozen=True, slots=True)
class Meta:
    """One of the two pages that lead to all others."""

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
    metas = [meta for meta in (first, second) if meta]
    if not metas:
        raise CorruptionError(f"{name}: neither page 0 nor page 1 is a valid meta", object=name)
    return max(metas, key=lambda meta: meta.txid)


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
    """A key of a leaf, and its value."""

    flags: int
    key: bytes
    value: bytes

    @property
    def is_bucket(self) -> bool:
        return bool(self.flags & BUCKET_FLAG)


class BoltReader:
    """Walks the trees of one state of a file, and collects their page numbers."""

    def __init__(self, file: File, meta: Meta, name: str) -> None:
        self._file = file
        self._name = name
        self.meta = meta
        self._size = file.size()
        self.pages: set[int] = set()
        """Pages of all trees that were walked."""
        if meta.high_water * meta.page_size > self._size:
            self._fail(0, f"{meta.high_water} pages are used, the file has {self._size} bytes")

    def elements(self, root: int) -> list[Element]:
        """Return the elements of all leaves of a tree, in order."""
        elements = list(self._walk(root, 0))
        keys = [element.key for element in elements]
        if any(a >= b for a, b in pairwise(keys)):
            self._fail(root, "keys are not in order")
        return elements

    def bucket(self, value: bytes) -> tuple[int, int, list[Element]]:
        """Return a bucket's root, sequence and elements; an inline one has root 0."""
        if len(value) < BUCKET.size:
            self._fail(self.meta.root, f"a bucket has {len(value)} bytes")
        root, sequence = BUCKET.unpack_from(value)
        if root:
            return root, sequence, self.elements(root)
        return 0, sequence, self._leaf(value[BUCKET.size :], self.meta.root)

    def collect_pages(self, value: bytes) -> None:
        """Walk a bucket for its pages only: its content belongs to another application."""
        for element in self.bucket(value)[2]:
            if element.is_bucket:
                self.collect_pages(element.value)

    def freelist_pages(self) -> set[int]:
        """Return the pages of the freelist itself."""
        return self._freelist()[1]

    def free_pages(self) -> set[int]:
        """Return the pages that the freelist contains."""
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
            self._fail(number, "is referenced twice")
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
        """Return a page with its overflow pages, and their numbers."""
        size, high = self.meta.page_size, self.meta.high_water
        if not 2 <= number < high:
            self._fail(number, f"expected a page from 2 to {high - 1}")
        data = self._file.read(size, number * size)
        stored, _, _, overflow = PAGE.unpack_from(data)
        if stored != number:
            self._fail(number, f"has page number {stored}")
        if number + overflow >= high:
            self._fail(number, f"continues for {overflow} pages, beyond page {high - 1}")
        if overflow:
            data += self._file.read(size * overflow, (number + 1) * size)
        return data, set(range(number, number + overflow + 1))

    def _leaf(self, data: bytes, number: int) -> list[Element]:
        count = self._count(data, number, LEAF_ELEMENT.size)
        elements = []
        for place in range(PAGE.size, PAGE.size + count * LEAF_ELEMENT.size, LEAF_ELEMENT.size):
            flags, pos, key_length, value_length = LEAF_ELEMENT.unpack_from(data, place)
            start, middle = place + pos, place + pos + key_length
            end = middle + value_length
            if end > len(data):
                self._fail(number, f"an element ends at {end} of {len(data)} bytes")
            elements.append(Element(flags, data[start:middle], data[middle:end]))
        return elements

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

    def _fail(self, number: int, problem: str) -> NoReturn:
        offset = number * self.meta.page_size
        raise CorruptionError(
            f"{self._name}, page {number}: {problem}", object=self._name, offset=offset
        )


# --- writing ------------------------------------------------------------------------


FILE_BYTES_MIN = 32 << 10
GROW_BYTES_MAX = 16 << 20
"""The file doubles up to this size, and then grows in steps of it."""

Node = tuple[bytes, int]
"""The first key below a page, and its number."""


def write_empty(file: File, page_size: int) -> None:
    """Write the pages of a file without buckets: two metas, a freelist, a leaf."""
    metas = [Meta(page_size, 3, 2, 4, txid).encode() for txid in (0, 1)]
    pages = [*metas, PAGE.pack(2, FREELIST, 0, 0), PAGE.pack(3, LEAF, 0, 0)]
    file.write(b"".join(page.ljust(page_size, b"\0") for page in pages), 0)


@dataclass(frozen=True, slots=True)
class _BoltBucket:
    element: Element
    """Its element in the tree of buckets."""
    items: Mapping[bytes, bytes]
    pages: frozenset[int]
    sequence: int = 0
    is_flat: bool = True
    """Whether it contains no buckets."""


class BoltFile:
    """A file with flat buckets, loaded into memory as a whole. Only its owner commits.

    Nested buckets are kept as they are.
    """

    def __init__(self, file: File, name: str) -> None:
        self._file = file
        self.meta = read_meta(file, name)
        reader = BoltReader(file, self.meta, name)
        elements = reader.elements(self.meta.root)
        self._own_pages = reader.pages | reader.freelist_pages()
        self._buckets = {element.key: _load(reader, element) for element in elements}

    def items(self, bucket: bytes) -> Mapping[bytes, bytes] | None:
        """Return the items of a bucket; None if it does not exist."""
        known = self._buckets.get(bucket)
        return known.items if known else None

    def commit(self, changes: Mapping[bytes, Mapping[bytes, bytes]]) -> None:
        """Replace the contents of these buckets, durably and atomically."""
        pages = _Pages(self.meta, self._used())
        buckets = dict(self._buckets)
        for name, items in changes.items():
            before = buckets.get(name)
            if before and not before.is_flat:
                raise UnsupportedFormatError(f"bucket {name!r} contains nested buckets")
            buckets[name] = _write_bucket(pages, name, items, before.sequence if before else 0)
        kept = frozenset().union(*(bucket.pages for bucket in buckets.values()))
        elements = [buckets[name].element for name in sorted(buckets)]
        root, own_pages = pages.write_tree(elements)
        freelist = pages.write_freelist(kept | own_pages)
        meta = replace(
            self.meta,
            root=root,
            freelist=freelist.start,
            high_water=pages.high_water,
            txid=self.meta.txid + 1,
        )
        self._store(meta, pages.writes)
        self.meta, self._buckets = meta, buckets
        self._own_pages = own_pages | set(freelist)

    def _used(self) -> set[int]:
        return self._own_pages.union(*(bucket.pages for bucket in self._buckets.values()))

    def _store(self, meta: Meta, writes: Iterable[tuple[int, bytes]]) -> None:
        size, needed = self._file.size(), meta.high_water * meta.page_size
        if needed > size:
            self._file.preallocate(_grown(needed))  # so that commits work on a full disk
        for number, data in sorted(writes):
            self._file.write(data, number * meta.page_size)
        self._file.sync_data()
        self._file.write(meta.encode(), meta.txid % 2 * meta.page_size)
        self._file.sync_data()


def _load(reader: BoltReader, element: Element) -> _BoltBucket:
    before = set(reader.pages)
    _, sequence, elements = reader.bucket(element.value)
    for inner in elements:
        if inner.is_bucket:
            reader.collect_pages(inner.value)
    items = {inner.key: inner.value for inner in elements}
    is_flat = not any(inner.is_bucket for inner in elements)
    return _BoltBucket(element, items, frozenset(reader.pages - before), sequence, is_flat)


def _write_bucket(
    pages: "_Pages", name: bytes, items: Mapping[bytes, bytes], sequence: int
) -> _BoltBucket:
    """Write a bucket to its own pages, or inline in the tree of buckets if it is small."""
    elements = [Element(0, key, items[key]) for key in sorted(items)]
    inline = _leaf(0, elements)
    root, taken = 0, set[int]()
    if len(inline) > pages.page_size // 4:
        root, taken = pages.write_tree(elements)
        inline = b""
    value = BUCKET.pack(root, sequence) + inline
    return _BoltBucket(Element(BUCKET_FLAG, name, value), dict(items), frozenset(taken), sequence)


def _grown(needed: int) -> int:
    """Return the size of a file that must hold `needed` bytes."""
    if needed > GROW_BYTES_MAX:
        return -(-needed // GROW_BYTES_MAX) * GROW_BYTES_MAX
    return max(FILE_BYTES_MIN, 1 << (needed - 1).bit_length())


class _Pages:
    """Page allocation of one commit, and its writes."""

    def __init__(self, meta: Meta, used: set[int]) -> None:
        self.page_size = meta.page_size
        self.high_water = meta.high_water
        self._free = sorted(set(range(2, meta.high_water)) - used)
        self.writes: list[tuple[int, bytes]] = []

    def write_tree(self, elements: Sequence[Element]) -> tuple[int, set[int]]:
        """Write leaves and the branches above them; return the root and all allocated pages."""
        taken: set[int] = set()
        nodes: list[Node] = []
        weights = [LEAF_ELEMENT.size + len(e.key) + len(e.value) for e in elements]
        for start, end in self._split(weights, least=1):
            run = self._allocate(PAGE.size + sum(weights[start:end]))
            self._write(run, _leaf(run.start, elements[start:end], len(run) - 1))
            nodes.append((elements[start].key if elements else b"", run.start))
            taken |= set(run)
        while len(nodes) > 1:
            nodes = self._write_branches(nodes, taken)
        return nodes[0][1], taken

    def _write_branches(self, nodes: list[Node], taken: set[int]) -> list[Node]:
        above: list[Node] = []
        weights = [BRANCH_ELEMENT.size + len(key) for key, _ in nodes]
        for start, end in self._split(weights, least=2):
            run = self._allocate(PAGE.size + sum(weights[start:end]))
            self._write(run, _branch(run.start, nodes[start:end], len(run) - 1))
            above.append((nodes[start][0], run.start))
            taken |= set(run)
        return above

    def _split(self, weights: Sequence[int], *, least: int) -> Iterable[tuple[int, int]]:
        """Yield ranges of elements that each fill a page, with at least `least` elements."""
        start, size = 0, PAGE.size
        for place, weight in enumerate(weights):
            full = size + weight > self.page_size or place - start >= COUNT_MAX
            if full and place - start >= least and len(weights) - place >= least:
                yield start, place
                start, size = place, PAGE.size
            size += weight
        yield start, len(weights)

    def write_freelist(self, used: frozenset[int] | set[int]) -> range:
        """Write the pages that the next commit may allocate: all that are unused by then."""
        count_max = self.high_water - len(used)
        run = self._allocate(PAGE.size + U64.size * (count_max + 1))
        free = sorted(set(range(2, self.high_water)) - used - set(run))
        numbers = [len(free), *free] if len(free) >= COUNT_MAX else free
        head = PAGE.pack(run.start, FREELIST, min(len(free), COUNT_MAX), len(run) - 1)
        self._write(run, head + b"".join(map(U64.pack, numbers)))
        return run

    def _allocate(self, size: int) -> range:
        """Allocate consecutive pages: the first free run that is long enough, or new ones."""
        count = -(-size // self.page_size)
        free = self._free
        for place in range(len(free) - count + 1):
            if free[place + count - 1] == free[place] + count - 1:
                run = range(free[place], free[place] + count)
                del free[place : place + count]
                return run
        self.high_water += count
        return range(self.high_water - count, self.high_water)

    def _write(self, run: range, data: bytes) -> None:
        self.writes.append((run.start, data.ljust(len(run) * self.page_size, b"\0")))


def _leaf(number: int, elements: Sequence[Element], overflow: int = 0) -> bytes:
    heads: list[bytes] = []
    bodies: list[bytes] = []
    start = len(elements) * LEAF_ELEMENT.size
    for place, (flags, key, value) in enumerate(elements):
        offset = start - place * LEAF_ELEMENT.size
        heads.append(LEAF_ELEMENT.pack(flags, offset, len(key), len(value)))
        bodies += (key, value)
        start += len(key) + len(value)
    return b"".join((PAGE.pack(number, LEAF, len(elements), overflow), *heads, *bodies))


def _branch(number: int, nodes: Sequence[Node], overflow: int) -> bytes:
    heads = []
    start = len(nodes) * BRANCH_ELEMENT.size
    for place, (key, child) in enumerate(nodes):
        heads.append(BRANCH_ELEMENT.pack(start - place * BRANCH_ELEMENT.size, len(key), child))
        start += len(key)
    keys = (key for key, _ in nodes)
    return b"".join((PAGE.pack(number, BRANCH, len(nodes), overflow), *heads, *keys))
