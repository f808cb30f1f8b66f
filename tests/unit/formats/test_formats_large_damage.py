"""Damage in large objects of all three formats: at random offsets, and always reported with them.

Each byte of a small object is tested with its format; here are the sizes and the
codecs that buckets hold, in which a bit is one of millions.
"""

import random
from functools import cache

import pyarrow as pa
import pytest

from reef.errors import CorruptionError
from reef.formats.coding import Codec
from reef.formats.manifest import MAGIC, decode_manifest, encode_manifest
from reef.formats.schema import DEFAULT_SCHEMA
from reef.formats.versions import RangeTombstone
from reef.formats.wal_object import (
    BatchHeader,
    OpKind,
    Ops,
    WalHeader,
    WalKind,
    WalObject,
    encode_ops,
)
from tests.support.segment_checks import check_segment
from tests.unit.formats.test_manifest import sample as manifest
from tests.unit.formats.test_segment import plain, write

PLACES = 40


def wal():
    """Return a WAL object of many batches, each with an idempotency key."""
    chance = random.Random(1)
    batches = [
        Ops(
            pa.array([b"key-%d-%d" % (number, row) for row in range(20)], pa.binary()),
            pa.array([int(OpKind.PUT)] * 20, pa.uint8()),
            fields={1: pa.array([chance.randbytes(500) for _ in range(20)], pa.binary())},
        )
        for number in range(40)
    ]
    headers = tuple(BatchHeader(20, key=f"k{number}", digest="d") for number in range(40))
    header = WalHeader(7, WalKind.BATCHES, 3, "w", "i", 0, schema_id=1, batches=headers)
    return WalObject.encode(header, tuple(encode_ops(ops) for ops in batches))


def segment(codec):
    """Return a segment of many groups, with range tombstones."""
    tombstones = [RangeTombstone(b"a%d" % n, b"b%d" % n, 50, n) for n in range(30)]
    data, _ = write(
        DEFAULT_SCHEMA,
        [plain(1500, size=40)],
        codec=codec,
        group_bytes=5000,
        range_tombstones=tombstones,
    )
    return data


FORMATS = {
    "wal": (wal, WalObject.decode),
    "segment": (lambda: segment(Codec.NONE), check_segment),
    "segment, zstd": (lambda: segment(Codec.ZSTD), check_segment),
    "segment, lz4": (lambda: segment(Codec.LZ4), check_segment),
    "manifest": (lambda: encode_manifest(manifest(3000, 10)), decode_manifest),
}


@cache
def intact(name):
    """Return an object that can be decoded."""
    make, decode = FORMATS[name]
    data = make()
    decode(data, name)
    return data


def refused(name, damaged):
    """Check that decoding reports the damage: which object, and where in it."""
    with pytest.raises(CorruptionError) as caught:
        FORMATS[name][1](bytes(damaged), name)
    assert caught.value.context["object"] == name
    assert 0 <= caught.value.context["offset"] <= len(damaged)


@pytest.mark.parametrize("name", FORMATS)
def test_a_flipped_bit_anywhere_is_detected(name):
    """At random places of the whole, and in each of the last bytes: the footer is small."""
    data, chance = intact(name), random.Random(2)
    places = [chance.randrange(len(data)) for _ in range(PLACES)]
    for place in (*places, *range(len(data) - 40, len(data))):
        damaged = bytearray(data)
        damaged[place] ^= 1 << chance.randrange(8)
        refused(name, damaged)


@pytest.mark.parametrize("name", FORMATS)
def test_a_truncation_anywhere_is_detected(name):
    """However much is missing, a byte or nearly all of it; and one byte more than there was."""
    data, chance = intact(name), random.Random(3)
    lengths = {
        0,
        1,
        8,
        16,
        4096,
        len(data) // 2,
        len(data) - 4096,
        *range(len(data) - 20, len(data)),
    }
    for length in (*lengths, *(chance.randrange(len(data)) for _ in range(PLACES))):
        refused(name, data[:length])
    refused(name, data + b"\0")


@pytest.mark.parametrize("name", FORMATS)
def test_a_part_that_reads_as_zeros_is_detected(name):
    """As a disk gives back a page that it has lost."""
    data, chance = intact(name), random.Random(4)
    for _ in range(PLACES // 3):
        start = chance.randrange(len(data) - 64)
        end = min(len(data), start + chance.choice([64, 4096]))
        if any(data[start:end]):
            refused(name, data[:start] + bytes(end - start) + data[end:])


def test_the_manifest_here_is_a_compressed_one():
    """And so is not the one that is tested byte by byte with its format."""
    assert intact("manifest").startswith(MAGIC)
