"""`reef log inspect`, `verify` and `dump`: whole logs, torn ones, and damaged ones."""

import json
import threading

import pytest

from reef.cli.main import run
from reef.files import OS
from reef.locallog import LocalLog, LogEntry
from reef.locallog.encoding import crc32c, frames
from reef.locallog.inspect import dump_entries, dump_frames, verify_log
from tests.unit.locallog.test_log import Reversed


@pytest.fixture
def cli(capsys):
    """Return a function that runs a command; it gives the exit code, stdout and stderr."""

    def call(*words):
        capsys.readouterr()
        code = run([str(word) for word in words])
        return code, *capsys.readouterr()

    return call


@pytest.fixture
def path(tmp_path):
    """Return a log with sealed segments and a tail, which is open elsewhere."""
    with LocalLog(tmp_path / "log", 4096) as log:
        for first in range(1, 101, 5):
            log.store_logs(
                [LogEntry(n, 3, data=b"data %d " % n * 10) for n in range(first, first + 5)]
            )
        log.delete_range(1, 7)
        log.set(b"term", b"3")
        yield tmp_path / "log"


def flip(file, offset):
    """Damage one byte."""
    data = bytearray(file.read_bytes())
    data[offset] ^= 0x40
    file.write_bytes(data)


def verified(cli, path, word="verify"):
    """Return the exit code and the JSON output."""
    code, out, _ = cli("log", word, path, "--output", "json")
    return code, json.loads(out)


def test_a_whole_log(cli, path):
    """All segments with their entries; nothing is wrong."""
    for word in ("inspect", "verify"):
        code, report = verified(cli, path, word)
        assert (code, report["problems"]) == (0, [])
        assert (report["first_index"], report["last_index"], report["stable_keys"]) == (8, 100, 1)
        assert len(report["segments"]) >= 3
        assert [s["sealed"] for s in report["segments"]][-1] is False
        for one, two in zip(report["segments"], report["segments"][1:], strict=False):
            assert two["first_index"] == one["last_index"] + 1
    assert "last index" in cli("log", "inspect", path)[1]


def test_every_golden_log_is_intact(cli, cases):
    """Except for the two that are damaged; a torn batch is not damage."""
    codes = {}
    for name, case in cases.items():
        if name != "raw_segment":
            codes[name], report = verified(cli, case.path / "wal")
            assert report["last_index"] == case.expected["last_index"] or codes[name], name
    damaged = {"crash_bad_mid_unchecked", "crash_header_garbled_many"}
    assert {name for name, code in codes.items() if code == 2} == damaged
    assert set(codes.values()) == {0, 2}


def test_every_byte_of_a_sealed_segment_counts(cli, path):
    """Whichever byte is damaged, verify reports it, with the segment and an offset."""
    file = sorted(path.glob("*.wal"))[1]
    whole = file.read_bytes()
    end = len(whole.rstrip(b"\0"))
    for offset in range(0, end, 97):
        flip(file, offset)
        code, report = verified(cli, path)
        assert code == 2, offset
        assert {problem["object"] for problem in report["problems"]} == {file.name}
        file.write_bytes(whole)
    assert verified(cli, path)[0] == 0


def test_an_index_that_points_elsewhere(cli, path):
    """Also if its checksum is right: a bug of a writer could cause this."""
    file = min(path.glob("*.wal"))
    data = bytearray(file.read_bytes())
    found = list(frames(lambda length, offset: bytes(data[offset : offset + length]), len(data)))
    *_, before, _ = [frame for frame in found if frame.type == 3]
    index, commit = found[-2:]
    data[index.offset + 12] += 8
    data[commit.offset + 4 : commit.offset + 8] = crc32c(
        bytes(data[before.end : commit.offset])
    ).to_bytes(4, "little")
    file.write_bytes(data)
    code, report = verified(cli, path, "inspect")
    assert code == 2
    assert "the index does not match the entries" in report["problems"][0]["message"]


def test_a_damaged_batch_of_the_tail(cli, path):
    """In the middle it is damage, with its place; at the end it is a torn batch."""
    file = sorted(path.glob("*.wal"))[-1]
    whole = file.read_bytes()
    flip(file, 60)
    code, report = verified(cli, path, "inspect")
    assert code == 2
    assert "the checksum of bytes 0 to" in report["problems"][0]["message"]
    file.write_bytes(whole)
    flip(file, len(whole.rstrip(b"\0")) - 30)
    code, report = verified(cli, path)
    assert code == 0
    assert report["segments"][-1]["torn_bytes"] > 0
    assert report["last_index"] == 95


def test_a_log_of_another_codec(cli, tmp_path):
    """Checksums do not need it; entries are left alone; a dump says that it cannot."""
    path = tmp_path / "other"
    with LocalLog(path, 4096, codec=Reversed()) as log:
        for first in range(1, 91, 3):
            log.store_logs([LogEntry(n, data=bytes(50)) for n in range(first, first + 3)])
    assert verified(cli, path)[0] == 0
    code, _, err = cli("log", "dump", path)
    assert code == 1
    assert "written with codec 1048576" in err
    flip(sorted(path.glob("*.wal"))[-1], 60)
    code, report = verified(cli, path)
    assert code == 2
    assert "checksum" in report["problems"][0]["message"]


def test_a_damaged_meta_store(cli, path):
    """Neither meta valid; a missing segment; pages both used and free."""
    meta = path / "wal-meta.db"
    whole = meta.read_bytes()
    flip(meta, 20)
    flip(meta, 4096 + 20)
    code, report = verified(cli, path)
    assert code == 2
    assert report["problems"][0]["object"] == "wal-meta.db"
    meta.write_bytes(whole)
    newest = max((0, 4096), key=lambda page: whole[page + 64 : page + 72][::-1])
    freelist = int.from_bytes(whole[newest + 48 : newest + 56], "little") * 4096
    root = whole[newest + 32 : newest + 40]
    meta.write_bytes(whole[: freelist + 16] + root + whole[freelist + 24 :])
    code, report = verified(cli, path)
    assert code == 2
    assert "on the freelist" in report["problems"][0]["message"]
    meta.write_bytes(whole)
    min(path.glob("*.wal")).unlink()
    code, report = verified(cli, path)
    assert code == 2
    assert report["problems"][0]["message"] == "the file is missing"


def test_dumps(cli, path):
    """Entries of a range, and all frames."""
    code, out, _ = cli("log", "dump", path, "--first", 9, "--last", 11, "--output", "json")
    rows = [json.loads(line) for line in out.splitlines()]
    assert (code, [row["index"] for row in rows]) == (0, [9, 10, 11])
    assert rows[0]["data"].startswith("data 9 ")
    assert (rows[0]["type"], rows[0]["appended_at"]) == ("command", "0001-01-01T00:00:00Z")
    code, out, _ = cli("log", "dump", path, "--frames", "--output", "json")
    rows = [json.loads(line) for line in out.splitlines()]
    assert code == 0
    assert {row["frame"] for row in rows} == {"entry", "index", "commit"}
    assert all(row["valid"] for row in rows if row["frame"] == "commit")
    assert cli("log", "dump", path, "--frames", "--first", 3)[0] == 1


def test_dumps_of_damaged_logs(cli, path):
    """Exit code 2, after what could be read."""
    file = min(path.glob("*.wal"))
    flip(file, len(file.read_bytes().rstrip(b"\0")) - 100)
    code, _, err = cli("log", "dump", path)
    assert code == 2
    assert file.name in err
    assert cli("log", "dump", path, "--frames")[0] == 2
    file.unlink()
    assert cli("log", "dump", path)[0] == 2


class Busy:
    """The real file system, on which something happens at a chosen call."""

    def __init__(self, is_due, act):
        self.is_due, self.act, self.happened = is_due, act, 0

    def open(self, path, *, writable=False):
        if self.is_due(path, None):
            self.happen()
        return BusyFile(self, OS.open(path, writable=writable), path)

    def open_regular(self, path, *, writable=False):
        if self.is_due(path, None):
            self.happen()
        return BusyFile(self, OS.open_regular(path, writable=writable), path)

    def happen(self):
        if not self.happened:
            self.happened = 1
            self.act()

    def __getattr__(self, name):
        return getattr(OS, name)


class BusyFile:
    """One of its files."""

    def __init__(self, files, inner, path):
        self.files, self.inner, self.path = files, inner, path

    def read(self, length, offset):
        if self.files.is_due(self.path, offset):
            self.files.happen()
        return self.inner.read(length, offset)

    def __getattr__(self, name):
        return getattr(self.inner, name)


READS = [
    lambda path, files: verify_log(path, files=files).problems,
    lambda path, files: list(dump_entries(path, files=files)) and [],
    lambda path, files: list(dump_frames(path, files=files)) and [],
]


@pytest.mark.parametrize("read", READS)
def test_segments_that_are_removed_during_a_read(tmp_path, read):
    """Between the read of the meta store and that of the file: that is not damage."""
    with LocalLog(tmp_path, 2000) as log:
        for first in range(1, 61, 3):
            log.store_logs([LogEntry(first + n, data=bytes(300)) for n in range(3)])
        oldest = min(tmp_path.glob("*.wal")).name
        files = Busy(
            lambda path, offset: path.endswith(oldest) and offset is None,
            lambda: log.delete_range(1, 50),
        )
        assert read(str(tmp_path), files) == []
        assert files.happened
        assert not (tmp_path / oldest).exists()


@pytest.mark.parametrize("read", READS)
def test_pages_that_are_reused_during_a_read(tmp_path, read):
    """The owner commits twice between two reads of the meta store: that is no damage."""
    with LocalLog(tmp_path) as log:
        log.store_logs([LogEntry(n) for n in range(1, 9)])
        log.set(b"large", b"1" * 9000)

        def commit():
            for value in range(4):
                log.set(b"large", b"%d" % value * 9000)

        files = Busy(
            lambda path, offset: path.endswith("wal-meta.db") and (offset or 0) > 4096, commit
        )
        assert read(str(tmp_path), files) == []
        assert files.happened


def test_batches_that_are_appended_during_a_read(tmp_path):
    """After the end of a scan, and before the check of the bytes behind it: they are no orphans."""
    with LocalLog(tmp_path, 1 << 16) as log:
        log.store_log(LogEntry(1, data=b"one"))
        end = log._view.tail._end

        def append():
            for index in range(2, 9):
                log.store_log(LogEntry(index, data=b"more"))

        files = Busy(lambda path, offset: path.endswith(".wal") and offset == end, append)
        assert verify_log(str(tmp_path), files=files).problems == []
        assert files.happened


def test_a_log_in_use(tmp_path):
    """Its owner appends, turns to new segments and removes old ones: none of that is damage."""
    done, seen = threading.Event(), []

    def work(log):
        last = 0
        while not done.is_set():
            log.store_logs([LogEntry(last + n, data=bytes(300)) for n in (1, 2, 3)])
            last += 3
            if last > 40:
                log.delete_range(log.first_index, last - 20)

    with LocalLog(tmp_path, 2000) as log:
        worker = threading.Thread(target=work, args=(log,))
        worker.start()
        try:
            for _ in range(30):
                seen += [problem for read in READS for problem in read(str(tmp_path), OS)]
        finally:
            done.set()
            worker.join()
    assert seen == []


def test_segments_without_a_meta_store_are_damage(cli, path):
    """They were a log; opening it refuses as well."""
    (path / "wal-meta.db").rename(path / "elsewhere")
    for word in ("inspect", "verify", "dump"):
        code, _, err = cli("log", word, path)
        assert code == 2, word
        assert "wal-meta.db is missing, but there are segments" in err


def test_a_lost_tail_that_was_truncated(cli, tmp_path):
    """Where a head was cut within the tail there were entries after it: that is reported."""
    with LocalLog(tmp_path / "log") as log:
        log.store_logs([LogEntry(n) for n in range(1, 10)])
        log.delete_range(1, 5)
    (file,) = (tmp_path / "log").glob("*.wal")
    file.unlink()
    code, report = verified(cli, tmp_path / "log")
    assert code == 2
    assert report["problems"][0]["message"].endswith("which had entry 6")


def test_a_directory_that_is_not_a_log(cli, tmp_path):
    """An error, and nothing is made."""
    for word in ("inspect", "verify", "dump"):
        code, _, err = cli("log", word, tmp_path)
        assert code == 1
        assert "is not a log" in err
    assert list(tmp_path.iterdir()) == []
