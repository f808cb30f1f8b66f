"""What handles show of themselves: useful, escaped, and without asking the store."""

import pickle
from html.parser import HTMLParser

import pyarrow as pa
import pytest

import reef
import reef.aio
from reef import stores
from reef.engine.display import columns_line, html_table, human_bytes, human_count
from reef.jobs import fold
from reef.telemetry import RequestMeter

COLUMNS = pa.schema([("id", pa.string()), ("<b>amount</b>", pa.list_(pa.float64()))])


class Cells(HTMLParser):
    """Reads a table as a browser does; fails on tags that are not a table's."""

    def __init__(self):
        super().__init__()
        self.cells, self.open = [], []

    def handle_starttag(self, tag, attrs):
        assert tag in ("table", "caption", "b", "tr", "td", "th"), tag
        self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.cells.append(data)


def cells(html):
    """Return the text of a well-formed table, cell by cell."""
    parser = Cells()
    parser.feed(html)
    parser.close()
    assert parser.open == []
    return parser.cells


@pytest.fixture
def metered():
    """Give a database with a namespace of 3 rows, and a meter."""
    meter = RequestMeter()
    db = reef.Database(stores.open("memory://", meter=meter))
    db.create("events", COLUMNS)
    with db.writer("events") as writer:
        writer.upsert([{"id": f"{n}", "<b>amount</b>": [1.0]} for n in range(3)])
    fold(db, "events")
    return db, meter


@pytest.mark.parametrize(
    ("count", "said"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (9909, "9.7 KiB"), (1 << 20, "1.0 MiB"),
     ((1 << 20) - 1, "1.0 MiB"), (5 << 40, "5.0 TiB"), (1 << 70, "1,048,576.0 PiB")],
)  # fmt: skip
def test_bytes_as_people_say_them(count, said):
    """The largest unit that leaves a number of three digits."""
    assert human_bytes(count) == said


def test_counts_as_people_say_them():
    """One row, and many rows."""
    assert [human_count(n, "row") for n in (0, 1, 2500)] == ["0 rows", "1 row", "2,500 rows"]
    assert human_count(2, "query", "queries") == "2 queries"


def test_repr_of_each_handle(metered):
    """Each handle shows its kind, its position and its columns."""
    db, _ = metered
    info = db.info("events")
    assert repr(info).startswith("<NamespaceInfo events, generation ")
    assert "3 rows" in repr(info)
    assert "id: string, <b>amount</b>: list<" in repr(info)
    assert "\n" not in repr(info)
    shown = cells(info._repr_html_())
    assert shown[0] == "Namespace events"
    assert "at most 3" in shown
    assert shown[-4:] == ["id", "string, key", "<b>amount</b>", "list<item: double>"]
    with db.writer("events") as writer:
        writer.upsert([{"id": "more"}])
        assert cells(writer._repr_html_())[:3] == ["Writer of events", "state", "open, epoch 2"]
        assert repr(writer).startswith("<Writer events, epoch 2, LSN ")
    assert "closed" in cells(writer._repr_html_())
    with db.reader("events") as reader:
        lsn = str(reader.last_lsn)
        assert cells(reader._repr_html_())[:5] == ["Reader of events", "state", "open", "LSN", lsn]
    assert repr(reader).endswith(", closed>")
    with db.reader("events", pin=True) as pinned:
        assert "pinned" in cells(pinned._repr_html_())
    assert cells(db._repr_html_())[:3] == ["Database", "store", db.store.url]


def test_names_cannot_break_out_of_the_table(tmp_path):
    """Directories and columns are anyone's words: they are shown, never obeyed."""
    evil = "<script>alert('x')</script>&amp;"
    html = html_table(evil, {evil: evil}, pa.schema([(evil, pa.string())]), evil)
    assert "<script" not in html
    assert cells(html) == [evil, evil, evil, "columns", evil, "string, key"]
    db = reef.open(str(tmp_path / "<img src=x onerror=1>"))
    assert "<img" not in db._repr_html_()


def test_many_columns_are_cut_short():
    """A wide table says how many more there are."""
    wide = pa.schema([(f"c{n}", pa.int8()) for n in range(100)])
    assert columns_line(wide).endswith("c39: int8, and 60 more")
    shown = cells(html_table("wide", {}, wide, "c0"))
    assert "columns, and 60 more" in shown
    assert "c40" not in shown


def test_repr_sends_no_request(metered):
    """A notebook shows a handle whenever it is named: that must cost nothing."""
    db, meter = metered
    with db.writer("events") as writer:
        reader, pinned = db.reader("events", refresh_interval_ms=0), db.reader("events", pin=True)
        handles = [db, db.info("events"), writer, reader, pinned]
        meter.reset()
        for handle in handles:
            assert repr(handle)
            assert handle._repr_html_()
        assert meter.requests() == {}


def test_infos_can_be_sent():
    """A result whose repr shows more than its fields is still a plain value."""
    info = reef.open("memory://").create("events", COLUMNS)
    assert pickle.loads(pickle.dumps(info)) == info
