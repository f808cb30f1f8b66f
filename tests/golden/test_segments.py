"""Segments that earlier releases wrote are read for ever, by every path that reads segments."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from reef.engine.read.caches import ByteCache
from reef.engine.read.segments import SegmentStore
from reef.formats.manifest import SegmentEntry
from reef.formats.segment import decode_tail
from reef.formats.segment_index import hash_key, hash_keys
from reef.formats.versions import RangeTombstone, concat_versions
from reef.paths import Namespace
from reef.stores.memory import MemoryStore
from tests.support.segment_checks import check_segment
from tests.support.strategies import same

FOLDER = Path(__file__).parent / "segments"
NAMES = sorted(path.stem for path in FOLDER.glob("*.seg"))
NAMESPACE = Namespace("golden")


def expected(name):
    """Return the rows that were written, as a table."""
    with pa.OSFile(str(FOLDER / f"{name}.arrow")) as file:
        return pa.ipc.open_file(file).read_all()


def opened(name):
    """Return a store of segments that has one, and its manifest entry."""
    data = (FOLDER / f"{name}.seg").read_bytes()
    footer = check_segment(data, name).footer
    store = MemoryStore()
    store.put(NAMESPACE.segment(footer.write_id), data)
    entry = SegmentEntry(
        id=footer.write_id,
        level=footer.level,
        size=len(data),
        checksum=0,
        tail_bytes=len(data) - 16,
        rows=footer.rows,
        tombstones=footer.tombstones,
        min_key=footer.min_key,
        max_key=footer.max_key,
        lsn_min=footer.lsn_min,
        lsn_max=footer.lsn_max,
        schema_id=footer.schema.id,
        set_hash=footer.set_hash,
    )
    return SegmentStore(store, NAMESPACE, ByteCache(1 << 20)), entry, footer


def check(rows, table):
    """Compare decoded rows with those that were written."""
    assert rows.keys.equals(table["key"].combine_chunks())
    for column, numbers in (("lsn", rows.lsns), ("seq", rows.seqs), ("kind", rows.kinds)):
        assert table[column].to_numpy().tolist() == numbers.tolist()
    for name in table.column_names:
        array = table[name].combine_chunks()
        if name.startswith("c"):
            found = rows.fields.get(int(name[1:]), pa.nulls(len(rows), array.type))
            assert same(found, array), name
        elif name.startswith("t"):
            assert rows.touched[int(name[1:])].equals(array), name
    expiry = table["expires_at_ms"].combine_chunks()
    assert same(
        pa.nulls(len(rows), pa.int64()) if rows.expires_at_ms is None else rows.expires_at_ms,
        expiry,
    )


def test_there_are_segments_of_all_versions():
    """A new version brings new files, and none is taken away."""
    assert len(NAMES) >= 4
    assert {name.split("-")[0] for name in NAMES} == {"v1", "v2"}


@pytest.mark.parametrize("name", NAMES)
def test_groups_hold_the_rows_that_were_written(name):
    """Group by group, as jobs read them."""
    data, table = (FOLDER / f"{name}.seg").read_bytes(), expected(name)
    tail = decode_tail(data, len(data), name)
    assert tail.footer.version == int(name[1])
    numbers = sorted(tail.footer.schema.types())
    groups = [
        tail.decode_group(
            group, numbers, [data[slice(*span)] for span in tail.ranges(group, numbers)]
        )
        for group in range(len(tail.index))
    ]
    check(concat_versions(groups, tail.footer.schema), table)
    if name == "v1-plain-zstd":
        assert tail.range_tombstones == [RangeTombstone(b"user-0001", b"user-0002", 900, 3)]


@pytest.mark.parametrize("name", NAMES)
def test_scans_and_lookups_find_the_rows_that_were_written(name):
    """All pages together, each key by itself, and many keys at once."""
    segments, entry, footer = opened(name)
    table = expected(name)
    pages = range(len(segments.tail(entry).index.pages.rows))
    check(segments.rows(entry, pages), table)
    keys, lsns = table["key"].to_pylist(), table["lsn"].to_pylist()
    for place, key in enumerate(keys):
        found = segments.find(entry, key, hash_key(key))
        assert [version.lsn for version in found] == [
            lsn for other, lsn in zip(keys, lsns, strict=True) if other == key
        ]
        for version in found:
            row = table.slice(lsns.index(version.lsn), 1)
            for number, value in version.values.items():
                assert value == row[f"c{number}"][0].as_py()
        assert segments.find(entry, key + b"\0", hash_key(key + b"\0")) == []
        if place % 7 == 0:
            sought = sorted({key, keys[0], keys[-1], b"nothing"})
            many = segments.find_many(entry, sought, hash_keys(sought), footer.schema)
            at = np.flatnonzero(np.isin(keys, sought))
            check(many, table.take(at))
