"""Files with mutated bytes: a result or CorruptionError, and no memory beyond the files' size."""

import random
import re
import tracemalloc
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reef.errors import CorruptionError, NotFoundError, UnsupportedFormatError
from reef.locallog import LocalLog
from reef.locallog.bolt import BoltFile, Meta, read_meta, write_empty
from reef.locallog.inspect import dump_entries, verify_log
from reef.locallog.recovery import scan_segment
from reef.testing.disk import SimulatedDisk
from reef.testing.runtime import deferred_runtime

REFUSED = (CorruptionError, UnsupportedFormatError)
NAMES = ["small_unsealed", "multi_segment", "many_segments", "stable", "tail_truncated"]


def mutate(rng, data):
    """Return bytes with a few of them changed, cut off, put in, or moved."""
    data = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        if not data:
            break
        place = rng.randrange(min(len(data), rng.choice((100, 5000, len(data)))) or 1)
        kind = rng.randrange(6)
        if kind == 0:
            data[place] ^= 1 << rng.randrange(8)
        elif kind == 1:
            data[place : place + 8] = rng.choice((b"\xff" * 8, bytes(8), rng.randbytes(8)))
        elif kind == 2:
            data[place : place + 4] = rng.randrange(1 << 32).to_bytes(4, "little")
        elif kind == 3:
            del data[place:]
        elif kind == 4:
            source = rng.randrange(len(data))
            data[place : place + 64] = data[source : source + 64]
        else:
            data[place:place] = rng.randbytes(rng.randint(1, 16))
    return bytes(data)


def heal_metas(data):
    """Fix the checksums of mutated metas, so that their fields are used."""
    import reef.locallog.bolt as bolt

    data = bytearray(data)
    for page in (0, 4096):
        body = bytes(data[page + 16 : page + 16 + bolt.META.size])
        if len(body) == bolt.META.size:
            data[page + 72 : page + 80] = bolt.U64.pack(bolt._fnv1a(body))
    return bytes(data)


def use(content):
    """Open a log and read everything; say whether it was refused, which verify must foretell."""
    content = {f"/log/{name}": data for name, data in content.items()}
    disk = SimulatedDisk(content)
    report = verify_log("/log", files=SimulatedDisk(content))
    with suppress(*REFUSED):
        list(dump_entries("/log", files=SimulatedDisk(content)))
    try:
        log = LocalLog("/log", files=disk, runtime=deferred_runtime(), segment_bytes=4096)
    except REFUSED:
        assert report.problems, "opening rejects a log that verify accepts"
        return True
    for index in {log.first_index, log.last_index, *range(log.first_index, log.last_index, 9)}:
        with suppress(NotFoundError, *REFUSED):
            log.get_log(index)
    with suppress(*REFUSED):
        list(log.entries())
    log.close()
    return False


def fuzz(cases, name, seeds):
    """Mutate one file of a case for each seed; return how many were refused."""
    original = {f.name: f.read_bytes() for f in (cases[name].path / "wal").iterdir()}
    refused = 0
    for seed in seeds:
        rng = random.Random(seed)
        content = dict(original)
        victim = "wal-meta.db" if rng.random() < 0.5 else rng.choice(sorted(content))
        content[victim] = mutate(rng, content[victim])
        if victim == "wal-meta.db" and rng.random() < 0.7:
            content[victim] = heal_metas(content[victim])
        refused += use(content)
    return refused


@pytest.mark.parametrize("name", NAMES)
def test_mutated_files(cases, name):
    """Never another error, whichever file is damaged."""
    assert 0 < fuzz(cases, name, range(150)) < 150


@pytest.mark.parametrize("name", ["multi_segment", "stable"])
def test_mutated_files_on_a_real_disk(cases, tmp_path, name):
    """Numbers that the system calls themselves would choke on are among them."""
    original = {f.name: f.read_bytes() for f in (cases[name].path / "wal").iterdir()}
    wild = [b"9" * 19, b"9" * 25, b"-5", b"1e9", b"null"]
    outcomes = []
    for number, value in enumerate((*wild, *[None] * 25)):
        rng, path = random.Random(number), tmp_path / str(number)
        path.mkdir()
        content = dict(original)
        meta = content["wal-meta.db"]
        if value is None:
            victim = rng.choice(sorted(content))
            content[victim] = mutate(rng, content[victim])
        else:
            for field in (b"IndexStart", b"SizeLimit", b"MaxIndex"):
                meta = re.sub(rb'"%s":\d+' % field, lambda m, v=value: m[0][: -len(v)] + v, meta)
            content["wal-meta.db"] = meta
        for file, data in content.items():
            (path / file).write_bytes(data)
        outcomes.append("refused")
        with suppress(*REFUSED), LocalLog(path, 4096) as log:
            list(log.entries())
            outcomes[-1] = "read"
    assert set(outcomes) == {"read", "refused"}, "both happen, and nothing else"


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_many_mutated_files(cases, name):
    """The same, thousands of times."""
    assert fuzz(cases, name, range(1000, 5000)) > 0


@settings(deadline=None)
@given(st.binary(max_size=400))
def test_any_bytes_are_a_segment(data):
    """A scan never fails: whatever is no frame ends it."""
    scan = scan_segment(SimulatedDisk({"s": bytes(32) + data}).open("s", writable=False))
    assert all(32 <= offset < 32 + len(data) for offset in scan.offsets)


@settings(deadline=None)
@given(st.binary(max_size=400), st.integers(0, 4000))
def test_any_bytes_are_pages(data, offset):
    """A bbolt file with anything on its pages is read, or is damaged; nothing else."""
    file = SimulatedDisk().create("b")
    write_empty(file, 512)
    BoltFile(file, "b").commit({b"a": {b"k": b"v" * 600}, b"b": {b"k": b"v"}})
    file.write(data, 1024 + offset)
    with suppress(CorruptionError):
        BoltFile(file, "b").commit({b"b": {b"k": b"w"}})
        assert BoltFile(file, "b").items(b"b")[b"k"] == b"w", "it has the value that it accepted"


def test_no_memory_beyond_the_file(cases):
    """Lengths and counts that claim gigabytes are compared with the file's size first."""
    (path,) = (cases["small_unsealed"].path / "wal").glob("*.wal")
    data = bytearray(path.read_bytes())
    data[36:40] = b"\xff\xff\xff\x7f"
    meta_file = bytearray((cases["small_unsealed"].path / "wal" / "wal-meta.db").read_bytes())
    newest = read_meta(SimulatedDisk({"m": bytes(meta_file)}).open("m", writable=False), "m")
    root = newest.root * 4096
    meta_file[root + 10 : root + 12] = b"\xff\xff"
    overflowing = bytearray(meta_file)
    overflowing[root + 12 : root + 16] = b"\xff\xff\xff\x7f"
    claims = Meta(4096, newest.root, newest.freelist, 1 << 50, newest.txid + 1).encode()
    high = bytearray(meta_file)
    page = (newest.txid + 1) % 2 * 4096
    high[page : page + 4096] = claims
    tracemalloc.start()
    try:
        scan = scan_segment(SimulatedDisk({"s": bytes(data)}).open("s", writable=True))
        assert scan.offsets == []
        for wrong in (meta_file, overflowing, high):
            content = {path.name: bytes(data), "wal-meta.db": bytes(wrong)}
            assert use(content)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()
