"""Random histories read by the classes of the native reader and by Python: the same rows.

No session of Spark is started: a small program reads many plans in one JVM, cut at many keys.
"""

import json
import random
import struct

import numpy as np
import pyarrow as pa
import pytest

import reef
import reef.jobs
from reef.formats import segment_writer
from reef.formats.segment_index import hash_key
from reef.spark.planner import respond
from tests.spark.data import Planned
from tests.spark.test_native import SCHEMA, WIDE, random_step, row_of

SEEDS = 12
OPERATORS = ("=", "<", "<=", ">", ">=", "<=>")


@pytest.fixture(scope="module")
def read_plans(java_program, tmp_path_factory):
    """Return a call that reads requests of the program in one run; rows and metrics of each."""
    program, folder = java_program("PlanReader"), tmp_path_factory.mktemp("plans")

    def read(requests):
        (folder / "in").write_text("".join(json.dumps(request) + "\n" for request in requests))
        done = program(folder / "in", folder / "out")
        assert done.returncode == 0, done.stderr[-3000:]
        return [json.loads(line) for line in (folder / "out").read_text().splitlines()]

    return read


def history(db, seed):
    """Make a namespace with random changes, and a schema that grows in between."""
    choices = random.Random(seed)
    db.create("t", SCHEMA)
    first = [row_of(choices, number) for number in range(0, 400, 3)]
    reef.jobs.ingest(db, "t", pa.Table.from_pylist(first, schema=SCHEMA))
    for schema in (SCHEMA, WIDE):
        db.alter("t", schema)
        with db.writer("t", background=False) as writer:
            for _ in range(choices.randrange(3, 9)):
                random_step(choices, db, writer, schema)


def plan_of(url, **options):
    """Return a plan, as the native reader receives it."""
    request = {"operation": "plan"}
    given = {"path": str(url), "namespace": "t", "reef.request": json.dumps(request), **options}
    return json.loads(respond(given).fields[0].metadata["response"])


def text(value, kind):
    """Return a value as the program writes it."""
    if value is None:
        return "null"
    if pa.types.is_map(kind):
        keys, values = zip(*value, strict=True) if value else ((), ())
        return f"{texts(keys, kind.key_type)}: {texts(values, kind.item_type)}"
    if pa.types.is_struct(kind):
        inner = (text(value[field.name], field.type) for field in kind)
        return f"{{{', '.join(inner)}}}"
    if isinstance(value, list):
        return texts(value, kind.value_type)
    if isinstance(value, bytes | str):
        return (value.encode() if isinstance(value, str) else value).hex()
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return struct.pack(">d", value).hex()
    return format(value, "f") if pa.types.is_decimal(kind) else str(value)


def texts(values, kind):
    """Return several values as the program writes them."""
    return f"[{', '.join(text(value, kind) for value in values)}]"


def texts_of(table):
    """Return the rows of a table as the program writes them, by key."""
    columns = []
    for column in table.columns:
        plain = column
        if pa.types.is_timestamp(column.type) or pa.types.is_time(column.type):
            plain = column.cast(pa.int64())
        elif pa.types.is_date(column.type):
            plain = column.cast(pa.int32())
        values = plain.to_pylist()
        columns.append([None if v is None else text(v, plain.type) for v in values])
    return {row[0]: list(row) for row in zip(*columns, strict=True)}


def random_predicates(choices):
    """Return one or two comparisons."""
    values = {
        "id": lambda: f"k{choices.randrange(400):04}",
        "n": lambda: choices.randrange(-1000, 1000),
        "y": choices.random,
    }
    names = choices.sample(sorted(values), choices.randrange(1, 3))
    predicates = [(choices.choice(OPERATORS), name, values[name]()) for name in names]
    if choices.random() < 0.3:
        predicates[0] = ("IN", "id", [values["id"]() for _ in range(choices.randrange(1, 20))])
    return predicates


def matches(row, names, predicates):
    """Whether a row, as text, fulfills all comparisons."""
    values = {"id": lambda t: bytes.fromhex(t).decode(), "n": int, "y": float_of}
    kinds = {"=": "__eq__", "<=>": "__eq__", "<": "__lt__"}
    kinds |= {"<=": "__le__", ">": "__gt__", ">=": "__ge__"}
    for operator, name, value in predicates:
        found = row[names.index(name)]
        if operator == "IN":
            if values[name](found) not in value:
                return False
        elif found is None or not getattr(values[name](found), kinds[operator])(value):
            return False
    return True


def float_of(bits):
    """Return the number that the program wrote as bits."""
    return struct.unpack(">d", bytes.fromhex(bits))[0]


def test_many_histories_read_the_same(read_plans, tmp_path, monkeypatch):
    """All rows in key order, however the tasks are cut. Of a filtered scan, Spark evaluates the
    filter again: what is left then is exact, no older version of a row among it."""
    monkeypatch.setattr(segment_writer, "PAGE_BYTES", 60)  # a few rows: tasks cut segments
    requests, expected = [], []
    for seed in range(SEEDS):
        url, choices = tmp_path / str(seed), random.Random(seed)
        history(reef.open(str(url)), seed)
        table = Planned(url, "t").table()
        for predicates in ([], [], random_predicates(choices), random_predicates(choices)):
            split = choices.choice([1, 3000, 1 << 30])
            names = ["id", *choices.sample(table.column_names[1:], choices.randrange(1, 20))]
            names += {name for _, name, _ in predicates} - set(names)
            request = {"plan": plan_of(url), "split_bytes": split, "predicates": predicates}
            requests.append({**request, "columns": names})
            expected.append((table.select(names), predicates, seed))
    for found, (table, predicates, seed) in zip(read_plans(requests), expected, strict=True):
        check(found["rows"], table, predicates, seed)


def check(rows, table, predicates, seed):
    """Compare rows that the program has read with those of Python."""
    names = table.column_names
    assert [row[0] for row in rows] == sorted({row[0] for row in rows}), seed
    found = {row[0]: row for row in rows if matches(row, names, predicates)}
    expected = {k: row for k, row in texts_of(table).items() if matches(row, names, predicates)}
    assert found == expected, (seed, predicates)


# --- what is read -------------------------------------------------------------------------

SIZES = pa.schema([("id", pa.string()), *((f"c{n}", pa.int64()) for n in range(12))])
SEGMENT_ROWS = 3000
LAST = 4 * SEGMENT_ROWS - 1


@pytest.fixture
def sized(tmp_path):
    """A table of four segments, one after the other, with many pages of twelve columns each."""
    db = reef.open(str(tmp_path / "bucket"))
    db.create("t", SIZES)
    noise = np.random.default_rng(1)
    for first in range(0, LAST, SEGMENT_ROWS):
        keys = [f"k{n:06}" for n in range(first, first + SEGMENT_ROWS)]
        numbers = [noise.integers(1 << 60, size=SEGMENT_ROWS) for _ in SIZES.names[1:]]
        reef.jobs.ingest(db, "t", pa.table([keys, *numbers], schema=SIZES))
    return db


def test_reads_take_what_they_need(read_plans, sized, tmp_path):
    """One of 13 columns, a limit, keys of a list, and keys that a join finds: fractions of all."""
    requests = [
        {},
        {"columns": ["c3"]},
        {"limit": 5},
        {"predicates": [("IN", "id", ["k000007", f"k{LAST:06}"])]},
        {"runtime": [("IN", "id", ["k000007", "k000008"])]},
        {"predicates": [(">=", "id", "k002000"), ("<", "id", "k002010")]},
        {"predicates": [("IN", "id", [f"k{n:06}x" for n in range(3)])]},
    ]
    plan = plan_of(tmp_path / "bucket")
    results = read_plans([{"plan": plan, **request} for request in requests])
    every, column, few, keys, joined, between, absent = results
    pages, stored = every["metrics"]["pagesRead"], every["metrics"]["bytesRead"]
    assert len(every["rows"]) == len(column["rows"]) == LAST + 1
    assert pages >= 12
    assert column["metrics"]["bytesRead"] < 0.2 * stored
    assert len(few["rows"]) == 5
    assert few["metrics"]["pagesRead"] <= 2
    for narrow in (keys, joined, between):
        assert narrow["metrics"]["pagesRead"] <= 2
        assert narrow["metrics"]["bytesRead"] < 0.25 * stored
    assert not absent["rows"]  # by the filter: a page has keys on both sides of them
    assert {"k000007", f"k{LAST:06}"} <= ids(keys)
    assert {"k000007", "k000008"} <= ids(joined)
    assert {f"k{n:06}" for n in range(2000, 2010)} <= ids(between)


def ids(result):
    """Return the keys of rows that the program has read."""
    return {bytes.fromhex(row[0]).decode() for row in result["rows"]}


def test_hashes_of_keys_are_those_of_python(java_program):
    """Of every length up to the one from which the filter is not used."""
    choices = random.Random(3)
    keys = [choices.randbytes(length) for length in range(241)]
    done = java_program("HashProbe")(*(f"x{key.hex()}" for key in keys))
    assert [int(line) for line in done.stdout.split()] == [hash_key(key) for key in keys]


def test_filters_of_keys_go_where_memory_is_short(java_program, db, url):
    """Those of two thousand segments take 150 MB, more than the JVM has: a plan holds them as long
    as there is room. Without its filter a segment may have every key."""
    keys = pa.array([f"k{n:06}" for n in range(50_000)])
    db.create("t", pa.schema([("id", pa.string())]))
    reef.jobs.ingest(db, "t", pa.table({"id": keys}))
    reef.jobs.fold(db, "t")
    (segment,) = plan_of(url)["segments"]
    assert segment["tail_bytes"] > 75_000
    stored = segment["url"], segment["size"], segment["tail_bytes"]
    done = java_program("TailProbe")(*stored, 2000)
    assert done.returncode == 0, done.stderr[-1000:]
    assert int(done.stdout) in (1, 2)


def test_a_key_is_planned_from_the_manifest(read_plans, sized, tmp_path):
    """Segments whose key range does not have it are not opened, not even their tails."""
    url = tmp_path / "bucket"
    plan = plan_of(url)
    for segment in plan["segments"][1:]:
        (url / segment["name"]).unlink()
    (found,) = read_plans([{"plan": plan, "predicates": [("=", "id", "k000007")]}])
    assert "k000007" in ids(found)
