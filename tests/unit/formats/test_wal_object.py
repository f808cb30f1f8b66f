"""WAL objects: there and back, and every flipped bit is noticed."""

import random
import struct

import msgspec
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reef.errors import CorruptionError, UnsupportedFormatError
from reef.formats.coding import crc32c
from reef.formats.schema import DEFAULT_SCHEMA
from reef.formats.wal_object import (
    BatchHeader,
    Job,
    JobSegment,
    Ops,
    WalHeader,
    WalKind,
    WalObject,
    decode_ops,
    encode_ops,
)


def ops(count, size=3):
    """Return `count` puts of small values."""
    return Ops(
        pa.array([b"key-%d" % n for n in range(count)], pa.binary()),
        pa.array([0] * count, pa.uint8()),
        fields={1: pa.array([b"v" * size] * count, pa.binary())},
    )


def sample(batches=2, **changes):
    """Return an encoded object of some batches."""
    header = WalHeader(
        lsn=7,
        kind=WalKind.BATCHES,
        epoch=3,
        writer_id="writer",
        write_id="01J",
        created_at_ms=1_800_000_000_000,
        after=("01H", "01I"),
        schema_id=1,
        batches=tuple(BatchHeader(2, key=f"k{n}", digest="d") for n in range(batches)),
    )
    header = msgspec.structs.replace(header, **changes)
    return WalObject.encode(header, tuple(encode_ops(ops(2)) for _ in header.batches)), header


def test_an_object_comes_back():
    """Header, batches and operations."""
    data, header = sample()
    decoded = WalObject.decode(data, "wal/7")
    assert decoded.header == header
    for record in decoded.records:
        found = decode_ops(record, DEFAULT_SCHEMA, "wal/7")
        assert found.keys.equals(ops(2).keys)
        assert found.fields[1].equals(ops(2).fields[1])


SEGMENT = JobSegment("01S", 100, 1, 2, 0, 50, b"a", b"b", "00" * 16)


@pytest.mark.parametrize("kind", WalKind)
def test_every_kind_comes_back(kind):
    """All six kinds are read, whichever process writes them."""
    job = Job("01B", key="load-1", live_wins=True, begin_lsn=5, segments=(SEGMENT,))
    data, header = sample(0, kind=kind, epoch=0, job=job, schema=DEFAULT_SCHEMA, after=None)
    assert WalObject.decode(data, "x").header == header
    assert kind.of_writer == (kind in ("batches", "fence"))


def test_begins_and_ingests_with_live_wins_have_a_version_of_their_own():
    """An older release would resolve patches above the begin, and must stop at it."""
    for job, version in ((Job("01B"), 1), (Job("01B", live_wins=True), 4)):
        data, header = sample(0, kind=WalKind.BEGIN, epoch=0, job=job, after=None)
        assert header.version == struct.unpack_from("<I", data, 8)[0] == version


def test_every_flipped_bit_is_detected():
    """Each bit of a small object, one at a time."""
    data, _ = sample()
    for bit in range(len(data) * 8):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CorruptionError) as caught:
            WalObject.decode(bytes(damaged), "wal/7")
        assert caught.value.context["object"] == "wal/7"
        assert 0 <= caught.value.context["offset"] <= len(data)


def test_every_truncation_is_detected():
    """Each length short of the whole."""
    data, _ = sample()
    for length in range(len(data)):
        with pytest.raises(CorruptionError):
            WalObject.decode(data[:length], "wal/7")


def test_flipped_bits_in_a_large_object_are_detected():
    """At random places of a megabyte."""
    header = sample(1)[1]
    data = WalObject.encode(header, (encode_ops(ops(2000, size=500)),))
    chance = random.Random(0)
    for _ in range(200):
        damaged = bytearray(data)
        damaged[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        with pytest.raises(CorruptionError):
            WalObject.decode(bytes(damaged), "wal/7")


def _resealed(data):
    """Return the bytes with a footer that fits them: valid, but from another release."""
    body = data[:-8]
    return body + data[-8:-4] + struct.pack("<I", crc32c(body))


def test_a_newer_version_is_not_reported_as_damage():
    """Valid bytes of a later release ask for an upgrade."""
    data, _ = sample()
    newer = _resealed(data[:8] + struct.pack("<I", 5) + data[12:])
    with pytest.raises(UnsupportedFormatError, match=r"format 5.*up to 4"):
        WalObject.decode(newer, "wal/7")


def test_a_corrupt_length_is_fatal():
    """H27: a wrong length field is an error, even under a footer that fits."""
    data, _ = sample()
    for wrong in (0, 1, 5, 2**31, 2**32 - 1):
        forged = _resealed(data[:16] + struct.pack("<I", wrong) + data[20:])
        with pytest.raises(CorruptionError):
            WalObject.decode(forged, "wal/7")


def test_unknown_header_fields_are_ignored():
    """A later release may add fields within the same version."""
    data, header = sample(0)
    fields = {**msgspec.to_builtins(header), "colour": "red", "batches": []}
    from reef.formats.coding import encode_frame

    body = data[:16] + encode_frame(msgspec.msgpack.encode(fields))
    extended = _resealed(body + struct.pack("<II", 0, 0))
    assert WalObject.decode(extended, "x").header == header


@given(st.binary(max_size=200))
def test_garbage_is_corruption(data):
    """Any damage is reported, and only as a CorruptionError."""
    with pytest.raises(CorruptionError):
        WalObject.decode(data, "x")
