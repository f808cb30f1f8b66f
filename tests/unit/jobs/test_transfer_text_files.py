"""Importing CSV and JSON lines: types of the namespace, errors with rows, streaming, repeats."""

import gzip
import json
import warnings
from datetime import UTC, date, datetime, time
from decimal import Decimal

import pyarrow as pa
import pytest

import reef
from reef import jobs
from reef.errors import InvalidInputError
from reef.jobs import import_

COLUMNS = pa.schema(
    [
        ("id", pa.string()),
        ("n", pa.int32()),
        ("text", pa.string()),
        ("flag", pa.bool_()),
        ("price", pa.decimal128(10, 2)),
        ("day", pa.date32()),
        ("at", pa.timestamp("us", "UTC")),
        ("raw", pa.binary()),
        ("tags", pa.list_(pa.string())),
        ("vector", pa.list_(pa.float32(), 2)),
    ]
)
ROW = {
    "id": "a",
    "n": 7,
    "text": 'x, "y"\nz',
    "flag": True,
    "price": Decimal("1.50"),
    "day": date(2026, 1, 31),
    "at": datetime(2026, 1, 31, 12, 30, 0, 500000, tzinfo=UTC),
    "raw": b"xyz",
    "tags": ["one", "two"],
    "vector": [0.5, 1.5],
}


@pytest.fixture
def db():
    """Give a database with a namespace of many types."""
    db = reef.open("memory://")
    db.create("rows", COLUMNS)
    return db


def row(db, key):
    """Return one row."""
    with db.reader("rows") as reader:
        return reader.get(key)


CSV_ROW = (
    'a,7,"x, ""y""\nz",true,1.50,2026-01-31,2026-01-31T12:30:00.5Z,xyz,'
    '"[""one"", ""two""]","[0.5, 1.5]"\n'
)
JSON_ROW = json.dumps(
    {
        **ROW,
        "price": "1.50",
        "day": "2026-01-31",
        "at": "2026-01-31T12:30:00.500000Z",
        "raw": "xyz",
    }
)


@pytest.mark.parametrize("name", ["rows.csv", "rows.csv.gz", "rows.jsonl", "rows.ndjson.gz"])
def test_columns_have_the_types_of_the_namespace(db, tmp_path, name):
    """Each value becomes what its column holds; nested columns of CSV are JSON."""
    text = ",".join(COLUMNS.names) + "\n" + CSV_ROW if "csv" in name else JSON_ROW + "\n"
    data = gzip.compress(text.encode()) if name.endswith(".gz") else text.encode()
    (tmp_path / name).write_bytes(data)
    report = import_(db, "rows", tmp_path / name)
    assert (report.rows, report.created) == (1, False)
    assert row(db, "a") == ROW


def test_tabs_and_a_subset_of_columns(db, tmp_path):
    """A TSV file; columns that it does not have are null after an upsert, and kept by a patch."""
    with db.writer("rows", background=False) as writer:
        writer.upsert([ROW])
    (tmp_path / "rows.tsv").write_text("n\tid\n8\ta\n")
    import_(db, "rows", tmp_path / "rows.tsv", mode="patch")
    assert row(db, "a") == {**ROW, "n": 8}
    import_(db, "rows", tmp_path / "rows.tsv")
    assert row(db, "a") == {**dict.fromkeys(ROW), "id": "a", "n": 8}


def test_a_patch_from_json_lines_keeps_other_columns(db, tmp_path):
    """Only the columns of the file are patched; null in it is a value."""
    with db.writer("rows", background=False) as writer:
        writer.upsert([ROW])
    (tmp_path / "rows.jsonl").write_text('{"id": "a", "n": 9, "text": null}\n')
    import_(db, "rows", tmp_path / "rows.jsonl", mode="patch")
    assert row(db, "a") == {**ROW, "n": 9, "text": None}


def test_null_and_empty_text(db, tmp_path):
    """An empty cell is null, a quoted one is empty text, and NA is text like any other."""
    (tmp_path / "rows.csv").write_text('id,text,n\na,,\nb,"",1\nc,NA,2\n')
    import_(db, "rows", tmp_path / "rows.csv")
    assert [row(db, key)["text"] for key in "abc"] == [None, "", "NA"]
    assert row(db, "a")["n"] is None


@pytest.mark.parametrize("name", ["rows.csv", "rows.jsonl"])
def test_a_new_namespace_gets_inferred_types(tmp_path, name):
    """From the first rows; a column without values is text, times have microseconds."""
    db = reef.open("memory://")
    text = "key,n,x,at,none\na,1,1.5,2026-01-31T12:30:00,\n"
    if name.endswith("jsonl"):
        text = '{"key": "a", "n": 1, "x": 1.5, "at": "2026-01-31T12:30:00", "none": null}\n'
    (tmp_path / name).write_text(text)
    assert import_(db, "rows", tmp_path / name, key="key").created
    with db.reader("rows") as reader:
        assert reader.schema == pa.schema(
            [
                ("key", pa.string()),
                ("n", pa.int64()),
                ("x", pa.float64()),
                ("at", pa.timestamp("us")),
                ("none", pa.string()),
            ]
        )
        assert reader.get("a")["at"] == datetime(2026, 1, 31, 12, 30)


def lines(name, bad, at, count=25_000):
    """Return a file of many rows with a bad one in it, over several blocks."""
    if name.endswith("csv"):
        rows = [f"k{n:05},{n},some text to fill blocks\n" for n in range(count)]
        rows[at] = bad
        return "id,n,text\n" + "".join(rows)
    rows = [json.dumps({"id": f"k{n:05}", "n": n, "text": "to fill blocks"}) for n in range(count)]
    rows[at] = bad.rstrip("\n")
    return "\n".join(rows) + "\n"


@pytest.mark.parametrize("at", [0, 24_990])
@pytest.mark.parametrize(
    ("name", "bad", "column"),
    [
        ("rows.csv", "k,seven,x\n", "n"),
        ("rows.csv", "k,1,x,y\n", None),
        ("rows.jsonl", '{"id": "k", "n": "seven"}', "n"),
        ("rows.jsonl", '{"id": "k", "n": 1.5}', "n"),
        ("rows.jsonl", '{"id": "k", "n": 1', None),
        ("rows.jsonl", '["k"]', None),
    ],
)
def test_a_bad_row_is_named(db, tmp_path, name, bad, column, at):
    """By its file, its number and its column, in the first block and in a later one."""
    (tmp_path / name).write_text(lines(name, bad, at))
    with pytest.raises(InvalidInputError) as caught:
        import_(db, "rows", tmp_path / name, batch_rows=10_000)
    assert f"{name}, row {at}" in caught.value.message
    assert caught.value.context["row"] == at
    assert caught.value.context.get("column") == column
    with db.reader("rows") as reader:  # whole batches before its block are imported
        assert reader.count() in ((0, 10_000) if at else (0,))


NESTED = pa.schema(
    [
        ("id", pa.string()),
        ("counts", pa.map_(pa.int32(), pa.list_(pa.float64()))),
        (
            "place",
            pa.struct([("at", pa.time64("us")), ("names", pa.map_(pa.string(), pa.binary()))]),
        ),
    ]
)


def test_maps_in_json_lines(tmp_path):
    """At any depth, with keys of any type, and with the values that JSON lacks."""
    db = reef.open("memory://")
    db.create("nested", NESTED)
    (tmp_path / "rows.jsonl").write_text(
        '{"id": "a", "counts": {"-7": [1, "NaN"], "8": null}, "place": {"names": {"x": "y"}}}\n'
        '{"id": "b", "place": {"at": "12:30:00.5", "names": {"x": {"base64": "/w=="}}}}\n'
    )
    import_(db, "nested", tmp_path / "rows.jsonl")
    rows = [row for _, row in db.reader("nested").scan()]
    assert repr(rows[0]["counts"]) == "{-7: [1.0, nan], 8: None}"
    assert rows[0]["place"] == {"at": None, "names": {"x": b"y"}}
    assert rows[1]["place"] == {"at": time(12, 30, 0, 500000), "names": {"x": b"\xff"}}


@pytest.mark.parametrize(
    ("text", "column"),
    [
        ('{"id": "a", "counts": {"x": [1]}}', "counts"),
        ('{"id": "a", "counts": [1]}', "counts"),
        ('{"id": "a", "place": {"names": {"x": {"base64": "?"}}}}', "place"),
        ('{"id": "a", "color": 1}', "color"),
        ('{"id": 7}', "id"),
        ('{"id": "a"', None),
    ],
)
def test_a_bad_row_with_maps_is_named(tmp_path, text, column):
    """By its number and column, as where Arrow parses the file."""
    db = reef.open("memory://")
    db.create("nested", NESTED)
    (tmp_path / "rows.jsonl").write_text(f'{{"id": "b"}}\n{text}\n')
    with pytest.raises(InvalidInputError, match=r"rows\.jsonl, row 1[,:]") as caught:
        import_(db, "nested", tmp_path / "rows.jsonl")
    assert caught.value.context.get("column") == column


def test_a_block_that_arrow_refuses_is_parsed_all_the_same(db, tmp_path):
    """From that block on, without a row twice: NaN is text in JSON, and 7.0 is a whole number."""
    rows = [{"id": f"k{n:05}", "n": n, "vector": [1, 2]} for n in range(30_000)]
    rows[20_000] |= {"vector": ["NaN", 2], "n": 7.0}
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert import_(db, "rows", tmp_path / "rows.jsonl").rows == len(rows)
    with db.reader("rows") as reader:
        assert reader.to_arrow(columns=["id"])["id"].to_pylist() == [row["id"] for row in rows]
    assert row(db, "k20000")["n"] == 7
    assert str(row(db, "k20000")["vector"]) == "[nan, 2.0]"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("rows.csv", 'id,tags\na,"[""x""]"\nb,{}\n'),
        ("rows.csv", "id,n,other\na,1,2\nb,1,2\n"),
        ("rows.jsonl", '{"id": "a"}\n{"id": "b", "other": 2}\n'),
        ("rows.jsonl", '{"id": "a"}\n{"id": "b", "day": "soon"}\n'),
    ],
)
def test_columns_that_do_not_fit_are_named(db, tmp_path, name, text):
    """JSON that is not of the column's type, and columns that the namespace does not have."""
    (tmp_path / name).write_text(text)
    with pytest.raises(InvalidInputError, match=rf"{name}.*column (tags|other|day)"):
        import_(db, "rows", tmp_path / name)
    with db.reader("rows") as reader:
        assert reader.count() == 0


@pytest.mark.parametrize("name", ["rows.csv", "rows.jsonl"])
def test_a_second_run_applies_nothing_twice(db, tmp_path, name):
    """Batches have keys, as for other formats."""
    text = "id,n\n" + "".join(f"k{n},{n}\n" for n in range(25))
    if name.endswith("jsonl"):
        text = "".join(json.dumps({"id": f"k{n}", "n": n}) + "\n" for n in range(25))
    (tmp_path / name).write_text(text)
    first = import_(db, "rows", tmp_path / name, batch_rows=10)
    with db.writer("rows", background=False) as writer:
        writer.upsert([{"id": "k3", "n": -1}])
    again = import_(db, "rows", tmp_path / name, batch_rows=10)
    assert (first.batches, first.replayed, again.replayed) == (3, 0, 3)
    assert row(db, "k3")["n"] == -1


def test_the_former_name_warns():
    """`import_files` still works."""
    with pytest.warns(DeprecationWarning, match=r"reef\.jobs\.import_files is now"):
        former = jobs.import_files
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert former is jobs.import_
    with pytest.raises(AttributeError, match="nonsense"):
        jobs.nonsense  # noqa: B018
