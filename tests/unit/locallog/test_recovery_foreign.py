"""Directories that another implementation has written, in shapes that the golden ones lack; and
what ours writes, read by a stranger."""

import json
import random
import struct

import pytest

from reef.errors import CorruptionError, InvalidInputError
from reef.locallog import LocalLog, LogEntry
from reef.locallog.bolt import BoltFile, write_empty
from reef.testing.disk import SimulatedDisk
from tests.unit.locallog.foreign import BoltCheck, Segment, bolt_bytes, payload, state_bytes
from tests.unit.locallog.histories import PATH, open_log


def disk_of(infos, files, *, next_id=99, stable=None, rng=None, **layout):
    """Return a disk with these segment files, and a meta store that knows these segments."""
    state = {b"m": state_bytes(next_id, infos)} if infos is not None else {}
    buckets = {b"wal-meta": state, b"stable": stable or {}}
    meta = bolt_bytes(buckets, rng or random.Random(1), **layout)
    content = {**files, "wal-meta.db": meta}
    return SimulatedDisk({f"{PATH}/{name}": data for name, data in content.items()})


def check(disk, first, last):
    """Open a log that has these entries, append to it, and open it again."""
    log = open_log(disk, 300)
    assert (log.first_index, log.last_index) == (first, last)
    indexes = list(range(first, last + 1)) if first else []
    assert [entry.index for entry in log.entries()] == indexes
    report = log.recovery
    log.store_log(LogEntry(last + 1, data=bytes(400)))
    log.store_log(LogEntry(last + 2))
    log.close()
    log = open_log(disk, 300)
    assert [entry.index for entry in log.entries()] == [*indexes, last + 1, last + 2]
    log.close()
    BoltCheck(disk.content()[f"{PATH}/wal-meta.db"]).buckets()
    return report


@pytest.mark.parametrize("seed", range(12))
def test_any_layout_of_the_meta_store(seed):
    """Page sizes, deep trees, gaps, no freelist, one meta torn: all values and entries are read,
    and the next bytes are those that the Go library expects."""
    rng = random.Random(seed)
    page_size = [1024, 4096, 16384, 65536][seed % 4]
    sealed = Segment(5, 0).batch(b"a" * 9, b"a").batch(b"b", b"c", seal=True)
    tail = Segment(9, 4).batch(b"d").batch(b"e", b"f")
    sizes = [0, 8, 50, page_size + 5 if seed % 3 else 3]
    stable = {
        b"k%04d" % n: rng.randbytes(rng.choice(sizes)) for n in range([400, 3, 60, 0][seed % 4])
    }
    disk = disk_of(
        [sealed.info(sealed=True, first=6), tail.info()],
        {sealed.name: sealed.file(), tail.name: tail.file()},
        stable=stable,
        rng=rng,
        page_size=page_size,
        txid=rng.choice([2, 7, 8, 1 << 40]),
        freelist=bool(seed % 5),
        older=["whole", "torn", "zeros"][seed % 3],
    )
    log = open_log(disk, 300)
    assert {key: log.get(key) for key in stable} == stable
    log.set(b"new", b"1")
    log.close()
    check(disk, 6, 11)
    found = BoltCheck(disk.content()[f"{PATH}/wal-meta.db"]).buckets()
    assert found[b"stable"] == {**stable, b"new": b"1"}
    assert [info["ID"] for info in json.loads(found[b"wal-meta"][b"m"])["Segments"]][:2] == [0, 4]


WHOLE = Segment(1, 0).batch(b"a").batch(b"b", b"c")
TRUNCATED = Segment(1, 0).batch(*[b"a"] * 4).batch(*[b"b"] * 3)
SEALED = Segment(1, 0).batch(*[b"a"] * 4).batch(*[b"b"] * 3, seal=True)
NEXT = Segment(6, 2).batch(b"q")
EMPTY = Segment(1, 0)


@pytest.mark.parametrize(
    "behind",
    [
        random.Random(3).randbytes(100),
        b"\x04" + bytes(7) + b"x" * 40,
        b"\x00\x00\x00\x00\x05\x00\x00\x00" + b"y" * 9,
        b"\x01\x00\x00\x00\xff\xff\xff\xff",
        b"\x03\x00\x00\x00\x01\x02\x03\x04",
        b"\x02\x00\x00\x00\x04\x00\x00\x00" + bytes(8),
        b"\x01\x00\x00",
    ],
)
def test_garbage_behind_the_last_commit(behind):
    """Whatever its bytes are, it is dropped and erased."""
    disk = disk_of([WHOLE.info()], {WHOLE.name: WHOLE.file(behind)})
    report = check(disk, 1, 3)
    assert report.dropped_bytes == len(behind.rstrip(b"\0"))
    assert not report.damaged


def test_stale_frames_are_no_proof_of_damage():
    """The Go library leaves them behind a rewind. They may have the right index, but no checksum
    of theirs is right: their batch was torn."""
    entry = payload(5, b"stale")
    frame = struct.pack("<B3xI", 1, len(entry)) + entry + bytes(-len(entry) % 8)
    behind = b"\x77" * 40 + b"\x03\0\0\0crc." + frame + b"\x03\0\0\0crc."
    report = check(disk_of([WHOLE.info()], {WHOLE.name: WHOLE.file(behind)}), 1, 3)
    assert report.dropped_bytes == len(behind)


def test_tails_in_every_state():
    """Without a file, without a byte, without a header, without a commit, with a seal that
    the meta store does not know, cut at either end."""
    cases = {
        "missing": (EMPTY.info(), {}, (0, 0)),
        "no byte": (EMPTY.info(), {EMPTY.name: b""}, (0, 0)),
        "ten bytes": (EMPTY.info(), {EMPTY.name: b"\x01" * 10}, (0, 0)),
        "zeros": (EMPTY.info(), {EMPTY.name: bytes(4096)}, (0, 0)),
        "header": (EMPTY.info(), {EMPTY.name: EMPTY.file()}, (0, 0)),
        "no commit": (WHOLE.info(), {WHOLE.name: WHOLE.data[:-8].ljust(4096, b"\0")}, (1, 1)),
        "short": (WHOLE.info(), {WHOLE.name: WHOLE.data[:-3]}, (1, 1)),
        "head": (TRUNCATED.info(first=3), {TRUNCATED.name: TRUNCATED.file()}, (3, 7)),
        "sealed": (SEALED.info(first=3), {SEALED.name: SEALED.file()}, (3, 7)),
        "sealed and more": (SEALED.info(), {SEALED.name: SEALED.file(b"\x01junk")}, (1, 7)),
        "torn seal": (SEALED.info(), {SEALED.name: SEALED.data[:-8].ljust(4096, b"\0")}, (1, 4)),
    }
    for name, (info, files, bounds) in cases.items():
        report = check(disk_of([info], files), *bounds)
        assert report.sealed_at_open == name.startswith("sealed"), name
        assert report.created_tail == (name == "missing"), name


def test_sealed_segments_in_every_state():
    """Without a tail, cut at their end, next to files that are not in the meta store."""
    whole = {SEALED.name: SEALED.file()}
    check(disk_of([SEALED.info(sealed=True)], whole), 1, 7)
    check(disk_of([SEALED.info(sealed=True, last=5)], whole), 1, 5)
    stale = {Segment(6, 1).name: b"junk", Segment(99, 77).name: b"", "x.txt": b"", "a.wal.b": b""}
    infos = [SEALED.info(sealed=True, last=5), NEXT.info()]
    disk = disk_of(infos, {**whole, NEXT.name: NEXT.file(), **stale})
    report = check(disk, 1, 6)
    assert report.deleted_files == [Segment(6, 1).name, Segment(99, 77).name]
    assert {f"{PATH}/x.txt", f"{PATH}/a.wal.b"} <= disk.content().keys()


def test_two_files_of_one_id():
    """The name says which of them is meant, in whatever order they are listed; those of an id
    that are not in the meta store are all deleted."""
    other = Segment(9, 0).batch(b"z")
    stale = {Segment(n, 77).name: b"" for n in (4, 5)}
    for files in ([WHOLE, other], [other, WHOLE]):
        disk = disk_of([WHOLE.info()], {**{f.name: f.file() for f in files}, **stale})
        assert check(disk, 1, 3).deleted_files == sorted(stale)
    with pytest.raises(CorruptionError, match="segment 0 is named"):
        open_log(disk_of([WHOLE.info()], {other.name: other.file()}))


def test_a_missing_tail_without_a_size(tmp_path):
    """A limit of 0 seals after each append; there is nothing to make room for."""
    info = {**EMPTY.info(), "SizeLimit": 0}
    for path, data in disk_of([info], {}).content().items():
        (tmp_path / path.removeprefix(f"{PATH}/")).write_bytes(data)
    with LocalLog(tmp_path, 300) as log:
        log.store_log(LogEntry(1))
        log.store_log(LogEntry(2))
    with LocalLog(tmp_path, 300) as log:
        assert [entry.index for entry in log.entries()] == [1, 2]


def test_no_state_at_all_is_an_empty_log():
    """The bucket is there, its one key is not."""
    check(disk_of(None, {}), 0, 0)


def test_reserved_bytes_are_ignored():
    """Those of frames; they count for the checksum all the same."""
    odd = Segment(1, 0).batch(b"a", reserved=b"\x07\x08\x09").batch(b"b", seal=False)
    report = check(disk_of([odd.info()], {odd.name: odd.file()}), 1, 2)
    assert not report.damaged


def test_a_tail_that_lost_entries_of_the_meta_store():
    """Entries behind a truncated head were acknowledged: their loss is reported, and the log
    is empty rather than one whose end comes before its beginning."""
    torn = TRUNCATED.file()[: len(TRUNCATED.data) - 8].ljust(4096, b"\0")
    for files in ({TRUNCATED.name: torn}, {}):
        report = check(disk_of([TRUNCATED.info(first=6)], files), 0, 0)
        assert report.damaged == [f"{TRUNCATED.name}, which had entry 6"]


def test_what_cannot_be_opened():
    """Another codec, a header that says another one, an open segment that is not the last."""
    other = Segment(1, 0, codec=2).batch(b"a")
    with pytest.raises(InvalidInputError, match="codec 2"):
        open_log(disk_of([other.info()], {other.name: other.file()}))
    damaged = bytearray(WHOLE.file())
    damaged[24] = 9
    with pytest.raises(CorruptionError, match="codec=9"):
        open_log(disk_of([WHOLE.info()], {WHOLE.name: bytes(damaged)}))
    with pytest.raises(CorruptionError, match="not the last"):
        open_log(disk_of([WHOLE.info(), Segment(4, 1).info()], {WHOLE.name: WHOLE.file()}))


@pytest.mark.parametrize("page_size", [512, 4096, 65536])
def test_our_files_are_read_by_an_independent_reader(page_size):
    """Every byte of every page, whatever the buckets hold and held before."""
    rng = random.Random(page_size)
    disk = SimulatedDisk()
    file = disk.create("/meta")
    write_empty(file, page_size)
    bolt = BoltFile(file, "meta")
    bolt.commit({b"wal-meta": {}, b"stable": {}})
    for count in (1500, 10, 400, 1, 0, 700):
        long = [0, 1, 40, 2 * page_size]
        items = {
            b"%06d" % rng.randrange(10**6) + b"z" * rng.choice([0, 3, 200]): bytes(
                rng.choices(long, [5, 5, 5, 0.2])[0]
            )
            for _ in range(count)
        }
        bolt.commit({b"stable": items})
        bolt.commit({b"wal-meta": {b"m": b"{}" * count}})
        found = BoltCheck(disk.content()["/meta"]).buckets()
        assert found == {b"stable": items, b"wal-meta": {b"m": b"{}" * count}}
        bolt = BoltFile(file, "meta")


def test_trees_that_bite_their_tail():
    """A branch that leads to itself, and two buckets that share a page: damage, not for ever."""
    many = {b"%04d" % n: bytes(30) for n in range(600)}
    data = bolt_bytes({b"a": many, b"b": many}, random.Random(5), page_size=1024)
    pages = {n // 1024: struct.unpack_from("<QHH", data, n) for n in range(2048, len(data), 1024)}
    branches = [n for n, (number, flags, _) in pages.items() if (number, flags) == (n, 1)]
    assert len(branches) > 10
    for branch in branches:
        brother = struct.unpack_from("<Q", data, branch * 1024 + 40)[0]
        for child in (branch, brother):
            bitten = bytearray(data)
            struct.pack_into("<Q", bitten, branch * 1024 + 24, child)
            with pytest.raises(CorruptionError, match=r"is referenced twice"):
                BoltFile(SimulatedDisk({"m": bytes(bitten)}).open("m", writable=False), "m")


def test_golden_meta_stores_pass_the_same_check(cases):
    """The check asks for nothing that the Go library does not do."""
    for name, case in cases.items():
        if name != "raw_segment":
            data = (case.path / "wal" / "wal-meta.db").read_bytes()
            found = BoltCheck(data, all_written=False).buckets()
            stable = {key.hex(): value.hex() for key, value in found[b"stable"].items()}
            assert stable == case.expected["stable_hex"]


def test_indexes_at_the_end_of_their_numbers(tmp_path):
    """A state that could not be opened again is rejected; an accepted one can be."""
    last = (1 << 64) - 3
    with LocalLog(tmp_path) as log:
        for index in (last + 1, last + 2, last + 3):
            with pytest.raises(InvalidInputError, match="exceeds the maximum index"):
                log.store_log(LogEntry(index))
        log.store_logs([LogEntry(last - 1), LogEntry(last)])
        log.delete_range(last, last)
        log.store_log(LogEntry(last))
    with LocalLog(tmp_path) as log:
        assert (log.first_index, log.last_index) == (last - 1, last)
