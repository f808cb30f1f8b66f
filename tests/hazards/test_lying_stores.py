"""H73: stores that honour create-only writes for some sizes, folders or ages only."""

import pickle
from types import SimpleNamespace

import msgspec
import pytest

from reef import paths, stores
from reef.engine.handles.database import Database
from reef.engine.log.log import Log, LogRules, Verdict
from reef.errors import (
    CorruptionError,
    ErrorKind,
    FencedError,
    InvalidInputError,
    NotFoundError,
    ReefError,
    UnavailableError,
)
from reef.formats.manifest import encode_manifest
from reef.formats.wal_object import WalKind, WalObject
from reef.jobs import fold, repair, verify
from reef.manifest.head import HeadFinder, Publisher
from reef.paths import Namespace
from reef.stores.memory import MemoryStore
from reef.stores.probe import (
    SCOPE,
    agree_on_cas,
    agrees_without_register,
    as_proved,
    probe,
    prove_size,
    remembered,
)
from reef.telemetry import RequestMeter
from tests.hazards.test_log import batch, manifest

NAME = "users"
MIB = 1 << 20


class OverwritingStore(stores.Wrapper):
    """Ignores the condition of a create where `where(key, body)` is true."""

    def __init__(self, inner, where):
        super().__init__(inner)
        self.where = where

    def create(self, key, body):
        if not self.where(key, body):
            return self.inner.create(key, body)
        return stores.WriteResult(stores.Outcome.CREATED, self.inner.put(key, body))


def refused(call):
    """Return the message of a refusal to trust a store."""
    with pytest.raises(InvalidInputError) as caught:
        call()
    assert caught.value.kind is ErrorKind.NOT_EXCLUSIVE
    return caught.value.message


# --- the probe -----------------------------------------------------------------------------
@pytest.mark.parametrize("threshold", [27, 1024, 32 << 10, 128 << 10, MIB, 4 * MIB])
def test_H73_a_store_that_overwrites_large_bodies_is_refused(threshold):
    """H73: bodies above some size overwrite. The probe's bodies had 26 bytes, and passed it."""
    store = OverwritingStore(MemoryStore(), lambda key, body: len(body) >= threshold)
    refused(lambda: agree_on_cas(store))
    assert remembered(store) is None


def test_H73_a_store_that_overwrites_small_bodies_is_refused():
    """H73: the other way round."""
    refused(lambda: probe(OverwritingStore(MemoryStore(), lambda key, body: len(body) < 100)))


@pytest.mark.parametrize(
    "part",
    ["namespaces/", "/wal/", ".wal", "/manifest/", ".manifest.json", "/leases/", "catalog/"],
)
def test_H73_a_store_that_overwrites_in_one_folder_is_refused(part):
    """H73: conditions hold in the probe's own folder, and not where the engine writes."""
    refused(lambda: probe(OverwritingStore(MemoryStore(), lambda key, body: part in key)))


@pytest.mark.parametrize(
    ("part", "size"), [("/wal/", 4 * MIB), ("/manifest/", 128 << 10), ("catalog/", 32 << 10)]
)
def test_H73_a_store_that_overwrites_large_bodies_of_one_folder_is_refused(part, size):
    """H73: each folder is probed with bodies as large as the engine writes there."""
    store = OverwritingStore(MemoryStore(), lambda key, body: part in key and len(body) > size)
    refused(lambda: probe(store))


class WinsTwice(stores.Wrapper):
    """Reports a second create of some names as created, and stores nothing."""

    def __init__(self, inner, part):
        super().__init__(inner)
        self.part = part
        self.seen = {}

    def create(self, key, body):
        self.seen[key] = self.seen.get(key, 0) + 1
        result = self.inner.create(key, body)
        if self.part in key and self.seen[key] == 2:
            return stores.WriteResult(stores.Outcome.CREATED, "tag")
        return result


@pytest.mark.parametrize("part", ["/create-0", "/wal/", "/manifest/"])
def test_H4_a_race_with_two_winners_is_refused(part):
    """H4: also if the object has the bytes of one of them, and later creates lose."""
    assert "more than one" in refused(lambda: probe(WinsTwice(MemoryStore(), part)))


class LiesByTag(stores.Wrapper):
    """Ignores If-Match below a folder."""

    def __init__(self, inner, part):
        super().__init__(inner)
        self.part = part

    def replace(self, key, body, tag):
        if self.part not in key:
            return self.inner.replace(key, body, tag)
        return stores.WriteResult(stores.Outcome.REPLACED, self.inner.put(key, body))


@pytest.mark.parametrize("part", ["/leases/", "catalog/", "HEAD.json"])
def test_H73_if_match_is_proved_where_it_is_used(part):
    """H73: leases and the catalog's head; a store that fails there is used without If-Match."""
    assert not probe(LiesByTag(MemoryStore(), part)).if_match


class LiesLater(stores.Wrapper):
    """Remembers a name for some requests only, as a cache of recent writes would."""

    def __init__(self, inner, requests):
        super().__init__(inner)
        self.requests = requests
        self.written = {}
        self.count = 0

    def create(self, key, body):
        self.count += 1
        written = self.written.get(key)
        if written is not None and self.count - written > self.requests:
            return stores.WriteResult(stores.Outcome.CREATED, self.inner.put(key, body))
        result = self.inner.create(key, body)
        if result.landed:
            self.written[key] = self.count
        return result


def test_H73_a_store_that_forgets_within_the_probe_is_refused():
    """H73: every name of the probe is tried once more after all the races."""
    refused(lambda: probe(LiesLater(MemoryStore(), requests=12)))


def aged(store, seconds=120.0):
    """Backdate the stored verdict."""
    known = remembered(store)
    known = msgspec.structs.replace(known, proved_at_s=known.proved_at_s - seconds)
    store.put(paths.cas_verdict(), msgspec.json.encode(known))


def test_H73_a_store_that_overwrites_old_objects_is_refused_from_then_on():
    """H73: the first opening a minute later tries to create an old name again."""
    store = OverwritingStore(MemoryStore(), lambda key, body: False)
    agree_on_cas(store)
    aged(store)
    store.where = lambda key, body: True
    assert "old object" in refused(lambda: agree_on_cas(store))
    store.where = lambda key, body: False  # as any new object would show it
    for _ in range(2):
        refused(lambda: agree_on_cas(store))
    assert remembered(store).refused
    assert not agrees_without_register(store, remembered(store))


def test_H73_an_old_object_is_tried_once():
    """H73: six requests once per bucket, a minute or more after the probe; then one GET again."""
    bucket = MemoryStore()
    agree_on_cas(bucket)
    assert not remembered(bucket).is_aged
    aged(bucket)
    meter = RequestMeter()
    store = stores.Meter(bucket, meter)
    assert agree_on_cas(stores.ReadBack(store)).is_aged
    assert meter.requests() == {"get": 4, "put": 2}
    meter.reset()
    assert agree_on_cas(store).is_aged
    assert meter.requests() == {"get": 1}


class Silent(stores.Wrapper):
    """Loses the response to every create."""

    def create(self, key, body):
        return stores.WriteResult(stores.Outcome.UNKNOWN)


def test_H73_silence_about_an_old_object_proves_nothing():
    """H73: neither an age nor a refusal is stored; the next opening tries again."""
    bucket = MemoryStore()
    agree_on_cas(bucket)
    aged(bucket)
    with pytest.raises(UnavailableError):
        agree_on_cas(Silent(bucket))
    assert not remembered(bucket).is_aged
    assert not remembered(bucket).refused
    assert agree_on_cas(bucket).is_aged


class Meanwhile(stores.Wrapper):
    """Calls `act` once, within the first create."""

    def __init__(self, inner, act):
        super().__init__(inner)
        self.act = act

    def create(self, key, body):
        if self.act is not None:
            act, self.act = self.act, None
            act()
        return self.inner.create(key, body)


def find_out(bucket, seen="a create over an old object took effect"):
    """Store the verdict of a process that found the store out."""
    known = msgspec.structs.replace(remembered(bucket), refused=seen)
    bucket.put(paths.cas_verdict(), msgspec.json.encode(known))


def test_H73_a_proof_of_size_does_not_undo_a_refusal():
    """H73: another process finds the store out while a larger body is proved: it stays refused.

    Root: the verdict that was read before the proof was written back behind it, without the
    refusal that arrived in between.
    """
    bucket = MemoryStore()
    agree_on_cas(bucket)
    proving = Meanwhile(bucket, lambda: find_out(bucket))
    refused(lambda: prove_size(proving, 6 * MIB))
    assert remembered(bucket).refused
    refused(lambda: agree_on_cas(bucket))


@pytest.mark.parametrize("due", ["an age", "a wider probe"])
def test_H73_an_upgrade_does_not_undo_a_refusal(due):
    """H73: of two processes that upgrade at once only one is lied to: its refusal stays.

    Root: the last process to write a verdict removed the refusal of the one before.
    """
    bucket = MemoryStore()
    agree_on_cas(bucket)
    aged(bucket)
    if due == "a wider probe":
        narrow = msgspec.structs.replace(remembered(bucket), scope=SCOPE - 1)
        bucket.put(paths.cas_verdict(), msgspec.json.encode(narrow))
    refused(lambda: agree_on_cas(Meanwhile(bucket, lambda: find_out(bucket))))
    assert remembered(bucket).refused
    refused(lambda: agree_on_cas(bucket))


def test_H73_a_proof_of_size_keeps_the_proofs_of_others():
    """H73: the age that another process proves meanwhile is kept, and so is a larger size."""
    bucket = MemoryStore()
    agree_on_cas(bucket)
    aged(bucket)

    def others():
        agree_on_cas(bucket)
        prove_size(bucket, 20 * MIB)

    known = prove_size(Meanwhile(bucket, others), 6 * MIB)
    assert known == remembered(bucket)
    assert (known.is_aged, known.bytes_proved) == (True, 32 * MIB)


def test_H73_a_writer_stops_at_a_larger_body_once_the_store_was_found_out():
    """H73: a verdict is read again before each larger size; a refusal ends writers that are open.

    Root: `prove_size` did not read the refusal.
    """
    bucket = MemoryStore()
    writer = Database(bucket).writer(NAME, background=False)
    writer.put("a", b"1")
    prove_size(bucket, 6 * MIB)  # another process had larger bodies
    find_out(bucket)
    refused(lambda: writer.put("b", b"x" * (6 * MIB)))


# --- larger bodies -------------------------------------------------------------------------
def test_H73_a_larger_body_is_proved_before_it_is_written():
    """H73: a store that overwrites above 10 MiB is refused at the first such batch."""
    store = OverwritingStore(MemoryStore(), lambda key, body: len(body) > 10 * MIB)
    writer = Database(store).writer(NAME, background=False)
    writer.put("a", b"x" * (6 * MIB))
    assert remembered(store).bytes_proved == 8 * MIB
    refused(lambda: writer.put("b", b"x" * (9 * MIB)))
    with pytest.raises(InvalidInputError):
        writer.put("c", b"1")
    writer = Database(store).writer(NAME, background=False)
    writer.put("c", b"1")
    with Database(store).reader(NAME) as reader:
        assert [key for key, _ in reader.scan()] == [b"a", b"c"]


def test_H73_a_size_is_proved_once_per_bucket():
    """H73: each doubling costs a few requests once; from then on such a batch is one PUT."""
    meter = RequestMeter()
    bucket = stores.Meter(MemoryStore(), meter)
    writer = Database(stores.ReadBack(bucket)).writer(NAME, background=False)
    meter.reset()
    writer.put("a", b"x" * (4 * MIB))
    assert meter.requests() == {"put": 1}
    meter.reset()
    writer.put("a", b"x" * (9 * MIB))
    assert meter.requests() == {"get": 4, "put": 4, "delete": 1}
    assert [info.key for info in bucket.list("namespaces/_probe-")] == []
    meter.reset()
    writer.put("a", b"x" * (12 * MIB))
    assert meter.requests() == {"put": 1}
    assert prove_size(bucket, 16 * MIB).bytes_proved == 16 * MIB


def test_H73_with_a_register_size_does_not_matter():
    """The register decides, not the store: nothing is proved by size."""
    store = MemoryStore()
    verdict = msgspec.structs.replace(probe(store), cas="sqlite-1", bytes_proved=0)
    assert as_proved(store, verdict) is store
    without = as_proved(store, msgspec.structs.replace(verdict, if_match=False))
    assert without.create("a", b"x" * (6 * MIB)).landed
    assert remembered(store) is None


# --- verdicts of older releases ------------------------------------------------------------
NARROW = b'{"format":1,"cas":"native","if_match":true,"proved_at_s":1700000000.0}'


def test_H73_a_narrower_verdict_is_upgraded_by_the_next_writer():
    """H73: by probing again, once; readers do not wait for it, and its cost is then one GET."""
    meter = RequestMeter()
    bucket = MemoryStore()
    bucket.put(paths.cas_verdict(), NARROW)
    store = stores.Meter(bucket, meter)
    assert remembered(store).scope < SCOPE
    assert not agrees_without_register(store, remembered(store))
    assert agree_on_cas(store).scope == SCOPE
    assert sum(meter.requests().values()) > 50
    assert bucket.get(paths.cas_verdict()) != NARROW
    meter.reset()
    assert agree_on_cas(store).scope == SCOPE
    assert meter.requests() == {"get": 1}


def test_H73_a_store_that_only_passed_the_narrower_probe_is_refused():
    """H73: also with a verdict in its favour, which stays as it is."""
    store = OverwritingStore(MemoryStore(), lambda key, body: len(body) > MIB)
    store.put(paths.cas_verdict(), NARROW)
    refused(lambda: agree_on_cas(store))
    assert store.get(paths.cas_verdict()) == NARROW


def test_H73_older_releases_read_the_verdict():
    """The format's number is the same, and fields were only added."""
    store = MemoryStore()
    agree_on_cas(store)
    known = msgspec.json.decode(store.get(paths.cas_verdict()))
    assert (known["format"], known["cas"], known["if_match"]) == (1, "native", True)


def test_H73_the_probe_costs_the_documented_requests():
    """ADR 0022: about 170 requests and 20 MiB sent on a store without a register."""
    meter = RequestMeter()
    store = stores.ReadBack(stores.Meter(MemoryStore(), meter))
    agree_on_cas(store)
    assert 120 <= sum(meter.requests().values()) <= 175, meter.requests()
    assert [info.key for info in store.list()] == [paths.cas_verdict()]


def test_H73_a_probe_is_not_a_namespace():
    """A process that dies in the middle leaves objects that no listing of namespaces shows."""
    store = MemoryStore()
    names = paths.ProbeNames("01J")
    for key in (names.wal_object(1), names.manifest(1), names.lease):
        store.put(key, b"left over")
    assert list(Database(store).namespaces()) == []


# --- a winner that has changed -------------------------------------------------------------
def trusted(overwrites):
    """Return a bucket whose verdict says that all was proved, and a store that overwrites."""
    bucket = MemoryStore()
    known = msgspec.structs.replace(probe(bucket), bytes_proved=1 << 40, is_aged=True)
    bucket.put(paths.cas_verdict(), msgspec.json.encode(known))
    return bucket, OverwritingStore(bucket, overwrites)


def changed(call):
    """Return the error of a slot whose winner has changed."""
    with pytest.raises(CorruptionError) as caught:
        call()
    assert caught.value.kind is ErrorKind.CHANGED_WINNER
    return caught.value


def test_H73_the_first_id_in_after_is_a_known_winner():
    """H73: its writer had seen it durable; the ids behind it were in flight, and make void."""
    floor = manifest(wal_floor=10, below_floor=("x", "y"))
    assert LogRules(floor).advance(batch(10, "a", ("x", "y"))) is Verdict.APPLIES
    assert LogRules(floor).advance(batch(10, "a", ("x", "z"))) is Verdict.VOID
    error = changed(lambda: LogRules(floor).advance(batch(10, "a", ("z", "y"))))
    assert error.context["lsn"] == 8
    changed(lambda: LogRules(floor).advance(batch(10, "a", ("z",))))
    skipped = manifest(wal_floor=10, below_floor=("", "y"))
    assert LogRules(skipped).advance(batch(10, "a", ("z", "y"))) is Verdict.APPLIES


def test_H73_disputed_slots_are_collected_for_a_repair():
    """H73: the writes behind such a slot count, as behind one that is skipped."""
    disputes = {}
    reader = LogRules(manifest(wal_floor=10, below_floor=("x", "y")), disputes)
    assert reader.advance(batch(10, "a", ("z", "y"))) is Verdict.APPLIES
    assert list(disputes) == [8]


@pytest.mark.parametrize("parallel", [1, 4])
def test_H73_acknowledged_writes_are_not_lost_in_silence(parallel):
    """H73: a fenced writer whose large objects overwrite. Some reader or writer raises."""
    bucket, store = trusted(lambda key, body: len(body) > MIB)
    options = {"background": False, "max_parallel_writes": parallel}
    zombie = Database(store).writer(NAME, **options)
    zombie.put("a", b"1")
    writer = Database(store).writer(NAME, **options)
    acknowledged, kinds = [], set()
    for turn in range(6):
        for who, prefix in ((zombie, "zombie"), (writer, "new")):
            try:
                who.put(f"{prefix}{turn}", b"z" * (2 * MIB))
                acknowledged.append(f"{prefix}{turn}".encode())
            except ReefError as error:
                kinds.add(error.kind)
    try:
        rows = {key for key, _ in Database(bucket).reader(NAME).scan()}
    except CorruptionError as error:
        kinds.add(error.kind)
    else:
        assert set(acknowledged) <= rows, "lost without an error"
    assert ErrorKind.CHANGED_WINNER in kinds
    report = verify(Database(bucket), NAME)
    assert any("was filled twice" in problem.message for problem in report.problems)


def overwrite(bucket, lsn):
    """Put another write into a slot, as a store that ignores the condition would."""
    log, key = Log(bucket, Namespace(NAME)), Namespace(NAME).wal_object(lsn)
    found = log.read(lsn)
    header = msgspec.structs.replace(found.header, write_id="another")
    bucket.put(key, WalObject.encode(header, tuple(found.records)))


def test_H73_readers_folds_and_openings_stop_at_a_changed_slot():
    """H73: every job that resolves the log from the bucket, by the same rule."""
    bucket, _ = trusted(lambda key, body: False)
    db = Database(bucket)
    with db.writer(NAME, background=False) as writer:
        lsn = writer.put("a", b"1").lsn
        writer.put("b", b"2")
    overwrite(bucket, lsn)
    changed(lambda: Database(bucket).reader(NAME).get("a"))
    changed(lambda: fold(Database(bucket), NAME))
    changed(lambda: Database(bucket).writer(NAME))


def test_H73_a_writer_notices_that_its_own_write_was_replaced():
    """H73: the fold's manifest keeps another winner than the one that the writer has applied."""
    bucket, _ = trusted(lambda key, body: False)
    writer = Database(bucket).writer(NAME, background=False)
    lsn = writer.put("a", b"1").lsn
    overwrite(bucket, lsn)
    fold(Database(bucket), NAME)
    changed(lambda: rebased(writer))
    with pytest.raises(CorruptionError):
        writer.put("b", b"2")


def rebased(writer):
    """Let a writer load the newest manifest, and raise what ended it."""
    writer._committer.rebase()
    writer._committer.check_open()


def test_H73_a_writer_with_objects_in_flight_notices_too():
    """H73: then it loads the manifest alone; the writer ends as well."""
    bucket, _ = trusted(lambda key, body: False)
    writer = Database(bucket).writer(NAME, background=False)
    overwrite(bucket, writer.put("a", b"1").lsn)
    fold(Database(bucket), NAME)
    committer = writer._committer
    committer._inflight.append(SimpleNamespace(acknowledged=True, batches=[]))
    changed(committer.rebase)
    assert not committer.is_open


def test_H73_a_reader_notices_that_a_write_it_has_shown_was_replaced():
    """H73: likewise, at its next refresh."""
    bucket, _ = trusted(lambda key, body: False)
    writer = Database(bucket).writer(NAME, background=False)
    lsn = writer.put("a", b"1").lsn
    reader = Database(bucket).reader(NAME)
    assert reader.get("a") == b"1"
    overwrite(bucket, lsn)
    fold(Database(bucket), NAME)
    changed(reader.refresh)


def test_H73_a_tail_that_restarts_compares_with_known_objects():
    """H73: a writer that lost a slot, and whose floor has moved past it meanwhile."""
    bucket, _ = trusted(lambda key, body: False)
    writer = Database(bucket).writer(NAME, background=False)
    lsn = writer.put("a", b"1").lsn
    tail = writer._committer.tail
    overwrite(bucket, lsn)
    fold(Database(bucket), NAME)
    head = HeadFinder(bucket, Namespace(NAME)).find().manifest
    changed(lambda: tail.restarted(head))


def test_H73_an_opening_notices_that_its_fence_was_replaced():
    """H73: a zombie's object in the place of a fence would be taken for the log before it."""

    class Replaces(stores.Wrapper):
        """Overwrites each fence, once it was acknowledged, with a batch of another writer."""

        def create(self, key, body):
            result = self.inner.create(key, body)
            if key.endswith(".wal"):
                header = WalObject.decode(body, key).header
                other = msgspec.structs.replace(
                    header, kind=WalKind.SKIP, write_id="another", epoch=0, schema=None
                )
                self.inner.put(key, WalObject.encode(other))
            return result

    bucket, _ = trusted(lambda key, body: False)
    Database(bucket).create(NAME)
    changed(lambda: Database(Replaces(bucket)).writer(NAME))


def test_H73_repair_keeps_both_sides_of_a_disputed_slot():
    """H73: the overwritten write is lost; the one in its slot and all behind it are kept."""
    bucket, _ = trusted(lambda key, body: False)
    with Database(bucket).writer(NAME, background=False) as writer:
        lsn = writer.put("a", b"1").lsn
        writer.put("b", b"2")
        writer.put("c", b"3")
    overwrite(bucket, lsn)
    report = verify(Database(bucket), NAME)
    assert [problem.lsn for problem in report.problems] == [lsn]
    repair(Database(bucket), NAME, apply=True)
    with Database(bucket).reader(NAME) as reader:
        assert [key for key, _ in reader.scan()] == [b"a", b"b", b"c"]
    with Database(bucket).writer(NAME, background=False) as writer:
        writer.put("d", b"4")


def test_H73_repair_settles_a_dispute_with_an_id_below_the_floor():
    """H73: the fold kept the id of the overwriting object; the batch behind it is not folded."""
    bucket, _ = trusted(lambda key, body: False)
    writer = Database(bucket).writer(NAME, background=False)
    lsn = writer.put("a", b"1").lsn
    overwrite(bucket, lsn)
    fold(Database(bucket), NAME)
    writer.put("b", b"2")
    changed(lambda: Database(bucket).reader(NAME).get("b"))
    assert [problem.lsn for problem in verify(Database(bucket), NAME).problems] == [lsn]
    repair(Database(bucket), NAME, apply=True)
    with Database(bucket).reader(NAME) as reader:
        assert [key for key, _ in reader.scan()] == [b"a", b"b"]


def test_H73_a_publisher_notices_that_its_manifest_was_replaced():
    """H73: a newer head names another write at the generation that it has published."""
    bucket, _ = trusted(lambda key, body: False)
    Database(bucket).create(NAME)

    def edit(head):
        return msgspec.structs.replace(head, grace_ms=head.grace_ms + 1)

    publisher = Publisher(bucket, Namespace(NAME))
    mine = publisher.publish(edit)
    recent = (*mine.recent[:-1], msgspec.structs.replace(mine.recent[-1], write_id="another"))
    other = msgspec.structs.replace(mine, write_id="another", recent=recent)
    bucket.put(Namespace(NAME).manifest(mine.generation), encode_manifest(other))
    Publisher(bucket, Namespace(NAME)).publish(edit)
    error = changed(publisher.heads.find)
    assert error.context["generation"] == mine.generation
    changed(lambda: publisher.publish(edit))


def test_H73_a_fenced_writer_on_an_honest_store_is_fenced():
    """The rule raises nothing where no winner has changed."""
    bucket, _ = trusted(lambda key, body: False)
    zombie = Database(bucket).writer(NAME, background=False)
    zombie.put("a", b"1")
    with Database(bucket).writer(NAME, background=False) as writer:
        writer.put("b", b"2")
        with pytest.raises(FencedError):
            zombie.put("c", b"3")
        fold(Database(bucket), NAME)
        writer.put("d", b"4")
    assert verify(Database(bucket), NAME).problems == []


def test_the_proof_travels_with_the_store():
    """A task in another process knows which tests passed and which store must not be used."""
    verdict = msgspec.structs.replace(probe(MemoryStore()), if_match=False)
    copy = pickle.loads(pickle.dumps(as_proved(stores.open("/nowhere"), verdict)))
    assert not copy.capabilities.if_match
    assert copy._bytes_proved == verdict.bytes_proved


def test_the_proof_does_not_change_how_ranges_are_read(tmp_path):
    """A writer and a reader share a disk cache by ranges: a proved store asks for the same ones."""
    bucket = MemoryStore()
    bucket.put(key := "namespaces/a/segments/1.seg", bytes(1000))
    cache = stores.DiskCache(bucket, str(tmp_path))
    proved = as_proved(cache, probe(bucket))
    ranges = [(0, 10), (20, 30)]
    proved.get_ranges(key, ranges)
    bucket.delete(key)
    assert cache.get_ranges(key, ranges) == proved.get_ranges(key, ranges) == [bytes(10)] * 2
    proved.forget(key, ranges[:1])
    with pytest.raises(NotFoundError):
        cache.get_range(key, 0, 10)
    assert cache.get_range(key, 20, 30) == bytes(10)
