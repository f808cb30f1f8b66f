"""Directories written by the Go library: read, continued, and written again byte by byte."""

import hashlib
import struct

import pytest

from reef.errors import CorruptionError
from reef.files import OS
from reef.locallog import LocalLog, LogEntry
from reef.locallog.bolt import BoltReader, read_meta
from reef.locallog.encoding import BINARY, FrameType, frame_all, frames
from reef.locallog.metastore import SegmentInfo, read_meta_store
from reef.locallog.segment import TailSegment

WHOLE = [
    *("fresh_empty", "small_unsealed", "batch50", "multi_segment", "large_entry", "start_1000"),
    *("many_segments", "stable", "head_truncated", "tail_truncated", "all_truncated"),
]
CRASHED = [
    *("crash_bad_last_crc", "crash_bad_mid_unchecked", "crash_garbage_frame"),
    *("crash_header_garbled_one_commit", "crash_no_last_commit", "crash_orphan_segment"),
    *("crash_stale_after_rewind", "crash_tail_missing", "crash_tail_truncated_file"),
    *("crash_torn_seal", "crash_torn_seal_nocommit"),
]
GO_REFUSES_APPENDS = {"crash_torn_seal", "crash_torn_seal_nocommit"}


def check_entries(log, expected):
    """Compare every fact of every entry, read one by one and in a row."""
    assert (log.first_index, log.last_index) == (expected["first_index"], expected["last_index"])
    wanted = expected.get("entries") or []
    for found, facts in zip(log.entries(), wanted, strict=True):
        encoded = BINARY.encode(found)
        assert {
            "index": found.index,
            "term": found.term,
            "type": found.type,
            "data_len": len(found.data),
            "data_sha256": hashlib.sha256(found.data).hexdigest(),
            "data_prefix_hex": found.data[:16].hex(),
            "extensions_hex": found.extensions.hex(),
            "appended_at": str(found.appended_at),
            "appended_at_hex": found.appended_at.raw.hex(),
            "encoded_len": len(encoded),
            "encoded_sha256": hashlib.sha256(encoded).hexdigest(),
        } == facts
        assert log.get_log(found.index) == found
    stable = {key.hex(): log.get(key).hex() for key in log._meta.stable}
    assert stable == expected["stable_hex"]
    for key, number in expected.get("stable_uint64", {}).items():
        assert log.get_uint64(bytes.fromhex(key)) == number


def test_all_cases_are_tried(cases):
    """None is left out."""
    others = {"raw_segment", "crash_header_garbled_many"}
    assert cases.keys() == {*WHOLE, *CRASHED, *others}


@pytest.mark.parametrize("name", [*WHOLE, *CRASHED])
def test_opened_read_appended_to_and_reopened(cases, tmp_path, name):
    """All entries and values are those that the Go library reads, and the log continues from there.

    Better than the Go library: after a torn seal, appends are accepted.
    """
    case = cases[name]
    path = case.copy(tmp_path / "wal")
    with LocalLog(path, 4096) as log:
        check_entries(log, case.expected)
        assert (case.expected["append_after_open"] == "ok") == (name not in GO_REFUSES_APPENDS)
        before = list(log.entries())
        added = [LogEntry(log.last_index + 1 + n, 7, data=b"new" * n) for n in range(200)]
        for batch in (added[:1], added[1:150], added[150:]):
            log.store_logs(batch)
        log.set(b"new", b"value")
    with LocalLog(path, 4096) as log:
        assert list(log.entries()) == [*before, *added]
        assert log.get(b"new") == b"value"
        assert not log.recovery.dropped_bytes
    assert (tmp_path / "wal" / "unrelated.txt").exists() == (name == "crash_orphan_segment")


@pytest.mark.parametrize("name", WHOLE)
def test_opening_a_whole_log_changes_nothing(cases, tmp_path, name):
    """No byte of any file: there is nothing to mend."""
    path = cases[name].copy(tmp_path / "wal")
    before = {file.name: file.read_bytes() for file in path.iterdir()}
    LocalLog(path).close()
    assert {file.name: file.read_bytes() for file in path.iterdir()} == before


def test_what_recovery_says_of_each_crash(cases, tmp_path):
    """The report names dropped, created and deleted parts; damage is not skipped (H27)."""
    reports = {}
    for name in CRASHED:
        with LocalLog(cases[name].copy(tmp_path / name)) as log:
            reports[name] = log.recovery
    assert reports["crash_bad_last_crc"].dropped_entries == 3
    assert reports["crash_bad_last_crc"].dropped_bytes > 700
    assert reports["crash_orphan_segment"].deleted_files == [
        "00000000000000000005-00000000000000ab.wal"
    ]
    assert reports["crash_tail_missing"].created_tail
    assert len(reports["crash_bad_mid_unchecked"].damaged) == 1
    assert not reports["crash_bad_mid_unchecked"].dropped_bytes
    assert reports["crash_stale_after_rewind"].dropped_bytes > 0


def test_a_garbled_header_is_damage(cases, tmp_path):
    """The header was acknowledged with the first batch, so no crash explains it."""
    case = cases["crash_header_garbled_many"]
    assert case.expected["open_error"]
    with pytest.raises(CorruptionError, match=r"0000.wal, offset 0: magic 0x58ebffff"):
        LocalLog(case.copy(tmp_path / "wal"))


def test_stale_frames_are_erased(cases, tmp_path):
    """Better than the Go library: bytes after a rewind are zeros before the next append."""
    path = cases["crash_stale_after_rewind"].copy(tmp_path / "wal")
    (file,) = path.glob("*.wal")
    with LocalLog(path) as log:
        end = log._view.tail.bounds(2, 2)[-1]
        assert not any(file.read_bytes()[end:])


# --- bytes --------------------------------------------------------------------------


def batches_of(file):
    """Return the payloads of each batch, and whether the batch seals the segment."""
    data = file.read_bytes()
    batch, sealed = [], False
    for frame in frames(lambda length, offset: data[offset : offset + length], len(data)):
        if frame.type == FrameType.ENTRY:
            batch.append(data[frame.offset + 8 : frame.offset + 8 + frame.length])
        elif frame.type == FrameType.INDEX:
            sealed = True
        else:
            assert frame.valid
            yield batch, sealed
            batch, sealed = [], False


def info_of(facts):
    """Return a segment's facts of expected.json as the meta store has them."""
    names = ("ID", "BaseIndex", "MinIndex", "MaxIndex", "Codec", "IndexStart")
    return SegmentInfo(*(facts[n] for n in names), "", "", facts["SizeLimit"])


def rewrite(info, file, target):
    """Write a segment again, batch by batch; return its bytes and where its index is."""
    tail = TailSegment(info, OS.create(str(target)), BINARY, [], 0)
    tail.file.preallocate(info.size_limit)
    index_start = 0
    for payloads, seal in batches_of(file):
        batch = tail.encode(frame_all(payloads), seal=seal and not payloads)
        assert bool(batch.index_start) == seal, "sealed by the same batch"
        tail.write(batch)
        tail.publish(batch)
        index_start = batch.index_start
    return target.read_bytes(), index_start


@pytest.mark.parametrize("name", WHOLE)
def test_segment_files_are_identical(cases, tmp_path, name):
    """The same entries in the same batches give the same file, sealed at the same batch."""
    case = cases[name]
    for facts in case.segments():
        info = info_of(facts)
        file = case.path / "wal" / info.name
        written, index_start = rewrite(info, file, tmp_path / info.name)
        assert written == file.read_bytes()
        assert index_start == info.index_start


def test_a_segment_of_another_codec_is_identical(cases, tmp_path):
    """Payloads of 0 to 17 bytes, one append each, then a seal: the segment layer alone."""
    case = cases["raw_segment"]
    expected = case.expected
    info = SegmentInfo(expected["id"], 77, 77, 0, expected["codec"], 0, "", "", 2048)
    file = case.path / "wal" / info.name
    written, index_start = rewrite(info, file, tmp_path / info.name)
    assert written == file.read_bytes()
    assert index_start == expected["index_start"]
    found = [payload for batch, _ in batches_of(file) for payload in batch]
    assert [payload.hex() for payload in found] == [e["payload_hex"] for e in expected["entries"]]


@pytest.mark.parametrize(
    "name", ["small_unsealed", "batch50", "multi_segment", "many_segments", "large_entry"]
)
def test_a_whole_log_is_identical(cases, tmp_path, name):
    """The same calls give the same segment files, and the same state but for its times."""
    case = cases[name]
    limit = case.segments()[0]["SizeLimit"]
    with LocalLog(tmp_path / "ours", limit) as log:
        for facts in case.segments():
            for payloads, _ in batches_of(case.path / "wal" / info_of(facts).name):
                log.store_logs([BINARY.decode(payload) for payload in payloads])
    theirs = {file.name: file.read_bytes() for file in (case.path / "wal").glob("*.wal")}
    ours = {file.name: file.read_bytes() for file in (tmp_path / "ours").glob("*.wal")}
    assert ours == theirs
    state, _ = read_meta_store(OS, str(tmp_path / "ours"))
    assert state.next_segment_id == case.expected["meta_before"]["NextSegmentID"]
    for mine, facts in zip(state.segments, case.segments(), strict=True):
        wanted = info_of(facts)
        assert (mine.id, mine.base_index, mine.min_index) == (
            wanted.id,
            wanted.base_index,
            wanted.min_index,
        )
        assert (mine.max_index, mine.index_start, mine.size_limit) == (
            *(wanted.max_index, wanted.index_start, wanted.size_limit),
        )


def test_the_state_is_written_as_the_go_library_writes_it(cases, tmp_path):
    """The same compact JSON: names, order, times of up to nine digits."""
    case = cases["tail_truncated"]
    path = case.copy(tmp_path / "wal")
    before = state_bytes(path)
    with LocalLog(path) as log:
        log._meta.set_state(log._meta.state)
    assert state_bytes(path) == before
    assert before.startswith(b'{"NextSegmentID":5,"Segments":[{"ID":0,"BaseIndex":1,"MinIndex":1,')


def state_bytes(path):
    """Return the state as it is in the file."""
    file = OS.open(str(path / "wal-meta.db"), writable=False)
    reader = BoltReader(file, read_meta(file, "meta"), "meta")
    (found,) = [e for e in reader.elements(reader.meta.root) if e.key == b"wal-meta"]
    ((_, key, value),) = reader.bucket(found.value)[2]
    assert key == b"m"
    return value


def test_a_new_meta_store_is_laid_out_as_the_go_library_does(tmp_path):
    """32 KiB, two metas by txid, root leaf and freelist, both buckets within the root."""
    LocalLog(tmp_path).close()
    data = (tmp_path / "wal-meta.db").read_bytes()
    assert len(data) == 32768
    heads = [struct.unpack_from("<QHHI", data, page * 4096) for page in range(8)]
    assert [head[1] for head in heads[:2]] == [4, 4]
    newest = max((0, 1), key=lambda page: struct.unpack_from("<Q", data, page * 4096 + 64)[0])
    root, _, freelist, high_water = struct.unpack_from("<QQQQ", data, newest * 4096 + 32)
    assert heads[root][:3] == (root, 2, 2)
    assert heads[freelist][:2] == (freelist, 16)
    count = heads[freelist][2]
    free = struct.unpack_from(f"<{count}Q", data, freelist * 4096 + 16)
    assert sorted({*free, root, freelist}) == list(range(2, high_water))
