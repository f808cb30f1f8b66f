"""The text index of a segment: every posting comes back, and damage never passes for one."""

import struct
import tracemalloc
from collections import defaultdict
from contextlib import suppress

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reef.errors import CorruptionError, InvalidInputError, ReefError, UnsupportedFormatError
from reef.formats import text_index
from reef.formats.coding import BlockKind, decode_block, encode_block
from reef.formats.postings import BLOCK_DOCUMENTS, Postings
from reef.formats.text_index import HEAD, TextDirectory, TextIndexBuilder

NAME, BASE = "ns/segments/1.seg", 4096
DOCUMENTS = st.lists(
    st.one_of(
        st.none(), st.lists(st.sampled_from(["a", "b", "cc", "d"]), max_size=6).map(" ".join)
    ),
    max_size=40,
)


def build(column, options=None, valid=None, step=0):
    """Return the directory and the data of an index, added in steps of some rows."""
    builder = TextIndexBuilder(options or {})
    column = pa.array(column, pa.string())
    valid = np.ones(len(column), bool) if valid is None else np.array(valid)
    for first in range(0, len(column), step or max(1, len(column))):
        ours = slice(first, first + (step or len(column)))
        builder.add(first, column[ours], valid[ours])
    parts = builder.finish()
    return parts.directory, b"".join(parts.data)


def read_all(encoded, data, terms, positions=False):
    """Return {term: {ordinal: (frequency, length, positions)}} of terms that the index has."""
    directory = TextDirectory.decode(encoded, NAME, 0)
    ranges = directory.block_ranges(terms)
    blocks = {
        number: directory.block(data[offset : offset + length], BASE + offset)
        for number, (offset, length) in ranges.items()
    }
    found = {}
    for term, entry in directory.entries(terms, blocks).items():
        offset, length = entry.postings_range
        postings = directory.postings(entry, data[offset : offset + length], BASE)
        rows = zip(postings.counts.tolist(), postings.lengths.tolist(), strict=True)
        places = [()] * postings.documents
        if positions:
            offset, length = entry.positions_range
            body = data[offset : offset + length]
            joined = directory.positions(entry, body, BASE, postings)
            places = np.split(joined, np.cumsum(postings.counts)[:-1])
        found[term] = {
            ordinal: (*row, tuple(int(at) for at in place))
            for ordinal, row, place in zip(postings.ordinals.tolist(), rows, places, strict=True)
        }
    return found


def expected(column, valid=None, positions=False):
    """Return the same from the documents."""
    model = defaultdict(dict)
    for ordinal, text in enumerate(column):
        if text is None or (valid is not None and not valid[ordinal]):
            continue
        words = text.split()
        for word in dict.fromkeys(words):
            places = tuple(at for at, other in enumerate(words) if other == word)
            model[word][ordinal] = (len(places), len(words), places if positions else ())
    return model


def corpus(rows, words=30_000, seed=1):
    """Return texts of some sixty words by Zipf's law."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 120, rows)
    return [" ".join(f"w{n}" for n in rng.zipf(1.2, length) % words) for length in lengths]


@given(DOCUMENTS, st.booleans(), st.integers(0, 7), st.data())
def test_an_index_has_every_token_of_valid_rows(column, positions, step, data):
    """Ordinals, frequencies, lengths and positions come back, however rows were added."""
    valid = data.draw(st.lists(st.booleans(), min_size=len(column), max_size=len(column)))
    encoded, body = build(column, {"positions": positions}, valid, step)
    model = expected(column, valid, positions)
    assert read_all(encoded, body, [*model, "missing"], positions) == model
    directory = TextDirectory.decode(encoded, NAME, 0)
    lengths = [len(t.split()) for t, ok in zip(column, valid, strict=True) if ok and t]
    assert (directory.documents, directory.tokens) == (sum(map(bool, lengths)), sum(lengths))


def test_large_dictionaries_and_long_postings(monkeypatch):
    """An index of many dictionary blocks, slabs and chunks is read by two rounds of ranges."""
    monkeypatch.setattr(text_index, "PENDING_BYTES", 20_000)
    monkeypatch.setattr(text_index, "ENCODED_AT_ONCE", 10_000)
    column = corpus(3000)
    encoded, data = build(column, {"positions": True}, step=100)
    model = expected(column, positions=True)
    directory = TextDirectory.decode(encoded, NAME, 0)
    assert directory.terms == len(model) > 10_000
    assert len(directory.block_ranges(model)) > 10
    assert max(map(len, model.values())) > 10 * BLOCK_DOCUMENTS
    assert read_all(encoded, data, model, positions=True) == model
    assert len(encoded) < 2_000


def test_small_dictionaries_are_in_the_directory():
    """A search of a small segment needs its tail and postings, and no dictionary block."""
    encoded, data = build(["red fish", "blue fish"] * 500)
    directory = TextDirectory.decode(encoded, NAME, 0)
    assert directory.block_ranges(["red", "fish"]) == {}
    assert directory.data_bytes == len(data)
    assert [*directory.ranges(["red", "fish", "blue"], {})] == ["red", "fish", "blue"]


def test_rare_terms_cost_no_read_of_their_own():
    """Postings of a few bytes are in the dictionary."""
    encoded, data = build(["red fish"])
    assert data == b""
    assert TextDirectory.decode(encoded, NAME, 0).ranges(["red", "fish"], {}) == {}
    assert read_all(encoded, data, ["fish"]) == {"fish": {0: (1, 2, ())}}


def test_gaps_between_rows_are_rows_without_text():
    """Rows that were never added have no tokens; ordinals after them are right."""
    builder = TextIndexBuilder({})
    one = np.ones(1, bool)
    builder.add(3, pa.array(["x"]), one)
    builder.add(9, pa.array(["x y"]), one)
    parts = builder.finish()
    assert read_all(parts.directory, b"", ["x"]) == {"x": {3: (1, 1, ()), 9: (1, 2, ())}}
    with pytest.raises(InvalidInputError, match="rows from 9 on after 10"):
        builder.add(9, pa.array(["x"]), one)
    with pytest.raises(InvalidInputError, match="int64"):
        builder.add(10, pa.array([1]), one)


def test_frequencies_and_lengths_of_every_width():
    """Numbers of one, two and four bytes come back."""
    column = ["a", "a " * 300, "a " * 70_000, "b " * 255, "b " * 256, "c c"]
    encoded, data = build(column, {"positions": True})
    assert read_all(encoded, data, ["a", "b", "c"], positions=True) == expected(
        column, positions=True
    )


def test_bounds_hold_for_every_average_length():
    """No posting of a block scores above the block's bound, whatever the statistics are."""
    column = corpus(2000, words=20)
    encoded, data = build(column)
    directory = TextDirectory.decode(encoded, NAME, 0)
    entry = directory.entries(["w1"], {})["w1"]
    offset, length = entry.postings_range
    postings = directory.postings(entry, data[offset : offset + length], BASE)
    highest, lowest = postings.bounds
    frequencies, lengths = postings.counts.astype(float), postings.lengths.astype(float)
    block = np.arange(postings.documents) // BLOCK_DOCUMENTS
    for average in (0.5, 10.0, 60.0, 1e6):
        scores = frequencies / (frequencies + 0.3 + 0.9 * lengths / average)
        bounds = 1 / (1 + 0.3 / highest + 0.9 / average * lowest)
        assert (scores <= bounds[block] * (1 + 1e-12)).all()
        assert bounds.max() < 2 * scores.max()


def test_every_flipped_byte_is_found():
    """Each byte of directory and data is covered by a checksum, named with object and offset."""
    column = corpus(150, words=2000)
    encoded, data = build(column, {"positions": True})
    terms = [*expected(column)]
    assert len(data) > 10_000
    rng = np.random.default_rng(3)
    for place in rng.integers(0, len(encoded), 60):
        damaged = bytearray(encoded)
        damaged[place] ^= 1 << rng.integers(8)
        with pytest.raises(CorruptionError) as caught:
            TextDirectory.decode(bytes(damaged), NAME, 0)
        assert NAME in str(caught.value)
    for place in rng.integers(0, len(data), 60):
        damaged = bytearray(data)
        damaged[place] ^= 1 << rng.integers(8)
        with pytest.raises(CorruptionError) as caught:
            read_all(encoded, bytes(damaged), terms, positions=True)
        assert caught.value.context["object"] == NAME
        assert abs(caught.value.context["offset"] - BASE - place) < 32_768


def test_short_reads_are_damage():
    """A range that ends early, or an empty one, is refused before it is decoded."""
    encoded, data = build(["red fish"] * 1000)
    directory = TextDirectory.decode(encoded, NAME, 0)
    entry = directory.entries(["fish"], {})["fish"]
    for length in (0, entry.postings_bytes - 1):
        with pytest.raises(CorruptionError, match=f"expected {entry.postings_bytes} bytes"):
            directory.postings(entry, data[entry.offset : entry.offset + length], BASE)


@given(st.binary(max_size=200), st.integers(0, 1 << 32), st.integers(0, 1 << 32))
def test_crafted_postings_are_refused_or_valid(data, documents, rows):
    """Bytes with a valid checksum that misstate counts take no memory and raise nothing else."""
    with suppress(CorruptionError):
        postings = Postings(data, documents, rows, NAME, 0)
        ordinals = postings.ordinals
        assert len(postings.lengths) == len(ordinals) == documents
        assert ordinals[-1] < rows
        _ = postings.frequencies, postings.bounds


@pytest.mark.parametrize(
    ("firsts", "deltas", "rows"), [([5], [0, 1], 6), ([5], [0, 0], 9), ([9], [0, 255], 99)]
)
def test_ordinals_ascend_below_the_number_of_rows(firsts, deltas, rows):
    """Ordinals under a valid checksum that repeat, or that no row has, are damage."""
    data = b"\x11" + struct.pack("<I", *firsts) + bytes(deltas) + bytes([1, 1])
    with pytest.raises(CorruptionError, match="do not ascend"):
        _ = Postings(data, 2, rows, NAME, 0).ordinals


@given(st.data())
def test_crafted_directories_are_refused_or_valid(data):
    """Any change of a payload under a valid checksum raises an error of ours, in little memory."""
    encoded, _ = build(corpus(20, words=300))
    payload = bytearray(decode_block(encoded, BlockKind.TERMS, NAME, 0))
    for _ in range(data.draw(st.integers(1, 4))):
        payload[data.draw(st.integers(0, min(len(payload) - 1, 200)))] = data.draw(
            st.integers(0, 255)
        )
    crafted = encode_block(BlockKind.TERMS, bytes(payload))
    tracemalloc.start()
    with suppress(ReefError):
        directory = TextDirectory.decode(crafted, NAME, 0)
        if not directory.block_ranges(["w1", "w2"]):
            for entry in directory.entries(["w1", "w2"], {}).values():
                _ = directory.postings(entry, b"", BASE).ordinals
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 << 20


def test_newer_versions_are_refused_as_such():
    """A directory of a later release asks for an upgrade; it is not damage."""
    encoded, _ = build(["x"])
    payload = bytearray(decode_block(encoded, BlockKind.TERMS, NAME, 0))
    payload[0] += 1
    with pytest.raises(UnsupportedFormatError, match="text index"):
        TextDirectory.decode(encode_block(BlockKind.TERMS, bytes(payload)), NAME, 0)


def test_postings_beyond_the_data_are_refused():
    """A dictionary block cannot name bytes after the end of the index's data."""
    encoded, _ = build(["red fish"] * 1000)
    payload = bytearray(decode_block(encoded, BlockKind.TERMS, NAME, 0))
    head = list(HEAD.unpack_from(payload))
    head[8] -= 1
    struct.pack_into(HEAD.format, payload, 0, *head)
    with pytest.raises(CorruptionError, match="after the data"):
        TextDirectory.decode(encode_block(BlockKind.TERMS, bytes(payload)), NAME, 0)
