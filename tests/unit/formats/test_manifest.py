"""Manifests: readable, bounded in size, and every flipped bit is noticed."""

import json
import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reef.errors import CorruptionError, UnsupportedFormatError
from reef.formats.coding import crc32c
from reef.formats.manifest import (
    Condemned,
    CursorEntry,
    DedupEntry,
    Manifest,
    OpenJob,
    Recent,
    SegmentEntry,
    Snapshot,
    decode_manifest,
    encode_manifest,
)
from reef.runtime import REAL
from tests.pace import processor_s


def entry(chance, number):
    """Return a segment as large namespaces have them: random ids, keys and hashes."""
    low, high = sorted(chance.randbytes(16) for _ in range(2))
    return SegmentEntry(
        id=REAL.ulid(),
        level=number % 3,
        size=chance.randrange(1 << 29),
        checksum=chance.randrange(1 << 32),
        rows=chance.randrange(1 << 22),
        tombstones=chance.randrange(1 << 10),
        min_key=low,
        max_key=high,
        lsn_min=number * 10,
        lsn_max=number * 10 + 9,
        tail_bytes=chance.randrange(1 << 20),
        schema_id=1,
        set_hash=chance.randbytes(16).hex(),
    )


def sample(segments=2, snapshots=1):
    """Return a manifest with something in every field."""
    chance = random.Random(0)
    return Manifest(
        generation=12,
        write_id="01W",
        published_at_ms=1_800_000_000_000,
        writer_epoch=3,
        compactor_epoch=2,
        max_parallel_writes=4,
        wal_floor=100,
        wal_id_last_seen=120,
        segments=tuple(entry(chance, number) for number in range(segments)),
        snapshots=tuple(
            Snapshot(REAL.ulid(), n, f"snapshot-{n}", 1_800_000_100_000 + n)
            for n in range(snapshots)
        ),
        dedup=(DedupEntry("job-7/3", "d1", 99, 0, 2, 3, "01V", 1_799_999_999_000),),
        stream_marks={"query": 4},
        open_jobs=(OpenJob("01J", 98, "load", live_wins=True),),
        condemned=(Condemned("wal/1", 11, 1_799_999_999_000),),
        oldest_retained=5,
        recent=(Recent(11, "01V", 1_799_999_999_000),),
        below_floor=("01T", "01U"),
        skipped_lsns=(17,),
        skipped_generations=(9,),
        branch_pins={"namespaces/child": 3},
        cursors={"c": CursorEntry(90, 11)},
    )


def test_a_manifest_comes_back():
    """All fields, plain and compressed."""
    for segments in (0, 2, 2000):
        manifest = sample(segments)
        assert decode_manifest(encode_manifest(manifest), "m") == manifest


def test_a_small_manifest_is_plain_json():
    """A person and any JSON tool can read it."""
    text = encode_manifest(sample())
    facts = json.loads(text)
    assert facts["format"] == 1
    assert facts["manifest"]["generation"] == 12
    assert len(text) < 64 * 1024


def test_a_large_manifest_is_compressed():
    """From 64 KiB on."""
    assert encode_manifest(sample(2000)).startswith(b"RFMAN1\0\0")


def test_the_largest_manifest_stays_in_its_bounds():
    """100,000 segments and 1,000 snapshots: under 10 MB, and load + edit + encode within 1 s."""
    data = encode_manifest(sample(100_000, 1_000))
    assert len(data) < 10_000_000
    best_s = min(processor_s(lambda: _load_edit_encode(data)) for _ in range(3))
    assert best_s < 1.0, f"{best_s:.2f} s"


def _load_edit_encode(data):
    manifest = decode_manifest(data, "m")
    edited = msgspec.structs.replace(
        manifest, generation=13, segments=(*manifest.segments[10:], *manifest.segments[:5])
    )
    encode_manifest(edited)


@pytest.mark.parametrize("segments", [1, 400])
def test_every_flipped_bit_is_detected(segments):
    """Each bit of a plain one; of a compressed one, at a few hundred places."""
    data = encode_manifest(sample(segments))
    bits = range(len(data) * 8)
    if segments > 1:
        bits = random.Random(0).sample(bits, 300)
    for bit in bits:
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CorruptionError):
            decode_manifest(bytes(damaged), "m")


def test_every_truncation_is_detected():
    """Each length short of the whole."""
    data = encode_manifest(sample(1))
    for length in range(len(data)):
        with pytest.raises(CorruptionError):
            decode_manifest(data[:length], "m")


def test_segment_columns_must_fit_each_other():
    """Columns of different lengths are no segments."""
    text = encode_manifest(sample(2)).replace(b'"level":[0,1]', b'"level":[0]')
    with pytest.raises(CorruptionError, match="1 values of level for 2 segments"):
        decode_manifest(_sealed(text[21:]), "m")


def _sealed(rest):
    return b'{"crc32c":"%08x",' % crc32c(rest) + rest


def test_a_newer_format_is_told_apart_from_damage():
    """Sound bytes of a later release ask for an upgrade, whatever their manifest looks like."""
    with pytest.raises(UnsupportedFormatError, match="manifest of format 3"):
        decode_manifest(_sealed(b'"format":3,"manifest":[1,2,3]}'), "m")
    with pytest.raises(CorruptionError, match="not a manifest"):
        decode_manifest(_sealed(b'"format":1,"manifest":[1,2,3]}'), "m")


@given(st.binary(max_size=200))
def test_garbage_is_corruption(data):
    """Never anything but a CorruptionError."""
    with pytest.raises(CorruptionError):
        decode_manifest(data, "m")
    with pytest.raises(CorruptionError):
        decode_manifest(b"RFMAN1\0\0" + data, "m")
