"""Logs as another implementation would write them, and an independent check of ours.

Nothing here uses Reef's own reading or writing: bytes are put together from the format page alone.
A meta store of `bolt_bytes` has pages in odd places with garbage between them, thin leaves, and
branches as deep as its keys allow. `check_bolt` reads a bbolt file as strictly as one can: every
byte of every page is either the expected one, or zero.
"""

import json
import struct

import google_crc32c

MAGIC, VERSION = 0xED0CDAED, 2
BRANCH, LEAF, META, FREELIST = 1, 2, 4, 0x10
NO_FREELIST = (1 << 64) - 1
ZERO_TIME = b"\x01" + bytes(12) + b"\xff\xff"
UNSEALED = "0001-01-01T00:00:00Z"
MADE = "2026-11-15T09:02:33.475341691+02:00"


def fnv1a(data):
    """Return the checksum of a meta page."""
    value = 0xCBF29CE484222325
    for byte in data:
        value = (value ^ byte) * 0x100000001B3 % (1 << 64)
    return value


# --- segments -----------------------------------------------------------------------


def uvarint(number):
    """Return a number of Go's variable length."""
    coded = b""
    while number >= 128:
        coded, number = coded + bytes([number & 127 | 128]), number >> 7
    return coded + bytes([number])


def payload(index, data, term=3):
    """Return an entry in the binary codec."""
    numbers = uvarint(index) + uvarint(term) + uvarint(0) + uvarint(len(data))
    return numbers + data + uvarint(0) + ZERO_TIME


class Segment:
    """A segment's file, put together batch by batch."""

    def __init__(self, base, number, codec=1, limit=4096):
        self.base, self.number, self.codec, self.limit = base, number, codec, limit
        self.data = struct.pack("<I3xBQQQ", 0x58EB6B0D, 0, base, number, codec)
        self.offsets, self.index_start, self._batch = [], 0, 0

    def batch(self, *entries, seal=False, reserved=bytes(3)):
        """Append entries, and the index if this is the last batch."""
        for data in entries:
            body = payload(self.base + len(self.offsets), data)
            self.offsets.append(len(self.data))
            self._frame(1, body, reserved)
        if seal:
            self.index_start = len(self.data) + 8
            self._frame(2, struct.pack(f"<{len(self.offsets)}I", *self.offsets), reserved)
        checksum = google_crc32c.value(self.data[self._batch :])
        self.data += struct.pack("<B3xI", 3, checksum)
        self._batch = len(self.data)
        return self

    def _frame(self, kind, body, reserved):
        head = bytes([kind]) + reserved + struct.pack("<I", len(body))
        self.data += head + body + bytes(-len(body) % 8)

    @property
    def name(self):
        return f"{self.base:020}-{self.number:016x}.wal"

    def file(self, behind=b""):
        """Return the whole file, with something behind the last commit."""
        return (self.data + behind).ljust(self.limit, b"\0")

    def info(self, *, sealed=False, first=None, last=None):
        """Return the meta store's record of it."""
        end = last or self.base + len(self.offsets) - 1
        return {
            "ID": self.number,
            "BaseIndex": self.base,
            "MinIndex": first or self.base,
            "MaxIndex": end if sealed else 0,
            "Codec": self.codec,
            "IndexStart": self.index_start if sealed else 0,
            "CreateTime": MADE,
            "SealTime": MADE if sealed else UNSEALED,
            "SizeLimit": self.limit,
        }


# --- meta stores --------------------------------------------------------------------


def state_bytes(next_id, infos):
    """Return the state as compact JSON."""
    state = {"NextSegmentID": next_id, "Segments": infos}
    return json.dumps(state, separators=(",", ":")).encode()


def _page(number, flags, overflow, elements):
    """Return a page; of a leaf the elements are (flags, key, value), of a branch (key, child)."""
    heads, bodies, count = b"", b"", len(elements)
    for place, element in enumerate(elements):
        offset = 16 * (count - place) + len(bodies)
        if flags == LEAF:
            kind, key, value = element
            heads += struct.pack("<IIII", kind, offset, len(key), len(value))
            bodies += key + value
        else:
            key, child = element
            heads += struct.pack("<IIQ", offset, len(key), child)
            bodies += key
    return struct.pack("<QHHI", number, flags, count, overflow) + heads + bodies


class _Layout:
    def __init__(self, page_size, rng):
        self.page_size, self.rng, self.pages, self.high_water = page_size, rng, {}, 2

    def put(self, make, size):
        """Write a page of so many bytes somewhere, behind a gap; return its number."""
        self.high_water += self.rng.randrange(3)
        number, count = self.high_water, -(-size // self.page_size)
        self.high_water += count
        self.pages[number] = make(number, count - 1).ljust(count * self.page_size, b"\0")
        return number

    def put_elements(self, flags, elements):
        size = len(_page(0, flags, 0, elements))
        return self.put(lambda number, more: _page(number, flags, more, elements), size)

    def tree(self, elements):
        nodes = [(e[0][1], self.put_elements(LEAF, e)) for e in self._cut(elements, 1, 6)]
        while len(nodes) > 1:
            nodes = [(n[0][0], self.put_elements(BRANCH, n)) for n in self._cut(nodes, 2, 9)]
        return nodes[0][1] if nodes else self.put_elements(LEAF, [])

    def _cut(self, elements, least, most):
        start = 0
        while start < len(elements):
            end = start + self.rng.randrange(least, most)
            end = end if len(elements) - end >= least else len(elements)
            yield elements[start:end]
            start = end

    def bucket(self, items):
        elements = [(0, key, items[key]) for key in sorted(items)]
        inline = _page(0, LEAF, 0, elements)
        if len(inline) <= self.page_size // 4 and self.rng.random() < 0.7:
            return struct.pack("<QQ", 0, 3) + inline
        return struct.pack("<QQ", self.tree(elements), 3)

    def freelist(self):
        size = 16 + 8 * (self.high_water + 2)
        taken = self.used()

        def make(number, more):
            own = {*taken, *range(number, number + more + 1)}
            free = [n for n in range(2, self.high_water) if n not in own]
            return struct.pack("<QHHI", number, FREELIST, len(free), more) + struct.pack(
                f"<{len(free)}Q", *free
            )

        return self.put(make, size)

    def used(self):
        size = self.page_size
        return {n + k for n, data in self.pages.items() for k in range(len(data) // size)}


def _meta(page_size, root, freelist, high_water, txid):
    body = struct.pack(
        "<IIIIQQQQQ", MAGIC, VERSION, page_size, 0, root, 0, freelist, high_water, txid
    )
    page = struct.pack("<QHHI", txid % 2, META, 0, 0) + body + struct.pack("<Q", fnv1a(body))
    return page.ljust(page_size, b"\0")


def bolt_bytes(buckets, rng, *, page_size=4096, txid=7, freelist=True, older="whole"):
    """Return a bbolt file; `older` is the meta before the last: whole, torn or zeros."""
    layout = _Layout(page_size, rng)
    root = layout.tree([(1, name, layout.bucket(buckets[name])) for name in sorted(buckets)])
    free = layout.freelist() if freelist else NO_FREELIST
    data = bytearray(rng.randbytes((layout.high_water + 2) * page_size))
    for number, page in layout.pages.items():
        data[number * page_size : number * page_size + len(page)] = page
    metas = {n: _meta(page_size, root, free, layout.high_water, n) for n in (txid - 1, txid)}
    if older == "torn":
        metas[txid - 1] = metas[txid - 1][:60] + metas[txid - 1][60:].replace(b"\xff", b"\0")[::-1]
    elif older == "zeros":
        metas[txid - 1] = bytes(page_size)
    for number, page in metas.items():
        data[number % 2 * page_size : number % 2 * page_size + page_size] = page
    return bytes(data)


# --- the second opinion -------------------------------------------------------------


class BoltCheck:
    """Reads a bbolt file, and asserts all that the Go library counts on."""

    def __init__(self, data, *, all_written=True):
        self.data, self.used, self.all_written = data, set(), all_written
        self.page_size = struct.unpack_from("<I", data, 24)[0]
        metas = [self._meta(number) for number in (0, 1)]
        assert abs(metas[0][8] - metas[1][8]) == 1, "two metas in a row"
        newest = max(metas, key=lambda meta: meta[8])
        self.root, _, self.freelist, self.high_water = newest[4:8]
        assert len(data) >= self.high_water * self.page_size

    def buckets(self):
        """Return the content of all buckets, after every page was checked."""
        found = {}
        for kind, name, value in self._tree(self.root):
            assert kind == 1
            found[name] = {key: value for _, key, value in self._bucket(value)}
        self._check_freelist()
        return found

    def _meta(self, number):
        start = number * self.page_size
        assert struct.unpack_from("<QHHI", self.data, start) == (number, META, 0, 0)
        body = self.data[start + 16 : start + 72]
        meta = struct.unpack("<IIIIQQQQQ", body)
        assert meta[:4] == (MAGIC, VERSION, self.page_size, 0)
        assert struct.unpack_from("<Q", self.data, start + 72)[0] == fnv1a(body)
        assert meta[8] % 2 == number
        self._zeros(self.data[start + 80 : start + self.page_size])
        return meta

    def _zeros(self, data):
        assert not self.all_written or not any(data), "bytes after the content of a page"

    def _page(self, number):
        found, flags, count, more = struct.unpack_from("<QHHI", self.data, number * self.page_size)
        assert found == number
        assert number + more < self.high_water
        taken = set(range(number, number + more + 1))
        assert not taken & self.used, "a page is used twice"
        self.used |= taken
        start = number * self.page_size
        return flags, count, self.data[start : start + (more + 1) * self.page_size]

    def _tree(self, number, low=b"", high=None, *, is_root=True):
        flags, count, data = self._page(number)
        if flags == LEAF:
            assert count or is_root
            return self._leaf(data, count, low, high)
        assert flags == BRANCH
        assert count >= 2
        children, end = [], 16 + 16 * count
        for place in range(16, 16 + 16 * count, 16):
            offset, size, child = struct.unpack_from("<IIQ", data, place)
            assert place + offset == end
            children.append((data[end : end + size], child))
            end += size
        self._zeros(data[end:])
        bounds = [*(key for key, _ in children[1:]), high]
        return [
            element
            for (key, child), bound in zip(children, bounds, strict=True)
            for element in self._tree(child, key, bound, is_root=False)
        ]

    def _leaf(self, data, count, low=b"", high=None):
        found, end = [], 16 + 16 * count
        for place in range(16, 16 + 16 * count, 16):
            kind, offset, key_size, value_size = struct.unpack_from("<IIII", data, place)
            assert place + offset == end
            key = data[end : end + key_size]
            found.append((kind, key, data[end + key_size : end + key_size + value_size]))
            end += key_size + value_size
            assert end <= len(data)
            assert low <= key
            assert high is None or key < high
        assert [e[1] for e in found] == sorted({e[1] for e in found})
        self._zeros(data[end:])
        return found

    def _bucket(self, value):
        root, _ = struct.unpack_from("<QQ", value)
        if root:
            assert len(value) == 16
            return self._tree(root)
        inline = value[16:]
        number, flags, count, more = struct.unpack_from("<QHHI", inline)
        assert (number, flags, more) == (0, LEAF, 0)
        assert len(inline) <= self.page_size // 4
        return self._leaf(inline, count)

    def _check_freelist(self):
        flags, count, data = self._page(self.freelist)
        assert flags == FREELIST
        start = 16
        if count == 0xFFFF:
            count, start = struct.unpack_from("<Q", data, 16)[0], 24
        free = struct.unpack_from(f"<{count}Q", data, start)
        assert list(free) == sorted(set(free))
        assert not set(free) & self.used
        assert set(free) | self.used == set(range(2, self.high_water)), (
            "a page is neither used nor free"
        )
        self._zeros(data[start + 8 * count :])
