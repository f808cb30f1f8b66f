"""`reef inspect`: every kind of object, whole and damaged."""

import json

import pytest

import reef
from reef.manifest.roots import take_lease
from reef.paths import Namespace

USERS = Namespace("users")


@pytest.fixture
def db(data):
    """Return a database with a segment of several groups, and something in the log."""
    db = reef.open(str(data))
    with db.writer("users", background=False) as writer:
        batch = reef.Batch()
        for number in range(500):
            batch.put(f"u{number:03}", b"%d" % number * 50)
        writer.write(batch)
        writer.delete_range("x", "y")
        reef.jobs.fold(db, "users", group_bytes=4096, codec="none")
        writer.put("late", b"\xff")
    return db


def segment_of(db):
    """Return the id of the one segment."""
    manifest = json.loads(db.store.get(last(db, USERS.manifests)))
    return manifest["segments"]["id"][0]


def last(db, prefix):
    """Return the last key with a prefix."""
    return max(info.key for info in db.store.list(prefix))


def flip(data, key, offset):
    """Damage one byte of an object."""
    path = data / key
    body = bytearray(path.read_bytes())
    body[offset] ^= 0x40
    path.write_bytes(body)


def inspect(cli, data, *words):
    """Return the exit code and the JSON output."""
    ran = cli("inspect", data, "users", *words, "--output", "json")
    return ran.code, json.loads(ran.out)


# --- whole --------------------------------------------------------------------------


def test_the_newest_manifest(cli, db, data):
    """Without a name it is the head that is shown, with its segments."""
    code, report = inspect(cli, data)
    assert (code, report["damage"]) == (0, [])
    assert report["generation"] == db.info("users").generation
    assert [segment["rows"] for segment in report["segments"]] == [500]
    assert report["segments"][0]["min_key"] == "u000"


def test_an_older_manifest(cli, db, data):
    """Generations that are kept can be inspected by number."""
    assert inspect(cli, data, "--generation", 1)[1]["generation"] == 1
    ran = cli("inspect", data, "users", "--generation", 99)
    assert ran.code == 1
    assert "99.manifest.json" in ran.err


def test_an_object_of_the_log(cli, db, data):
    """Header and operations."""
    code, report = inspect(cli, data, "--lsn", 3)
    assert (code, report["kind"], report["lsn"]) == (0, "batches", 3)
    assert report["operations"] == [{"batch": 0, "op": "delete_range", "key": "x", "end_key": "y"}]
    assert inspect(cli, data, "--lsn", 1)[1]["kind"] == "fence"


def test_a_segment(cli, db, data):
    """Footer, range tombstones and every group, in order."""
    code, report = inspect(cli, data, "--segment", segment_of(db))
    assert (code, report["damage"]) == (0, [])
    assert (report["rows"], report["level"]) == (500, 0)
    assert [(t["start"], t["end"]) for t in report["range_tombstones"]] == [("x", "y")]
    groups = report["groups"]
    assert len(groups) > 5
    assert sum(group["rows"] for group in groups) == 500
    assert groups[0]["first_key"] == "u000"
    ends = [group["offset"] + group["bytes"] for group in groups]
    assert ends[:-1] == [group["offset"] for group in groups[1:]]


def test_a_lease(cli, db, data):
    """Its owner, its generation, its remaining time."""
    manifest = reef.manifest.head.HeadFinder(db.store, USERS).find().manifest
    lease = take_lease(db.store, USERS, manifest, owner="me", ttl_s=60)
    code, report = inspect(cli, data, "--lease", lease.record.id)
    assert (code, report["owner"], report["generation"]) == (0, "me", manifest.generation)
    assert 0 < report["seconds_left"] <= 60
    assert report["expired"] is False


def test_for_people(cli, db, data):
    """Tables, of which --rows bounds the length."""
    out = cli("inspect", data, "users", "--segment", segment_of(db), "--rows", 2).out
    assert "set hash" in out
    assert out.rstrip().splitlines()[-1].split()[0] == "1"
    assert "published at" in cli("inspect", data, "users").out


def test_missing_objects(cli, db, data):
    """An object that is missing is an error; two names are a wrong command line."""
    for words in (("--lsn", 99), ("--segment", "none"), ("--lease", "none")):
        assert cli("inspect", data, "users", *words).code == 1
    assert cli("inspect", data, "unknown").code == 1
    assert cli("inspect", data, "users", "--lsn", 1, "--generation", 1).code == 64


# --- damaged ------------------------------------------------------------------------


def test_a_damaged_head(cli, db, data):
    """It is the newest one that is inspected, not its fallback (H18)."""
    key = last(db, USERS.manifests)
    flip(data, key, 100)
    code, report = inspect(cli, data)
    assert (code, report["object"]) == (2, key)
    (damage,) = report["damage"]
    assert damage["offset"] == 21
    assert "checksum" in damage["message"]


def test_a_damaged_record(cli, db, data):
    """The footer's checksum shows the damage, the frame's shows where it is (H17)."""
    key = USERS.wal_object(2)
    size = (data / key).stat().st_size
    flip(data, key, size - 100)
    code, report = inspect(cli, data, "--lsn", 2)
    assert code == 2
    assert report["kind"] == "batches"
    assert report["damage"][0]["offset"] == size - 8
    assert "record 0" in report["damage"][1]["message"]
    assert 0 < report["damage"][1]["offset"] < size - 100


def test_a_damaged_header_of_the_log(cli, db, data):
    """Nothing is known of it then but where the damage is."""
    flip(data, USERS.wal_object(2), 40)
    code, report = inspect(cli, data, "--lsn", 2)
    assert code == 2
    assert "the header" in report["damage"][1]["message"]
    assert report["operations"] == []


def test_a_cut_object_of_the_log(cli, db, data):
    """Objects are written whole: a short one is damage, and never a crash."""
    path = data / USERS.wal_object(2)
    whole = path.read_bytes()
    for size in (0, 5, 20, 1000, len(whole) - 1):
        path.write_bytes(whole[:size])
        code, report = inspect(cli, data, "--lsn", 2)
        assert (code, report["bytes"]) == (2, size)


def test_damaged_groups(cli, db, data):
    """Each is named with its offset; the others are still reported."""
    segment = segment_of(db)
    groups = inspect(cli, data, "--segment", segment)[1]["groups"]
    for number in (1, 3):
        flip(data, USERS.segment(segment), groups[number]["offset"] + 50)
    code, report = inspect(cli, data, "--segment", segment)
    assert code == 2
    assert len(report["damage"]) == 2
    for number, damage in zip((1, 3), report["damage"], strict=True):
        start = groups[number]["offset"]
        assert start <= damage["offset"] < start + groups[number]["bytes"]
    assert report["groups"] == groups


@pytest.mark.parametrize("offset", [0, 9, -1, -20])
def test_damaged_ends_of_a_segment(cli, db, data, offset):
    """The first bytes, the last ones, the footer."""
    flip(data, USERS.segment(segment_of(db)), offset)
    ran = cli("inspect", data, "users", "--segment", segment_of(db))
    assert ran.code == 2
    assert "damaged at offset" in ran.out


def test_a_damaged_lease(cli, db, data):
    """It holds everything for a day: worth knowing."""
    db.store.put(USERS.lease("L"), b"{")
    code, report = inspect(cli, data, "--lease", "L")
    assert code == 2
    assert "not a lease" in report["damage"][0]["message"]
