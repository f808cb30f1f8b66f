"""Which indexes are used, and which of their candidates count."""

import msgspec
import numpy as np
import pyarrow as pa
import pytest

import reef
from reef.engine.read.segments import SegmentStore
from reef.formats.filter_index import BuildableFilter
from reef.formats.manifest import IndexKind, IndexSpec, Manifest, decode_outline, encode_manifest
from reef.formats.schema import Schema
from reef.formats.segment import Lineage
from reef.formats.segment_writer import SegmentWriter
from reef.formats.versions import Versions
from reef.formats.wal_object import OpKind
from reef.jobs import build_indexes, compact, fold, ingest
from reef.manifest.branching import needed_homes
from reef.manifest.edits import replace_level
from reef.stores.memory import MemoryStore
from tests.support.search import clustered, table_of

NAME = "docs"
VECTORS, QUERIES = clustered(1200, dimensions=8)
INDEXES = [
    reef.vector_index("v", rows_min=10, lists=8, probes=8),
    reef.filter_index("n", rows_min=10),
]


def load(db, numbers, vectors=VECTORS):
    """Load rows as a segment of their own."""
    ingest(db, NAME, table_of(vectors, numbers))
    fold(db, NAME)


def make(*parts):
    """Return a database with an indexed segment for each part of the rows."""
    db = reef.Database(MemoryStore())
    db.create(NAME, table_of(VECTORS, range(1)).schema, indexes=INDEXES)
    for part in parts:
        load(db, part)
    build_indexes(db, NAME)
    return db


def test_a_row_that_a_newer_segment_has_replaced_is_not_found():
    """Both versions are in an index; only the newer one counts, wherever it is now."""
    db = make(range(1000))
    moved = VECTORS.copy()
    moved[:500] = 100
    load(db, range(500), moved)
    build_indexes(db, NAME)
    with db.reader(NAME) as reader:
        for number in range(0, 500, 50):
            query = {"vector": ("v", VECTORS[number]), "k": 20, "columns": []}
            plan = reader.search(**query, explain=True)
            assert (plan["segments_indexed"], plan["segments_exhaustive"]) == (2, 0)
            keys = reader.search(**query)["id"].to_pylist()
            assert all(int(key) >= 500 for key in keys)
            assert keys == reader.search(**query, recall="exact")["id"].to_pylist()
        far = reader.search(vector=("v", [100.0] * 8), k=5)["_distance"].to_pylist()
        assert far == [0.0] * 5


@pytest.mark.parametrize("is_folded", [False, True])
def test_a_range_delete_hides_candidates(is_folded):
    """Deletes in memory and in newer segments count, though neither has such a key."""
    db = make(range(1000))
    with db.writer(NAME, background=False) as writer:
        writer.delete_range("000100", "000200")
    if is_folded:
        fold(db, NAME)
    with db.reader(NAME) as reader:
        keys = reader.search(vector=("v", VECTORS[150]), k=50)["id"].to_pylist()
        assert keys
        assert not [key for key in keys if "000100" <= key < "000200"]


def test_an_expired_row_of_an_indexed_segment_is_not_found():
    """Expiry is that of the reader's clock, at the time of the search."""
    db = make(range(1000))
    with db.writer(NAME, background=False) as writer:
        for number in range(1000, 1100):
            row = {"v": VECTORS[number].tolist(), "n": 1}
            writer.put(f"{number:06}", row, ttl_s=0.001)
    fold(db, NAME)
    build_indexes(db, NAME)
    with db.reader(NAME) as reader:
        assert reader.search(vector=("v", VECTORS[0]), explain=True)["segments_indexed"] == 2
        keys = reader.search(vector=("v", VECTORS[1050]), k=20)["id"].to_pylist()
        assert not [key for key in keys if key >= "001000"]


def test_small_neighbours_with_indexes_are_merged_and_not_joined():
    """A copy of their groups would have no index, since its rows are not decoded."""
    db = make(*np.array_split(np.arange(1200), 4))
    db._namespaces.publisher(NAME).publish(
        lambda head: msgspec.structs.replace(
            head, segments=tuple(replace_level(entry, 1) for entry in head.segments)
        )
    )
    report = compact(db, NAME, strategy="leveled", segment_bytes_min=1 << 20)
    assert (report.inputs > 1, report.joined) == (True, 0)
    with db.reader(NAME) as reader:
        plan = reader.search(vector=("v", QUERIES[0]), explain=True)
        assert (plan["segments_indexed"] > 0, plan["segments_exhaustive"]) == (True, 0)
        assert len(reader.search(vector=("v", QUERIES[0]), k=1200, columns=[])) == 1200


def test_an_index_serves_only_its_own_kind_column_options_and_centroids():
    """An index that was built otherwise is not used; the smallest size of segments is no matter."""
    spec = IndexSpec(IndexKind.VECTOR, 2, {"metric": "l2", "rows_min": 5}, "01A")
    assert spec.serves(IndexSpec(IndexKind.VECTOR, 2, {"metric": "l2"}, "01A"))
    for other in (
        IndexSpec(IndexKind.FILTER, 2, {"metric": "l2"}, "01A"),
        IndexSpec(IndexKind.VECTOR, 3, {"metric": "l2"}, "01A"),
        IndexSpec(IndexKind.VECTOR, 2, {"metric": "dot"}, "01A"),
        IndexSpec(IndexKind.VECTOR, 2, {"metric": "l2"}, "01B"),
    ):
        assert not spec.serves(other)


def test_outlines_and_homes_have_the_centroids():
    """A sweep keeps those of each generation; a branch keeps the home of those it shares."""
    own = IndexSpec(IndexKind.VECTOR, 1, {}, "01A")
    shared = IndexSpec(IndexKind.VECTOR, 2, {}, "01B", "namespaces/parent")
    untrained = IndexSpec(IndexKind.VECTOR, 3)
    manifest = Manifest(
        generation=1, write_id="w", published_at_ms=0, indexes=(own, shared, untrained)
    )
    outline = decode_outline(encode_manifest(manifest), "m")
    assert outline.segment_ids == ("01A.ctr",)
    assert outline.homes == needed_homes(manifest) == {"namespaces/parent"}
    assert manifest.own_objects == {"01A.ctr"}


@pytest.mark.parametrize("kind", [OpKind.PUT, OpKind.DELETE, OpKind.PATCH])
def test_a_segment_with_patches_has_no_index(kind):
    """Tombstones are left out of the index; a patch changes a row that the index does not have."""
    schema = Schema.of(pa.schema([("id", pa.string()), ("n", pa.int64())]))
    (column,) = schema.fields
    rows = Versions(
        pa.array([b"a", b"b"], pa.binary()),
        np.array([1, 2]),
        np.zeros(2, np.uint32),
        np.array([OpKind.PUT, kind], np.uint8),
        {column.number: pa.array([1, 2])},
        touched={column.number: pa.array([False, kind is OpKind.PATCH])},
    )
    spec = IndexSpec(IndexKind.FILTER, column.number, {"rows_min": 1})
    writer = SegmentWriter(schema, 0, Lineage("s", 0), indexes=[BuildableFilter(spec)])
    list(writer.write([rows]))
    (place,) = writer.summary.footer.indexes
    assert place.is_built is (kind is not OpKind.PATCH)


def test_a_scan_reads_only_groups_with_matching_rows(monkeypatch):
    """Bounds of groups exclude nothing where values are spread; a filter index does."""
    rng = np.random.default_rng(2)
    table = pa.table(
        {
            "id": [f"{i:06}" for i in range(30_000)],
            "n": rng.permutation(30_000),
            "pad": ["x"] * 30_000,
        }
    )
    read = []
    rows = SegmentStore.rows

    def counted(self, entry, pages, *args, **options):
        read.append(len(pages))
        return rows(self, entry, pages, *args, **options)

    monkeypatch.setattr(SegmentStore, "rows", counted)
    found = {}
    for indexes in ([], [reef.filter_index("n")]):
        db = reef.Database(MemoryStore())
        db.create(NAME, table.schema, indexes=indexes)
        ingest(db, NAME, table)
        fold(db, NAME)
        read.clear()
        with db.reader(NAME) as reader:
            assert reader.count("n IN (17, 20000) OR n = 4") == 3
            assert reader.count("NOT n < 29999") == 1
        found[len(indexes)] = sum(read)
    assert found[1] < found[0] / 2


TIED = pa.schema([("id", pa.string()), ("v", pa.list_(pa.float32(), 2))])


@pytest.mark.parametrize("is_deleted", [False, True])
def test_a_stale_row_that_ties_with_the_last_result_is_not_found(is_deleted):
    """Of rows as far as the k-th, the smaller keys are the result: all of them are looked up."""
    db = reef.Database(MemoryStore())
    db.create(NAME, TIED, indexes=[reef.vector_index("v", rows_min=1, lists=2)])

    def rows(prefix):
        return [{"id": f"{prefix}{i:03}", "v": [50.0 + i, 9.0]} for i in range(40)]

    ingest(db, NAME, pa.Table.from_pylist([{"id": "a", "v": [1.0, 1.0]}, *rows("g")], TIED))
    fold(db, NAME)
    build_indexes(db, NAME)
    newer = [*rows("h"), {"id": "z", "v": [1.0, 1.0]}]
    with db.writer(NAME, background=False) as writer:
        if is_deleted:
            writer.delete("a")
        else:
            writer.put("a", {"v": [90.0, 90.0]})
        writer.upsert(pa.Table.from_pylist(newer, TIED))
    fold(db, NAME)
    build_indexes(db, NAME)
    with db.reader(NAME) as reader:
        plan = reader.search(vector=("v", [1, 1]), k=1, explain=True)
        assert plan["segments_indexed"] == 2
        result = reader.search(vector=("v", [1, 1]), k=1).to_pylist()
        assert result == [{"id": "z", "v": [1.0, 1.0], "_distance": 0.0}]


def test_two_versions_of_a_key_are_checked_one_by_one():
    """Both are candidates of one query; a newer one in memory hides both."""
    db = make(range(1000), range(500))
    with db.writer(NAME, background=False) as writer:
        writer.put("000007", {"v": [50.0] * 8, "n": 1})
        for recall in (None, "exact"):
            result = writer.search(vector=("v", VECTORS[7]), k=5, columns=[], recall=recall)
            assert "000007" not in result["id"].to_pylist()
            assert len(set(result["id"].to_pylist())) == 5


def test_of_rows_as_far_as_the_last_result_the_smaller_keys_are_returned():
    """Whichever segments they are in: rows that tie with the k-th are all compared by key."""
    db = reef.Database(MemoryStore())
    db.create(NAME, TIED, indexes=[reef.vector_index("v", rows_min=1, lists=2)])
    for prefix, near, far in (("g", "m", "y"), ("h", "z", "n")):
        rows = [{"id": f"{prefix}{i:03}", "v": [50.0 + i, 9.0]} for i in range(40)]
        rows += [{"id": near, "v": [1.0, 1.0]}, {"id": far, "v": [-1.0, -1.0]}]
        rows.sort(key=lambda row: row["id"])
        ingest(db, NAME, pa.Table.from_pylist(rows, TIED))
        fold(db, NAME)
        build_indexes(db, NAME)
    with db.reader(NAME) as reader:
        for query, key in (([1, 1], "m"), ([-1, -1], "n")):
            assert reader.search(vector=("v", query), explain=True)["segments_indexed"] == 2
            assert reader.search(vector=("v", query), k=1)["id"].to_pylist() == [key]
