"""The bytes on the format pages are those that are written and read."""

import re
from pathlib import Path

from reef.locallog import EntryTime, LocalLog, LogEntry
from reef.locallog.bolt import read_meta
from reef.locallog.recovery import scan_segment
from reef.testing.disk import SimulatedDisk
from tests.golden.samples import dump

PAGES = Path(__file__).parents[3] / "docs" / "format"
ROW = re.compile(r"^[0-9a-f]{4}  ((?:[0-9a-f]{2} ?){1,16})", re.MULTILINE)
ENTRIES = [
    LogEntry(1, 1, data=b"Ada"),
    LogEntry(
        2, 1, 4, extensions=b"x", appended_at=EntryTime.from_unix_ns(1_700_000_000_000_000_009)
    ),
]


def shown(page):
    """Return the bytes of a page's hex dump."""
    text = (PAGES / page).read_text()
    return b"".join(bytes.fromhex(row) for row in ROW.findall(text))


def write_sample(path):
    """Write the log of the page; return its first segment, and the meta page that counts."""
    with LocalLog(path, 96) as log:
        log.store_logs(ENTRIES)
    meta = (path / "wal-meta.db").read_bytes()
    newest = int.from_bytes(meta[64:72], "little") < int.from_bytes(meta[4160:4168], "little")
    return min(path.glob("*.wal")).read_bytes(), meta[newest * 4096 :][:80]


def test_the_segment_on_the_page(tmp_path):
    """Byte for byte as written: header, two entries, index, commit."""
    segment, _ = write_sample(tmp_path)
    assert dump(segment) in (PAGES / "local-log.md").read_text()
    assert shown("local-log.md") == segment


def test_the_segment_on_the_page_is_read():
    """The page's segment is read for ever."""
    file = SimulatedDisk({"s": shown("local-log.md")}).open("s", writable=False)
    scan = scan_segment(file)
    assert (scan.offsets, [commit.valid for commit in scan.commits]) == ([32, 64], [True])
    assert scan.commits[0].index_start == 104


def test_the_meta_on_the_page(tmp_path):
    """The first bytes of the meta page, as they are written."""
    _, meta = write_sample(tmp_path)
    assert dump(meta) in (PAGES / "local-log-meta.md").read_text()
    file = SimulatedDisk({"m": meta.ljust(8192, b"\0")}).open("m", writable=False)
    assert read_meta(file, "m").page_size == 4096
