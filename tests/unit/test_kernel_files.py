"""The kernel reads pages of open files, and merges rows, as Python does, or leaves it to Python.

Every comparison also runs on damaged files: with other bytes, cut short, with hostile bounds.
"""

import os
import random
import struct
from functools import partial

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reef import kernel
from reef.engine.read.caches import ByteCache
from reef.engine.read.merge import in_order, newest_versions
from reef.engine.read.segments import BLOCK_KINDS, SegmentStore
from reef.errors import CorruptionError, NotFoundError
from reef.files import OS
from reef.formats.coding import Codec
from reef.formats.schema import DEFAULT_SCHEMA, Schema
from reef.formats.segment import Lineage, decode_tail
from reef.formats.segment_index import hash_key, hash_keys
from reef.formats.segment_writer import SegmentWriter
from reef.formats.versions import Versions, merge_rows, row_buffers
from reef.stores.local import LocalStore
from reef.stores.wrappers import Meter, ReadBack, Retry, Throttle
from tests.support.strategies import schemas, versions
from tests.unit.formats.test_pages import NAMESPACE, opened
from tests.unit.test_kernel import FEW, alike, native

pytestmark = pytest.mark.skipif(
    getattr(native, "get_values", None) is None, reason="the kernel was not built here"
)


@pytest.fixture(autouse=True)
def small_files_stay_open(monkeypatch):
    """Files of tests are small."""
    monkeypatch.setattr("reef.stores.local.KEPT_BYTES_MIN", 0)


@pytest.fixture
def python(monkeypatch):
    """Return a function that calls another one without the kernel."""

    def call(function, *arguments):
        with monkeypatch.context() as patched:
            patched.setattr(kernel, "native", None)
            return function(*arguments)

    return call


def in_directory(root, data, cache_bytes=0):
    """Return a segment in a directory with the policies of `reef.open`, its entry and its path."""
    _, entry = opened(data)
    store = LocalStore(str(root))
    name = NAMESPACE.segment(entry.id)
    store.put(name, data)
    segments = SegmentStore(
        ReadBack(Retry(Throttle(Meter(store)))), NAMESPACE, ByteCache(cache_bytes)
    )
    segments.tail(entry)  # which opens the file
    assert segments._direct is not None
    return segments, entry, os.path.join(root, name)


def encoded(rows, schema, draw, monkeypatch):
    """Return a segment of some page size and codec."""
    monkeypatch.setattr(
        "reef.formats.segment_writer.PAGE_BYTES", draw(st.sampled_from([1, 40, 8192]))
    )
    writer = SegmentWriter(schema, 0, Lineage("01S", 0), codec=draw(st.sampled_from(Codec)))
    return b"".join(writer.write([rows]))


def outcome(call, *arguments):
    """Return a result, or the text of the damage."""
    try:
        return call(*arguments)
    except CorruptionError as error:
        return str(error)


def damage(path, draw):
    """Change some bytes of a file; its inode stays the same."""
    size = os.path.getsize(path)
    with open(path, "r+b") as file:
        for _ in range(draw(st.integers(0, 3))):
            file.seek(draw(st.integers(0, size - 1)))
            file.write(draw(st.binary(min_size=1, max_size=4)))


@FEW
@given(data=st.data())
def test_a_row_is_read_as_in_python(data, python, monkeypatch, tmp_path_factory):
    """All types, codecs and page sizes, damaged or not: the same versions, or the same damage."""
    schema = data.draw(schemas())
    rows = data.draw(versions(schema).filter(len))
    body = encoded(rows, schema, data.draw, monkeypatch)
    cache_bytes = data.draw(st.sampled_from([0, 300, 1 << 20]))  # kept, and read once by once
    segments, entry, path = in_directory(tmp_path_factory.mktemp("d"), body, cache_bytes)
    damage(path, data.draw)
    known = rows.keys.to_pylist()
    columns = data.draw(st.sampled_from([None, *[[f.number] for f in schema.fields]]))
    for key in [*dict.fromkeys(known), b"\0none"]:
        found = outcome(segments.find, entry, key, hash_key(key), columns)
        assert found == outcome(python, segments.find, entry, key, hash_key(key), columns)


def plain_segment(count=3000):
    """Return a segment of many pages of plain rows, and their keys."""
    chance = random.Random(3)
    keys = [b"key-%08d" % n for n in range(count)]
    values = [None if n % 50 == 7 else chance.randbytes(20) * 4 for n in range(count)]
    rows = Versions(
        pa.array(keys, pa.binary()),
        np.arange(count, dtype=np.int64) + 5,
        np.zeros(count, np.uint32),
        np.zeros(count, np.uint8),
        {1: pa.array(values, pa.binary())},
    )
    writer = SegmentWriter(DEFAULT_SCHEMA, 0, Lineage("01S", 0), codec=Codec.LZ4)
    return b"".join(writer.write([rows])), keys, values


def test_a_plain_row_is_not_left_to_python(tmp_path, monkeypatch):
    """One call of the kernel, counted as one request of the bytes that were read."""
    body, keys, values = plain_segment()
    segments, entry, _ = in_directory(tmp_path, body, 1 << 20)
    meter = segments._direct._meter
    before = meter.meter.to_dict()["get"]
    monkeypatch.setattr(segments, "_read_page", None)
    for number in range(0, 3000, 200):
        (row,) = segments.find(entry, keys[number], hash_key(keys[number]))
        assert row.values == {1: values[number]}
        assert (row.lsn, row.seq, row.kind) == (number + 5, 0, 0)
    after = meter.meter.to_dict()["get"]
    assert after["requests"] - before["requests"] == 15
    assert after["bytes"] > before["bytes"] + 15 * 1000


def test_a_file_whose_name_was_replaced_or_removed_is_not_read(tmp_path):
    """The open file of another object would have other rows."""
    body, keys, values = plain_segment()
    segments, entry, path = in_directory(tmp_path, body)
    tail = segments.tail(entry)
    segments.tail = lambda _: tail

    def find(key):
        return segments.find(entry, key, hash_key(key))

    assert find(keys[5])[0].values == {1: values[5]}
    os.rename(path, path + ".other")
    with pytest.raises(NotFoundError):
        find(keys[5])
    with open(path, "wb") as file:
        file.write(bytes(len(body)))
    with pytest.raises(CorruptionError):
        find(keys[5])
    os.replace(path + ".other", path)
    assert find(keys[6])[0].values == {1: values[6]}
    os.truncate(path, 4000)
    with pytest.raises(CorruptionError):
        find(keys[-1])


def test_other_policies_are_not_passed_by(tmp_path):
    """Stores with hooks of their own, throttled ones, and no directories have no direct reads."""
    body, keys, values = plain_segment()
    _, entry, _ = in_directory(tmp_path, body)
    local = LocalStore(str(tmp_path))
    throttle = Throttle(Meter(local))
    assert SegmentStore(throttle, NAMESPACE, ByteCache(0))._direct is not None
    for store in (local, Throttle(local), Meter(Meter(local)), Pinging(Meter(local))):
        assert SegmentStore(store, NAMESPACE, ByteCache(0))._direct is None
    other = SegmentStore(throttle, NAMESPACE, ByteCache(0))
    other.tail(entry)
    calls = []
    other._direct.call = lambda *arguments: calls.append(
        type(other._direct).call(other._direct, *arguments)
    )
    other.find(entry, keys[3], hash_key(keys[3]))
    throttle._note_refusal("read", NAMESPACE.segment(entry.id), 0.0)
    assert other.find(entry, keys[3], hash_key(keys[3]))[0].values == {1: values[3]}
    assert None not in calls[:2], "to read values, and then the page that is kept"
    assert calls[2:] == [None, None]


class Pinging(Meter):
    """A policy that a caller brings."""


@FEW
@given(data=st.data())
def test_hostile_bounds_are_not_followed(data, tmp_path_factory):
    """Whatever bounds, page and column count: a result or None, and never a crash."""
    path = str(tmp_path_factory.mktemp("d") / "file")
    body, keys, _ = plain_segment(200)
    with open(path, "wb") as file:
        file.write(body)
    tail = decode_tail(body, len(body), "seg")
    layout = tail.layout(tail.numbers)
    bounds = bytearray(layout.bounds)
    for _ in range(data.draw(st.integers(0, 4))):
        place = data.draw(st.integers(0, len(bounds) // 8 - 1)) * 8
        words = st.sampled_from([0, 1, -1, 17, len(body), len(body) + 1, 1 << 31, 1 << 40, 1 << 62])
        bounds[place : place + 8] = struct.pack("<q", data.draw(words))
    columns = data.draw(st.sampled_from([1, 1, 1, 0, 2, 63, 64, -1]))
    page = data.draw(st.sampled_from([0, 0, 0, 1, -1, 1 << 40]))
    file, identity = OS.open(path), OS.identity(path)
    identity = data.draw(st.sampled_from([identity, identity, identity[:8], b"", bytes(56)]))
    key, cut = data.draw(st.sampled_from(keys)), data.draw(st.integers(0, 9)) * 8
    arguments = (file.descriptor, path.encode(), identity, bytes(bounds[: len(bounds) - cut]))
    found = native.get_row(*arguments, columns, page, BLOCK_KINDS, key, True)
    if found is not None and found[0] >= 0 and found[0] < found[1] and found[5] is not None:
        assert type(found[5][0]) in {bytes, type(None)}
    file.close()
    assert native.get_row(*arguments, columns, page, BLOCK_KINDS, key, True) is None


TYPED = {
    **{"a": pa.binary(), "b": pa.string(), "c": pa.int8(), "d": pa.uint64(), "e": pa.float32()},
    **{"f": pa.list_(pa.float32(), 3), "g": pa.list_(pa.float64(), 2), "h": pa.bool_()},
    **{"i": pa.timestamp("us", "UTC"), "j": pa.int32(), "k": pa.list_(pa.int64())},
}


def typed_segment(codec):
    """Return a schema of most types, a segment of it, its keys, and its rows by number."""
    schema = Schema.of(pa.schema([("id", pa.binary()), *TYPED.items()]))
    count, keys = 400, [b"key-%04d" % n for n in range(400)]
    values = {
        "a": lambda n: b"x" * (n % 9),
        "b": lambda n: "é" * (n % 5),
        "c": lambda n: n % 256 - 128,
        "d": lambda n: 2**64 - 1 - n,
        "e": lambda n: n / 3,
        "f": lambda n: [n, n / 7, -n],
        "g": lambda n: [n * 1e300, -0.0],
        "h": lambda n: n % 2 == 0,
        "i": lambda n: n * 10**9,
        "j": lambda n: -n,
        "k": lambda n: [n] * (n % 3),
    }
    arrays = {
        name: pa.array([None if n % 13 == 5 else values[name](n) for n in range(count)], data_type)
        for name, data_type in TYPED.items()
    }
    rows = Versions(
        pa.array(keys, pa.binary()),
        np.arange(count, dtype=np.int64) + 5,
        np.zeros(count, np.uint32),
        np.array([n % 11 == 3 for n in range(count)], np.uint8),
        {field.number: arrays[field.name] for field in schema.fields},
    )
    writer = SegmentWriter(schema, 0, Lineage("01S", 0), codec=codec, group_bytes=4096)
    return b"".join(writer.write([rows])), schema, keys


@pytest.mark.parametrize("codec", Codec)
def test_rows_of_most_types_are_not_left_to_python(codec, tmp_path, python, monkeypatch):
    """One call reads a row that is not kept: numbers, texts and vectors as values, others decoded
    from their payload, blocks of other codecs as well."""
    body, _, keys = typed_segment(codec)
    segments, entry, _ = in_directory(tmp_path, body)
    expected = [python(segments.find, entry, key, hash_key(key)) for key in keys]
    assert sum(1 for (found,) in expected if not found.values) == 37, "deletes"
    with monkeypatch.context() as patched:
        patched.setattr(segments, "_read_row", None)
        patched.setattr(segments, "_read_missing", None)
        for key, rows in zip(keys, expected, strict=True):
            assert segments.find(entry, key, hash_key(key)) == rows
        assert segments.find(entry, b"key-0004x", 0) == []


def test_a_full_cache_keeps_a_page_that_is_read_again(tmp_path):
    """The first read of a page takes its values alone; the second one before long keeps it."""
    body, keys, _ = plain_segment(30_000)
    segments, entry, _ = in_directory(tmp_path, body, 400_000)
    for key in keys[:: len(keys) // 100]:
        segments.find(entry, key, hash_key(key))
    cache, near = segments.cache, hash_key(keys[-1])
    assert cache._is_full
    before = set(cache._values)
    segments.find(entry, keys[-1], near)
    assert set(cache._values) == before
    segments.find(entry, keys[-1], near)
    assert len(set(cache._values) - before) == 2, "keys and values of the page"


@FEW
@given(data=st.data())
def test_hostile_columns_of_a_row_do_no_harm(data, tmp_path_factory):
    """Whatever bounds, types, widths and items: values, None or False, and never a crash."""
    body, _, keys = typed_segment(data.draw(st.sampled_from(Codec)))
    path = str(tmp_path_factory.mktemp("d") / "file")
    with open(path, "wb") as file:
        file.write(body)
    tail = decode_tail(body, len(body), "seg")
    layout = tail.layout(tail.numbers)
    words = st.sampled_from([0, 1, 2, 3, 4, 5, 6, 7, 8, -4, -8, 12, 16, 64, -1, 1 << 31, 1 << 62])
    columns, bounds = bytearray(layout.values), bytearray(layout.bounds)
    for changed in data.draw(st.sampled_from([[], [columns], [bounds], [columns, bounds]])):
        for _ in range(data.draw(st.integers(1, 3))):
            place = data.draw(st.integers(0, min(len(changed), 200) // 8 - 1)) * 8
            changed[place : place + 8] = struct.pack("<q", data.draw(words))
    cut = data.draw(st.integers(0, 6)) * 8
    file, identity = OS.open(path), OS.identity(path)
    identity = data.draw(st.sampled_from([identity, identity, identity[:8], b""]))
    page = data.draw(st.sampled_from([0, 0, 0, 1, -1, 1 << 40]))
    found = native.get_values(
        *(file.descriptor, path.encode(), identity, bytes(bounds)),
        *(bytes(columns[: len(columns) - cut]), page, BLOCK_KINDS),
        data.draw(st.sampled_from([*keys[:20], b"", b"zzz"])),
    )
    if found:
        assert found[4] is None or type(found[4]) is tuple


@FEW
@given(data=st.data())
def test_many_rows_are_read_as_in_python(data, python, monkeypatch, tmp_path_factory):
    """Pages and keys, all types and codecs, damaged or not: the same rows, or the same damage."""
    schema = data.draw(schemas())
    rows = data.draw(versions(schema).filter(len))
    body = encoded(rows, schema, data.draw, monkeypatch)
    segments, entry, path = in_directory(tmp_path_factory.mktemp("d"), body)
    tail = segments.tail(entry)
    segments.tail = lambda _: tail
    damage(path, data.draw)
    known = rows.keys.to_pylist()
    asked = sorted(
        data.draw(st.sets(st.one_of(st.sampled_from(known), st.binary(min_size=1, max_size=3))))
    )
    columns = data.draw(st.sampled_from([None, [], *[[f.number] for f in schema.fields]]))
    pages = len(tail.index.pages.rows)
    some = range(data.draw(st.integers(0, pages - 1)), pages)
    for call, *arguments in (
        (segments.find_many, entry, asked, hash_keys(asked), schema, columns),
        (partial(segments.rows, keep=False), entry, some, columns),
        (partial(segments.rows, keep=False), entry, [*some][::2], columns),
    ):
        found = outcome(call, *arguments)
        expected = outcome(python, call, *arguments)
        if isinstance(found, str) or isinstance(expected, str):
            assert found == expected
        else:
            assert alike(found, expected)
            assert found.distinct == expected.distinct


def test_many_plain_rows_are_not_left_to_python(tmp_path, monkeypatch):
    """One call of the kernel each: of keys and of pages, with nulls and absent keys."""
    body, keys, values = plain_segment()
    segments, entry, _ = in_directory(tmp_path, body, 20_000)
    tail = segments.tail(entry)
    monkeypatch.setattr(segments, "_fetch", None)
    monkeypatch.setattr(segments, "_checked_ranges", None)
    asked = [b"aaa", *keys[::7], b"zzz"]
    found = segments.find_many(entry, asked, hash_keys(asked), DEFAULT_SCHEMA)
    assert found.keys.to_pylist() == keys[::7]
    assert found.fields[1].to_pylist() == values[::7]
    rows = segments.rows(entry, range(3, 9), keep=False)
    first = int(tail.index.pages.rows[:3].sum())
    assert rows.keys.to_pylist() == keys[first : first + len(rows)]
    assert rows.fields[1].to_pylist() == values[first : first + len(rows)]
    assert rows.lsns.tolist() == list(range(first + 5, first + 5 + len(rows)))


@FEW
@given(data=st.data())
def test_hostile_reads_of_rows_do_no_harm(data, tmp_path_factory):
    """Whatever bounds, columns, pages and counts: rows, None or an error, and never a crash."""
    path = str(tmp_path_factory.mktemp("d") / "file")
    body, keys, _ = plain_segment(400)
    with open(path, "wb") as file:
        file.write(body)
    tail = decode_tail(body, len(body), "seg")
    layout = tail.layout(tail.numbers)
    bounds = bytearray(layout.bounds)
    words = st.sampled_from([0, 1, -1, 17, len(body), len(body) + 1, 1 << 31, 1 << 40, 1 << 62])
    for _ in range(data.draw(st.integers(0, 2))):
        place = data.draw(st.integers(0, len(bounds) // 8 - 1)) * 8
        bounds[place : place + 8] = struct.pack("<q", data.draw(words))
    columns = data.draw(
        st.sampled_from([[1, 0]] * 4 + [[], [1, 8], [1, -8], [2, 0], [1], [1, 0] * 2])
    )
    pages = data.draw(st.lists(st.one_of(st.integers(0, len(tail.index.pages.rows)), words)))
    counts = data.draw(st.lists(st.one_of(st.integers(0, 3), words), max_size=len(pages)))
    sought = data.draw(st.sampled_from([None, tuple(keys[:9]), (), (b"", keys[3])]))
    file = OS.open(path)
    arguments = (file.descriptor, path.encode(), OS.identity(path), bytes(bounds))
    numbers = [np.array(some, np.int64) for some in (columns, pages, counts)]
    try:
        found = native.read_rows(
            *arguments, numbers[0], BLOCK_KINDS, numbers[1], sought, numbers[2]
        )
    except ValueError:
        assert len(counts) != len(pages)
    else:
        assert found is None or len(found) == 6 + len(columns) // 2


@FEW
@given(data=st.data())
def test_rows_are_merged_as_in_python(data, python):
    """Parts of all types, with ranges and limits: the newest row of each key, or left to Python."""
    schema = data.draw(schemas())
    parts = [data.draw(versions(schema).filter(len)) for _ in range(data.draw(st.integers(1, 3)))]
    parts = [part.slice(data.draw(st.integers(0, len(part) - 1)), len(part)) for part in parts]
    if len(parts) > 1:
        assert alike(newest_versions(parts, schema), python(newest_versions, parts, schema))
    buffers = [row_buffers(part, schema) for part in parts]
    if None in buffers:
        return
    known = [key for part in parts for key in part.keys.to_pylist()]
    start, end = (data.draw(st.sampled_from([b"", *known, b"\xff"])) for _ in range(2))
    end = None if end == b"" else end
    most = data.draw(st.sampled_from([0, 1, 2, 5, 1000]))
    found = merge_rows(buffers, schema, start, end, most)
    if found is None:
        return
    rows = in_order(parts, schema)
    keys = rows.keys.to_pylist()
    firsts = [
        n
        for n, key in enumerate(keys)
        if (not n or key != keys[n - 1]) and key >= start and (end is None or key < end)
    ]
    expected = rows.take(np.array(firsts[:most], np.int64))
    assert not expected.has_partial
    assert alike(found, expected)


def test_hostile_parts_are_left_to_python():
    """Offsets, lengths and first rows outside of their buffers are not followed."""
    keys = (struct.pack("<3i", 0, 1, 2), b"ab", 0, 2, np.zeros(2, np.int64), np.zeros(2, np.uint32))
    kinds, widths = np.zeros(2, np.uint8), np.array([0, 4], np.int64)
    texts, numbers = (None, struct.pack("<3i", 0, 1, 3), b"xyz", 0), (None, None, bytes(8), 0)

    def merged(*columns, keys=keys, kinds=kinds, widths=widths):
        return native.merge_rows([(keys, kinds, columns)], widths, b"", None, 99)

    assert merged(texts, numbers)[5:] == [
        (None, struct.pack("<3i", 0, 1, 3), b"xyz"),
        (None, None, bytes(8)),
    ]
    assert merged(None, None)[5][0] == b"\0"
    for bad in (
        (None, struct.pack("<3i", 0, 1, 4), b"xyz", 0),
        (None, struct.pack("<3i", 0, 2, 1), b"xyz", 0),
        (None, struct.pack("<3i", -1, 1, 3), b"xyz", 0),
        (None, struct.pack("<2i", 0, 1), b"xyz", 0),
        (None, struct.pack("<3i", 0, 1, 3), b"xyz", 1),
        (None, struct.pack("<3i", 0, 1, 3), b"xyz", -1),
        (b"", struct.pack("<3i", 0, 1, 3), b"xyz", 0),
        (None, None, b"xyz", 0),
    ):
        assert merged(bad, numbers) is None
    for bad in (
        (None, None, bytes(7), 0),
        (None, None, bytes(8), 1),
        (None, None, bytes(8), 1 << 62),
    ):
        assert merged(texts, bad) is None
    assert merged(texts, numbers, widths=np.array([0, -4], np.int64)) is None
    assert merged(texts, numbers, widths=np.array([0, 1 << 62], np.int64)) is None
    assert merged(texts, numbers, kinds=np.array([0, 3], np.uint8)) is None
    assert merged(texts, numbers, kinds=np.zeros(1, np.uint8)) is None
    assert merged(texts) is None
    with pytest.raises(TypeError):
        merged(texts, [None])
    with pytest.raises(TypeError):
        native.merge_rows([None], widths, b"", None, 9)
