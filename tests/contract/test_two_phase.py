"""Two-phase compare-and-swap passes the same suite: each register, on a directory and on rclone.

rclone's S3 server ignores every condition, so what excludes there is the register alone. The
everyday selection has each register once on a directory and SQLite on rclone; the others on
rclone are slow.
"""

import pytest

from reef import stores
from reef.stores.probe import agree_on_cas, remembered
from reef.testing.contract import StoreContract
from tests.contract.test_races import check_winners, race
from tests.support.registers import REGISTERS, register_url, unconditional_bucket

BUCKET = "two-phase"


@pytest.fixture(scope="module")
def rclone_options(servers):
    """A bucket that has no conditions."""
    return unconditional_bucket(servers, BUCKET)


class OnTwoPhase(StoreContract):
    """A fresh directory, or a fresh prefix on rclone, for each test; records by their scope."""

    register = ""
    bucket = "directory"

    @pytest.fixture
    def store(self, servers, request, tmp_path):
        cas = register_url(servers, self.register, tmp_path)
        if self.bucket == "directory":
            return stores.open(str(tmp_path / "bucket"), cas=cas)
        options = request.getfixturevalue("rclone_options")
        url = f"s3://{BUCKET}/{type(self).__name__}/{abs(hash(request.node.nodeid)):x}"
        return stores.open(url, cas=cas, **options)


class TestSqlite(OnTwoPhase):
    register = "sqlite"


class TestPostgreSQL(OnTwoPhase):
    register = "postgresql"


class TestMariaDB(OnTwoPhase):
    register = "mariadb"


class TestDynalite(OnTwoPhase):
    register = "dynalite"


class TestSqliteOnRclone(OnTwoPhase):
    register = "sqlite"
    bucket = "rclone"


@pytest.mark.slow
class TestPostgreSQLOnRclone(OnTwoPhase):
    register = "postgresql"
    bucket = "rclone"


@pytest.mark.slow
class TestMariaDBOnRclone(OnTwoPhase):
    register = "mariadb"
    bucket = "rclone"


@pytest.mark.slow
class TestDynaliteOnRclone(OnTwoPhase):
    register = "dynalite"
    bucket = "rclone"


@pytest.mark.slow
class TestMotoOnRclone(OnTwoPhase):
    register = "moto"
    bucket = "rclone"


del OnTwoPhase  # it has no register of its own


@pytest.mark.parametrize("register", REGISTERS)
def test_racing_creates_have_one_winner(servers, tmp_path, register):
    """Eight threads a round, on each register: the insert decides."""
    store = stores.open(str(tmp_path / "b"), cas=register_url(servers, register, tmp_path))
    check_winners(store, race(store, racers=8, rounds=10))


@pytest.mark.parametrize(
    "register",
    ["sqlite", *(pytest.param(name, marks=pytest.mark.slow) for name in REGISTERS[1:])],
)
def test_h4_rclone_is_accepted_with_a_register(servers, rclone_options, tmp_path, register):
    """H4: a store refused without a register passes with one; the bucket remembers which."""
    cas = register_url(servers, register, tmp_path)
    store = stores.open(f"s3://{BUCKET}/probed-{register}", cas=cas, **rclone_options)
    verdict = agree_on_cas(store)
    assert verdict.cas == store.cas
    assert not verdict.if_match
    assert remembered(store) == verdict
    assert [info.key for info in store.list("store/probe/")] == []
