"""Manifests: readable, bounded in size, and every flipped bit is noticed."""

import json
import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reef.errors import CorruptionError, UnsupportedFormatError
from reef.formats import manifest as manifest_format
from reef.formats.coding import crc32c
from reef.formats.manifest import (
    FORMAT,
    BranchPin,
    Condemned,
    CursorEntry,
    DedupEntry,
    InheritedLog,
    Manifest,
    ManifestDecoder,
    OpenJob,
    Origin,
    Recent,
    SegmentEntry,
    SnapshotEntry,
    decode_manifest,
    decode_outline,
    encode_manifest,
)
from reef.runtime import REAL
from tests.support.cpu_time import processor_s


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
            SnapshotEntry(REAL.ulid(), n, f"snapshot-{n}", 1_800_000_100_000 + n)
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
        branches={"01B": BranchPin("namespaces/child", 3, 90, 1_799_999_999_000)},
        origin=Origin("01A", "namespaces/parent", 7, 40, 1_799_999_999_000),
        inherited=(InheritedLog(40, "namespaces/parent"),),
        pinned_homes=("namespaces/parent",),
        releases_origin=True,
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
    assert facts["format"] == 6, "a load with live_wins is open"
    assert facts["manifest"]["generation"] == 12
    assert len(text) < 64 * 1024


def test_a_large_manifest_is_compressed():
    """From 64 KiB on."""
    assert encode_manifest(sample(2000)).startswith(b"RFMAN1\0\0")


@pytest.mark.quiet
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


def test_the_format_is_the_lowest_that_has_all_fields():
    """An older release must not publish over fields that it does not know, nor be locked out."""

    def number(**changes):
        return json.loads(encode_manifest(msgspec.structs.replace(sample(1), **changes)))["format"]

    plain = {"open_jobs": (), "branches": {}, "origin": None}
    assert number(open_jobs=()) == 4, "it has branches, and is one"
    assert number(**plain) == 1
    assert number(**plain | {"open_jobs": (OpenJob("01J", 98, live_wins=True),)}) == 6
    (segment,) = sample(1).segments
    load = msgspec.structs.replace(segment, lsn_min=7, lsn_max=7, visible_lsn=7)
    assert (load.rows_lsn, load.is_late) == (7, False)
    assert number(**plain, segments=(load,)) == 1
    late = msgspec.structs.replace(load, visible_lsn=9)
    assert (late.rows_lsn, late.is_late) == (7, True)
    assert number(**plain, segments=(late,)) == 6


def test_a_newer_format_is_not_reported_as_damage():
    """Valid bytes of a later release ask for an upgrade, whatever their manifest is."""
    with pytest.raises(UnsupportedFormatError, match=f"manifest of format {FORMAT + 1}"):
        decode_manifest(_sealed(b'"format":%d,"manifest":[1,2,3]}' % (FORMAT + 1)), "m")
    with pytest.raises(CorruptionError, match="not a manifest"):
        decode_manifest(_sealed(b'"format":1,"manifest":[1,2,3]}'), "m")


@given(st.binary(max_size=200))
def test_garbage_is_corruption(data):
    """Never anything but a CorruptionError."""
    with pytest.raises(CorruptionError):
        decode_manifest(data, "m")
    with pytest.raises(CorruptionError):
        decode_manifest(b"RFMAN1\0\0" + data, "m")


@pytest.mark.parametrize("generations", [10, 100])
def test_manifests_with_the_same_segments_decode_them_once(monkeypatch, generations):
    """A chain of snapshots, cursors and condemned keys costs the segments of one generation."""
    decoded = []
    real = manifest_format._from_columns
    monkeypatch.setattr(manifest_format, "_from_columns", lambda c: decoded.append(c) or real(c))
    decoder, first = ManifestDecoder(), sample(50)
    for generation in range(generations):
        changed = msgspec.structs.replace(first, generation=12 + generation)
        assert decoder.decode(encode_manifest(changed), "m") == changed
    other = msgspec.structs.replace(first, segments=first.segments[1:])
    assert decoder.decode(encode_manifest(other), "m") == other
    assert len(decoded) == 2


@pytest.mark.parametrize("segments", [0, 2, 1000])
def test_an_outline_has_the_fields_of_the_manifest(segments):
    """Generation, floor and own segments; damage is detected as in the whole manifest."""
    whole = sample(segments)
    if segments:
        borrowed = msgspec.structs.replace(whole.segments[0], home="parent")
        whole = msgspec.structs.replace(whole, segments=(borrowed, *whole.segments[1:]))
    data = encode_manifest(whole)
    own = tuple(s.id for s in whole.segments if s.home is None)
    outline = decode_outline(data, "m")
    assert (outline.generation, outline.wal_floor) == (whole.generation, whole.wal_floor)
    assert outline.segment_ids == own
    for place in (0, 30, len(data) // 2, len(data) - 2):
        broken = bytearray(data)
        broken[place] ^= 1
        with pytest.raises(CorruptionError):
            decode_outline(bytes(broken), "m")
