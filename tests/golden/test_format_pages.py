"""The bytes in docs/format are real: they decode, and today's code still writes them."""

import re
from pathlib import Path

import pytest

from reef.formats.manifest import decode_manifest
from reef.formats.schema import DEFAULT_SCHEMA
from reef.formats.wal_object import WalObject, decode_ops
from tests.golden import samples
from tests.support.segment_checks import check_segment

PAGES = Path(__file__).parent.parent.parent / "docs" / "format"
ROW = re.compile(r"^[0-9a-f]{4}  ((?:[0-9a-f]{2} ?){1,16})", re.MULTILINE)


def shown(page):
    """Return the bytes of a page's hex dump."""
    text = (PAGES / page).read_text()
    return b"".join(bytes.fromhex(row) for row in ROW.findall(text))


@pytest.mark.parametrize(
    ("page", "make"),
    [
        ("wal.md", samples.wal_object),
        ("segment.md", samples.segment),
        ("manifest.md", samples.manifest),
    ],
    ids=["wal", "segment", "manifest"],
)
def test_the_dump_equals_the_written_bytes(page, make):
    """Byte for byte; a change of format must change the page, and its version."""
    assert shown(page) == make()
    assert samples.dump(make()) in (PAGES / page).read_text()


def test_the_wal_dump_decodes():
    """The page's object is read for ever."""
    found = WalObject.decode(shown("wal.md"), "wal/2")
    assert (found.header.lsn, found.header.after) == (2, ("a",))
    ops = decode_ops(found.records[0], DEFAULT_SCHEMA, "wal/2")
    assert (ops.keys.to_pylist(), ops.fields[1].to_pylist()) == ([b"u1"], [b"Ada"])


def test_the_segment_dump_decodes():
    """The page's segment is read for ever."""
    tail = check_segment(shown("segment.md"), "segments/s.seg")
    assert (tail.footer.rows, tail.footer.tombstones) == (2, 1)
    assert (tail.footer.min_key, tail.footer.max_key) == (b"u1", b"u2")


def test_the_manifest_on_the_page_decodes():
    """The page's manifest is read for ever, and equals the one that is written."""
    page = (PAGES / "manifest.md").read_text()
    (text,) = re.findall(r"^\{\"crc32c\".*\}$", page, re.MULTILINE)
    assert text.encode() == samples.manifest()
    assert decode_manifest(text.encode(), "m").generation == 1
