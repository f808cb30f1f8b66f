"""Text search through handles: current rows only, damage, requests, phrases, options."""

import logging

import pyarrow as pa
import pytest

import reef
from reef.errors import InvalidInputError
from reef.formats import text_index
from reef.formats.segment import decode_tail
from reef.jobs import build_indexes, compact, fold, ingest
from reef.manifest.head import locate
from reef.paths import Namespace
from reef.stores.memory import MemoryStore

NAME = "docs"
SCHEMA = pa.schema([("id", pa.string()), ("n", pa.int64()), ("body", pa.string())])


def make(bodies, store=None, **options):
    """Return a database with these texts in one indexed segment."""
    db = reef.Database(store or MemoryStore())
    db.create(NAME, SCHEMA, indexes=[reef.text_index("body", rows_min=1, **options)])
    keys = [f"k{number:05}" for number in range(len(bodies))]
    ingest(db, NAME, pa.table({"id": keys, "n": range(len(bodies)), "body": bodies}).cast(SCHEMA))
    fold(db, NAME)
    return db


def keys_of(handle, query, **search):
    """Return the keys of a result."""
    return handle.search(text=("body", query), columns=[], **search)["id"].to_pylist()


def test_replaced_and_deleted_rows_are_not_found():
    """Old versions are in the index of their segment, and in no result."""
    db = make(["red fish", "blue fish", "red bird", "old fish"])
    with db.writer(NAME, background=False) as writer:
        writer.put("k00000", {"body": "green bird"})
        writer.delete("k00001")
        writer.patch([{"id": "k00003", "body": "new bird"}])
        for _ in range(2):  # in memory, and folded into a second segment
            assert keys_of(writer, "fish") == []
            assert keys_of(writer, "red") == ["k00002"]
            assert sorted(keys_of(writer, "bird")) == ["k00000", "k00002", "k00003"]
            assert keys_of(writer, "new") == ["k00003"]
            fold(db, NAME)
            writer.refresh()


def test_a_row_is_found_as_soon_as_it_is_written():
    """Memory is searched with the statistics of everything."""
    db = make(["common"] * 50)
    with (
        db.writer(NAME, background=False) as writer,
        db.reader(NAME, refresh_interval_ms=0) as reader,
    ):
        writer.put("new", {"body": "rare common"})
        for handle in (writer, reader):
            result = handle.search(text=("body", "rare common"), k=2)
            assert result["id"].to_pylist() == ["new", "k00000"]
            plan = handle.search(text=("body", "rare common"), explain=True)
            assert (plan["documents"], plan["tokens"]) == (51, 52)
            assert plan["terms"] == {"rare": 1, "common": 51}


@pytest.mark.parametrize("part", ["directory", "data"])
def test_damage_falls_back_to_the_rows(part, caplog):
    """A broken index costs time and a warning, and changes neither rows nor scores."""
    db = make([f"common w{number % 97}" for number in range(3000)])
    with db.reader(NAME) as reader:
        expected = reader.search(text=("body", "w5 common"))
    [entry] = locate(db.store, NAME).found.manifest.segments
    key = Namespace(NAME).segment(entry.id)
    data = bytearray(db.store.get(key))
    tail = decode_tail(bytes(data[-entry.tail_bytes :]), entry.size, key)
    place = getattr(tail.footer.indexes[0], part)
    for offset in range(place.offset + 20, place.offset + place.length, 5):
        data[offset] ^= 0x55
    db.store.put(key, bytes(data))
    damaged = reef.Database(db.store)
    with damaged.reader(NAME) as reader, caplog.at_level(logging.WARNING):
        assert reader.search(text=("body", "w5 common")).equals(expected)
        assert reader.search(text=("body", "w5 common"), explain=True)["damaged"] == [entry.id]
    assert "searched row by row" in caplog.text


def test_phrases_need_positions_in_the_index():
    """Without them the query is rejected, with the option that would allow it."""
    bodies = ["new york", "york new", "new big york"]
    with make(bodies).reader(NAME) as reader:
        with pytest.raises(InvalidInputError, match="positions=True"):
            reader.search(text=("body", '"new york"'))
        assert keys_of(reader, '"big" york') == ["k00002"]
    db = make(bodies, positions=True)
    with db.writer(NAME, background=False) as writer:
        assert keys_of(writer, '"new york"') == ["k00000"]
        writer.put("k9", {"body": "the new york times"})
        assert sorted(keys_of(writer, '"new york"')) == ["k00000", "k9"]
        assert keys_of(writer, '"new york" times', k=1) == ["k9"]


def test_unchanged_rows_are_split_once(monkeypatch):
    """The index of rows in memory is kept from search to search until a row is written."""
    built = []
    original = text_index.TextIndexBuilder.finish
    monkeypatch.setattr(
        text_index.TextIndexBuilder, "finish", lambda self: built.append(1) or original(self)
    )
    db = reef.Database(MemoryStore())
    db.create(NAME, SCHEMA, indexes=[reef.text_index("body")])
    with db.writer(NAME, background=False) as writer:
        for number in range(5):
            writer.put(f"k{number}", {"body": f"word{number} all"})
        for number in range(5):
            assert keys_of(writer, f"word{number}") == [f"k{number}"]
        assert len(built) == 1
        writer.put("k5", {"body": "word5"})
        assert keys_of(writer, "word5") == ["k5"]
        assert len(built) == 2


def test_warm_searches_read_no_index():
    """Directory, dictionary and postings are cached as they are decoded."""
    db = make([f"common x{number * 2654435761 % 2**64:x}" for number in range(9000)])
    with db.reader(NAME) as reader:
        query = {"text": ("body", "common x9e3779b1"), "columns": [], "k": 3}
        plans = [reader.search(**query, explain=True) for _ in range(2)]
        assert reader.search(**query)["id"].to_pylist() == ["k00001", "k00000", "k00002"]
    assert 3 <= plans[0]["requests"] <= 6
    assert plans[1]["requests"] == 0
    assert plans[0]["bytes"] < 300_000


def test_scores_do_not_depend_on_the_number_of_segments():
    """Rows that were written once have the same scores in one segment and in several."""
    bodies = [f"w{number % 7} w{number % 11} w{number % 13}" for number in range(200)]
    whole = make(bodies)
    parts = reef.Database(MemoryStore())
    parts.create(NAME, SCHEMA, indexes=[reef.text_index("body", rows_min=20)])
    with parts.writer(NAME, background=False) as writer:
        for first in range(0, 200, 30):
            for number in range(first, min(first + 30, 200)):
                writer.put(f"k{number:05}", {"n": number, "body": bodies[number]})
            if first < 120:
                fold(parts, NAME)
                writer.refresh()
        with whole.reader(NAME) as reader:
            for query in ("w1", "w0 w12 w5", "w3 w3 w9 none"):
                for where in (None, "n < 77"):
                    search = {"text": ("body", query), "where": where, "k": 12}
                    assert writer.search(**search).equals(reader.search(**search))


def test_an_index_is_added_and_dropped():
    """Rows are found with other words while an index that stems is there."""
    db = make(["swimming reefs"] * 3)
    db.alter(NAME, drop_index="body")
    with db.reader(NAME) as reader:
        assert keys_of(reader, "swim") == []
        assert len(keys_of(reader, "swimming")) == 3
    db.alter(NAME, add_index=reef.text_index("body", "english", rows_min=1))
    build_indexes(db, NAME)
    compact(db, NAME, full=True)
    with db.reader(NAME) as reader:
        assert len(keys_of(reader, "swim")) == 3
        assert reader.search(text=("body", "swims"), explain=True)["plan"] == "indexed"
