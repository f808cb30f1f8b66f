"""`db.sql`: namespaces as views of DuckDB, pinned for the statement; the past too; read-only."""

import datetime as dt

import pyarrow as pa
import pytest

import reef
from reef.engine.handles.sql import replace_as_of
from reef.errors import CorruptionError, ErrorKind, InvalidInputError
from reef.jobs import fold
from reef.stores import Wrapper

USERS = pa.schema([("id", pa.string()), ("name", pa.string()), ("age", pa.int64())])
ORDERS = pa.schema([("id", pa.string()), ("user", pa.string()), ("amount", pa.float64())])


@pytest.fixture
def db():
    """Two namespaces, one with a snapshot and a past."""
    with reef.open("memory://") as db:
        db.create("users", USERS)
        db.create("orders", ORDERS)
        with db.writer("users", background=False) as writer:
            writer.upsert([{"id": "u1", "name": "Ada", "age": 30}])
            fold(db, "users")
            db.snapshot("users", "nightly")
            writer.upsert([{"id": "u2", "name": "Bob", "age": 40}])
        with db.writer("orders", background=False) as writer:
            rows = [("o1", "u1", 5.0), ("o2", "u1", 7.0), ("o3", "u2", 9.0)]
            writer.upsert([{"id": i, "user": u, "amount": a} for i, u, a in rows])
        yield db


def values(result):
    """Return the rows as tuples."""
    return [tuple(row.values()) for row in result.to_pylist()]


def test_namespaces_are_views(db):
    """Joins, aggregates, subqueries and CTEs; rows of segments and of the log."""
    joined = """
        SELECT u.name, sum(o.amount) AS total FROM users u JOIN orders o ON o.user = u.id
        WHERE u.age >= 30 GROUP BY ALL ORDER BY total
    """
    assert db.sql(joined).to_pylist() == [
        {"name": "Bob", "total": 9.0},
        {"name": "Ada", "total": 12.0},
    ]
    assert values(db.sql("WITH x AS (FROM users) SELECT count(*) FROM x, orders")) == [(6,)]
    assert values(db.sql("SELECT name FROM Users WHERE id IN (SELECT user FROM ORDERS)")) != []
    assert values(db.sql("SELECT max(age) FROM main.users")) == [(40,)]
    assert values(db.sql("SELECT name FROM users WHERE age = ?", [40])) == [("Bob",)]
    assert values(db.sql("SELECT name FROM users WHERE age = $age", {"age": 30})) == [("Ada",)]
    assert values(db.sql("PIVOT orders ON user USING sum(amount)")) != []
    assert "ARROW_SCAN" in str(values(db.sql("EXPLAIN SELECT * FROM users"))).upper()
    assert [row[0] for row in values(db.sql("DESCRIBE users"))] == ["id", "name", "age"]
    assert values(db.sql("show tables;")) == [("orders",), ("users",)]


@pytest.mark.parametrize(
    ("table", "names"),
    [
        ("users", ["Ada", "Bob"]),
        ('"users@nightly"', ["Ada"]),
        ("users AS OF 'nightly'", ["Ada"]),
        ("users AS OF SNAPSHOT 'nightly' AS u", ["Ada"]),
        ('"users@lsn:2"', ["Ada"]),
        ("users as of lsn 2 where users.age > 0", ["Ada"]),
        ("users AS OF TIMESTAMP '9999-01-01 00:00'", ["Ada", "Bob"]),
        ("users AS OF '9999-01-01T00:00'", ["Ada", "Bob"]),
        ('"users@9999-01-01"', ["Ada", "Bob"]),
        ("users AS OF '9999-01-01' u JOIN users AS OF 'nightly' n ON u.id = n.id", ["Ada"]),
    ],
)  # fmt: skip
def test_the_past(db, table, names):
    """A snapshot by name, an LSN, a time; with and without an alias."""
    column = "u.name" if " u JOIN" in table else "name"
    assert values(db.sql(f"SELECT {column} FROM {table} ORDER BY 1")) == [(n,) for n in names]


def test_generations(db):
    """By number, quoted or with AS OF; one that never was is named in the error."""
    generation = db.snapshots("users")[0].generation
    for table in (
        f'"users@{generation}"',
        f"users AS OF {generation}",
        f'"users" AS OF GENERATION {generation}',
    ):
        assert values(db.sql(f"SELECT count(*) FROM {table}")) == [(1,)]
    both = f"SELECT n.name FROM users n ANTI JOIN users AS OF {generation} ON n.id = users.id"
    assert values(db.sql(both)) == [("Bob",)]
    with pytest.raises(reef.NotFoundError, match="999"):
        db.sql("SELECT * FROM users AS OF 999")
    with pytest.raises(reef.NotFoundError, match="weekly"):
        db.sql("SELECT * FROM users AS OF 'weekly'")


@pytest.mark.parametrize(
    ("query", "replaced"),
    [
        ("SELECT * FROM t AS OF 1", 'SELECT * FROM "t@1" AS t'),
        ("SELECT * FROM t AS OF 1 x", 'SELECT * FROM "t@1" x'),
        ("SELECT * FROM t AS OF 1 AS x", 'SELECT * FROM "t@1" AS x'),
        ("FROM t AS OF 1 WHERE a", 'FROM "t@1" AS t WHERE a'),
        ("FROM t AS OF 1, u AS OF 2", 'FROM "t@1" AS t, "u@2" AS u'),
        ("FROM t -- x\n AS /* y */ OF 'it''s'", 'FROM "t@it\'s" AS t'),
        ('FROM "odd.name" AS OF \'a"b\'', 'FROM "odd.name@a""b" AS "odd.name"'),
        ("SELECT 't AS OF 1', \"t AS OF 1\", $$t AS OF 1$$ -- t AS OF 1",
         "SELECT 't AS OF 1', \"t AS OF 1\", $$t AS OF 1$$ -- t AS OF 1"),
        ("SELECT a AS of FROM t", "SELECT a AS of FROM t"),
        ("SELECT a AS of, 1 FROM t", "SELECT a AS of, 1 FROM t"),
        ("t AS OF", "t AS OF"),
    ],
)  # fmt: skip
def test_as_of_is_replaced_outside_of_texts_and_comments(query, replaced):
    """The table keeps its name, unless it has an alias."""
    assert replace_as_of(query, frozenset({"WHERE", "JOIN", "ON", "AS"})) == replaced


def test_odd_names_are_quoted():
    """Names with dots and dashes, columns with spaces, reserved words and other letters."""
    with reef.open("memory://") as db:
        schema = pa.schema(
            [("id", pa.string()), ('odd "name"', pa.int64()), ("select", pa.int64())]
        )
        for name in ("a.b-c", "1st", "Ünused"[1:], "order"):
            db.create(name, schema)
            with db.writer(name, background=False) as writer:
                writer.upsert([{"id": "k", 'odd "name"': 1, "select": 2}])
            query = f'SELECT "odd ""name""", "select" FROM "{name}" WHERE "select" = 2'
            assert db.sql(query).to_pylist() == [{'odd "name"': 1, "select": 2}]
            assert values(db.sql(f'SELECT count(*) FROM "{name}" AS OF LSN 2')) == [(1,)]


def test_names_that_differ_only_in_case():
    """DuckDB ignores case: an exact name is found, both in one query are an error."""
    with reef.open("memory://") as db:
        for name, age in (("users", 1), ("Users", 2)):
            db.create(name, USERS)
            with db.writer(name, background=False) as writer:
                writer.upsert([{"id": "k", "age": age}])
        assert values(db.sql("SELECT age FROM users")) == [(1,)]
        assert values(db.sql('SELECT age FROM "Users"')) == [(2,)]
        with pytest.raises(InvalidInputError, match="differ only in case"):
            db.sql("SELECT * FROM users, Users")
        with pytest.raises(reef.NotFoundError, match="no namespace USERS"):
            db.sql("SELECT * FROM USERS")


@pytest.mark.parametrize(
    ("query", "kind"),
    [
        ("INSERT INTO users VALUES ('u3', 'Eve', 5)", "INSERT"),
        ("UPDATE users SET age = 5", "UPDATE"),
        ("DELETE FROM users", "DELETE"),
        ("DROP VIEW users", "DROP"),
        ("CREATE TABLE t AS SELECT * FROM users", "CREATE"),
        ("COPY (SELECT 1) TO 'x.csv'", "COPY"),
        ("ATTACH 'x.db'", "ATTACH"),
        ("SET threads = 1", "SET"),
    ],
)
def test_only_queries_are_accepted(db, query, kind):
    """The error says what it is, and how to write instead."""
    with pytest.raises(InvalidInputError, match=f"read-only here, and this is {kind}") as caught:
        db.sql(query)
    assert "db.writer" in str(caught.value)
    assert db.reader("users").count() == 2


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("SELEC 1", "not valid SQL"),
        ("SELECT 1; SELECT 2", "one statement, this is 2"),
        ("", "one statement, this is 0"),
        ("SELECT nme FROM users", 'column "nme" not found'),
        ("SELECT CAST('x' AS INT)", "the query failed"),
        (5, "a query is text, got int"),
    ],
)
def test_wrong_queries(db, query, message):
    """They are the user's errors, with DuckDB's explanation."""
    with pytest.raises(InvalidInputError) as caught:
        db.sql(query)
    assert message.lower() in str(caught.value).lower()


def test_variables_of_the_program_are_not_tables(db):
    """A namespace that was mistyped is an error, even if the caller has a table of that name."""
    user = pa.table({"id": ["secret"]})
    with pytest.raises(reef.NotFoundError, match="user"):
        db.sql("SELECT * FROM user")
    assert len(user) == 1


def test_times_are_of_utc_wherever_it_runs(db):
    """Hours and days of a time do not depend on the machine."""
    query = "SELECT hour(TIMESTAMPTZ '2026-01-31 23:30:00+00') AS hour"
    assert values(db.sql(query)) == [(23,)]


def test_an_unknown_namespace_is_named(db):
    """With a similar name, if there is one. Variables of the program are no tables."""
    elsewhere = pa.table({"x": [1]})
    assert len(elsewhere) == 1
    with pytest.raises(reef.NotFoundError, match="no namespace uesrs") as caught:
        db.sql("SELECT * FROM uesrs")
    assert "Did you mean users?" in str(caught.value)
    with pytest.raises(reef.NotFoundError, match="no namespace elsewhere"):
        db.sql("SELECT * FROM elsewhere")


def test_a_query_returns_an_arrow_table(db):
    """With nothing left open behind it."""
    table = db.sql("SELECT id FROM users ORDER BY id")
    assert type(table) is pa.Table
    assert table["id"].to_pylist() == ["u1", "u2"]
    assert not db.stats("users").leases


def test_a_stream_is_read_once(db):
    """Any way to read it closes it at the end, and releases the snapshots."""
    result = db.sql_stream("SELECT id FROM users ORDER BY id")
    assert result.schema.names == ["id"]
    assert db.stats("users").leases == 1
    assert "not read yet" in repr(result)
    assert [row["id"] for row in result] == ["u1", "u2"]
    assert not db.stats("users").leases
    with pytest.raises(reef.ClosedError):
        result.to_arrow()
    query = "SELECT id FROM users ORDER BY id"
    assert pa.table(db.sql_stream(query)).column("id").to_pylist() == ["u1", "u2"]
    assert sum(len(batch) for batch in db.sql_stream(query).batches()) == 2
    with db.sql_stream(query):
        assert db.stats("users").leases
    assert not db.stats("users").leases


def test_a_statement_reads_its_snapshots(db):
    """Rows that are written while the result is read do not appear in it."""
    result = db.sql_stream("SELECT count(*) AS n FROM users")
    with db.writer("users", background=False) as writer:
        writer.upsert([{"id": "u9", "name": "Zoe", "age": 1}])
    assert list(result) == [{"n": 2}]
    result = db.sql_stream("SELECT count(*) AS n FROM users")
    db.close()
    with pytest.raises(reef.ClosedError):
        db.sql("SELECT 1")
    with pytest.raises(reef.ClosedError):
        result.to_arrow()


def test_errors_of_the_store_are_not_hidden_by_those_of_duckdb(db):
    """Damage is reported as damage."""
    fold(db, "orders")
    (segment,) = db.store.list("namespaces/orders/segments/")
    body = bytearray(db.store.get(segment.key))
    body[40] ^= 1
    db.store.put(segment.key, bytes(body))
    with pytest.raises(CorruptionError, match="orders"):
        db.sql("SELECT sum(amount) FROM orders")


def test_read_only_credentials_are_enough(db):
    """Without permission to write there is no lease, but still one snapshot."""

    class ReadOnly(Wrapper):
        def _denied(self, *_args):
            raise InvalidInputError("no permission", kind=ErrorKind.ACCESS_DENIED)

        put = create = replace = upload = copy = delete_many = now = _denied

    readable = db._over(ReadOnly(db.store))
    assert values(readable.sql("SELECT count(*) FROM users")) == [(2,)]
    assert values(readable.sql("SELECT count(*) FROM users AS OF LSN 2")) == [(1,)]


def test_types_come_back_as_they_were():
    """Decimals, times, bytes, lists and vectors pass through DuckDB."""
    with reef.open("memory://") as db:
        schema = pa.schema(
            [
                ("id", pa.string()),
                ("price", pa.decimal128(10, 2)),
                ("at", pa.timestamp("us", "UTC")),
                ("day", pa.date32()),
                ("data", pa.binary()),
                ("tags", pa.list_(pa.string())),
                ("v", pa.list_(pa.float32(), 2)),
            ]
        )
        db.create("t", schema)
        row = {
            "id": "k",
            "price": "1.50",
            "at": dt.datetime(2024, 1, 1, tzinfo=dt.UTC),
            "day": dt.date(2024, 1, 1),
            "data": b"\0\xff",
            "tags": ["a", "b"],
            "v": [1.0, 2.0],
        }
        from decimal import Decimal

        row["price"] = Decimal(row["price"])
        with db.writer("t", background=False) as writer:
            writer.upsert([row])
        where = "price = 1.5 AND day <= DATE '2024-01-01' AND data = '\\x00\\xFF'::BLOB"
        (found,) = db.sql(f"SELECT * FROM t WHERE {where}").to_pylist()
        assert found == row
