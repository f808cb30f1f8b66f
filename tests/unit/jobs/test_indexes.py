"""Search indexes of existing data: building, damage, centroids as roots, branches, rebuild."""

import logging

import msgspec
import numpy as np
import pyarrow as pa
import pytest

import reef
from reef.config import BackgroundSettings
from reef.errors import ConflictError, InvalidInputError, NotFoundError
from reef.formats.filter_index import FilterIndexBuilder
from reef.formats.manifest import Condemned
from reef.formats.segment import decode_tail
from reef.formats.segment_writer import IndexParts
from reef.formats.text_index import TextIndexBuilder
from reef.jobs import backup, build_indexes, compact, fold, ingest, rebuild, restore, sweep, verify
from reef.jobs.background import Background
from reef.jobs.compact.job import Compactor
from reef.jobs.indexes import IndexPlanner, forget_replaced, retrain_worn
from reef.jobs.verify.chain import ProblemKind
from reef.manifest.edits import set_centroids
from reef.manifest.head import HeadFinder, locate
from reef.paths import Namespace
from reef.stores.memory import MemoryStore
from tests.support.search import clustered, table_of
from tests.support.sweep_world import NAME as USERS
from tests.support.sweep_world import World

NAME = "docs"
VECTORS, QUERIES = clustered(3000, dimensions=8)
INDEXES = [reef.vector_index("v", rows_min=100), reef.filter_index("n", rows_min=100)]


def make(indexes=INDEXES, parts=2, store=None):
    """Return a database with some thousand rows in segments."""
    db = reef.Database(store or MemoryStore())
    db.create(NAME, table_of(VECTORS, range(1)).schema, indexes=indexes)
    for part in np.array_split(np.arange(3000), parts):
        ingest(db, NAME, table_of(VECTORS, part))
    fold(db, NAME)
    return db


def head(db, name=NAME):
    """Return the newest manifest."""
    return locate(db.store, name).found.manifest


def search(db, name=NAME, **arguments):
    """Search for the neighbours of one query."""
    with db.reader(name) as reader:
        return reader.search(vector=("v", QUERIES[0]), columns=[], **arguments)


def test_an_older_release_does_not_publish_over_indexes():
    """The format of a manifest with indexes is 7: an older release would forget them."""
    db = make()
    name = Namespace(NAME).manifest(head(db).generation)
    assert b'"format":7' in db.store.get(name)
    db.alter(NAME, drop_index="v")
    db.alter(NAME, drop_index="n")
    name = Namespace(NAME).manifest(head(db).generation)
    assert b'"format":1' in db.store.get(name)


def segment_key(db, number=0):
    """Return the name of a segment's object."""
    return Namespace(NAME).segment(head(db).segments[number].id)


def tail_of(db, number=0):
    """Return the tail of a segment."""
    entry = head(db).segments[number]
    data = db.store.get(segment_key(db, number))
    return decode_tail(data[-entry.tail_bytes :], entry.size, "s")


def test_an_index_is_added_to_existing_rows_and_dropped():
    """`alter` builds it while rows stay; dropping it is one edit, and searches stay right."""
    db = make(indexes=[])
    expected = search(db, recall="exact")["id"].to_pylist()
    assert search(db, explain=True)["plan"] == "exhaustive"
    info = db.alter(NAME, add_index=INDEXES[0])
    assert info.indexes == ("vector(v)",)
    assert search(db, explain=True)["plan"] == "indexed"
    assert search(db)["id"].to_pylist() == expected
    generation = head(db).generation
    assert db.alter(NAME, drop_index="v").indexes == ()
    assert head(db).generation == generation + 1
    assert search(db, explain=True)["plan"] == "exhaustive"
    assert search(db)["id"].to_pylist() == expected


def test_indexes_are_a_part_of_what_create_promises():
    """The same indexes are no change, others a conflict; so is another one of the same column."""
    db = make(indexes=INDEXES)
    schema = table_of(VECTORS, range(1)).schema
    assert db.create(NAME, schema, indexes=INDEXES).indexes == ("vector(v)", "filter(n)")
    with pytest.raises(ConflictError, match="other indexes"):
        db.create(NAME, schema, indexes=INDEXES[:1])
    with pytest.raises(ConflictError, match="other options"):
        db.alter(NAME, add_index=reef.vector_index("v", metric="dot"))
    with pytest.raises(NotFoundError, match="no column 'x'"):
        db.alter(NAME, drop_index="x")
    db.alter(NAME, drop_index="n")
    with pytest.raises(NotFoundError, match="column n has no index"):
        db.alter(NAME, drop_index="n")


def test_a_re_created_namespace_has_its_own_indexes():
    """Dropping a name drops its indexes; creating it again starts with the given ones."""
    db = make()
    db.drop(NAME)
    schema = table_of(VECTORS, range(1)).schema
    assert db.create(NAME, schema, indexes=INDEXES[1:]).indexes == ("filter(n)",)
    assert head(db).indexes[0].centroids == ""


def test_background_work_trains_and_builds():
    """A writer's process builds what segments lack, one segment per step."""
    db = make(parts=3)
    with db.writer(NAME, background=False) as writer:
        background = Background(db, writer, BackgroundSettings())
        steps = []
        while (step := background.step(("index",))) is not None:
            steps.append(step.job)
        assert steps == ["index"] * 3
        assert search(db, explain=True)["segments_indexed"] == 3


def test_small_segments_get_no_index():
    """Below `rows_min` rows a segment has none; its footer still names the indexes."""
    db = make(indexes=[reef.filter_index("n", rows_min=2000)])
    assert [place.is_built for place in tail_of(db).footer.indexes] == [False]
    compact(db, NAME, full=True)
    assert [place.is_built for place in tail_of(db).footer.indexes] == [True]


@pytest.mark.parametrize("part", ["directory", "data"])
@pytest.mark.parametrize("number", [0, 1])
def test_damage_to_an_index_falls_back_to_the_rows(part, number, caplog):
    """A broken block costs time and a warning, never a row; verify reports it."""
    db = make(parts=1)
    build_indexes(db, NAME)
    key, place = segment_key(db), getattr(tail_of(db).footer.indexes[number], part)
    data = bytearray(db.store.get(key))
    for offset in range(place.offset + 20, place.offset + place.length, 7):
        data[offset] ^= 0x55
    db.store.put(key, bytes(data))
    where = {"where": "n < 50"} if number else {}
    expected = search(db, recall="exact", **where)["id"].to_pylist()
    with caplog.at_level(logging.WARNING):
        assert search(db, **where)["id"].to_pylist() == expected
    assert "searched row by row" in caplog.text
    assert search(db, explain=True, **where)["damaged"]
    problems = verify(db, NAME, deep=True).problems
    assert [problem.kind for problem in problems] == [ProblemKind.INDEX_DAMAGED]
    build_indexes(db, NAME, again=True)
    assert all(problem.object == key for problem in verify(db, NAME, deep=True).problems)
    assert search(db, explain=True, **where)["damaged"] == []


def test_lost_centroids_fall_back_to_the_rows():
    """Without its centroids a vector index is of no use, and nothing else is lost."""
    db = make(parts=1)
    build_indexes(db, NAME)
    expected = search(db)["id"].to_pylist()
    spec = head(db).indexes[0]
    db.store.delete(Namespace(NAME).centroids(spec.centroids))
    assert search(db)["id"].to_pylist() == expected
    assert search(db, explain=True)["segments_indexed"] == 0
    kinds = [problem.kind for problem in verify(db, NAME).problems]
    assert kinds == [ProblemKind.INDEX_DAMAGED]
    with db.writer(NAME, background=False) as writer:
        writer.put("more", {"v": VECTORS[0].tolist(), "n": 1})
    fold(db, NAME)


def test_verify_notices_rows_under_a_wrong_value():
    """Deep checks compare sampled rows with the index, not only checksums."""
    made = FilterIndexBuilder.finish

    def wrong(self):
        self._values = [pa.array(np.roll(values.to_numpy(), 1)) for values in self._values]
        parts = made(self)
        return IndexParts(parts.directory, parts.data)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FilterIndexBuilder, "finish", wrong)
        db = make(parts=1)
    assert not verify(db, NAME).problems
    (problem,) = verify(db, NAME, deep=True).problems
    assert problem.kind is ProblemKind.INDEX_DAMAGED
    assert "not under its value" in problem.message


def texts(count=4000):
    """Return rows with texts."""
    words = [f"w{n % 37} w{n % 11} all" if n % 5 else None for n in range(count)]
    return pa.table({"id": [f"{n:06}" for n in range(count)], "body": pa.array(words, pa.string())})


@pytest.mark.parametrize("wrong", [0, 3])
def test_verify_notices_postings_of_other_rows(wrong):
    """Words of sampled rows are split again: each has the postings that its rows make."""
    made = TextIndexBuilder.add

    def shifted(self, first_ordinal, column, valid):
        values = column.to_pylist()
        values[wrong] = "another text"
        made(self, first_ordinal, pa.array(values, column.type), valid)

    db = reef.Database(MemoryStore())
    db.create(NAME, texts(1).schema, indexes=[reef.text_index("body", rows_min=1)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TextIndexBuilder, "add", shifted)
        ingest(db, NAME, texts())
    fold(db, NAME)
    assert not verify(db, NAME).problems
    (problem,) = verify(db, NAME, deep=True).problems
    assert problem.kind is ProblemKind.INDEX_DAMAGED
    assert "text index" in problem.message


def test_verify_compares_all_rows_with_the_indexes_if_asked():
    """Rows outside of the sample are not compared otherwise; intact indexes pass both."""
    made = FilterIndexBuilder.finish

    def wrong(self):
        values = pa.concat_arrays(self._values).to_pylist()
        values[len(values) // 4] = 99 - values[len(values) // 4]
        self._values, self._ordinals = [pa.array(values)], [np.concatenate(self._ordinals)]
        return made(self)

    def build():
        db = reef.Database(MemoryStore())
        count = 60_000
        table = pa.table({"id": [f"{n:06}" for n in range(count)], "n": np.arange(count) % 90})
        table = table.append_column("body", texts(count)["body"])
        indexes = [reef.filter_index("n", rows_min=1), reef.text_index("body", rows_min=1)]
        db.create(NAME, table.schema, indexes=indexes)
        ingest(db, NAME, table)
        fold(db, NAME)
        return db

    db = build()
    assert not verify(db, NAME, deep=True, indexes="all").problems
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FilterIndexBuilder, "finish", wrong)
        db = build()
    assert not verify(db, NAME, deep=True).problems
    (problem,) = verify(db, NAME, deep=True, indexes="all").problems
    assert problem.kind is ProblemKind.INDEX_DAMAGED
    with pytest.raises(InvalidInputError, match="needs deep"):
        verify(db, NAME, indexes="all")


def test_a_sweep_keeps_centroids_that_a_manifest_names_and_deletes_others():
    """Centroids are roots of every retained generation; those of a driver that died go."""
    world = World()
    db, names = world.db, world.names
    schema = pa.schema([("id", pa.string()), ("v", pa.list_(pa.float32(), 8))])
    db.create(USERS, schema, indexes=[reef.vector_index("v", rows_min=10, lists=4)])
    with db.writer(USERS, background=False) as writer:
        writer.upsert(table_of(VECTORS, range(200)).drop_columns("n"))
    world.fold()
    world.run(lambda: build_indexes(db, USERS))
    used = world.head().indexes[0].centroids
    orphan = names.centroids("01ORPHAN")
    db.store.put(orphan, b"never named")
    world.advance(1000)
    deleted = world.sweep_twice()
    left = world.keys("segments")
    assert deleted
    assert f"{used}.ctr" in left
    assert "01ORPHAN.ctr" not in left
    db.alter(USERS, drop_index="v")
    world.advance(1000)
    world.sweep_twice()
    assert f"{used}.ctr" not in world.keys("segments")


def test_condemned_centroids_are_not_named():
    """A driver that stalled for longer than the grace period may not publish its centroids."""
    db = make()
    build_indexes(db, NAME)
    manifest = head(db)
    spec = msgspec.structs.replace(manifest.indexes[0], centroids="")
    stalled = msgspec.structs.replace(
        manifest, indexes=(spec,), condemned=(Condemned("segments/01X.ctr", 1, 1),)
    )
    with pytest.raises(ConflictError, match="condemned"):
        set_centroids(stalled, spec, "01X")
    assert set_centroids(stalled, spec, "01Y").indexes[0].centroids == "01Y"
    assert set_centroids(manifest, spec, "01Y") is None


def test_a_branch_searches_the_segments_of_its_origin():
    """It names the centroids of its origin, pins them, and searches by the shared indexes."""
    db = make()
    build_indexes(db, NAME)
    db.branch(NAME, "trial")
    (spec, _) = head(db, "trial").indexes
    assert spec.home == Namespace(NAME).root
    assert search(db, "trial", explain=True)["segments_indexed"] == 2
    assert search(db, "trial")["id"].to_pylist() == search(db)["id"].to_pylist()
    assert HeadFinder(db.store, Namespace("trial")).find().manifest.pinned_homes


def test_rebuild_restores_the_indexes_from_footers():
    """Without any manifest the specs come from the newest segment, and its indexes serve again."""
    db = make()
    build_indexes(db, NAME)
    before = head(db)
    for info in list(db.store.list(Namespace(NAME).manifests)):
        db.store.delete(info.key)
    rebuild(db, NAME, apply=True)
    assert head(db).indexes == before.indexes
    assert search(db, explain=True)["segments_indexed"] == 2


def test_a_restored_namespace_has_its_indexes_without_centroids(tmp_path):
    """A backup has segments with their indexes; centroids are trained again."""
    db = make(parts=1)
    build_indexes(db, NAME)
    expected = search(db)["id"].to_pylist()
    backup(db, NAME, str(tmp_path))
    other = reef.Database(MemoryStore())
    restore(str(tmp_path), other, NAME)
    assert [spec.centroids for spec in head(other).indexes] == ["", ""]
    assert search(other)["id"].to_pylist() == expected
    build_indexes(other, NAME)
    assert search(other, explain=True)["plan"] == "indexed"
    assert search(other)["id"].to_pylist() == expected


def drift(db):
    """Replace all rows by others, in a few clusters that no centroid is near."""
    rng = np.random.default_rng(7)
    centers = 50 + rng.normal(size=(12, 8))
    noise = 0.3 * rng.normal(size=VECTORS.shape)
    vectors = (centers[rng.integers(0, 12, len(VECTORS))] + noise).astype("f4")
    for part in np.array_split(np.arange(len(VECTORS)), 2):
        ingest(db, NAME, table_of(vectors, part))
        fold(db, NAME)
    return vectors


def test_worn_centroids_are_replaced_without_a_pause():
    """Segments are searched by lists of both sets until all are rewritten; results are the same."""
    db = make(INDEXES[:1])
    build_indexes(db, NAME)
    assert not retrain_worn(db, NAME)  # they fit
    (old,) = head(db).indexes
    moved = drift(db)

    def nearest():
        with db.reader(NAME) as reader:
            plan = reader.search(vector=("v", moved[5]), explain=True)
            assert plan["segments_exhaustive"] == 0
            assert plan["segments_indexed"] == len(head(db).segments)
            return reader.search(vector=("v", moved[5]), k=1)["id"].to_pylist()

    assert nearest() == ["000005"]
    assert retrain_worn(db, NAME)
    assert not retrain_worn(db, NAME)  # one retraining at a time
    new, kept = head(db).indexes
    assert (kept, new.centroids != old.centroids) == (old, True)
    assert db.info(NAME).indexes == ("vector(v)",)
    assert nearest() == ["000005"]
    with Compactor(db, NAME) as work:
        assert work.step(take_over=True, planner=IndexPlanner(db, NAME)).published
    assert not forget_replaced(db, NAME)  # other segments still have lists of the old set
    db.branch(NAME, "branch")
    assert nearest() == search_one(db, "branch", moved[5]) == ["000005"]
    build_indexes(db, NAME)
    assert head(db).indexes == (new,)
    sweep(db, NAME, apply=True, force=True, retain_generations_s=0)
    assert nearest() == search_one(db, "branch", moved[5]) == ["000005"]
    assert not [p for p in verify(db, NAME, deep=True).problems if p.severity == "error"]


def search_one(db, name, vector):
    """Return the key of the nearest row."""
    with db.reader(name) as reader:
        return reader.search(vector=("v", vector), k=1)["id"].to_pylist()


def test_background_work_replaces_worn_centroids():
    """Centroids are compared with new ones when compactions have rewritten the table."""
    db = make(INDEXES[:1])
    build_indexes(db, NAME)
    (old,) = head(db).indexes
    drift(db)
    with db.writer(NAME, background=False) as writer:
        background = Background(db, writer, BackgroundSettings())
        background._rewritten = 10_000
        while background.step(("index",)) is not None:
            pass
    (new,) = head(db).indexes
    assert new.centroids not in {"", old.centroids}
