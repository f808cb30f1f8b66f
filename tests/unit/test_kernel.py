"""The compiled kernel returns what the Python code returns, or leaves the case to it.

Every comparison also runs on damaged input: cut short, with changed bytes, with wrong lengths.
The kernel may then leave the case to Python or return the same; it never crashes, and never returns
anything else.
"""

import os
import random
import struct
import subprocess
import sys
from bisect import bisect_left, bisect_right
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from reef import kernel
from reef.engine.read.merge import newest_versions, sorted_places
from reef.engine.rows.convert import python_list
from reef.errors import CorruptionError
from reef.files import OS
from reef.formats.coding import BlockKind, Codec, Packer, decode_block, encode_block
from reef.formats.group import _column_payloads, _key_payloads, encode_group
from reef.formats.pages import (
    KeyPage,
    decode_column_pages,
    decode_key_pages,
    join_column,
    join_keys,
    value_reader,
)
from reef.formats.schema import DEFAULT_SCHEMA
from reef.formats.segment import Lineage, decode_tail
from reef.formats.segment_index import FilterBuilder, KeyFilter, hash_keys
from reef.formats.segment_writer import SegmentWriter
from reef.formats.versions import (
    KeysInOrder,
    Versions,
    concat_versions,
    key_place,
    merge_places,
)
from tests.support.strategies import same, schemas, versions
from tests.unit.formats.test_pages import NAMESPACE, opened

native = kernel.native
pytestmark = pytest.mark.skipif(native is None, reason="the kernel was not built here")
FEW = settings(
    deadline=None,
    max_examples=30,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)


@pytest.fixture
def python(monkeypatch):
    """Return a function that calls another one without the kernel."""

    def call(function, *arguments):
        with monkeypatch.context() as patched:
            patched.setattr(kernel, "native", None)
            return function(*arguments)

    return call


def damaged(data, draw):
    """Return some bytes after one of several kinds of damage; often none."""
    how = draw(st.sampled_from(["none", "cut", "longer", "byte", "word"]))
    if how == "none" or not data:
        return bytes(data)
    place = draw(st.integers(0, len(data) - 1))
    if how == "cut":
        return bytes(data[:place])
    if how == "longer":
        return bytes(data) + bytes(draw(st.integers(1, 16)))
    broken = bytearray(data)
    if how == "byte":
        broken[place] ^= draw(st.integers(1, 255))
    else:  # lengths and offsets are words
        place = draw(st.integers(0, min(len(data), 96) // 4)) * 4
        word = st.sampled_from([0, 1, 7, 1 << 31, (1 << 31) - 1, (1 << 32) - 1, len(data)])
        broken[place : place + 4] = struct.pack("<I", draw(word))
    return bytes(broken[: len(data)])


def seal(kind, codec, raw_length, stored):
    """Return a block with a correct checksum, whatever is in it."""
    from reef.formats.coding import crc32c, padding

    checked = struct.pack("<BBHI", kind, codec, 0, raw_length) + stored + padding(len(stored))
    return struct.pack("<II", len(stored), crc32c(checked)) + checked


TEXTS = st.one_of(
    st.binary(max_size=300),
    st.builds(
        lambda part, times: part * times, st.binary(min_size=1, max_size=40), st.integers(1, 300)
    ),
    st.builds(
        lambda seed, size: random.Random(seed).randbytes(size),
        st.integers(0, 9),
        st.sampled_from([1, 1535, 1536, 1537, 3072, 5000]),
    ),
)


def alike(left, right):
    """Whether rows are the same, column by column."""
    columns = {**left.fields, **right.fields}
    return (
        left.keys.equals(right.keys)
        and left.lsns.tolist() == right.lsns.tolist()
        and left.seqs.tolist() == right.seqs.tolist()
        and left.kinds.tolist() == right.kinds.tolist()
        and left.expires_at_ms == right.expires_at_ms
        and left.touched.keys() == right.touched.keys()
        and all(array.equals(right.touched[n]) for n, array in left.touched.items())
        and left.fields.keys() == right.fields.keys()
        and all(same(left.fields[n], right.fields[n]) for n in columns)
    )


# --- blocks -------------------------------------------------------------------------


@FEW
@given(TEXTS, st.sampled_from(Codec))
def test_blocks_decode_to_their_payload(payload, codec):
    """All codecs and sizes, those around the lanes of the checksum too."""
    block = encode_block(BlockKind.COLUMN, payload, codec)
    assert bytes(decode_block(block, BlockKind.COLUMN, "b", 0)) == payload
    found = native.decode_block(block, BlockKind.COLUMN)
    assert found == payload or (block[9] == Codec.ZSTD and found is None)
    assert native.decode_block(memoryview(block), BlockKind.COLUMN) == found
    assert native.decode_block(block, BlockKind.KEYS) is None


@FEW
@given(st.data())
def test_damaged_blocks_are_left_to_python(data):
    """Any change of a block is found by its checksum, or changes nothing."""
    payload = data.draw(TEXTS)
    block = encode_block(BlockKind.COLUMN, payload, data.draw(st.sampled_from(Codec)))
    assert native.decode_block(damaged(block, data.draw), BlockKind.COLUMN) in (payload, None)


@settings(deadline=None, max_examples=150)
@given(st.data())
def test_hostile_lz4_is_never_decoded_to_something_else(python_codec, data):
    """With a correct checksum: whatever the kernel accepts, the library decodes to the same."""
    payload = data.draw(TEXTS.filter(len))
    good = pa.Codec("lz4_raw").compress(payload, asbytes=True)
    stored = data.draw(
        st.one_of(st.binary(min_size=1, max_size=40), st.just(damaged(good, data.draw)))
    )
    raw_length = data.draw(st.sampled_from([len(payload), len(payload) + 1, 1, 12, 40, 1 << 16]))
    found = native.decode_block(seal(2, Codec.LZ4, raw_length, stored), BlockKind.COLUMN)
    if found is not None:
        assert found == python_codec.decompress(stored, raw_length, asbytes=True)


@pytest.fixture(scope="module")
def python_codec():
    """Return the library that decompresses where there is no kernel."""
    return pa.Codec("lz4_raw")


def test_a_block_cannot_claim_more_than_its_share():
    """A raw length far beyond the stored bytes is not allocated."""
    assert native.decode_block(seal(2, Codec.LZ4, 1 << 31, b"x" * 16), BlockKind.COLUMN) is None


# --- pages --------------------------------------------------------------------------


def page_payloads(rows, ends):
    """Return the payloads of key pages, and those of each column that has values."""
    keys = list(_key_payloads(rows, ends))
    columns = {
        number: list(_column_payloads(number, array, ends))
        for number, array in rows.fields.items()
        if array.null_count < len(array)
    }
    return keys, columns


def cut_into_pages(rows, draw):
    """Return where pages end, each with at least one row, and how many rows each has."""
    inner = draw(st.sets(st.integers(1, len(rows)), max_size=4)) - {len(rows)}
    ends = [*sorted(inner), len(rows)]
    return ends, np.diff([0, *ends]).astype(np.int64)


def outcome(call, *arguments):
    """Return a result, or that it is damage."""
    try:
        return call(*arguments)
    except CorruptionError:
        return CorruptionError


@FEW
@given(data=st.data())
def test_pages_are_joined_as_in_python(data, python):
    """Keys and all column types, damaged or not: the same rows, or left to Python."""
    schema = data.draw(schemas())
    rows = data.draw(versions(schema).filter(len))
    ends, counts = cut_into_pages(rows, data.draw)
    keys, columns = page_payloads(rows, ends)
    keys[0] = damaged(keys[0], data.draw)
    places = [0] * len(ends)
    joined = join_keys(keys, counts)
    if joined is not None:
        assert alike(joined, python(decode_key_pages, keys, counts, schema, "s", places))
    fields = {field.number: field for field in schema.fields}
    for number, payloads in columns.items():
        payloads[-1] = damaged(payloads[-1], data.draw)
        array = join_column(payloads, counts, fields[number])
        if array is not None:
            array.validate(full=array.type != pa.string())
            expected = python(decode_column_pages, payloads, counts, fields[number], "s", places)
            assert same(array, expected)


def plain(count, width=None, seed=0):
    """Return rows of bytes; keys of one width, or of several."""
    numbers = random.Random(seed)
    if width:
        keys = sorted({numbers.randbytes(width) for _ in range(count)})
    else:
        keys = sorted({numbers.randbytes(numbers.randint(1, 9)) for _ in range(count)})
    values = [numbers.randbytes(numbers.randint(0, 30)) for _ in keys]
    return Versions(
        pa.array(keys, pa.binary()),
        np.arange(len(keys), dtype=np.int64),
        np.arange(len(keys), dtype=np.uint32),
        np.zeros(len(keys), np.uint8),
        {1: pa.array(values, pa.binary())},
    )


@pytest.mark.parametrize("width", [None, 3])
def test_plain_pages_are_not_left_to_python(width):
    """The shape that nearly all pages have is joined by the kernel, from payloads and blocks."""
    rows = plain(300, width)
    ends = [100, 101, len(rows)]
    counts = np.diff([0, *ends]).astype(np.int64)
    keys, columns = page_payloads(rows, ends)
    assert alike(join_keys(keys, counts).with_fields(rows.fields), rows)
    assert join_column(columns[1], counts, DEFAULT_SCHEMA.fields[0]).equals(rows.fields[1])
    stored, blocks = encode_group(rows, ends, Packer(Codec.LZ4))
    for numbers, payloads in ((stored, keys), (blocks[1], columns[1])):
        body = b"".join(numbers)
        bounds = np.cumsum([0, *map(len, numbers)]).astype(np.int64)
        kind = BlockKind.KEYS if numbers is stored else BlockKind.COLUMN
        args = [body[:10], body[10:]], np.array([0, 10]), bounds[:-1].copy(), bounds[1:].copy()
        found = native.decode_blocks(*args, bytes([kind]) * 3)
        assert found[0] is None, "it is in two ranges"
        assert found[1:] == payloads[1:]
        args = [body], np.array([0]), bounds[:-1].copy(), bounds[1:].copy()
        assert native.decode_blocks(*args, bytes([kind]) * 3) == payloads
        if numbers is stored:
            assert alike(join_keys(args, counts).with_fields(rows.fields), rows)
        else:
            assert join_column(args, counts, DEFAULT_SCHEMA.fields[0]).equals(rows.fields[1])


@FEW
@given(data=st.data())
def test_a_key_is_found_as_in_python(data):
    """With several versions, absent keys and damage: the same rows and stamp."""
    count = data.draw(st.integers(1, 60))
    letters = st.binary(min_size=1, max_size=data.draw(st.sampled_from([1, 2, 6])))
    keys = sorted(data.draw(st.lists(letters, min_size=count, max_size=count)))
    rows = Versions(
        pa.array(keys, pa.binary()),
        np.arange(count, dtype=np.int64) * -7,
        np.arange(count, dtype=np.uint32) + 4_000_000_000,
        np.arange(count, dtype=np.uint8) % 4,
        {},
    )
    payload = damaged(next(iter(_key_payloads(rows, [count]))), data.draw)
    key = data.draw(st.one_of(st.sampled_from(keys), letters))
    found = native.find_key(payload, key, count)
    try:
        page = KeyPage.of(payload)
    except ValueError:
        page = None
    if page is None or page.rows != count:
        assert found is None
    elif found is not None:
        expected = page.find(key)
        assert range(found[0], found[1]) == expected
        if expected:
            assert found[2:] == page.stamp(found[0])


@FEW
@given(data=st.data())
def test_a_value_is_read_as_in_python(data, python):
    """Bytes and nulls, damaged or not."""
    values = data.draw(
        st.lists(st.one_of(st.none(), st.binary(max_size=6)), min_size=1, max_size=40)
    )
    (payload,) = _column_payloads(1, pa.array(values, pa.binary()), [len(values)])
    payload = damaged(payload, data.draw)
    row = data.draw(st.integers(0, len(values) - 1))
    found = native.bytes_at(payload, row, len(values))
    if found is not None:
        read = value_reader(DEFAULT_SCHEMA.fields[0])
        assert found[0] == python(read, payload, row, len(values))


@FEW
@given(data=st.data())
def test_picked_rows_are_those_of_the_keys(data, python, monkeypatch):
    """`find_many` by the kernel and without it, over all types, page sizes and codecs."""
    schema = data.draw(schemas())
    rows = data.draw(versions(schema).filter(len))
    monkeypatch.setattr(
        "reef.formats.segment_writer.PAGE_BYTES", data.draw(st.sampled_from([1, 40, 8192]))
    )
    writer = SegmentWriter(schema, 0, Lineage("01S", 0), codec=data.draw(st.sampled_from(Codec)))
    segments, entry = opened(b"".join(writer.write([rows])))
    known = rows.keys.to_pylist()
    asked = sorted(
        data.draw(st.sets(st.one_of(st.sampled_from(known), st.binary(min_size=1, max_size=3))))
    )
    hashes = hash_keys(asked)
    found = segments.find_many(entry, asked, hashes, schema)
    other, _ = opened(segments._store.get(NAMESPACE.segment(entry.id)))
    assert alike(found, python(other.find_many, entry, asked, hashes, schema))
    assert found.keys.to_pylist() == [key for key in known if key in set(asked)]


@FEW
@given(data=st.data())
def test_a_streamed_scan_has_the_same_rows(data, python):
    """Pages that are not kept, of all types and codecs: with the kernel and without."""
    schema = data.draw(schemas())
    rows = data.draw(versions(schema).filter(len))
    writer = SegmentWriter(schema, 0, Lineage("01S", 0), codec=data.draw(st.sampled_from(Codec)))
    encoded = b"".join(writer.write([rows]))
    segments, entry = opened(encoded)
    pages = range(len(decode_tail(encoded, len(encoded), "s").index.pages.rows))
    streamed = segments.rows(entry, pages, keep=False)
    assert alike(streamed, python(segments.rows, entry, pages))
    assert alike(streamed, segments.rows(entry, pages))


def test_damage_of_a_streamed_scan_is_reported():
    """A changed byte in any block is damage, with the kernel as without it."""
    rows = plain(500)
    writer = SegmentWriter(DEFAULT_SCHEMA, 0, Lineage("01S", 0))
    encoded = bytearray(b"".join(writer.write([rows])))
    encoded[40] ^= 1
    segments, entry = opened(bytes(encoded))
    with pytest.raises(CorruptionError, match="checksum"):
        segments.rows(entry, range(1), keep=False)
    with pytest.raises(CorruptionError, match="checksum"):
        segments.rows(entry, range(1))


def test_picks_outside_of_their_pages_are_refused():
    """Rows and pages that do not exist, and pairs out of order, are not read."""
    rows = plain(50)
    keys, columns = page_payloads(rows, [20, len(rows)])
    counts = np.array([20, len(rows) - 20])
    field = DEFAULT_SCHEMA.fields[0]
    for pairs in ([(0, 20)], [(2, 0)], [(1, 0), (0, 1)], [(0, -1)], [(-1, 0)]):
        picks = np.array(pairs, np.int32).tobytes()
        assert join_keys(keys, counts, picks) is None
        assert join_column(columns[1], counts, field, picks) is None
    picks = np.array([(0, 3), (0, 3), (1, 0)], np.int32).tobytes()
    assert join_keys(keys, counts, picks).keys.to_pylist() == [
        rows.keys[place].as_py() for place in (3, 3, 20)
    ]


# --- arguments that no caller passes --------------------------------------------------


def test_wrong_arguments_raise():
    """Arrays of another length, and objects of another type, are errors and not read."""
    with pytest.raises(ValueError, match="length"):
        native.decode_blocks([b"x"], np.array([0, 1]), np.array([0]), np.array([1]), b"\1")
    with pytest.raises(ValueError, match="length"):
        native.decode_blocks([b"x"], np.array([0]), np.array([0]), np.array([1, 2]), b"\1")
    with pytest.raises(ValueError, match="length"):
        native.join_keys([b"x"], 1, np.array([1, 2]), None)
    with pytest.raises(TypeError):
        native.decode_blocks((b"x",), np.array([0]), np.array([0]), np.array([1]), b"\1")
    with pytest.raises(TypeError):
        native.search([b"x"], np.array([1]), ["text"], np.array([0]))
    with pytest.raises(TypeError):
        native.read_ranges(0, [3])
    with pytest.raises(ValueError, match="filter"):
        native.may_have(b"", 1)
    huge = np.array([1 << 62])
    assert native.decode_blocks([b"x" * 40], np.array([0]), huge, huge, b"\1") == [None]
    assert native.decode_blocks([b"x" * 40], -huge, np.array([0]), np.array([16]), b"\1") == [None]
    assert native.join_keys([bytes(100)], 1, huge, None) is None
    assert native.search([bytes(100)], huge, [b"k"], np.array([0])) is None
    assert native.search([bytes(100)], huge, [b"k"], np.array([7])) is None


# --- small things -------------------------------------------------------------------


def test_the_filter_is_that_of_python(python):
    """Keys that are there, and thousands that are not."""
    builder = FilterBuilder()
    builder.add(hash_keys([b"%d" % n for n in range(500)]))
    key_filter = KeyFilter(builder.build())
    for key_hash in hash_keys([b"%d" % n for n in range(3000)]).tolist():
        assert key_filter.may_have(key_hash) == python(key_filter.may_have, key_hash)


@FEW
@given(st.lists(st.binary(max_size=5)), st.binary(max_size=5), st.integers(0, 3), st.booleans())
def test_a_key_has_its_place_among_sorted_keys(keys, key, skipped, above):
    """Slices too."""
    array = pa.array(sorted(keys), pa.binary())[skipped:]
    bisect = bisect_right if above else bisect_left
    assert key_place(array, key, above=above) == bisect(KeysInOrder(array), key)


def _part(rows):
    """Return sorted versions of keys: (key, lsn, seq) each, behind a row that is cut off."""
    rows = sorted(set(rows), key=lambda row: (row[0], -row[1], -row[2]))
    keys = pa.array([b"", *(key for key, _, _ in rows)], pa.binary())[1:]
    lsns = np.array([lsn for _, lsn, _ in rows], np.int64)
    seqs = np.array([seq for _, _, seq in rows], np.uint32)
    return Versions(keys, lsns, seqs, np.zeros(len(rows), np.uint8), {1: keys})


PARTS = st.lists(
    st.lists(
        st.tuples(st.sampled_from([b"", b"a", b"aa", b"b", b"\xff"]), *[st.integers(0, 3)] * 2),
        min_size=1,
    ),
    min_size=2,
    max_size=5,
)


@given(parts=PARTS)
@FEW
def test_parts_are_merged_as_they_are_sorted(parts, python):
    """By key and newest first, all rows or the newest of each key; ties by the order of parts."""
    parts = [_part(rows) for rows in parts]
    schema = DEFAULT_SCHEMA
    rows = concat_versions(parts, schema)
    order = python(sorted_places, rows)
    assert merge_places(parts, every=True).tolist() == order.tolist()
    keys = [rows.keys[place].as_py() for place in order]
    firsts = [p for n, p in enumerate(order.tolist()) if not n or keys[n] != keys[n - 1]]
    assert merge_places(parts, every=False).tolist() == firsts
    newest, expected = newest_versions(parts, schema), python(newest_versions, parts, schema)
    assert newest.keys.equals(expected.keys)
    assert newest.lsns.tolist() == expected.lsns.tolist()


def test_parts_that_are_not_sorted_are_left_to_python():
    """Wrong order of keys or versions, too many parts, and offsets outside of the buffers."""
    ordered = _part([(b"a", 1, 1), (b"b", 2, 1), (b"b", 1, 1)])
    for places in ([1, 0, 2], [0, 2, 1]):
        mixed = ordered.take(np.array(places))
        assert merge_places([ordered, mixed], every=False) is None
    assert merge_places([ordered] * 17, every=False) is None
    assert merge_places([ordered, Versions.empty(DEFAULT_SCHEMA)], every=False) is None
    offsets = struct.pack("<4i", 0, 2, 9, 5)
    stamps = np.zeros(3, np.int64), np.zeros(3, np.uint32)
    assert native.merge_places([(offsets, b"abcde", 0, 3, *stamps)], True) is None
    assert native.merge_places([(offsets, b"abcde", 2, 3, *stamps)], True) is None
    assert native.merge_places([(offsets, b"abcde", 0, 2, *stamps)], True) is None
    with pytest.raises(TypeError):
        native.merge_places((), True)


def test_key_places_outside_of_the_buffers_are_left_to_python():
    """Offsets that do not fit the data are not followed."""
    offsets = np.array([0, 5, 3, 900], np.int32)
    assert native.key_place(offsets, b"abcde", 0, 3, b"zz", False) is None
    assert native.key_place(offsets, b"abcde", 2, 3, b"b", False) is None
    assert native.key_place(offsets, b"abcde", -1, 1, b"b", False) is None
    assert native.bytes_list(offsets, b"abcde", 0, 3) is None
    assert native.bytes_list(offsets, b"abcde", 0, 9) is None
    assert native.bytes_list(offsets, b"abcde", 0, 1) == [b"abcde"]


@FEW
@given(st.lists(st.one_of(st.none(), st.binary(max_size=5))), st.integers(0, 3))
def test_lists_are_those_of_arrow(values, skipped):
    """Bytes with and without nulls, and slices."""
    array = pa.array(values, pa.binary())[skipped:]
    assert python_list(array) == array.to_pylist() == values[skipped:]


def test_a_bitmap_without_nulls_does_not_slow_lists_down(monkeypatch):
    """Merges leave columns with a bitmap although no value is null: the kernel lists them."""
    array = pa.array([None, b"a", b"bc"], pa.binary())[1:]
    assert array.buffers()[0] is not None
    listed = []
    monkeypatch.setattr(kernel, "native", SimpleNamespace(bytes_list=_spy(listed)))
    assert python_list(array) == [b"a", b"bc"]
    assert listed == [[b"a", b"bc"]]
    assert python_list(pa.array([None, b"a"], pa.binary())) == [None, b"a"]
    assert len(listed) == 1


def _spy(listed):
    def bytes_list(*arguments):
        listed.append(native.bytes_list(*arguments))
        return listed[-1]

    return bytes_list


def test_ranges_of_a_file(tmp_path, python):
    """The same bytes as without the kernel; past the end, fewer."""
    path = str(tmp_path / "file")
    (tmp_path / "file").write_bytes(bytes(range(200)))
    file = OS.open(path)
    ranges = [(n, n + 7) for n in range(0, 100, 9)]
    assert file.read_ranges(ranges) == [bytes(range(n, n + 7)) for n in range(0, 100, 9)]
    assert file.read_ranges([(0, 3), (190, 300)]) == [bytes(range(3)), bytes(range(190, 200))]
    assert file.read_ranges(ranges) == python(file.read_ranges, ranges)
    identity = OS.identity(path)
    assert identity == OS.identity_of(file.stat()) == python(OS.identity, path)
    (tmp_path / "file").write_bytes(b"other")
    assert OS.identity(path) != identity
    file.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        file.read_ranges(ranges)
    with pytest.raises(FileNotFoundError):
        OS.identity(str(tmp_path / "missing"))


def test_the_environment_switches_it_off():
    """REEF_KERNEL=0 leaves everything to Python."""
    code = "from reef import kernel; print(kernel.native)"
    environment = {**os.environ, "REEF_KERNEL": "0"}
    printed = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert printed.stdout == "None\n"


def test_a_kernel_of_another_version_is_not_used(monkeypatch):
    """One that an older build has left behind."""
    monkeypatch.setattr(native, "VERSION", kernel.VERSION + 1)
    assert kernel._load() is None
