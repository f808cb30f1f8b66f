"""A catalog whose objects were lost or damaged: no process continues from missing objects."""

import pytest

from reef.catalog import Catalog, CatalogSnapshot
from reef.errors import ConflictError, CorruptionError, NotFoundError, OutcomeUnknownError
from reef.stores import Outcome, RetryPolicy, Wrapper, WriteResult
from reef.stores.memory import MemoryStore
from reef.testing import Fault, Faults, Rule
from tests.unit.catalog.conftest import AT_ONCE, put

QUICK = RetryPolicy(attempts_max=3, deadline_s=2.0, first_delay_s=0.001)


def lose(store, prefix=""):
    """Delete all objects of a catalog, as an accident would."""
    for kind in ("HEAD.json", "heads/", "segments/", "checkpoints/", "leases/", "gc/"):
        if kind.startswith(prefix):
            store.delete_many([info.key for info in store.list(kind)])


def filled(catalog, count=5):
    """Commit some transactions, with a checkpoint among them."""
    for number in range(count):
        put(catalog, **{f"old{number}": b"x"})
        if number == count // 2:
            catalog.compactor().compact_once()


def test_a_process_that_knew_a_lost_catalog_continues(store):
    """It starts again at once, although it remembers the old head."""
    catalog = Catalog(store, backoff=QUICK)
    filled(catalog)
    lose(store)
    assert catalog.scan_latest() == []
    put(catalog, a=b"1")
    put(Catalog(store), b=b"2")
    put(catalog, c=b"3")
    for one in (catalog, Catalog(store)):
        assert [key for key, _ in one.scan_latest()] == [b"a", b"b", b"c"]
    report = catalog.verify()
    assert (report.transactions, report.problems) == (3, [])


@pytest.mark.parametrize("new", [0, 1, 9], ids=["nothing", "less", "more than there was"])
def test_a_session_from_before_the_loss_commits_nothing(new):
    """Its reads are of another history, whatever the numbers of the new one are.

    Where heads are numbered, an emptied number seems free for some minutes: `verify` reports it.
    """
    store = MemoryStore()
    catalog = Catalog(store, backoff=QUICK)
    filled(catalog)
    session = catalog.session_write()
    assert session.get("missing") is None
    session.put("mine", b"x")
    lose(store)
    for number in range(new):
        put(Catalog(store), **{f"new{number}": b"x"})
    with pytest.raises(ConflictError, match="lost"):
        session.commit()
    assert len(Catalog(store).scan_latest()) == new
    assert Catalog(store).recover_orphans() == 0


def test_a_lease_pins_the_used_head_not_the_known_one(store):
    """H22: a process that knew a later checkpoint leases from the head that is there now."""
    knew = Catalog(store, retention=AT_ONCE, cache=None)
    filled(knew, 9)
    lose(store)
    other = Catalog(store, retention=AT_ONCE, cache=None)
    put(other, a=b"1")
    other.compactor().compact_once()
    with knew.session_read() as session:
        for number in range(9):
            put(other, a=b"%d" % number)
            other.compactor().compact_and_gc()
        assert session.get("a") == b"1"


def test_a_lost_head_is_a_problem(catalog):
    """Objects of higher numbers than the head's show that it was lost."""
    filled(catalog)
    assert catalog.verify().problems == []
    lose(catalog.store, "H")
    lose(catalog.store, "heads")
    (problem,) = Catalog(catalog.store).verify().problems
    assert "HEAD" in problem.object
    assert "was lost" in problem.message


def damage(store, kind):
    """Cut the last object of a kind short."""
    name = [info.key for info in store.list(kind)][-1]
    store.put(name, store.get(name)[:-3])


@pytest.mark.parametrize("kind", ["head", "segments/", "checkpoints/", "gc/"])
@pytest.mark.parametrize("lost", [False, True], ids=["damaged", "lost"])
def test_an_unreadable_catalog_can_be_recreated(store, kind, lost):
    """The new state is intact and above all old numbers, and the old one is discarded."""
    catalog = Catalog(store, retention=AT_ONCE, backoff=QUICK)
    filled(catalog)
    old = catalog.snapshot()
    catalog.compactor().gc_compute()
    if kind == "head":
        kind = "HEAD.json" if store.capabilities.if_match else "heads/"
    if lost:
        lose(store, kind)
    else:
        damage(store, kind)
    Catalog(store, retention=AT_ONCE).recreate(lambda: {"a": b"1", "b": b"2"})
    for one in (catalog, Catalog(store)):
        assert one.scan_latest() == [(b"a", b"1"), (b"b", b"2")]
        report = one.verify()
        assert (report.problems, report.keys) == ([], 2)
    assert catalog.snapshot().txn_id > old.txn_id
    assert catalog.snapshot().revision > old.revision
    with pytest.raises(NotFoundError):
        Catalog(store).session_at(CatalogSnapshot.from_dict(old.to_dict()))
    put(catalog, c=b"3")
    catalog.compactor().compact_and_gc()
    catalog.compactor().compact_and_gc()
    assert len(list(store.list("checkpoints/"))) == 1
    assert list(store.list("segments/")) == []
    assert len(Catalog(store).scan_latest()) == 3
    assert Catalog(store).verify().problems == []


def test_sessions_of_a_discarded_history_get_a_conflict(store):
    """Nothing of theirs is applied to the new state; transact continues from there."""
    catalog = Catalog(store, backoff=QUICK)
    filled(catalog)
    session = catalog.session_write()
    session.put("mine", b"x")
    Catalog(store).recreate(lambda: {"a": b"1"})
    with pytest.raises(ConflictError):
        session.commit()
    put(catalog, b=b"2")
    assert Catalog(store).scan_latest() == [(b"a", b"1"), (b"b", b"2")]


def test_a_lost_response_recreates_once(store):
    """The head is read, and has landed."""
    rules = [Rule(Fault.FAIL_AFTER, "*e", name, times=1) for name in ("HEAD*", "heads/*")]
    Catalog(store).recreate(lambda: {"a": b"0"})
    faults = Faults(store, rules)
    Catalog(faults, backoff=QUICK).recreate(lambda: {"a": b"1"})
    assert sum(rule.struck for rule in rules) == 1
    assert Catalog(store).snapshot().txn_id == 2
    assert Catalog(store).get_latest("a") == b"1"


def test_a_recreation_is_not_older_than_the_state_it_replaces(store):
    """A commit during it is seen by the next attempt; a commit after it stays."""
    catalog, made = Catalog(store, backoff=QUICK), []
    put(catalog, a=b"1")

    def make():
        made.append(dict(catalog.scan_latest()))
        if len(made) == 1:
            put(Catalog(store), b=b"2")
        return {key.decode(): value for key, value in made[-1].items()}

    catalog.recreate(make)
    assert len(made) == 2
    put(catalog, c=b"3")
    assert [key for key, _ in Catalog(store).scan_latest()] == [b"a", b"b", b"c"]


def test_a_new_beginning_that_dies_spoils_nothing(store):
    """Its checkpoint belongs to no history; the old history continues, and is intact."""

    class Died(Exception):
        """The process is gone."""

    class Dies(Wrapper):
        """Dies at the first write of the head."""

        def create(self, key, body):
            return self._die(key) or self.inner.create(key, body)

        def replace(self, key, body, tag):
            return self._die(key) or self.inner.replace(key, body, tag)

        def _die(self, key):
            if key.lower().startswith("head"):
                raise Died

    catalog = Catalog(store)
    filled(catalog)
    with pytest.raises(Died):
        Catalog(Dies(store)).recreate(lambda: {"other": b"state"})
    assert len(catalog.scan_latest()) == 5
    for number in range(4):
        put(catalog, more=b"%d" % number)
        catalog.compactor().compact_once()
        report = catalog.verify()
        assert (report.problems, report.keys) == ([], 6)
    assert len(list(store.list("checkpoints/"))) == 6


def test_a_commit_on_top_of_a_lost_response_stays(store):
    """The recreation has landed without a response, and another process has committed on it."""

    class Unheard(Wrapper):
        """Loses the first response of the head, after another commit."""

        done = False

        def create(self, key, body):
            return self._unheard(key, self.inner.create(key, body))

        def replace(self, key, body, tag):
            return self._unheard(key, self.inner.replace(key, body, tag))

        def _unheard(self, key, result):
            if not key.lower().startswith("head") or self.done:
                return result
            self.done = True
            put(Catalog(store), mine=b"x")
            return WriteResult(Outcome.UNKNOWN)

    Catalog(Unheard(store), backoff=QUICK).recreate(lambda: {"a": b"1"})
    assert Catalog(store).scan_latest() == [(b"a", b"1"), (b"mine", b"x")]


@pytest.mark.parametrize("fault", [Fault.WRONG_BYTES, Fault.SHORT_READ])
def test_H8_a_head_or_a_plan_that_is_damaged_in_transit_is_read_again(store, fault):
    """H8: once, it is read again; permanently, it is damage."""
    put(Catalog(store), a=b"1")
    old = Catalog(store).snapshot()
    Catalog(store, retention=AT_ONCE).compactor().compact_and_gc()
    rules = [Rule(fault, "get", name, times=1) for name in ("HEAD*", "heads/*", "gc/*")]
    catalog = Catalog(Faults(store, rules))
    assert catalog.get_latest("a") == b"1"
    with pytest.raises(NotFoundError):
        catalog.session_at(old)
    assert sum(rule.struck for rule in rules) == 2
    for rule in rules:
        rule.times = None
    with pytest.raises(CorruptionError):
        catalog.get_latest("a")
    with pytest.raises(CorruptionError):
        catalog.session_at(old)


def test_H21_a_chain_that_cannot_be_read_makes_the_outcome_unknown(store, monkeypatch):
    """H21: the response is lost, others commit on top, and the chain back to it cannot be read.

    To say that nothing was written would make the caller apply it twice.
    """
    monkeypatch.setattr("reef.catalog.head.RECENT_MIN", 1)
    monkeypatch.setattr("reef.catalog.head.RECENT_MAX", 1)
    put(Catalog(store), a=b"1")
    lost = [Rule(Fault.FAIL_AFTER, "*e", name, times=1) for name in ("HEAD*", "heads/*")]
    silent = [Rule(Fault.FAIL_BEFORE, "get", "segments/*"), Rule(Fault.FAIL_BEFORE, "list", "seg*")]

    class Overtaken(Wrapper):
        """Others commit before the head is read again."""

        def get_tagged(self, key):
            self._overtake(key)
            return self.inner.get_tagged(key)

        def list(self, prefix="", start_after=""):
            self._overtake(prefix)
            return self.inner.list(prefix, start_after)

        def _overtake(self, key):
            if key.lower().startswith("head") and sum(rule.struck for rule in lost) and silent:
                faults.rules, silent[:] = [*silent], []
                for number in range(3):
                    put(Catalog(store), **{f"other{number}": b"x"})

    faults = Faults(Overtaken(store), lost)
    faults.url = f"{store.url}#elsewhere"
    catalog = Catalog(faults, cache=None)
    session = catalog.session_write()
    session.put("mine", b"x")
    with pytest.raises(OutcomeUnknownError) as unknown:
        session.commit()
    faults.rules.clear()
    assert catalog.resolve(unknown.value.receipt) is True
    assert Catalog(store).get_latest("mine") == b"x"
