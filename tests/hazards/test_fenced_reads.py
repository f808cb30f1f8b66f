"""H77: a writer that was fenced does not serve reads, unless stale ones were asked for.

The root: reads only checked whether the handle was closed. A fenced writer does not follow the log
any more, so its rows grow older without end, and only its writes raise an error.
"""

import asyncio
from contextlib import suppress

import pyarrow as pa
import pytest

import reef
import reef.aio
from reef.jobs import fold

NAME = "users"
READS = {
    "get": lambda writer: writer.get("k1"),
    "get, from the row cache": lambda writer: writer.get("warm"),
    "get, some columns": lambda writer: writer.get("k1", columns=["value"]),
    "get_many": lambda writer: writer.get_many(["k1", "k2"]),
    "scan": lambda writer: list(writer.scan()),
    "scan, of a prefix": lambda writer: list(writer.scan(prefix="k", limit=1)),
    "scan_arrow": lambda writer: writer.scan_arrow().read_all(),
    "an Arrow stream": pa.table,
    "schema": lambda writer: writer.schema,
    "transaction": lambda writer: writer.transaction(),
    "refresh": lambda writer: writer.refresh(),
}


def fence(db, writer):
    """Open another writer, and have this one notice."""
    db.writer(NAME, background=False).put("k1", b"newer")
    with pytest.raises(reef.FencedError):
        writer.put("k2", b"lost")


def opened(db, **settings):
    """Return a writer with rows in a segment, in memory and in the row cache."""
    writer = db.writer(NAME, background=False, **settings)
    for number in range(5000):
        writer.put(f"k{number}", b"old", wait=False)
    writer.put("warm", b"old")
    writer.flush()
    fold(db, NAME)
    writer.refresh()
    writer.put("k1", b"old")
    assert writer.get("warm") == b"old"
    return writer


@pytest.fixture(scope="module")
def fenced():
    """Give a writer that was fenced."""
    db = reef.open("memory://")
    writer = opened(db)
    fence(db, writer)
    return writer


@pytest.mark.parametrize("read", READS)
def test_H77_a_fenced_writer_does_not_serve_reads(fenced, read):
    """H77: every read method raises FencedError, again and again."""
    for _ in range(2):
        with pytest.raises(reef.FencedError, match="took over"):
            READS[read](fenced)


def test_H77_a_fenced_writer_still_says_what_became_of_its_writes(fenced):
    """Outcomes are resolved from the bucket: that is no stale read."""
    receipt = reef.Receipt(NAME, 1, 0, 1, "other", 1)
    assert fenced.resolve(receipt) in ("rejected", "unknown")
    assert not fenced.is_open
    assert "Writer" in repr(fenced)
    fenced.flush()


@pytest.mark.parametrize(
    "begin",
    [
        lambda writer: iter(writer.scan()),
        lambda writer: iter(writer.scan(reverse=True)),
        lambda writer: iter(writer.scan_arrow()),
        lambda writer: iter(writer.transaction().scan()),
        lambda writer: iter(writer.transaction().scan_arrow()),
    ],
    ids=["scan", "reverse", "scan_arrow", "of a transaction", "of a transaction, Arrow"],
)
def test_H77_a_scan_that_was_open_ends(begin):
    """H77: an iterator that was opened before raises at its next group of rows."""
    db = reef.open("memory://")
    writer = opened(db)
    rows = begin(writer)
    next(rows)
    fence(db, writer)
    with pytest.raises(reef.FencedError):
        list(rows)


def test_H77_a_transaction_that_was_open_does_not_read_on():
    """H77: its reads go to the writer, and so raise; so does its commit."""
    db = reef.open("memory://")
    writer = opened(db)
    tx = writer.transaction()
    tx.get("k1")
    tx.put("mine", b"1")
    fence(db, writer)
    reads = [lambda: tx.get("k2"), lambda: tx.get_many(["k2"]), lambda: list(tx.scan()), tx.commit]
    for read in reads:
        with pytest.raises(reef.FencedError):
            read()


def test_H77_a_condition_is_not_decided_on_stale_rows():
    """H77: the reads before a conditional write raise, and nothing is sent."""
    db = reef.open("memory://")
    writer = opened(db)
    fence(db, writer)
    with pytest.raises(reef.FencedError):
        writer.write(reef.Batch().put("x", b"1"), when=[reef.present("k1")])


def test_stale_reads_can_be_asked_for():
    """H77: with `stale_reads` reads continue, from rows as old as the takeover; writes do not."""
    db = reef.open("memory://")
    writer = opened(db, stale_reads=True)
    rows = writer.scan()
    next(rows)
    tx = writer.transaction()
    fence(db, writer)
    assert writer.get("k1") == b"old" == writer.get("warm")
    assert len(list(rows)) == 5000
    assert tx.get("k3") == b"old"
    for read in READS.values():
        with suppress(StopIteration):
            read(writer)
    tx.put("k3", b"new")
    with pytest.raises(reef.FencedError):
        tx.commit()


def test_stale_reads_is_a_yes_or_no():
    """Any other value is refused before the role is taken."""
    with pytest.raises(reef.InvalidInputError, match="True or False"):
        reef.open("memory://").writer(NAME, stale_reads="yes")


def test_H77_a_fenced_writer_behind_asyncio():
    """H77: a row that is at hand is not served from the loop either."""

    async def main():
        async with (
            reef.aio.open("memory://") as db,
            db.writer(NAME, background=False) as writer,
        ):
            await writer.put("k", b"old")
            assert await writer.get("k") == b"old"
            scan = writer.scan()
            async with db.writer(NAME, background=False) as other:
                await other.put("k", b"new")
                with pytest.raises(reef.FencedError):
                    await writer.put("k", b"lost")
                for read in (
                    lambda: writer.get("k"),
                    lambda: writer.get("k", columns=["value"]),
                    lambda: writer.get_many(["k"]),
                    lambda: _drained(writer.scan()),
                    lambda: _drained(scan),
                ):
                    with pytest.raises(reef.FencedError):
                        await read()

    asyncio.run(main())


async def _drained(rows):
    return [row async for row in rows]


def test_H77_a_fenced_writer_with_a_local_log(tmp_path):
    """H77: nor does one that acknowledges locally, once its upload has met the fence."""
    db = reef.open(f"file://{tmp_path}/bucket")
    settings = {"durability": "local", "local_log": tmp_path / "log", "background": False}
    writer = db.writer(NAME, **settings)
    writer.put("k", b"old")
    writer.flush()
    db.writer(NAME, background=False, take_over=True).put("k", b"new")
    with suppress(reef.FencedError):
        writer.put("k", b"lost")
    with pytest.raises(reef.FencedError):
        writer.flush()
    for read in (lambda: writer.get("k"), lambda: list(writer.scan()), writer.transaction):
        with pytest.raises(reef.FencedError, match="on this disk only") as caught:
            read()
        assert caught.value.context["path"] == str(tmp_path / "log")
    with pytest.raises(reef.FencedError):
        writer.close()
