"""The bbolt file: trees of all shapes, growth, free pages, and metas that are torn."""

import random
import struct

import pytest

from reef.errors import CorruptionError, UnsupportedFormatError
from reef.locallog.bolt import NO_FREELIST, PAGE, BoltFile, BoltReader, Meta, read_meta, write_empty
from reef.testing.disk import SimulatedDisk

BUCKET = b"bucket"


def new_file(page_size=4096):
    """Return an open file without buckets."""
    file = SimulatedDisk().create("bolt")
    write_empty(file, page_size)
    return file


def check(file):
    """Read a file from its bytes: every page is used once, free, or neither; return buckets."""
    meta = read_meta(file, "bolt")
    reader = BoltReader(file, meta, "bolt")
    found = {}
    for element in reader.elements(meta.root):
        found[element.key] = {e.key: e.value for e in reader.bucket(element.value)[2]}
    own = reader.freelist_pages()
    free = freelist(file, meta)
    assert not own & reader.pages
    assert free == sorted(set(range(2, meta.high_water)) - own - reader.pages)
    assert file.size() >= meta.high_water * meta.page_size
    return found


def freelist(file, meta):
    """Return the free pages as the Go library reads them."""
    offset = meta.freelist * meta.page_size
    _, flags, count, overflow = PAGE.unpack(file.read(16, offset))
    assert flags == 0x10
    body = file.read((overflow + 1) * meta.page_size - 16, offset + 16)
    if count == 0xFFFF:
        (count,) = struct.unpack_from("<Q", body)
        body = body[8:]
    return list(struct.unpack_from(f"<{count}Q", body))


@pytest.mark.parametrize("page_size", [1024, 4096, 16384])
@pytest.mark.parametrize("seed", range(3))
def test_contents_of_all_sizes(page_size, seed):
    """Inline buckets, leaves, branches, values over many pages; the file grows and is reused."""
    rng = random.Random(seed)
    file = new_file(page_size)
    bolt = BoltFile(file, "bolt")
    expected = {}
    for _ in range(40):
        name = rng.choice((b"a", b"b", b"stable"))
        count = rng.choice((0, 1, 3, 50, 800))
        items = {
            rng.randbytes(rng.randint(1, 40)): rng.randbytes(rng.choice((0, 5, 100, 2000)))
            for _ in range(count)
        }
        if rng.random() < 0.2:
            items[b"large"] = rng.randbytes(100_000)
        bolt.commit({name: items})
        expected[name] = items
        assert check(file) == expected
        if rng.random() < 0.3:
            bolt = BoltFile(file, "bolt")
    assert all(bolt.items(name) == items for name, items in expected.items())
    assert bolt.items(b"none") is None


def test_a_tree_of_three_levels():
    """Branches over branches, and keys that are as long as a page."""
    file = new_file(1024)
    items = {b"%05d" % n + bytes(300): b"v%d" % n for n in range(3000)}
    items |= {b"x%d" % n + b"k" * 5000: b"" for n in range(5)}
    BoltFile(file, "bolt").commit({BUCKET: items})
    assert check(file) == {BUCKET: items}
    assert BoltFile(file, "bolt").items(BUCKET) == items


def test_a_bucket_that_did_not_change_keeps_its_pages():
    """A small change does not write a large neighbour again."""
    file = new_file()
    bolt = BoltFile(file, "bolt")
    bolt.commit({b"large": {b"m": bytes(200_000)}, b"small": {}})
    disk = file._disk
    before = len(disk.trace)
    bolt.commit({b"small": {b"k": b"v"}})
    assert sum(len(step.data) for step in disk.trace[before:]) < 5 * 4096
    assert check(file) == {b"large": {b"m": bytes(200_000)}, b"small": {b"k": b"v"}}


def test_free_pages_are_used_again():
    """A thousand commits leave a file of eight pages, as the Go library's."""
    file = new_file()
    bolt = BoltFile(file, "bolt")
    for number in range(1000):
        bolt.commit({BUCKET: {b"k": b"%d" % number}})
    assert file.size() == 32768
    assert bolt.meta.txid == 1001
    for size in (40_000, 3_000_000, 20_000_000):
        bolt.commit({BUCKET: {b"k": bytes(size)}})
    assert file.size() in (32 << 20, 48 << 20)
    check(file)


def test_a_freelist_of_many_pages():
    """More than 65,534 free pages: their number is in the list itself."""
    file = new_file(512)
    bolt = BoltFile(file, "bolt")
    bolt.commit({BUCKET: {b"k": bytes(70_000 * 512)}})
    bolt.commit({BUCKET: {b"k": b"small"}})
    meta = read_meta(file, "bolt")
    assert PAGE.unpack(file.read(16, meta.freelist * 512))[2] == 0xFFFF
    assert check(file) == {BUCKET: {b"k": b"small"}}


def test_a_file_without_a_freelist():
    """The Go library can leave it out; which pages are free follows from the trees."""
    file = new_file()
    BoltFile(file, "bolt").commit({BUCKET: {b"k": bytes(9000)}})
    meta = read_meta(file, "bolt")
    without = Meta(meta.page_size, meta.root, NO_FREELIST, meta.high_water, meta.txid)
    file.write(without.encode(), meta.txid % 2 * 4096)
    bolt = BoltFile(file, "bolt")
    bolt.commit({b"other": {b"a": b"b"}})
    assert check(file) == {BUCKET: {b"k": bytes(9000)}, b"other": {b"a": b"b"}}


def test_buckets_in_buckets_are_kept():
    """Buckets of others are neither read nor overwritten."""
    file = new_file()
    bolt = BoltFile(file, "bolt")
    bolt.commit({b"outer": {b"k": bytes(9000)}, b"ours": {}})
    meta = read_meta(file, "bolt")
    (outer, _) = sorted(BoltReader(file, meta, "x").elements(meta.root), key=lambda e: e.key)[::-1]
    leaf = struct.unpack_from("<Q", outer.value)[0] * 4096
    inner = struct.pack("<QQ", 0, 0) + PAGE.pack(0, 2, 0, 0)
    file.write(struct.pack("<IIII", 1, 16, 1, len(inner)) + b"i" + inner, leaf + 16)
    bolt = BoltFile(file, "bolt")
    for number in range(5):
        bolt.commit({b"ours": {b"n": bytes(5000 * number)}})
    found = BoltFile(file, "bolt")
    with pytest.raises(UnsupportedFormatError, match="contains nested buckets"):
        found.commit({b"outer": {}})
    assert found.items(b"outer") == {b"i": inner}
    assert found._buckets[b"outer"].element.value == outer.value


@pytest.mark.parametrize("page_size", [1024, 4096, 65536])
def test_a_torn_meta_leaves_the_other(page_size):
    """Whichever of the two is damaged, by whichever byte."""
    file = new_file(page_size)
    bolt = BoltFile(file, "bolt")
    for number in range(3):
        bolt.commit({BUCKET: {b"n": b"%d" % number}})
    newest = bolt.meta.txid % 2
    for byte in range(16, 80):
        for page, value in ((newest, b"1"), (1 - newest, b"2")):
            offset = page * page_size + byte
            before = file.read(1, offset)
            file.write(bytes([before[0] ^ 0x10]), offset)
            assert BoltFile(file, "bolt").items(BUCKET) == {b"n": value}
            file.write(before, offset)
    file.write(b"\0", 16)
    file.write(b"\0", page_size + 16)
    with pytest.raises(CorruptionError, match="neither page 0 nor page 1"):
        BoltFile(file, "bolt")


def test_another_version_is_not_damage():
    """A bbolt file of a later version asks for an upgrade."""
    import reef.locallog.bolt as bolt

    file = new_file()
    body = bolt.META.pack(bolt.MAGIC, 3, 4096, 0, 3, 0, 2, 4, 9)
    file.write(body + bolt.U64.pack(bolt._fnv1a(body)), 16)
    with pytest.raises(UnsupportedFormatError):
        read_meta(file, "bolt")
