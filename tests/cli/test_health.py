"""`reef.jobs.health` and `reef health`: problems and their causes."""

import json

import pytest

import reef
from reef.jobs.health import HealthLimits
from reef.paths import Namespace
from tests.support.sweep_world import DAY_S, NAME, World

USERS = Namespace("users")


@pytest.fixture
def db(data):
    """Return a database with something in the log."""
    db = reef.open(str(data))
    with db.writer("users", background=False) as writer:
        writer.put("u1", b"Ada")
        writer.put("u2", b"x" * 1000)
    return db


def names(report):
    """Return the problems."""
    return [problem.name for problem in report.problems]


def test_all_is_well(cli, db, data):
    """Exit code 0, and the measures."""
    ran = cli("health", data, "users")
    assert (ran.code, ran.out.splitlines()[0]) == (0, "users is healthy")
    printed = json.loads(cli("health", data, "users", "--output", "json").out)
    assert printed["healthy"] is True
    assert printed["measures"]["fold_lag_lsns"] == 3
    assert printed["measures"]["unfolded_bytes"] > 1000


@pytest.mark.parametrize(
    ("limit", "printed"),
    [
        (("--fold-lag-lsns", 2), "fold lag: 3 objects of the log are not folded, from LSN 1 to 3"),
        (("--fold-lag", 0), "fold lag: rows have waited"),
        (("--unfolded-bytes", 1000), "unfolded bytes"),
        (("--writer-silent", 0), "writer gone: the last writer"),
    ],
)
def test_past_a_limit(cli, db, data, limit, printed):
    """Exit code 2, the reason, and what to do."""
    db.store.runtime.sleep(0.01)
    ran = cli("health", data, "users", *limit)
    assert ran.code == 2
    assert ran.out.startswith("users is not healthy\n")
    assert printed in ran.out


def test_a_fold_makes_it_well(cli, db, data):
    """Only the unfolded log counts."""
    assert cli("health", data, "users", "--fold-lag-lsns", 0, "--unfolded-bytes", 0).code == 2
    assert cli("index", data, "users").code == 0
    words = ("--fold-lag-lsns", 0, "--unfolded-bytes", 0, "--fold-lag", 0)
    assert cli("health", data, "users", *words).code == 0


def test_a_writer_that_never_came(cli, data):
    """Only where one is expected."""
    reef.open(str(data)).create("new")
    assert cli("health", data, "new").code == 0
    ran = cli("health", data, "new", "--writer-silent", 60)
    assert ran.code == 2
    assert "the namespace never had a writer" in ran.out


def test_a_damaged_head(cli, db, data):
    """Named, whether or not an older manifest is used in its place (H18)."""
    paths = sorted((data / USERS.manifests).iterdir())
    for path in reversed(paths):
        path.write_bytes(b"{}")
        ran = cli("health", data, "users", "--output", "json")
        printed = json.loads(ran.out)
        assert ran.code == 2
        assert printed["problems"][0]["name"] == "damaged head"
        assert paths[-1].name in printed["problems"][0]["message"]


@pytest.mark.parametrize("lsn", [2, 3])
def test_a_damaged_end_of_the_log(cli, db, data, lsn):
    """The first rows that are not folded, or the last: readers stop there (H17)."""
    path = data / USERS.wal_object(lsn)
    path.write_bytes(path.read_bytes()[:-1])
    ran = cli("health", data, "users")
    assert ran.code == 2
    assert "damaged head" in ran.out
    assert path.name in ran.out


def test_a_namespace_that_is_not_there(cli, data):
    """An error, which is not the same as not being well."""
    assert cli("health", data, "unknown").code == 1


@pytest.mark.parametrize("words", [("--fold-lag", "soon"), ("--nonsense",)])
def test_wrong_limits(cli, db, data, words):
    """The command line is wrong."""
    assert cli("health", data, "users", *words).code == 64


def test_a_limit_below_zero(cli, db, data):
    """Limits are checked as settings are."""
    assert cli("health", data, "users", "--fold-lag", -1).code == 1


def test_every_limit_is_an_option(cli):
    """And the help names its default."""
    out = cli("health", "--help").out
    for name in HealthLimits.__slots__:
        assert f"--{name.removesuffix('_s').replace('_', '-')} " in out
    assert "3,600" in out


# --- on virtual time ----------------------------------------------------------------


def test_rows_that_wait_for_a_day():
    """The age of the oldest row that is not folded, by the store's clock."""
    world = World()
    with world.run(lambda: world.db.writer(NAME)) as writer:
        world.run(lambda: writer.put("k", b"v"))
        assert reef.jobs.health(world.db, NAME).healthy
        world.advance(4000)
        assert names(world.run(lambda: reef.jobs.health(world.db, NAME))) == ["fold lag"]
        world.fold()
        assert world.run(lambda: reef.jobs.health(world.db, NAME)).healthy


def test_no_process_sweeps():
    """Generations that no sweep takes away are lag, whether or not any was condemned."""
    world = World()
    with world.run(lambda: world.db.writer(NAME)) as writer:
        world.run(lambda: writer.put("k", b"v"))
    world.fold()
    world.advance(1.5 * DAY_S)
    assert world.run(lambda: reef.jobs.health(world.db, NAME)).healthy
    world.advance(DAY_S)
    assert names(world.run(lambda: reef.jobs.health(world.db, NAME))) == ["sweep lag"]
    world.run(lambda: reef.jobs.sweep(world.db, NAME, apply=True))
    assert world.run(lambda: reef.jobs.health(world.db, NAME)).healthy
    world.advance(2 * DAY_S)  # condemned, and nothing has deleted it
    assert names(world.run(lambda: reef.jobs.health(world.db, NAME))) == ["sweep lag"]
    world.run(lambda: reef.jobs.sweep(world.db, NAME, apply=True))
    assert world.run(lambda: reef.jobs.health(world.db, NAME)).healthy


def test_pinned_objects_are_no_lag():
    """A snapshot keeps an old generation on purpose: no sweep could take it."""
    world = World()
    with world.run(lambda: world.db.writer(NAME)) as writer:
        world.run(lambda: writer.put("k", b"v"))
    world.fold()
    world.run(lambda: world.db.snapshot(NAME, "kept"))
    for _ in range(2):
        world.advance(2 * DAY_S)
        world.run(lambda: reef.jobs.sweep(world.db, NAME, apply=True))
    world.advance(0.5 * DAY_S)
    report = world.run(lambda: reef.jobs.health(world.db, NAME, sweep_lag_s=DAY_S))
    assert report.healthy, report
