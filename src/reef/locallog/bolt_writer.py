"""Writing bbolt files: new pages beside the old ones, then one meta page in turn.

A commit never touches a page that the state before it uses. Its order makes it atomic: the
file grows if it must, new pages are written, synced; then the other meta page, synced. A
power failure in between leaves the old meta valid, and everything it leads to whole.

Trees here are small (a few keys, one of which may be large), so a bucket that changed is
written anew as a whole; one that did not keeps its pages.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from reef.errors import UnsupportedFormatError
from reef.locallog.bolt import (
    BRANCH,
    BRANCH_ELEMENT,
    BUCKET,
    BUCKET_FLAG,
    COUNT_MAX,
    FREELIST,
    LEAF,
    LEAF_ELEMENT,
    PAGE,
    U64,
    BoltReader,
    Element,
    Meta,
    read_meta,
)
from reef.locallog.vfs import File

__all__ = ["BoltFile", "write_empty"]

FILE_BYTES_MIN = 32 << 10
GROW_BYTES_MAX = 16 << 20
"""The file doubles up to here, and grows by this much from there on."""

Node = tuple[bytes, int]
"""The first key below a page, and its number."""


def write_empty(file: File, page_size: int) -> None:
    """Write the pages of a file without buckets: two metas, a freelist, a leaf."""
    metas = [Meta(page_size, 3, 2, 4, txid).encode() for txid in (0, 1)]
    pages = [*metas, PAGE.pack(2, FREELIST, 0, 0), PAGE.pack(3, LEAF, 0, 0)]
    file.write(b"".join(page.ljust(page_size, b"\0") for page in pages), 0)


@dataclass(frozen=True, slots=True)
class _Bucket:
    element: Element
    """As it stands in the tree of buckets."""
    items: Mapping[bytes, bytes]
    pages: frozenset[int]
    sequence: int = 0
    is_flat: bool = True
    """Whether there are no buckets in it."""


class BoltFile:
    """A file with flat buckets, in memory as a whole. One owner, who commits.

    Whatever else lies in the file (buckets in buckets) is kept as it is.
    """

    def __init__(self, file: File, name: str) -> None:
        self._file = file
        self.meta = read_meta(file, name)
        reader = BoltReader(file, self.meta, name)
        elements = reader.elements(self.meta.root)
        self._own_pages = reader.pages | reader.freelist_pages()
        self._buckets = {element.key: _load(reader, element) for element in elements}

    def items(self, bucket: bytes) -> Mapping[bytes, bytes] | None:
        """Return what a bucket holds; None if there is none."""
        found = self._buckets.get(bucket)
        return found.items if found else None

    def commit(self, changes: Mapping[bytes, Mapping[bytes, bytes]]) -> None:
        """Put these contents in place of the buckets' old ones, durably, all or none."""
        pages = _Pages(self.meta, self._used())
        buckets = dict(self._buckets)
        for name, items in changes.items():
            before = buckets.get(name)
            if before and not before.is_flat:
                raise UnsupportedFormatError(f"bucket {name!r} has buckets in it")
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
            self._file.preallocate(_grown(needed))  # so that a commit works on a full disk
        for number, data in sorted(writes):
            self._file.write(data, number * meta.page_size)
        self._file.sync_data()
        self._file.write(meta.encode(), meta.txid % 2 * meta.page_size)
        self._file.sync_data()


def _load(reader: BoltReader, element: Element) -> _Bucket:
    before = set(reader.pages)
    _, sequence, found = reader.bucket(element.value)
    for inner in found:
        if inner.is_bucket:
            reader.note_pages(inner.value)
    items = {inner.key: inner.value for inner in found}
    is_flat = not any(inner.is_bucket for inner in found)
    return _Bucket(element, items, frozenset(reader.pages - before), sequence, is_flat)


def _write_bucket(
    pages: "_Pages", name: bytes, items: Mapping[bytes, bytes], sequence: int
) -> _Bucket:
    """Write a bucket of its own pages, or within the tree of buckets if it is small."""
    elements = [Element(0, key, items[key]) for key in sorted(items)]
    inline = _leaf(0, elements)
    root, taken = 0, set[int]()
    if len(inline) > pages.page_size // 4:
        root, taken = pages.write_tree(elements)
        inline = b""
    value = BUCKET.pack(root, sequence) + inline
    return _Bucket(Element(BUCKET_FLAG, name, value), dict(items), frozenset(taken), sequence)


def _grown(needed: int) -> int:
    """Return the size of a file that must hold `needed` bytes."""
    if needed > GROW_BYTES_MAX:
        return -(-needed // GROW_BYTES_MAX) * GROW_BYTES_MAX
    return max(FILE_BYTES_MIN, 1 << (needed - 1).bit_length())


class _Pages:
    """The pages that a commit may take, and what it writes on them."""

    def __init__(self, meta: Meta, used: set[int]) -> None:
        self.page_size = meta.page_size
        self.high_water = meta.high_water
        self._free = sorted(set(range(2, meta.high_water)) - used)
        self.writes: list[tuple[int, bytes]] = []

    def write_tree(self, elements: Sequence[Element]) -> tuple[int, set[int]]:
        """Write leaves and the branches above them; return the root, and all pages taken."""
        taken: set[int] = set()
        nodes: list[Node] = []
        weights = [LEAF_ELEMENT.size + len(e.key) + len(e.value) for e in elements]
        for start, end in self._split(weights, least=1):
            run = self._take(PAGE.size + sum(weights[start:end]))
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
            run = self._take(PAGE.size + sum(weights[start:end]))
            self._write(run, _branch(run.start, nodes[start:end], len(run) - 1))
            above.append((nodes[start][0], run.start))
            taken |= set(run)
        return above

    def _split(self, weights: Sequence[int], *, least: int) -> Iterable[tuple[int, int]]:
        """Yield stretches that each fill a page; at least one, and with `least` elements."""
        start, size = 0, PAGE.size
        for place, weight in enumerate(weights):
            full = size + weight > self.page_size or place - start >= COUNT_MAX
            if full and place - start >= least and len(weights) - place >= least:
                yield start, place
                start, size = place, PAGE.size
            size += weight
        yield start, len(weights)

    def write_freelist(self, used: frozenset[int] | set[int]) -> range:
        """Write which pages the next commit may take: all that are not used by then."""
        count_max = self.high_water - len(used)
        run = self._take(PAGE.size + U64.size * (count_max + 1))
        free = sorted(set(range(2, self.high_water)) - used - set(run))
        numbers = [len(free), *free] if len(free) >= COUNT_MAX else free
        head = PAGE.pack(run.start, FREELIST, min(len(free), COUNT_MAX), len(run) - 1)
        self._write(run, head + b"".join(map(U64.pack, numbers)))
        return run

    def _take(self, size: int) -> range:
        """Return the first free run of pages that is long enough, or new ones."""
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
