"""Segments: there and back, planned from the tail, and every flipped bit is noticed."""

import random
import struct
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from reef.errors import CorruptionError, UnsupportedFormatError
from reef.formats import coding as block_format
from reef.formats import segment as segment_format
from reef.formats.coding import BlockKind, Codec, Packer, crc32c, decode_block, encode_block
from reef.formats.schema import DEFAULT_SCHEMA
from reef.formats.segment import EMPTY, Lineage, SetHash, decode_tail, set_hash
from reef.formats.segment_index import FilterBuilder, KeyFilter, bounds_of, hash_key, hash_keys
from reef.formats.segment_writer import SegmentWriter
from reef.formats.versions import RangeTombstone, Versions, concat_versions
from tests.support.segment_checks import check_segment
from tests.support.strategies import same, schemas, versions

LINEAGE = Lineage("01W", 1_800_000_000_000, ("01A", "01B"), ("01C",), "job-1")


def write(schema, pieces, **settings):
    """Return a segment's bytes and its summary."""
    writer = SegmentWriter(schema, settings.pop("level", 0), LINEAGE, **settings)
    data = b"".join(writer.write(pieces))
    return data, writer.summary


def read(data, summary, schema):
    """Read all groups back through the tail, as a reader would, and put them together."""
    tail = decode_tail(data[-summary.tail_bytes :], len(data), "seg")
    numbers = sorted(schema.types())
    groups = []
    for group in range(len(tail.index)):
        blocks = [data[slice(*span)] for span in tail.ranges(group, numbers)]
        groups.append(tail.decode_group(group, numbers, blocks))
    return tail, groups


def plain(rows, first=0, size=20):
    """Return simple rows of the default schema."""
    return Versions(
        pa.array([b"key-%06d" % n for n in range(first, first + rows)], pa.binary()),
        np.arange(1, rows + 1, dtype=np.int64),
        np.zeros(rows, np.uint32),
        np.zeros(rows, np.uint8),
        {1: pa.array([b"%d" % n * size for n in range(rows)], pa.binary())},
    )


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(data=st.data())
def test_versions_come_back(data):
    """All types, all codecs, any group size, with and without range tombstones."""
    schema = data.draw(schemas())
    rows = data.draw(versions(schema))
    encoded, summary = write(
        schema,
        [rows],
        codec=data.draw(st.sampled_from(Codec)),
        group_bytes=data.draw(st.sampled_from([1, 40, 200, 100_000])),
    )
    tail, groups = read(encoded, summary, schema)
    found = concat_versions(groups, schema)
    assert found.keys.equals(rows.keys)
    assert found.lsns.tolist() == rows.lsns.tolist()
    assert found.seqs.tolist() == rows.seqs.tolist()
    assert found.kinds.tolist() == rows.kinds.tolist()
    for number, array in rows.fields.items():
        expected_null = array.null_count == len(array)
        assert (number not in found.fields and expected_null) or same(found.fields[number], array)
    for number, array in rows.touched.items():
        assert found.touched[number].equals(array)
    if rows.expires_at_ms is not None and rows.expires_at_ms.null_count < len(rows):
        assert same(found.expires_at_ms, rows.expires_at_ms)
    assert summary.footer.rows == len(rows)
    assert summary.checksum == crc32c(encoded)
    check_segment(encoded, "seg")
    _check_index(tail, groups)


def _check_index(tail, groups):
    """The index entry of a group matches the group, and no key is in two groups."""
    seen = set()
    for number, group in enumerate(groups):
        keys = group.keys.to_pylist()
        assert (keys[0], keys[-1]) == (tail.index.first_keys[number], tail.index.last_keys[number])
        assert (group.lsns.min(), group.lsns.max()) == (
            tail.index.lsn_min[number],
            tail.index.lsn_max[number],
        )
        assert not seen & set(keys)
        seen |= set(keys)


def test_the_footer_has_the_fields_the_manifest_needs():
    """Level, counts, bounds, lineage and the whole schema: a manifest can be made from it."""
    tombstones = [RangeTombstone(b"a", b"c", 50, 0), RangeTombstone(b"zz", b"zzz", 2, 1)]
    data, summary = write(DEFAULT_SCHEMA, [plain(10)], level=1, range_tombstones=tombstones)
    footer = check_segment(data, "seg").footer
    assert footer == summary.footer
    assert (footer.level, footer.rows, footer.tombstones) == (1, 10, 2)
    assert (footer.min_key, footer.max_key) == (b"a", b"zzz"), "bounds include tombstones (H36)"
    assert (footer.lsn_min, footer.lsn_max) == (1, 50)
    assert (footer.ancestors, footer.siblings, footer.job) == (("01A", "01B"), ("01C",), "job-1")
    assert footer.schema == DEFAULT_SCHEMA
    assert list(check_segment(data, "seg").range_tombstones) == tombstones


def test_a_segment_of_range_tombstones_only():
    """Deletes alone make a segment too."""
    data, summary = write(DEFAULT_SCHEMA, [], range_tombstones=[RangeTombstone(b"a", b"b", 5, 0)])
    assert summary.footer.rows == 0
    assert check_segment(data, "seg").range_tombstones[0].end == b"b"


def test_an_empty_segment_is_refused():
    """There is nothing to write."""
    with pytest.raises(ValueError, match="without rows"):
        write(DEFAULT_SCHEMA, [])


def test_pieces_do_not_matter():
    """The same rows in one piece or in many give the same bytes."""
    whole = write(DEFAULT_SCHEMA, [plain(1000)], group_bytes=2000)[0]
    rows = plain(1000)
    pieces = [rows.slice(start, start + 77) for start in range(0, 1000, 77)]
    assert write(DEFAULT_SCHEMA, pieces, group_bytes=2000)[0] == whole


def test_groups_are_about_as_large_as_asked():
    """Cut by bytes, never inside a key's versions."""
    data, summary = write(DEFAULT_SCHEMA, [plain(5000)], codec=Codec.NONE, group_bytes=10_000)
    _, groups = read(data, summary, DEFAULT_SCHEMA)
    assert len(groups) > 20
    sizes = [g.keys.nbytes + g.fields[1].nbytes for g in groups[:-1]]
    assert all(5_000 < size < 15_000 for size in sizes)


def test_groups_grow_with_their_segment(monkeypatch):
    """A large segment has groups up to four times as large; pieces make no difference to that."""
    monkeypatch.setattr("reef.formats.group.LARGE_SEGMENT_BYTES", 40_000)
    rows = plain(8000)
    data, summary = write(DEFAULT_SCHEMA, [rows], codec=Codec.NONE, group_bytes=4000)
    _, groups = read(data, summary, DEFAULT_SCHEMA)
    sizes = [g.keys.nbytes + g.fields[1].nbytes + 13 * len(g) for g in groups[:-1]]
    assert all(3000 < size < 5000 for size in sizes[:9])
    assert all(14_000 < size < 18_000 for size in sizes[-9:])
    assert max(after / before for before, after in pairwise(sizes)) < 1.4, "it is no jump"
    pieces = [rows.slice(start, start + 777) for start in range(0, 8000, 777)]
    assert write(DEFAULT_SCHEMA, pieces, codec=Codec.NONE, group_bytes=4000)[0] == data


def test_columns_can_be_left_out():
    """Only the key block is needed to see which keys there are."""
    data, summary = write(DEFAULT_SCHEMA, [plain(10)])
    tail = decode_tail(data[-summary.tail_bytes :], len(data), "seg")
    (span,) = tail.ranges(0, [])
    assert len(tail.decode_group(0, [], [data[slice(*span)]])) == 10


def test_every_flipped_bit_is_detected():
    """Each bit of a small segment, one at a time."""
    tombstones = [RangeTombstone(b"a", b"c", 50, 0)]
    data, _ = write(DEFAULT_SCHEMA, [plain(12)], group_bytes=150, range_tombstones=tombstones)
    for bit in range(len(data) * 8):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CorruptionError) as caught:
            check_segment(bytes(damaged), "seg")
        assert caught.value.context["object"] == "seg"


def test_every_truncation_is_detected():
    """Each length short of the whole, and one byte too many."""
    data, _ = write(DEFAULT_SCHEMA, [plain(12)])
    for length in range(len(data)):
        with pytest.raises(CorruptionError):
            check_segment(data[:length], "seg")
    with pytest.raises(CorruptionError):
        check_segment(data + b"\0", "seg")


def test_flipped_bits_in_a_large_segment_are_detected():
    """At random places of some hundred kilobytes."""
    data, _ = write(DEFAULT_SCHEMA, [plain(3000, size=10)], codec=Codec.NONE, group_bytes=5000)
    chance = random.Random(0)
    for _ in range(60):
        damaged = bytearray(data)
        damaged[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        with pytest.raises(CorruptionError):
            check_segment(bytes(damaged), "seg")


def test_a_newer_version_is_not_reported_as_damage(monkeypatch):
    """Valid bytes of a later release ask for an upgrade."""
    monkeypatch.setattr("reef.formats.segment_writer.PLAIN_VERSION", 4)
    data, _ = write(DEFAULT_SCHEMA, [plain(3)])
    with pytest.raises(UnsupportedFormatError, match="segment of format 4"):
        decode_tail(data, len(data), "seg")
    assert segment_format.VERSION == 3


@given(st.binary(max_size=300))
def test_garbage_is_corruption(data):
    """Never anything but a CorruptionError."""
    with pytest.raises(CorruptionError):
        decode_tail(data, len(data), "seg")


# --- blocks -----------------------------------------------------------------------


@given(st.binary(max_size=3000), st.sampled_from(Codec), st.sampled_from(BlockKind))
def test_blocks_come_back(payload, codec, kind):
    """Compressed or not, aligned to 8."""
    block = encode_block(kind, payload, codec)
    assert len(block) % 8 == 0
    assert bytes(decode_block(block, kind, "x", 0)) == payload


def test_what_does_not_shrink_is_stored_as_it_is():
    """Random bytes are not made longer by compression."""
    payload = random.Random(0).randbytes(1000)
    assert len(encode_block(BlockKind.COLUMN, payload, Codec.ZSTD)) == 16 + 1000
    hardly = payload + bytes(60)
    assert len(encode_block(BlockKind.COLUMN, hardly, Codec.ZSTD)) == 16 + 1064, "not an eighth"
    well = payload + bytes(600)
    assert len(encode_block(BlockKind.COLUMN, well, Codec.ZSTD)) < 16 + 1100


def test_noise_is_not_compressed_again_and_again(monkeypatch):
    """Tried ever less often while it does not shrink; a column that shrinks is tried every time."""
    tried, compress = [], block_format._compress

    def counted(payload, codec):
        if codec != Codec.NONE:
            tried.append(len(payload))
        return compress(payload, codec)

    monkeypatch.setattr(block_format, "_compress", counted)
    noise, text, packer = random.Random(0).randbytes(1000), b"text " * 300, Packer(Codec.ZSTD)
    for _ in range(100):
        packer.block(BlockKind.COLUMN, noise, 1)
        packer.block(BlockKind.COLUMN, text, 2)
    assert 100 <= tried.count(len(text)) <= 108, "both codecs are compared every sixteenth time"
    assert 5 <= tried.count(len(noise)) <= 12
    blocks = [packer.block(BlockKind.COLUMN, text, 1) for _ in range(20)]
    assert min(map(len, blocks[-4:])) == max(map(len, blocks[-4:])) < 100, "it shrinks again"
    assert all(bytes(decode_block(b, BlockKind.COLUMN, "x", 0)) == text for b in blocks)


@pytest.mark.parametrize(("count", "codec"), [(256, Codec.LZ4), (2048, Codec.ZSTD)])
def test_zstd_must_save_a_kibibyte_in_each_block(count, codec):
    """Each of its blocks costs a scan microseconds: small columns of wide rows use lz4."""
    chance = random.Random(0)
    numbers = b"".join(struct.pack("<i", chance.randrange(100)) for _ in range(count))
    block = Packer(Codec.ZSTD).block(BlockKind.COLUMN, numbers, 1)
    assert block[9] == codec
    assert bytes(decode_block(block, BlockKind.COLUMN, "x", 0)) == numbers


def test_a_block_cannot_claim_more_than_its_size_allows():
    """The raw length is bounded by the stored one; very regular data falls back to lz4."""
    zeros = bytes(50_000_000)
    block = encode_block(BlockKind.COLUMN, zeros, Codec.ZSTD)
    assert bytes(decode_block(block, BlockKind.COLUMN, "x", 0)) == zeros
    checked = struct.pack("<BBHI", BlockKind.COLUMN, Codec.ZSTD, 0, 2**32 - 1) + bytes(8)
    bomb = struct.pack("<II", 8, crc32c(checked)) + checked
    with pytest.raises(CorruptionError, match="claims to hold 4294967295"):
        decode_block(bomb, BlockKind.COLUMN, "x", 0)


# --- filter and set hash ------------------------------------------------------------


def filter_of(hashes):
    """Return the filter of keys with these hashes."""
    builder = FilterBuilder()
    builder.add(hashes)
    return KeyFilter(builder.build())


@given(st.lists(st.binary(min_size=1, max_size=40), unique=True, max_size=200))
def test_the_filter_never_denies_a_key_that_is_there(present):
    """No false negatives, one by one and all at once."""
    key_filter = filter_of(hash_keys(present))
    assert all(key_filter.may_have(hash_key(key)) for key in present)
    assert key_filter.may_have_many(hash_keys(present)).all()


def test_the_filter_rarely_claims_a_key_that_is_not_there():
    """Fewer than 1 in 100, and both ways of asking agree."""
    key_filter = filter_of(hash_keys([b"in-%d" % n for n in range(20_000)]))
    absent = hash_keys([b"out-%d" % n for n in range(20_000)])
    claimed = key_filter.may_have_many(absent)
    assert claimed.sum() < 200
    assert [key_filter.may_have(int(h)) for h in absent[:500]] == claimed[:500].tolist()


def test_a_filter_of_no_keys_claims_nothing():
    """Range tombstones alone have no keys."""
    assert not filter_of(hash_keys([])).may_have(hash_key(b"x"))


@given(st.data())
def test_the_set_hash_does_not_depend_on_order_and_subtracts(data):
    """Sums of parts equal the whole, in any order."""
    rows = data.draw(versions(DEFAULT_SCHEMA))

    def hash_of(part):
        return set_hash(hash_keys(part.keys), part.seqs, part.kinds)

    cut = data.draw(st.integers(0, len(rows)))
    left, right = rows.slice(0, cut), rows.slice(cut, len(rows))
    assert hash_of(left) + hash_of(right) == hash_of(rows)
    assert hash_of(rows) - hash_of(right) == hash_of(left)
    shuffled = rows.take(np.array(data.draw(st.permutations(range(len(rows)))), np.int64))
    assert hash_of(shuffled) == hash_of(rows)
    assert SetHash.parse(str(hash_of(rows))) == hash_of(rows)
    assert hash_of(rows.slice(0, 0)) == EMPTY


def test_the_set_hash_sees_key_sequence_and_kind():
    """Changing any of the three changes the hash."""
    base = (hash_keys([b"k"]), np.array([1], np.uint32), np.array([0], np.uint8))
    hashes = {
        set_hash(*base),
        set_hash(hash_keys([b"l"]), *base[1:]),
        set_hash(base[0], np.array([2], np.uint32), base[2]),
        set_hash(*base[:2], np.array([1], np.uint8)),
    }
    assert len(hashes) == 4


# --- column bounds ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("array", "bounds"),
    [
        (pa.array([3, 1, None, 2]), (1, 3)),
        (pa.array([1.5, float("nan")]), (None, None)),
        (pa.array([None, None], pa.int64()), (None, None)),
        (pa.array(["b", "a"]), ("a", "b")),
        (pa.array(["x" * 100, "a"]), (None, None)),
        (pa.array([b"b" * 100, b"a"]), (b"a", b"b" * 63 + b"c")),
        (pa.array([b"\xff" * 100]), (b"\xff" * 64, None)),
        (pa.array([b"a\xff" * 50]), (b"a\xff" * 32, b"a\xff" * 31 + b"b")),
        (pa.array([[1]]), (None, None)),
        (pa.array([True, False]), (None, None)),
    ],
    ids=str,
)
def test_bounds_are_bounds(array, bounds):
    """Long texts are cut to a bound, NaN and nested values have none."""
    found = [bound.as_py() if isinstance(bound, pa.Scalar) else bound for bound in bounds_of(array)]
    assert tuple(found) == bounds


@given(st.lists(st.binary(max_size=100), min_size=1))
def test_binary_bounds_hold_for_all_values(items):
    """No value is outside."""
    low, high = bounds_of(pa.array(items, pa.binary()))
    assert all(low <= item and (high is None or item <= high) for item in items)
