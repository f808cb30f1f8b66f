"""Crafted objects with valid checksums: decoders never ask for more than the object allows.

A checksum only shows that the bytes did not change by accident. Each object here misstates
counts, lengths or nesting; the memory that decoding allocates in Python and NumPy is watched.
"""

import struct
import tracemalloc

import msgspec
import numpy as np
import pyarrow as pa
import pytest

from reef.errors import CorruptionError
from reef.formats.coding import (
    U32,
    BlockKind,
    Codec,
    Packer,
    crc32c,
    decode_block,
    encode_block,
    encode_frame,
    padding,
)
from reef.formats.columns import encode_columns
from reef.formats.group import decode_key_block, encode_group
from reef.formats.manifest import MAGIC as MANIFEST_MAGIC
from reef.formats.manifest import decode_manifest
from reef.formats.schema import DEFAULT_SCHEMA
from reef.formats.segment import END, HEAD, MAGIC, Lineage, decode_tail
from reef.formats.segment_index import GroupEntry, decode_index, encode_index, encode_pages
from reef.formats.segment_writer import SegmentWriter
from reef.formats.versions import Versions
from reef.formats.wal_object import WalObject, decode_ops

ROOM_BYTES = 64 << 20
"""Far more than any of these objects, far less than the sizes they claim."""


def refused(decode):
    """Decode; return the name of the exception, or the peak of allocated memory."""
    tracemalloc.start()
    try:
        decode()
    except Exception as error:
        peak = tracemalloc.get_traced_memory()[1]
        return type(error).__name__ if peak < ROOM_BYTES else f"{peak:,} bytes were taken"
    finally:
        tracemalloc.stop()
    return "nothing was refused"


# --- WAL objects ------------------------------------------------------------------------


def wal(header, records=(), count=None):
    """Return a WAL object of a raw header and raw frames, sealed."""
    body = struct.pack("<8sII", b"RFWAL1\0\0", 1, 0) + encode_frame(header) + b"".join(records)
    return body + struct.pack("<II", len(records) if count is None else count, crc32c(body))


def wal_header(**fields):
    """Return the fields of a valid header, as MessagePack, without the closing of the map."""
    valid = {
        "lsn": 1,
        "kind": "batches",
        "epoch": 1,
        "writer_id": "w",
        "write_id": "i",
        "created_at_ms": 0,
    }
    return msgspec.msgpack.encode({**valid, **fields})


def with_field(name, raw):
    """Return a header whose last field is given as raw MessagePack."""
    valid = bytearray(wal_header())
    valid[0] += 1  # one more pair in the map
    return bytes(valid) + msgspec.msgpack.encode(name) + raw


HUGE = struct.pack(">I", 2**32 - 1)
NESTED = b"\x91" * 100_000 + b"\x90"
WAL_FORGERIES = {
    "records in the footer": wal(wal_header(), count=2**32 - 1),
    "batches": wal(with_field("batches", b"\xdd" + HUGE)),
    "after": wal(with_field("after", b"\xdd" + HUGE)),
    "text": wal(with_field("writer_id", b"\xdb" + HUGE)),
    "map": wal(b"\xdf" + HUGE),
    "bytes in a frame": struct.pack("<8sII", b"RFWAL1\0\0", 1, 0) + struct.pack("<II", 2**31, 0),
    "nesting": wal(with_field("batches", b"\x91\x82\xa3ops\x01\xa4when" + NESTED)),
}


@pytest.mark.parametrize("forgery", WAL_FORGERIES)
def test_forged_wal_objects(forgery):
    """Counts and lengths are checked against the bytes before anything is allocated."""
    data = WAL_FORGERIES[forgery]
    if forgery == "bytes in a frame":
        data += bytes(64)
        data += struct.pack("<II", 0, crc32c(data))
    assert refused(lambda: WalObject.decode(data, "wal/1")) == "CorruptionError"


def columns(rows, layout):
    """Return a column set's head: numbers and the lengths of their buffers, without the buffers."""
    head = struct.pack("<II", rows, len(layout))
    for number, lengths in layout:
        head += struct.pack("<HH", number, len(lengths))
        head += b"".join(struct.pack("<I", length) for length in lengths)
    return head + padding(len(head))


ABSENT = 0xFFFFFFFF
RECORD_FORGERIES = {
    "rows without buffers": columns(2**32 - 1, [(0, [ABSENT] * 3), (1, [ABSENT] * 2)]),
    "rows with empty buffers": columns(2**32 - 1, [(0, [0, 0, 0]), (1, [ABSENT, 0])]),
    "lengths": columns(1, [(0, [ABSENT, 2**31, 2**31]), (1, [ABSENT, 1])]),
    "columns": struct.pack("<II", 1, 2**32 - 1),
    "buffers": struct.pack("<II", 1, 1) + struct.pack("<HH", 0, 65_535),
    "offsets": columns(1, [(0, [ABSENT, 8, 0]), (1, [ABSENT, 1])])
    + struct.pack("<ii", 0, 2**31 - 1)
    + bytes(8),
}


@pytest.mark.parametrize("forgery", RECORD_FORGERIES)
def test_forged_records(forgery):
    """The number of rows costs nothing until there are buffers that can hold them."""
    record = RECORD_FORGERIES[forgery]
    assert refused(lambda: decode_ops(record, DEFAULT_SCHEMA, "wal/1")) == "CorruptionError"


# --- blocks -----------------------------------------------------------------------------


def block(kind, codec, stored, raw_length):
    """Return a sealed block that claims to hold `raw_length` bytes."""
    checked = struct.pack("<BBHI", kind, codec, 0, raw_length) + stored + padding(len(stored))
    return struct.pack("<II", len(stored), crc32c(checked)) + checked


@pytest.mark.parametrize("codec", ["zstd", "lz4_raw"])
@pytest.mark.parametrize("claim", [0, 1000, 2**32 - 1])
def test_compression_bombs(codec, claim):
    """A block unpacks to the size it claims, and that is bounded by its size."""
    bomb = pa.Codec(codec).compress(bytes(1 << 30 if codec == "zstd" else 1 << 27), asbytes=True)
    number = Codec.ZSTD if codec == "zstd" else Codec.LZ4
    data = block(BlockKind.KEYS, number, bomb, claim)
    assert refused(lambda: decode_block(data, BlockKind.KEYS, "seg", 0)) == "CorruptionError"


def test_a_frame_of_another_size_than_claimed():
    """Too little is as wrong as too much."""
    stored = pa.Codec("zstd").compress(bytes(1000), asbytes=True)
    for claim in (999, 1001, 5000):
        with pytest.raises(CorruptionError):
            decode_block(block(BlockKind.KEYS, Codec.ZSTD, stored, claim), BlockKind.KEYS, "s", 0)


# --- segments ---------------------------------------------------------------------------


def key_block(rows, prefix):
    """Return a key block whose many empty keys have one long prefix."""
    empty = pa.Array.from_buffers(
        pa.binary(), rows, [None, pa.py_buffer(np.zeros(rows + 1, np.int32)), pa.py_buffer(b"")]
    )
    numbers = np.zeros(rows, np.int64)
    head = U32.pack(len(prefix)) + prefix
    columns = {
        1: empty,
        2: pa.array(numbers),
        3: pa.array(numbers.astype(np.uint32)),
        4: pa.array(numbers.astype(np.uint8)),
    }
    payload = head + padding(len(head)) + encode_columns(rows, columns)
    return encode_block(BlockKind.KEYS, payload, Codec.ZSTD)


def test_a_prefix_that_multiplies():
    """A long common prefix of many short keys: small as stored, gigabytes when put back."""
    data = key_block(1_000_000, b"p" * 60_000)
    assert len(data) < 200_000
    assert refused(lambda: decode_key_block(data, DEFAULT_SCHEMA, "seg", 0)) == "CorruptionError"


def test_keys_with_a_long_common_prefix_come_back():
    """A writer's output for the most regular keys is never taken for a forgery."""
    keys = [b"\0" * 65_000 + b"%04d" % number for number in range(40)]
    zeros = np.zeros(len(keys), np.int64)
    rows = Versions(
        pa.array(keys, pa.binary()), zeros, zeros.astype(np.uint32), zeros.astype(np.uint8), {}
    )
    for codec in Codec:
        (data,), _ = encode_group(rows, [len(rows)], Packer(codec))
        assert decode_key_block(data, DEFAULT_SCHEMA, "seg", 0).keys.to_pylist() == keys


def index_entry(first, last):
    """Return an index entry of an empty group."""
    return GroupEntry(first, last, [1], [1], [first], 1, 1, [32], {}, {})


def test_index_keys_that_multiply():
    """Each key shares 60 KB with the one before it: a small index, gigabytes of keys."""
    count = 20_000
    rests = [b"k" * 60_000, *[b""] * (count - 1)]
    numbers = pa.array(np.ones(count, np.int64))
    payload = encode_columns(
        count,
        {
            0: pa.array([0, *[60_000] * (count - 1)], pa.uint16()),
            1: pa.array(rests, pa.binary()),
            2: pa.array([60_000] * count, pa.uint16()),
            3: pa.array([b""] * count, pa.binary()),
            4: numbers.cast(pa.uint32()),
            5: numbers,
            6: numbers,
            7: numbers.cast(pa.uint32()),
        },
    )
    said = refused(lambda: decode_index(payload, DEFAULT_SCHEMA, 16, "seg", 0))
    assert said == "CorruptionError"


def test_an_index_of_long_keys_comes_back():
    """A writer's output for them is never taken for a forgery."""
    shared = b"k" * 60_000
    entries = [index_entry(shared + b"%08d" % n, shared + b"%08d" % n) for n in range(50)]
    payload, pages = (encode(entries, DEFAULT_SCHEMA) for encode in (encode_index, encode_pages))
    index = decode_index(payload, DEFAULT_SCHEMA, 16, "seg", 0, pages=pages)
    assert list(index.first_keys) == [entry.first_key for entry in entries]


def segment_with_footer(change):
    """Return a segment whose footer was changed and sealed again."""
    writer = SegmentWriter(DEFAULT_SCHEMA, 0, Lineage("w", 0))
    zeros = np.zeros(3, np.int64)
    rows = Versions(
        pa.array([b"a", b"b", b"c"], pa.binary()),
        zeros,
        zeros.astype(np.uint32),
        zeros.astype(np.uint8),
        {1: pa.array([b"1", b"2", b"3"], pa.binary())},
    )
    data = b"".join(writer.write([rows]))
    length = END.unpack(data[-END.size :])[0]
    footer = data[-END.size - length : -END.size]
    changed = change(footer)
    return data[: -END.size - length] + changed + END.pack(len(changed), crc32c(changed), MAGIC)


def edited(**fields):
    """Return a change of some of the footer's fields."""
    return lambda footer: msgspec.msgpack.encode({**msgspec.msgpack.decode(footer), **fields})


FOOTER_FORGERIES = {
    "not a map": lambda footer: b"\x93\x01\x02\x03",
    "no message": lambda footer: b"\xc1",
    "version is text": edited(version="one"),
    "list": lambda footer: footer[:-1] + b"\xdd" + HUGE,
    "place far away": edited(index=[2**40, 2**40]),
    "negative place": edited(index=[-50, 60]),
    "filter of no size": edited(filter=[HEAD.size, 0]),
    "nesting": lambda footer: b"\x81\xa1x" + NESTED,
    "ancestors": lambda footer: bytes([footer[0] + 1]) + footer[1:] + b"\xa9ancestors\xdd" + HUGE,
}


@pytest.mark.parametrize("forgery", FOOTER_FORGERIES)
def test_forged_footers(forgery):
    """Whatever a footer says, the error is a CorruptionError that names the object."""
    data = segment_with_footer(FOOTER_FORGERIES[forgery])
    assert refused(lambda: decode_tail(data, len(data), "seg")) == "CorruptionError"


# --- manifests --------------------------------------------------------------------------


def manifest(rest):
    """Return a sealed manifest of this text."""
    return b'{"crc32c":"%08x",' % crc32c(rest) + rest


MANIFEST_FORGERIES = {
    "nesting": manifest(b'"format":1,"manifest":' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    "nested segments": manifest(
        b'"format":1,"manifest":{"generation":1,"write_id":"w","published_at_ms":0},"segments":'
        + b'{"x":' * 100_000
        + b"1"
        + b"}" * 100_000
        + b"}"
    ),
    "huge numbers": manifest(b'"format":1,"manifest":{"generation":1' + b"0" * 100_000 + b"}}"),
    "a bomb": MANIFEST_MAGIC
    + block(
        BlockKind.MANIFEST,
        Codec.ZSTD,
        pa.Codec("zstd").compress(b"[" * (1 << 30), asbytes=True),
        2**32 - 1,
    ),
}


@pytest.mark.parametrize("forgery", MANIFEST_FORGERIES)
def test_forged_manifests(forgery):
    """Deep nesting, endless numbers, bombs: reported as damage."""
    data = MANIFEST_FORGERIES[forgery]
    assert refused(lambda: decode_manifest(data, "m")) == "CorruptionError"


def test_the_memory_watch_sees_allocations():
    """Without a check the tests above would notice: they can fail."""

    def greedy():
        raise CorruptionError(f"too late: {len(np.zeros(ROOM_BYTES, np.uint8))}")

    assert refused(greedy).endswith("bytes were taken")
    assert refused(lambda: None) == "nothing was refused"
