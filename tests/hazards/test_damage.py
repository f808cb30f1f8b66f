"""H8, H17, H18, H27: damaged objects. Losses are reported, and never skipped silently."""

import msgspec
import pytest

import reef
from reef import stores
from reef.errors import (
    CorruptionError,
    ErrorKind,
    InvalidInputError,
    UnavailableError,
    UnsupportedFormatError,
)
from reef.formats.coding import crc32c
from reef.formats.manifest import Recent, encode_manifest
from reef.formats.wal_object import FOOTER, HEAD, MAGIC, VERSION, Job, WalKind, WalObject
from reef.jobs import fold
from reef.manifest.head import HeadFinder
from reef.paths import Namespace
from reef.stores import RetryPolicy, Wrapper
from reef.testing import Fault, Rule, open_store
from tests.support.bulk_jobs import append, ingest

NAME = "users"
USERS = Namespace(NAME)
QUICK = RetryPolicy(attempts_max=3, deadline_s=5.0, first_delay_s=0.001, delay_max_s=0.002)


@pytest.fixture
def db():
    """Give an empty database in memory."""
    return reef.open("memory://")


def flip(db, key, place=40):
    """Flip one bit of an object at rest."""
    damaged = bytearray(db.store.get(key))
    damaged[place] ^= 1
    db.store.put(key, bytes(damaged))


def written(db, count):
    """Write k0, k1, …, one object each; return their LSNs."""
    with db.writer(NAME) as writer:
        return [writer.put(f"k{n}", b"v%d" % n).lsn for n in range(count)]


def reported(db):
    """Return a list that the events of a database go to."""
    events = []
    db.events.subscribe(events.append)
    return events


# --- the log --------------------------------------------------------------------------


@pytest.mark.parametrize("which", [0, 2, 4], ids=["first", "middle", "last"])
def test_H17_a_writer_stops_at_a_damaged_object_and_names_it(db, which):
    """H17, H27: damage anywhere in the log is fatal for a writer; nothing acknowledged is lost."""
    lsns = written(db, 5)
    flip(db, USERS.wal_object(lsns[which]))
    with pytest.raises(CorruptionError) as caught:
        db.writer(NAME)
    assert caught.value.context["object"] == USERS.wal_object(lsns[which])
    assert caught.value.context["offset"] >= 0


@pytest.mark.parametrize("which", [0, 2, 4], ids=["first", "middle", "last"])
def test_H17_a_reader_serves_up_to_a_damaged_object_and_says_so(db, which):
    """H17: by its attribute, its repr and an event."""
    lsns = written(db, 5)
    flip(db, USERS.wal_object(lsns[which]))
    events = reported(db)
    reader = db.reader(NAME)
    assert dict(reader.scan()) == {b"k%d" % n: b"v%d" % n for n in range(which)}
    assert reader.damage.context["object"] == USERS.wal_object(lsns[which])
    assert "damaged" in repr(reader)
    assert [(e.name, e.fields["lsn"]) for e in events] == [("damaged_log", lsns[which])]


def test_H17_a_warm_reader_stops_in_front_of_damage(db):
    """H17: damage found by a probe is reported in the same way, and nothing behind it is shown."""
    with db.writer(NAME) as writer:
        writer.put("a", b"1")
        reader = db.reader(NAME, refresh_interval_ms=1e9)
        assert reader.damage is None
        damaged = writer.put("b", b"2").lsn
        writer.put("c", b"3")
        events = reported(db)
        flip(db, USERS.wal_object(damaged))
        reader.refresh()
        assert dict(reader.scan()) == {b"a": b"1"}
        assert reader.damage.context["object"] == USERS.wal_object(damaged)
        assert [event.name for event in events] == ["damaged_log"]


def make_senseless(db, lsn):
    """Give an object of the log a record that no release writes, under valid checksums."""
    key = USERS.wal_object(lsn)
    header = WalObject.decode(db.store.get(key), key).header
    db.store.put(key, WalObject.encode(header, (b"\xff" * 40,)))


def test_H17_a_record_that_makes_no_sense_is_damage_too(db):
    """H17, H27: checksums do not prove validity; a reader serves up to it, at every refresh."""
    with db.writer(NAME, background=False) as writer:
        writer.put("a", b"1")
        warm = db.reader(NAME, refresh_interval_ms=1e9)
        senseless = writer.put("b", b"2").lsn
        writer.put("c", b"3")
    make_senseless(db, senseless)
    for reader in (warm, warm, db.reader(NAME)):
        reader.refresh()
        assert dict(reader.scan()) == {b"a": b"1"}
        assert reader.last_lsn == senseless - 1
        assert reader.damage.context["object"] == USERS.wal_object(senseless)
    with pytest.raises(CorruptionError) as caught:
        db.writer(NAME)
    assert caught.value.context["object"] == USERS.wal_object(senseless)
    (problem,) = reef.jobs.verify(db, NAME).problems
    body = db.store.get(USERS.wal_object(senseless))
    record = body.index(b"\xff" * 40)
    for offset in (caught.value.context["offset"], problem.offset):
        assert record <= offset < record + 40, "counted from the beginning of the object"


def test_H27_an_unsupported_format_is_reported_at_every_refresh(db):
    """H27: the second refresh does not skip an object at which the first one has failed."""
    db.writer(NAME, background=False).close()
    reader = db.reader(NAME, refresh_interval_ms=1e9)
    append(db.store, NAME, WalKind.BEGIN, Job("job"))
    newer = USERS.wal_object(append(db.store, NAME, WalKind.ABORT, Job("job")))
    body = db.store.get(newer)[: -FOOTER.size]
    body = HEAD.pack(MAGIC, VERSION + 1, 0) + body[HEAD.size :]
    db.store.put(newer, body + FOOTER.pack(0, crc32c(body)))
    before = reader.last_lsn
    for _ in range(2):
        with pytest.raises(UnsupportedFormatError):
            reader.refresh()
        assert reader.last_lsn == before + 1


def test_H17_damage_that_was_only_in_transit_is_forgotten(db):
    """H17: once the object can be read again, a listing clears the mark and continues."""
    lsns = written(db, 3)
    intact = db.store.get(USERS.wal_object(lsns[1]))
    flip(db, USERS.wal_object(lsns[1]))
    reader = db.reader(NAME, list_interval_s=0)
    assert reader.damage is not None
    db.store.put(USERS.wal_object(lsns[1]), intact)
    reader.refresh()
    assert reader.damage is None
    assert len(dict(reader.scan())) == 3


def repaired(db, **changes):
    """Publish as a repair does: the next generation, from the last intact one."""
    finder = HeadFinder(db.store, USERS)
    head = finder.find(fallback=True).manifest
    newest = max(number_in(info.key) for info in db.store.list(USERS.manifests))
    write_id = db.store.runtime.ulid()
    following = msgspec.structs.replace(
        head,
        generation=newest + 1,
        write_id=write_id,
        recent=(*head.recent, Recent(newest + 1, write_id, 0)),
        writer_epoch=head.writer_epoch + 1,
        **changes,
    )
    assert db.store.create(USERS.manifest(newest + 1), encode_manifest(following)).landed
    return following


def number_in(key):
    """Return the number in an object's name."""
    return int(key.rpartition("/")[2].split(".")[0])


def test_H17_after_a_repair_the_loss_is_skipped_by_everyone(db):
    """H17: the LSN is listed as skipped and stays in its slot; commits, folds, ingests continue."""
    lsns = written(db, 4)
    flip(db, USERS.wal_object(lsns[1]))
    reader = db.reader(NAME)
    repaired(db, skipped_lsns=(lsns[1],))
    left = {b"k0": b"v0", b"k2": b"v2", b"k3": b"v3"}
    reader.refresh()
    assert (dict(reader.scan()), reader.damage) == (left, None)
    with db.writer(NAME) as writer:
        assert dict(writer.scan()) == left
        ingest(db.store, NAME, {b"bulk": b"1"})  # takes the writer's next slot
        assert writer.put("next", b"works").lsn > lsns[-1]
    fold(db, NAME)
    everything = {**left, b"bulk": b"1", b"next": b"works"}
    assert dict(db.reader(NAME).scan()) == everything
    with db.writer(NAME) as writer:
        assert dict(writer.scan()) == everything
    assert db.store.get(USERS.wal_object(lsns[1])), "it stays in its slot"


def test_H17_a_reader_drops_a_row_that_a_repair_has_skipped(db):
    """H17: it had read the object before that was damaged; all readers show the same rows."""
    lsns = written(db, 4)
    reader = db.reader(NAME)
    assert len(dict(reader.scan())) == 4
    flip(db, USERS.wal_object(lsns[1]))
    repaired(db, skipped_lsns=(lsns[1],))
    reader.refresh()
    assert dict(reader.scan()) == {b"k0": b"v0", b"k2": b"v2", b"k3": b"v3"}


def test_H27_recovery_returns_a_typed_report(db):
    """H27: the report of an opening is available, and its numbers are consistent."""
    with db.writer(NAME) as writer:
        assert writer.recovery.applied == 0
    lsns = written(db, 3)
    with db.writer(NAME) as writer:
        report = writer.recovery
        assert (report.first_lsn, report.applied, report.voided, report.ignored) == (1, 3, 0, 0)
        assert report.last_lsn > lsns[-1]
        assert report.seconds >= 0


@pytest.mark.parametrize("length", [0, 1, 2**31, 2**32 - 1])
def test_H27_a_wrong_length_is_fatal(db, length):
    """H27: a corrupt length field in the middle of the log: no opening that "succeeds"."""
    lsns = written(db, 3)
    key = USERS.wal_object(lsns[1])
    body = db.store.get(key)
    db.store.put(key, body[:16] + length.to_bytes(4, "little") + body[20:])
    with pytest.raises(CorruptionError) as caught:
        db.writer(NAME)
    assert caught.value.context["object"] == key
    with pytest.raises(CorruptionError):
        fold(db, NAME)
    assert HeadFinder(db.store, USERS).find().manifest.wal_floor == 1, "nothing was folded past it"


# --- manifests ------------------------------------------------------------------------


def folded(db):
    """Make a namespace whose head names a segment; return the head."""
    with db.writer(NAME) as writer:
        writer.put("a", b"1")
        fold(db, NAME)
        writer.put("b", b"2")
    return HeadFinder(db.store, USERS).find().manifest


def test_H18_a_writer_never_falls_back(db):
    """H18: opening for writing names the damaged manifest and asks for repair; so does a fold."""
    head = folded(db)
    key = USERS.manifest(head.generation)
    flip(db, key)
    before = sorted(info.key for info in db.store.list())
    for attempt in (lambda: db.writer(NAME), lambda: fold(db, NAME)):
        with pytest.raises(CorruptionError, match="newest manifest is damaged") as caught:
            attempt()
        assert caught.value.context["object"] == key
        assert "repair" in caught.value.hint
    assert sorted(info.key for info in db.store.list()) == before, "nothing was written"


def test_H18_a_reader_falls_back_loudly(db):
    """H18: it serves the generation before, and says so by attribute, repr and event."""
    head = folded(db)
    flip(db, USERS.manifest(head.generation))
    events = reported(db)
    reader = db.reader(NAME)
    assert dict(reader.scan()) == {b"a": b"1", b"b": b"2"}
    assert reader.damage.context["object"] == USERS.manifest(head.generation)
    assert "damaged" in repr(reader)
    assert f"generation {head.generation - 1}," in repr(reader)
    assert [event.name for event in events] == ["damaged_manifest"]
    assert events[0].fields["served_generation"] == head.generation - 1
    reader.refresh()
    assert len(events) == 1, "reported once"


def test_H18_after_a_sweep_the_generation_before_is_not_enough(db):
    """H18: what only g−1 needs is gone: reads that need it say so, none is quietly short."""
    with db.writer(NAME) as writer:
        writer.put("a", b"1")
        fold(db, NAME)
    before = HeadFinder(db.store, USERS).find().manifest
    with db.writer(NAME) as writer:  # two generations on, as after a compaction
        writer.put("b", b"2")
    head = HeadFinder(db.store, USERS).find().manifest
    db.store.delete(USERS.segment(before.segments[0].id))  # swept, once g took its place
    flip(db, USERS.manifest(head.generation))
    reader = db.reader(NAME)
    assert reader.damage is not None
    with pytest.raises(CorruptionError, match=f"though generation {head.generation - 1} needs it"):
        reader.get("a")
    with pytest.raises(CorruptionError, match="needs it"):
        list(reader.scan())


def test_H18_a_warm_reader_stays_where_it_is(db):
    """H18: its memory is newer than any state it could fall back to."""
    head = folded(db)
    reader = db.reader(NAME, list_interval_s=0)
    flip(db, USERS.manifest(head.generation))
    reader.refresh()
    assert f"generation {head.generation}," in repr(reader)
    assert reader.damage is not None
    with pytest.raises(CorruptionError):
        db.writer(NAME)
    assert dict(reader.scan()) == {b"a": b"1", b"b": b"2"}


@pytest.mark.parametrize("list_interval_s", [0, 60])
def test_H18_a_warm_reader_moves_on_to_the_newest_intact_one(db, list_interval_s):
    """H18: its state may be older than that, and its log was folded and swept since."""
    with db.writer(NAME) as writer:
        writer.put("a", b"1")
        reader = db.reader(NAME, list_interval_s=list_interval_s)
        writer.put("b", b"2")
        fold(db, NAME)
        intact = HeadFinder(db.store, USERS).find().manifest
    for lsn in range(1, intact.wal_floor - 1):
        db.store.delete(USERS.wal_object(lsn))
    with db.writer(NAME):  # its epoch is in one more generation
        pass
    flip(db, USERS.manifest(intact.generation + 1))
    for _ in range(2):
        reader.refresh()
        assert reader.damage is not None
        assert f"generation {intact.generation}," in repr(reader)
        assert dict(reader.scan()) == {b"a": b"1", b"b": b"2"}


def test_H18_a_repair_ends_it(db):
    """H18: generation g+1 with `skipped: [g]`: warm and cold, everyone passes over g."""
    head = folded(db)
    warm = HeadFinder(db.store, USERS)
    warm.find()
    reader = db.reader(NAME)
    with db.writer(NAME) as writer:
        writer.put("c", b"3")
    damaged = HeadFinder(db.store, USERS).find().manifest.generation
    assert damaged > head.generation
    flip(db, USERS.manifest(damaged))
    reader.refresh()
    assert reader.damage is not None
    published = repaired(db, skipped_generations=(damaged,))
    assert warm.find().manifest.generation == published.generation
    assert HeadFinder(db.store, USERS).find().manifest.generation == published.generation
    reader.refresh()
    assert reader.damage is None
    with db.writer(NAME) as writer:
        writer.put("d", b"4")
    fold(db, NAME)
    expected = {b"a": b"1", b"b": b"2", b"c": b"3", b"d": b"4"}
    assert dict(db.reader(NAME).scan()) == expected
    reader.refresh()
    assert dict(reader.scan()) == expected


# --- segments -------------------------------------------------------------------------


def test_a_segment_that_the_head_names_and_that_is_missing_is_damage(db):
    """It was not swept, since the head needs it: CorruptionError, with the object's name."""
    head = folded(db)
    key = USERS.segment(head.segments[0].id)
    db.store.delete(key)
    reader = db.reader(NAME)
    with pytest.raises(CorruptionError, match="needs it") as caught:
        reader.get("a")
    assert caught.value.context["object"] == key
    assert reader.get("b") == b"2", "what does not need it is served"


# --- in transit -----------------------------------------------------------------------


def opened(tmp_path, *rules):
    """Open a database whose store fails by rule."""
    return reef.Database(open_store(tmp_path, faults=rules, retry=QUICK))


@pytest.mark.parametrize("fault", [Fault.SHORT_READ, Fault.WRONG_BYTES])
def test_H8_bodies_damaged_in_transit_are_read_again(tmp_path, fault):
    """H8: a truncated or garbled log object, manifest or segment range is read again."""
    with reef.open(str(tmp_path)).writer(NAME) as writer:
        writer.put("a", b"1")
        fold(reef.open(str(tmp_path)), NAME)
        writer.put("b", b"2")
    rules = [Rule(fault, "get", f"*/{kind}/*", times=1) for kind in ("wal", "manifest")]
    rules.append(Rule(fault, "get_range", "*/segments/*", times=1))  # the tail
    rules.append(Rule(fault, "get_range", "*/segments/*", times=1, skip=1))  # a group
    db = opened(tmp_path, *rules)
    assert dict(db.reader(NAME).scan()) == {b"a": b"1", b"b": b"2"}
    assert all(rule.struck == 1 for rule in rules)


def test_H8_truncated_for_ever_is_a_typed_error(tmp_path):
    """H8: a log object is damage then, a segment's range a store that cannot be read from."""
    with reef.open(str(tmp_path)).writer(NAME) as writer:
        writer.put("a", b"1")
        fold(reef.open(str(tmp_path)), NAME)
        lsn = writer.put("b", b"2").lsn
    short = opened(tmp_path, Rule(Fault.SHORT_READ, "get", f"*{lsn:020}.wal"))
    with pytest.raises(CorruptionError):
        short.writer(NAME)
    assert short.reader(NAME).damage is not None
    short = opened(tmp_path, Rule(Fault.SHORT_READ, "get_range", "*/segments/*"))
    with pytest.raises(UnavailableError) as caught:
        short.reader(NAME).get("a")
    assert caught.value.kind is ErrorKind.SHORT_READ


def test_H8_a_range_past_the_end_is_not_served(tmp_path):
    """H8: a segment that is shorter than the manifest says gives an error, not fewer rows."""
    db = reef.open(str(tmp_path))
    head = folded(db)
    path = tmp_path / USERS.segment(head.segments[0].id)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises((CorruptionError, UnavailableError, InvalidInputError)):
        db.reader(NAME).get("a")


def test_H29_a_fold_whose_segment_is_short_is_not_published(tmp_path):
    """H29: an upload that says "done" and left fewer bytes, or none: the head stays as it was."""

    class Cuts(Wrapper):
        """Loses the end of every segment, or all of it."""

        keep = 10

        def upload(self, key, parts):
            whole = b"".join(parts)
            self.inner.upload(key, [whole[: self.keep]])
            if not self.keep:
                self.inner.delete(key)
            return len(whole)

    db = reef.open(str(tmp_path))
    with db.writer(NAME) as writer:
        writer.put("a", b"1")
    before = HeadFinder(db.store, USERS).find().manifest
    for keep in (10, 0):
        cutting = Cuts(stores.open(str(tmp_path)))
        cutting.keep = keep
        with pytest.raises(reef.ReefError):
            fold(reef.Database(cutting), NAME)
        assert HeadFinder(db.store, USERS).find().manifest == before
    assert fold(db, NAME).published
    assert db.reader(NAME).get("a") == b"1"
