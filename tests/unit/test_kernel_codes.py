"""Distances to codes and probes of filters: the kernel returns what the Python code returns."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reef import kernel
from reef.formats.segment_index import FilterBuilder, KeyFilter, hash_keys, may_have_each
from reef.formats.vector_index import (
    LEVELS,
    CodedLists,
    VectorDirectory,
    _CodedQuery,
    code_margin,
    nearest_codes,
)

native = kernel.native
needs_kernel = pytest.mark.skipif(
    not hasattr(native, "may_have_each"), reason="this kernel was not built here"
)
MANY = settings(deadline=None, max_examples=60)


def directory(rng, dimensions, metric="l2", spread=1.0):
    """Return the directory of an index, of which only the codes' meaning counts."""
    low = (spread * rng.normal(size=dimensions)).astype("f4")
    scale = (spread * rng.random(dimensions) / LEVELS).astype("f4")
    return VectorDirectory("a segment", metric, np.zeros(0, "i8"), np.zeros(0, "i8"), low, scale)


def list_of(rng, rows, dimensions):
    """Return a list as it is stored."""
    ordinals = rng.integers(0, 50, rows).astype("<u4")
    squares = rng.normal(size=rows).astype("<f4")
    squares[rng.random(rows) < 0.1] = rng.choice([0.0, np.inf, np.nan])
    codes = rng.integers(0, 256, (rows, dimensions)).astype("u1")
    return b"crc." + ordinals.tobytes() + squares.tobytes() + codes.tobytes()


def in_one(lists):
    """Return lists as one buffer, and where each is in it."""
    ends = np.cumsum([len(one) for one in lists], dtype=np.int64)
    starts = ends - [len(one) for one in lists]
    return [b"".join(lists)], np.stack([starts, ends], axis=1)


@st.composite
def searches(draw):
    """Return lists of some segments, a query, and how many rows are asked for."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    dimensions = draw(st.sampled_from([1, 3, 16, 31, 32, 33, 64, 97, 128, 300]))
    metric, spread = (
        draw(st.sampled_from(["l2", "cosine", "dot"])),
        draw(st.sampled_from([1, 1e12])),
    )
    sources = []
    for _ in range(draw(st.integers(1, 3))):
        sizes = draw(st.lists(st.integers(1, 40), max_size=3))
        lists, spans = [list_of(rng, size, dimensions) for size in sizes], None
        if lists and draw(st.booleans()):
            lists, spans = in_one(lists)
        inside = rng.random(50) < 0.5 if draw(st.booleans()) else None
        sources.append(CodedLists(directory(rng, dimensions, metric, spread), lists, spans, inside))
    query = (spread * rng.normal(size=dimensions)).astype("f4")
    if draw(st.booleans()):
        query[:] = 0
    return sources, query, draw(st.integers(1, 150))


@needs_kernel
@given(search=searches())
@MANY
def test_the_nearest_codes_are_the_same_bit_for_bit(search):
    """Ordinals, sources and distances agree for all dimensions, masks, ties and infinite values."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(kernel, "native", None)
        expected = nearest_codes(*search)
    found = nearest_codes(*search)
    for part in ("sources", "ordinals", "far"):
        np.testing.assert_array_equal(getattr(found, part), getattr(expected, part))


@needs_kernel
@given(search=searches(), seed=st.integers(0, 2**32))
@MANY
def test_damaged_lists_are_left_to_python(search, seed):
    """Lists of a wrong length, spans outside of the buffer and unknown ordinals have no result."""
    (source, *_), query, most = search
    rng = np.random.default_rng(seed)
    coded = _CodedQuery.of(query, [source])
    rest = (coded.weights[0], float(coded.bases[0]), float(coded.steps[0]))
    data = bytearray(list_of(rng, 5, len(query)))
    wrong = bytes(data[: rng.integers(0, len(data))])
    for lists, spans, inside in (
        ([wrong], None, None),
        ([bytes(data)], np.array([[0, len(data) + 1]]), None),
        ([bytes(data)], np.array([[-8, len(data)]]), None),
        ([bytes(data)], np.array([[9, 3]]), None),
        ([bytes(data)], None, np.ones(1, bool)),
    ):
        found = native.nearest_codes([(lists, spans, *rest, inside)], len(query), most, False)
        each = 8 + len(query)
        is_whole = spans is None and inside is None and len(wrong) >= 4
        if not (is_whole and (len(wrong) - 4) % each == 0):
            assert found is None or inside is not None


@needs_kernel
def test_arguments_of_other_types_are_errors():
    """The kernel raises for objects of a wrong type or length."""
    weights = np.zeros(4, np.int16)
    for source in (1, (1,), ([1], None, weights, 0, 1, None), ([], None, weights[:3], 0, 1, None)):
        with pytest.raises((TypeError, ValueError)):
            native.nearest_codes([source], 4, 1, False)
    with pytest.raises(ValueError, match="one buffer"):
        native.nearest_codes([([], np.zeros(2, "i8"), weights, 0.0, 1.0, None)], 4, 1, False)
    assert native.nearest_codes([([], None, weights, 0.0, 1.0, None)], 0, 1, False) is None
    with pytest.raises(ValueError, match="not a filter"):
        native.may_have_each([b"short"], np.zeros(1, np.uint64))


@given(st.lists(st.lists(st.binary(max_size=3), max_size=30), max_size=4), st.booleans())
@MANY
def test_filters_are_probed_together_as_one_by_one(filled, by_kernel):
    """Each filter says of each hash what it says by itself."""
    filters = []
    for keys in filled:
        builder = FilterBuilder()
        builder.add(hash_keys(keys))
        filters.append(KeyFilter(builder.build()))
    hashes = hash_keys([bytes([first, second]) for first in range(8) for second in range(8)])
    with pytest.MonkeyPatch.context() as patched:
        if not by_kernel:
            patched.setattr(kernel, "native", None)
        found = may_have_each(filters, hashes)
    assert found.shape == (len(filters), len(hashes))
    for number, one in enumerate(filters):
        assert found[number].tolist() == [one.may_have(key_hash) for key_hash in hashes.tolist()]


@pytest.mark.parametrize("metric", ["l2", "dot"])
def test_the_margin_covers_the_errors_of_codes(metric):
    """Of vectors within the margin of each other by exact distance, codes hardly ever say more."""
    rng = np.random.default_rng(3)
    vectors = rng.normal(size=(400, 96)).astype("f4")
    low, high = vectors.min(axis=0), vectors.max(axis=0)
    scale = (high - low) / LEVELS
    index = VectorDirectory("a segment", metric, np.zeros(0, "i8"), np.zeros(0, "i8"), low, scale)
    decoded = np.rint((vectors - low) / scale) * scale + low
    query = rng.normal(size=96).astype("f4")
    if metric == "dot":
        exact, coded = -vectors @ query, -decoded @ query
    else:
        exact = np.square(vectors - query).sum(axis=1) - query @ query
        coded = np.square(decoded - query).sum(axis=1) - query @ query
    errors = coded - exact
    for at in range(0, 400, 40):
        margin = code_margin([CodedLists(index, [])], query, float(coded[at]))
        assert np.mean(np.abs(errors - errors[at]) <= margin) >= 0.95
        assert margin <= 40 * np.std(errors)
