"""Pages: decoded together, one by one and searched in place, with the same result; damage shows."""

import random
import struct
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from reef.engine.read.caches import ByteCache
from reef.engine.read.segments import SegmentStore
from reef.errors import CorruptionError
from reef.formats import pages as page_format
from reef.formats.coding import BlockKind, Codec, Packer, decode_block, encode_block
from reef.formats.group import encode_group
from reef.formats.manifest import SegmentEntry
from reef.formats.pages import KeyPage, decode_column_pages, decode_key_pages
from reef.formats.schema import DEFAULT_SCHEMA, Schema
from reef.formats.segment import Lineage, decode_tail
from reef.formats.segment_index import decode_index, encode_index, encode_pages, hash_key, hash_keys
from reef.formats.segment_writer import SegmentWriter
from reef.formats.versions import Versions
from reef.paths import Namespace
from reef.stores.memory import MemoryStore
from tests.support.segment_checks import check_segment
from tests.support.strategies import same, schemas, versions

NAMESPACE = Namespace("n")


def segment(schema, rows, page_bytes, monkeypatch, **options):
    """Return a segment whose pages have about so many bytes for each column."""
    monkeypatch.setattr("reef.formats.segment_writer.PAGE_BYTES", page_bytes)
    writer = SegmentWriter(schema, 0, Lineage("01S", 0), **options)
    return b"".join(writer.write([rows]))


def opened(data):
    """Return a store of segments that has this one, and its entry."""
    footer = decode_tail(data, len(data), "seg").footer
    store = MemoryStore()
    store.put(NAMESPACE.segment(footer.write_id), data)
    entry = SegmentEntry(
        **{"id": footer.write_id, "level": 0, "size": len(data), "checksum": 0},
        **{"tail_bytes": len(data) - 16, "rows": footer.rows, "tombstones": 0},
        **{"min_key": footer.min_key, "max_key": footer.max_key, "schema_id": 1},
        **{"lsn_min": footer.lsn_min, "lsn_max": footer.lsn_max, "set_hash": footer.set_hash},
    )
    return SegmentStore(store, NAMESPACE, ByteCache(1 << 20)), entry


@settings(
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    deadline=None,
    max_examples=60,
)
@given(data=st.data())
def test_every_way_of_reading_finds_the_same_rows(data, monkeypatch):
    """All types, codecs and page sizes: whole groups, pages together, by key, by many keys."""
    schema = data.draw(schemas())
    rows = data.draw(versions(schema))
    encoded = segment(
        schema,
        rows,
        data.draw(st.sampled_from([1, 20, 100, 8192])),
        monkeypatch,
        codec=data.draw(st.sampled_from(Codec)),
        group_bytes=data.draw(st.sampled_from([40, 400, 100_000])),
    )
    tail = check_segment(encoded, "seg")
    segments, entry = opened(encoded)
    pages = range(len(tail.index.pages.rows))
    found = segments.rows(entry, pages)
    assert found.keys.equals(rows.keys)
    assert found.lsns.tolist() == rows.lsns.tolist()
    for number, array in rows.fields.items():
        if number in found.fields:
            assert same(found.fields[number], array)
        else:
            assert array.null_count == len(array)
    keys = rows.keys.to_pylist()
    if found.distinct:
        assert len(set(keys)) == len(keys)
    for place, key in enumerate(keys):
        by_key = segments.find(entry, key, hash_key(key))
        assert (rows.lsns[place], rows.seqs[place]) in [(v.lsn, v.seq) for v in by_key]
        assert len(by_key) == keys.count(key)
    sought = sorted(set(keys[::2]))
    many = segments.find_many(entry, sought, hash_keys(sought), schema)
    assert many.keys.to_pylist() == [key for key in keys if key in sought]


def plain(count, width=16):
    """Return rows with keys and values of one length, or of several if `width` is 0."""
    chance = random.Random(count)
    keys = sorted({b"%08d" % n + b"k" * (8 if width else n % 5) for n in range(count)})
    values = [chance.randbytes(100 if width else n % 7) for n in range(count)]
    return Versions(
        pa.array(keys, pa.binary()),
        np.arange(1, count + 1, dtype=np.int64),
        np.zeros(count, np.uint32),
        np.zeros(count, np.uint8),
        {1: pa.array(values, pa.binary())},
    )


@pytest.mark.parametrize("width", [16, 0])
def test_pages_that_are_alike_are_decoded_together(width, monkeypatch):
    """The way of one by one is for other pages; both give the same arrays."""
    rows = plain(500, width)
    ends = [*range(100, 500, 100), 500]
    keys, columns = encode_group(rows, ends, Packer(Codec.NONE))
    payloads = [decode_block(block, BlockKind.KEYS, "s", 0) for block in keys]
    values = [decode_block(block, BlockKind.COLUMN, "s", 0) for block in columns[1]]
    counts, field = np.full(5, 100), DEFAULT_SCHEMA.fields[0]
    together = decode_key_pages(payloads, counts, DEFAULT_SCHEMA, "s", [0] * 5)
    column = decode_column_pages(values, counts, field, "s", [0] * 5)

    def unlike(*_):
        raise page_format._Unlike

    with monkeypatch.context() as patch:
        patch.setattr(page_format, "_heads", unlike)
        alone = decode_key_pages(payloads, counts, DEFAULT_SCHEMA, "s", [0] * 5)
        assert alone.keys.equals(together.keys)
        assert alone.keys.equals(rows.keys)
        assert alone.lsns.tolist() == together.lsns.tolist() == rows.lsns.tolist()
        assert decode_column_pages(values, counts, field, "s", [0] * 5).equals(column)
    assert column.equals(rows.fields[1])
    monkeypatch.setattr(page_format, "decode_key_payload", unlike)
    monkeypatch.setattr(page_format, "decode_column_payload", unlike)
    decode_key_pages(payloads, counts, DEFAULT_SCHEMA, "s", [0] * 5)
    decode_column_pages(values, counts, field, "s", [0] * 5)


def test_values_of_one_length_have_no_offsets():
    """Four bytes less for each key and value."""
    rows = plain(1000)
    (key_block,), columns = encode_group(rows, [1000], Packer(Codec.NONE))
    assert len(key_block) < 1000 * (16 + 13) + 120
    assert len(columns[1][0]) < 1000 * 100 + 60


TYPES = [pa.binary(), pa.string(), pa.int64(), pa.float32(), pa.bool_(), pa.list_(pa.float32(), 3)]


@pytest.mark.parametrize("data_type", TYPES, ids=str)
@pytest.mark.parametrize("nulls", [False, True])
def test_damaged_payloads_with_right_checksums(data_type, nulls):
    """Any bytes under a valid seal: the rows or a CorruptionError that names the object."""
    schema = Schema.of(pa.schema([("id", pa.binary()), ("c", data_type)]), "id")
    count, chance = 60, random.Random(str(data_type))
    values = {
        pa.binary(): [b"x" * (n % 4) for n in range(count)],
        pa.string(): ["é" * (n % 4) for n in range(count)],
        pa.bool_(): [n % 3 == 0 for n in range(count)],
        pa.list_(pa.float32(), 3): [[n, n, n] for n in range(count)],
    }.get(data_type, list(range(count)))
    if nulls:
        values = [None if n % 5 == 0 else value for n, value in enumerate(values)]
    rows = plain(count)
    rows = rows.with_fields({1: pa.array(values, data_type)})
    ends = [20, 40, 60]
    keys, columns = encode_group(rows, ends, Packer(Codec.NONE))
    data = b"".join(SegmentWriter(schema, 0, Lineage("01S", 0)).write([rows]))
    tail = decode_tail(data, len(data), "seg")
    whole = [decode_block(b, BlockKind.KEYS, "s", 0) for b in keys]
    cells = [decode_block(b, BlockKind.COLUMN, "s", 0) for b in columns[1]]
    counts, outcomes = np.full(3, 20), set()
    for _ in range(400):
        for payloads, decode in (
            (whole, lambda p: decode_key_pages(p, counts, schema, "seg", [0, 0, 0])),
            (whole, lambda p: _search(tail, p[0])),
            (cells, lambda p: decode_column_pages(p, counts, schema.fields[0], "seg", [0, 0, 0])),
            (cells, lambda p: tail.value(0, 1, p[0], chance.randrange(20))),
        ):
            damaged = [bytearray(payload) for payload in payloads]
            _damage(damaged[0], chance)
            try:
                result = decode([bytes(payload) for payload in damaged])
                if isinstance(result, pa.Array):
                    result.validate()
                outcomes.add("rows")
            except CorruptionError as error:
                outcomes.add(error.context["object"])
    assert "seg" in outcomes
    assert outcomes <= {"rows", "seg"}


def _damage(payload, chance):
    """Change a word of the head, cut the payload, or make it longer."""
    how = chance.randrange(4)
    if how == 0:
        del payload[chance.randrange(len(payload)) :]
    elif how == 1:
        payload += bytes(chance.choice([1, 8, 64]))
    else:
        at = chance.randrange(0, min(len(payload), 96) - 4, 2)
        word = chance.choice([0, 1, 0xFF, 0x7FFFFFFF, 0xFFFFFFFF, chance.randrange(1 << 32)])
        payload[at : at + 4] = struct.pack("<I", word)


def _search(tail, payload):
    found, _ = tail.find(0, b"%08d" % 7 + b"k" * 8, payload)
    return found


def test_a_page_cannot_claim_more_rows_than_it_has_bytes():
    """Values without offsets have a byte each: billions of rows do not fit a small page."""
    head = struct.pack("<IIHHIII", 0xFFFFFFFF, 1, 1, 3, 0xFFFFFFFF, 0xFFFFFFFF, 0)
    field = DEFAULT_SCHEMA.fields[0]
    for rows in (0xFFFFFFFF, 1):
        with pytest.raises(CorruptionError):
            decode_column_pages([head], np.array([rows]), field, "seg", [0])
        with pytest.raises(CorruptionError):
            decode_column_pages([head] * 2, np.array([rows] * 2), field, "seg", [0, 0])


def test_another_prefix_than_none_is_searched_as_well():
    """Pages of version 1 have one; they are no plain pages."""
    rows = plain(10)
    (block,), _ = encode_group(rows, [10], Packer(Codec.NONE))
    payload = bytes(decode_block(block, BlockKind.KEYS, "s", 0))
    assert KeyPage.of(payload) is not None
    assert KeyPage.of(payload[:40]) is None
    assert KeyPage.of(b"\x01" + payload[1:]) is None


def test_a_page_block_that_does_not_fit_its_index_is_damage(monkeypatch):
    """Pages that do not add up to their groups, or whose keys are out of order."""
    data = segment(DEFAULT_SCHEMA, plain(500), 500, monkeypatch)
    index = decode_tail(data, len(data), "seg").index
    entries = [index.entry(group) for group in range(len(index))]
    payload = encode_index(entries, DEFAULT_SCHEMA)
    assert len(index.pages.rows) > 3 * len(index)

    def decoded(change):

        pages = encode_pages(
            [replace(entries[0], **change(entries[0])), *entries[1:]], DEFAULT_SCHEMA
        )
        return decode_index(payload, DEFAULT_SCHEMA, 16, "seg", 0, pages=pages)

    assert decoded(lambda e: {}).pages.keys == index.pages.keys
    for change in (
        lambda e: {"rows": [e.rows[0] + 1, *e.rows[1:]]},
        lambda e: {"key_blocks": [e.key_blocks[0] + 8, *e.key_blocks[1:]]},
        lambda e: {"column_blocks": {1: [e.column_blocks[1][0] + 8, *e.column_blocks[1][1:]]}},
        lambda e: {"page_keys": [*e.page_keys[:-2], e.page_keys[-1], e.page_keys[-2]]},
        lambda e: {"page_keys": [b"\xff", *e.page_keys[1:]]},
    ):
        with pytest.raises(CorruptionError):
            decoded(change)
    with pytest.raises(CorruptionError, match="without its page block"):
        decode_index(payload, DEFAULT_SCHEMA, 16, "seg", 0)


def test_blocks_of_another_kind_are_damage():
    """A column where keys are expected, and keys where a column is."""
    block = encode_block(BlockKind.COLUMN, bytes(100))
    with pytest.raises(CorruptionError, match="expected a block of kind 1"):
        decode_block(block, BlockKind.KEYS, "seg", 0)


def test_offsets_that_fall_are_damage():
    """Arrow trusts its buffers: a page whose offsets go back never reaches it."""
    field = DEFAULT_SCHEMA.fields[0]

    def page(*offsets):
        body = struct.pack("<4i", *offsets)
        data = b"abcdefgh"
        return struct.pack("<IIHHIII", 3, 1, 1, 3, 0xFFFFFFFF, 16, 8) + body + data

    good = page(0, 2, 5, 8)
    rows = np.array([3, 3])
    found = decode_column_pages([good, good], rows, field, "seg", [0, 0])
    assert found.to_pylist() == [b"ab", b"cde", b"fgh"] * 2
    for wrong in (page(0, 5, 2, 8), page(1, 2, 5, 8), page(0, 2, 5, 9), page(0, -2, 5, 8)):
        with pytest.raises(CorruptionError):
            decode_column_pages([good, wrong], rows, field, "seg", [0, 0])


def test_all_versions_of_a_key_are_found():
    """Newest first, in a plain page, whatever comes before and after it."""
    keys = [b"a", b"b", b"b", b"b", b"c"]
    rows = Versions(
        pa.array(keys, pa.binary()),
        np.array([1, 9, 7, 5, 2], np.int64),
        np.array([0, 3, 2, 1, 0], np.uint32),
        np.zeros(5, np.uint8),
        {1: pa.array(list(keys), pa.binary())},
    )
    data = b"".join(SegmentWriter(DEFAULT_SCHEMA, 0, Lineage("01S", 0)).write([rows]))
    segments, entry = opened(data)
    found = segments.find(entry, b"b", hash_key(b"b"))
    assert [(version.lsn, version.seq) for version in found] == [(9, 3), (7, 2), (5, 1)]
    assert [version.lsn for version in segments.find(entry, b"c", hash_key(b"c"))] == [2]
    assert segments.find(entry, b"bb", hash_key(b"bb")) == []
