"""Every server of the harness does the least that tests expect of it."""

import subprocess

import pytest
import sqlalchemy

from tests.support.servers import SERVERS
from tests.support.servers.base import HOST, http_status
from tests.support.servers.proc import listening_addresses, processes_of

S3_NAMES = ["ceph", "seaweedfs", "ministack", "rclone", "moto"]


@pytest.mark.parametrize("name", S3_NAMES)
def test_s3_roundtrip(servers, name):
    """An object that was put into a new bucket comes back unchanged."""
    server = servers.use(name)
    bucket = server.make_bucket("roundtrip")
    with server.client() as s3:
        s3.put_object(Bucket=bucket, Key="a/b", Body=b"\x00reef\xff")
        with s3.get_object(Bucket=bucket, Key="a/b")["Body"] as body:
            assert body.read() == b"\x00reef\xff"


@pytest.mark.parametrize("name", S3_NAMES)
def test_s3_options(servers, name):
    """The options name the server's address and keys in the words that stores take."""
    server = servers.use(name)
    assert server.options() == {
        "endpoint": f"http://{HOST}:{server.port}",
        "access_key_id": server.access_key,
        "secret_access_key": server.secret_key,
        "region": server.region,
        "allow_http": True,
    }


@pytest.mark.parametrize("name", S3_NAMES)
def test_making_a_bucket_twice_is_harmless(servers, name):
    """Tests that share a bucket need not know who made it."""
    server = servers.use(name)
    assert server.make_bucket("twice") == server.make_bucket("twice")


@pytest.mark.parametrize("name", ["postgresql", "mariadb"])
def test_sql_responds(servers, name):
    """A table can be made, written and read through SQLAlchemy."""
    engine = sqlalchemy.create_engine(servers.use(name).url)
    try:
        with engine.begin() as connection:
            assert connection.execute(sqlalchemy.text("select 1")).scalar() == 1
            connection.execute(sqlalchemy.text("create table smoke (n int primary key)"))
            connection.execute(sqlalchemy.text("insert into smoke values (7)"))
            assert connection.execute(sqlalchemy.text("select n from smoke")).scalar() == 7
            connection.execute(sqlalchemy.text("drop table smoke"))
    finally:
        engine.dispose()


def test_dynalite_lists_tables(dynalite):
    """A table that was made is listed; tests before this one may have made others."""
    key = {"AttributeName": "id"}
    with dynalite.client() as dynamodb:
        assert "smoke" not in dynamodb.list_tables()["TableNames"]
        dynamodb.create_table(
            TableName="smoke",
            KeySchema=[{**key, "KeyType": "HASH"}],
            AttributeDefinitions=[{**key, "AttributeType": "S"}],
            BillingMode="PAY_PER_REQUEST",
        )
        assert "smoke" in dynamodb.list_tables()["TableNames"]


def test_azurite_responds(azurite):
    """A container can be made; a request without a signature is refused."""
    assert azurite.make_container("smoke") == "smoke"
    assert azurite.make_container("smoke") == "smoke"
    assert http_status(azurite.address, f"/{azurite.account_name}?comp=list") == 403


@pytest.mark.parametrize(("name", "flag"), [("java17", "-version"), ("strace", "-V")])
def test_tools_run(servers, name, flag):
    """The program that was found starts."""
    path = servers.use(name).path()
    done = subprocess.run([path, flag], capture_output=True, timeout=120, check=True)
    assert b"version" in done.stdout + done.stderr


@pytest.mark.parametrize("name", SERVERS)
def test_listens_on_the_loopback_only(servers, name):
    """No other machine can reach a test's server."""
    server = servers.use(name)
    pids = processes_of(server.directory, [child.pid for child in server.children])
    assert listening_addresses(pids) == {HOST}
