"""H71: a local log that was copied, or came back from an older image of its disk.

All copies have one stream id and continue from the same LSN. Entries differ by epoch and
digest, openings by their lives; acknowledged writes of every copy arrive, or are kept and named.
"""

import msgspec
import pytest

import reef
from reef.engine.context import NamespaceContext
from reef.engine.handles.database import Database
from reef.engine.local import open as opening
from reef.engine.local.open import LocalOpening, read_pending
from reef.engine.local.stream import (
    IDENTITY,
    LIVES_MAX,
    LocalBatch,
    LogIdentity,
    encode_entry,
    find_position,
    point_of,
)
from reef.engine.log.log import Log, _is_marked
from reef.errors import CorruptionError, ErrorKind, FencedError
from reef.formats.manifest import StreamPoint
from reef.formats.schema import DEFAULT_SCHEMA
from reef.formats.wal_object import BatchHeader, WalHeader, WalKind
from reef.jobs import fold
from reef.locallog import LocalLog
from reef.manifest.dedup import LINEAGE_MAX, StreamHistory, extend_lineage
from reef.manifest.edits import new_namespace
from reef.manifest.head import HeadFinder, Publisher
from reef.paths import Namespace
from reef.stores.memory import MemoryStore
from reef.testing import Fault, Faults, Rule
from reef.testing.disk import SimulatedDisk

NAME = "users"
USERS = Namespace(NAME)
SETTINGS = {
    "durability": "local",
    "local_log": "/log",
    "background": False,
    "upload_interval_ms": 1e9,
    "local_segment_bytes": 4096,
    "write_deadline_s": 5.0,
}


@pytest.fixture
def store():
    """The bucket."""
    return MemoryStore()


def start(store, disk, **settings):
    """Return the writer of a machine with this disk."""
    db = Database(store)
    db._log_files = disk
    return db.writer(NAME, **SETTINGS, **settings)


def put(writer, name, count):
    """Acknowledge some writes under one name; return their keys."""
    keys = [f"{name}/{number:02}" for number in range(count)]
    for key in keys:
        writer.put(key, b"v")
    return keys


def kill(writer):
    """Leave a writer as a killed process leaves it."""
    writer._uploader.stop()
    writer._closed = True


def image(disk):
    """Return a copy of a disk."""
    return SimulatedDisk(disk.content())


def arrived(store):
    """Return the key of every write that ever counted, in order."""
    return [change.key.decode() for change in Database(store).reader(NAME).changes(after_lsn=0)]


def one_log(store, shared=5):
    """Return a disk with some writes that were uploaded, and known to be."""
    disk = SimulatedDisk()
    writer = start(store, disk)
    put(writer, "both", shared)
    writer.close()
    return image(disk)


def refused(store, disk):
    """Open a log that has forked; return the error."""
    before = disk.content()
    with pytest.raises(FencedError) as caught:
        start(store, disk)
    disk.restart()
    assert disk.content() == before, "a log that was refused has changed"
    return caught.value


@pytest.mark.parametrize("copied", [3, 10, 12])
@pytest.mark.parametrize("folds", [False, True])
def test_H71_a_copy_that_has_uploaded_does_not_cost_the_original_its_writes(store, copied, folds):
    """H71: fewer, as many, or more entries than the original has; in the log, or folded."""
    original = one_log(store)
    copy = image(original)
    writer = start(store, original)
    mine = put(writer, "original", 10)
    kill(writer)
    original = image(original)
    with start(store, copy) as other:
        theirs = put(other, "copy", copied)
    if folds:
        fold(Database(store), NAME)
    error = refused(store, original)
    assert error.kind is ErrorKind.LOG_FORKED
    assert (error.context["first_index"], error.context["path"]) == (6, "/log")
    report = read_pending("/log", store=store, files=original)
    assert (report.forked, report.batches, report.first_index) == (True, 10, 6)
    for applied in (10, 0):
        with start(store, original, reapply=True) as again:
            assert again.local_recovery.replayed == applied
        original = image(original)
    assert arrived(store)[5:] == [*theirs, *mine]
    with start(store, original) as again:  # it has a name of its own from now on
        put(again, "later", 1)
    with start(store, copy) as other:
        put(other, "copy later", 1)
    assert arrived(store)[-2:] == ["later/00", "copy later/00"]


def test_H71_an_older_image_continues_behind_the_uploads_of_the_newer_disk(store):
    """H71: the bucket is ahead of the log. Its entries are in the bucket, and are not applied
    again; the newer disk, with an entry that was not uploaded, is then a fork."""
    newer = SimulatedDisk()
    writer = start(store, newer)
    put(writer, "early", 3)
    older = image(newer)  # of a machine that runs: three entries, none known to be uploaded
    put(writer, "middle", 4)
    writer.flush()
    last = put(writer, "last", 1)
    kill(writer)
    with start(store, older) as restored:
        assert restored.local_recovery.uploaded_index == 7
        assert restored.local_recovery.replayed == 0
        put(restored, "restored", 2)
        assert restored.pending.first_index == 8
    assert refused(store, image(newer)).kind is ErrorKind.LOG_FORKED
    with start(store, image(newer), reapply=True):
        pass
    assert len(arrived(store)) == len(set(arrived(store))) == 10
    assert arrived(store)[-1:] == last


@pytest.mark.parametrize("fault", [Fault.FAIL_BEFORE, Fault.FAIL_AFTER])
def test_H71_a_copy_made_while_an_upload_is_in_flight(store, fault):
    """H71: whether the PUT has landed or not, what both disks have counts once."""
    rule = Rule(fault, "create", "*/wal/*", times=0)
    bucket, original = Faults(store, [rule]), SimulatedDisk()
    writer = start(bucket, original)
    shared = put(writer, "both", 3)
    rule.times = None
    with pytest.raises(reef.UnavailableError):
        writer.flush(timeout_s=0.2)
    copy = image(original)
    more = put(writer, "original", 2)
    kill(writer)
    with start(store, copy) as other:
        assert other.local_recovery.replayed == (3 if fault is Fault.FAIL_BEFORE else 0)
        theirs = put(other, "copy", 1)
    assert arrived(store) == [*shared, *theirs]
    assert refused(store, image(original)).kind is ErrorKind.LOG_FORKED
    with start(store, image(original), reapply=True):
        pass
    assert arrived(store) == [*shared, *theirs, *more]


def test_H71_copies_with_the_same_tail_upload_it_once(store):
    """H71: the same entries on two disks are one entry, not a fork."""
    original = one_log(store)
    writer = start(store, original)
    put(writer, "tail", 3)
    kill(writer)
    copy = image(original)
    with start(store, image(original)):
        pass
    with start(store, copy) as other:
        assert other.local_recovery.replayed == 0
        assert other.local_recovery.uploaded_index == 8
    assert len(arrived(store)) == 8


def test_H71_a_copy_that_had_the_role_is_another_writer(store):
    """H71: it has uploaded nothing but a conditional write, which no mark shows: the tail of the
    original is still not written over it unless that is asked for."""
    original = one_log(store)
    copy = image(original)
    writer = start(store, original)
    writer.put("both/00", b"older")
    kill(writer)
    with start(store, copy) as other:
        other.put("both/00", b"newer", when=[reef.present("both/00")])
    error = refused(store, image(original))
    assert error.kind is ErrorKind.FENCED
    assert Database(store).reader(NAME).get("both/00") == b"newer"
    with start(store, image(original), reapply=True):
        pass
    assert Database(store).reader(NAME).get("both/00") == b"older"


def test_H71_a_copy_made_within_an_opening_is_another_writer(store, monkeypatch):
    """H71: the life was noted, and the role not taken yet, when the disk was copied. The copy takes
    the role first; the original takes it back, and the copy's tail stays on its disk.

    Root: the copy kept the life that both have among its own, so that the takeover by the original
    was mistaken for an earlier opening of the copy, and its tail was written over newer rows.
    """
    original, made = one_log(store), []
    write = LogIdentity.write

    def copied(identity, log):
        write(identity, log)
        if made:
            return
        made.append(image(original))
        copy = start(store, made[0])
        copy.put("both/00", b"older")
        kill(copy)

    monkeypatch.setattr(LogIdentity, "write", copied)
    with start(store, original) as writer:
        writer.put("both/00", b"newer", when=[reef.present("both/00")])
    monkeypatch.undo()
    error = refused(store, image(made[0]))
    assert error.kind is ErrorKind.FENCED
    assert Database(store).reader(NAME).get("both/00") == b"newer"
    with start(store, image(made[0]), reapply=True):
        pass
    assert Database(store).reader(NAME).get("both/00") == b"older"


def test_H71_a_forked_log_does_not_fence_the_copy_that_runs(store):
    """H71: it is refused before it takes the role."""
    original = one_log(store)
    copy = image(original)
    writer = start(store, original)
    put(writer, "original", 2)
    kill(writer)
    running = start(store, copy)
    put(running, "copy", 2)
    running.flush()
    refused(store, image(original))
    put(running, "copy again", 1)
    running.close()
    assert arrived(store)[-1] == "copy again/00"


def test_H71_copies_of_a_fork_are_applied_once(store):
    """H71: a branch has the same name on every disk that has it; where a disk has more, only that
    is applied, and a branch may fork again."""
    original = one_log(store)
    copy = image(original)
    writer = start(store, original)
    first = put(writer, "original", 2)
    twin = image(original)
    second = put(writer, "longer", 1)
    kill(writer)
    with start(store, copy) as other:
        theirs = put(other, "copy", 4)
    with start(store, twin, reapply=True) as again:
        assert again.local_recovery.replayed == 2
        third = put(again, "twin", 1)
    with start(store, image(original), reapply=True) as again:
        assert again.local_recovery.replayed == 1
    with start(store, image(original), reapply=True) as again:
        assert again.local_recovery.replayed == 0
    assert arrived(store)[5:] == [*theirs, *first, *third, *second]


def test_H71_a_reapply_that_dies_is_repeated(store, monkeypatch):
    """H71: between the publish that names the branch and the log's own note of it."""
    original = one_log(store)
    copy = image(original)
    writer = start(store, original)
    mine = put(writer, "original", 2)
    kill(writer)
    original = image(original)
    with start(store, copy) as other:
        put(other, "copy", 2)

    def die(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(LocalOpening, "_record_known", die)
        with pytest.raises(KeyboardInterrupt):
            start(store, original, reapply=True)
    original = image(original)
    with pytest.raises(FencedError):
        start(store, original)
    original.restart()
    with start(store, original, reapply=True) as again:
        assert again.local_recovery.replayed == 2
    assert arrived(store)[-2:] == mine
    assert len(arrived(store)) == 9


def test_H71_a_reapply_that_dies_before_it_has_noted_uploads(store, monkeypatch):
    """H71: the log has its new name, and with it how far it was uploaded under the old one."""
    original = SimulatedDisk()
    writer = start(store, original)
    writer._uploader._truncate = lambda: None  # it never notes its uploads
    shared = put(writer, "both", 3)
    writer.flush()
    copy = image(original)
    mine = put(writer, "original", 2)
    kill(writer)
    original = image(original)
    with start(store, copy) as other:
        theirs = put(other, "copy", 2)

    def die(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(opening, "truncate", die)
        with pytest.raises(KeyboardInterrupt):
            start(store, original, reapply=True)
    with start(store, image(original)) as again:  # the requested upload is finished
        assert again.local_recovery.replayed == 2
    assert arrived(store) == [*shared, *theirs, *mine]


def test_H71_between_the_check_and_the_publish_a_copy_may_upload(store, monkeypatch):
    """H71: the position that decides is the one after the fences."""
    original = one_log(store)
    copy = image(original)
    writer = start(store, original)
    put(writer, "original", 2)
    kill(writer)
    checked = LocalOpening._check_claim

    def late(self, *args):
        claim = checked(self, *args)
        monkeypatch.setattr(LocalOpening, "_check_claim", checked)
        with start(store, copy) as other:
            put(other, "copy", 2)
        return claim

    monkeypatch.setattr(LocalOpening, "_check_claim", late)
    with pytest.raises(FencedError):
        start(store, image(original), reapply=True)
    assert arrived(store)[5:] == ["copy/00", "copy/01"]


def test_H71_a_receipt_is_not_resolved_by_a_copys_upload(store):
    """H71: the copy's entry has the same stream and the same index."""
    original = one_log(store)
    copy = image(original)
    writer = start(store, original)
    receipt = writer.put("original", b"1")
    with start(store, copy) as other:
        put(other, "copy", 3)
        theirs = other.put("mine", b"1")
        other.flush()
        assert other.resolve(theirs) == "committed"
    assert writer.resolve(receipt) == "unknown"
    kill(writer)


def test_H71_a_slow_put_is_not_proved_by_a_copys_mark():
    """H13, H71: an object that landed in a collected slot counts only if its own entries were
    folded; a copy's mark with the same number or a higher one proves nothing."""
    mine, theirs = StreamPoint(3, 7, b"m" * 16), StreamPoint(4, 7, b"t" * 16)
    header = WalHeader(
        lsn=1,
        kind=WalKind.BATCHES,
        epoch=3,
        writer_id="w",
        write_id="x",
        created_at_ms=0,
        marks={"s": 7},
        lineages={"s": (mine,)},
    )
    head = msgspec.structs.replace(new_namespace(DEFAULT_SCHEMA), writer_epoch=3)
    for lineage, proved in [
        ((mine,), True),
        ((theirs,), False),
        ((StreamPoint(4, 9, b"9"),), False),
        ((StreamPoint(3, 7, b"other"),), False),
        ((StreamPoint(3, 9, b"9"),), True),
        ((), False),
    ]:
        marks = {"s": lineage[-1].index if lineage else 7}
        manifest = msgspec.structs.replace(head, stream_marks=marks, stream_lineages={"s": lineage})
        assert _is_marked(manifest, header) is proved, lineage
        later = msgspec.structs.replace(manifest, writer_epoch=4)
        assert not _is_marked(later, header), "a copy may have committed the same entries"


def test_H71_an_upload_is_not_proved_by_a_copy_that_has_committed_the_same_entries(store):
    """H13, H71: a PUT of the original gets no response, a copy commits the same entry behind its
    fence and continues, and everything is folded and collected. The original must not take its
    object for committed: it would step over the fence, and acknowledge its next upload in a
    collected slot, below the floor, where it never counts."""
    bucket, original = Faults(store), SimulatedDisk()
    writer = start(bucket, original, max_parallel_writes=1)
    shared = put(writer, "both", 1)
    bucket.rules.append(Rule(Fault.FAIL_BEFORE, "create", "*/wal/*"))
    with pytest.raises(reef.UnavailableError):
        writer.flush(timeout_s=0.2)
    copy = image(original)
    more = put(writer, "original", 1)
    with start(store, copy, max_parallel_writes=1) as other:
        assert other.local_recovery.replayed == 1
        other.flush()
        theirs = put(other, "copy", 1)  # in a slot of its own: the last one is not collected
    fold(Database(store), NAME)
    collect_batches(store)
    bucket.rules.clear()
    with pytest.raises(reef.OutcomeUnknownError):
        writer.flush()
    kill(writer)
    original = image(original)
    assert refused(store, original).kind is ErrorKind.LOG_FORKED
    assert read_pending("/log", store=store, files=original).batches == len(more)
    with start(store, original, reapply=True):
        pass
    rows = [key.decode() for key, _ in Database(store).reader(NAME).scan()]
    assert sorted(rows) == sorted([*shared, *theirs, *more])


def collect_batches(store):
    """Delete the batches below the floor, but for the last slot: as a sweep does after a grace."""
    floor = HeadFinder(store, USERS).find().manifest.wal_floor
    log = Log(store, USERS)
    for slot in log.filled(1):
        if slot.lsn < floor - 1 and log.read(slot.lsn).header.kind is WalKind.BATCHES:
            store.delete(USERS.wal_object(slot.lsn))


def forget_lineages(store, disk):
    """Leave bucket and log as a release leaves them that knows neither lineages nor lives."""
    fold(Database(store), NAME)
    Publisher(store, USERS).publish(
        lambda head: msgspec.structs.replace(head, stream_lineages={}, writer_life="")
    )
    with LocalLog("/log", 4096, files=disk) as log:
        identity = msgspec.json.decode(log.get(IDENTITY), type=LogIdentity)
        log.set(IDENTITY, msgspec.json.encode(msgspec.structs.replace(identity, lives=())))
    return image(disk)


def test_H71_marks_that_are_plain_integers_still_open(store):
    """H71: bucket and log of an older release; the tail is applied, and has a lineage then."""
    disk = SimulatedDisk()
    writer = start(store, disk)
    put(writer, "uploaded", 3)
    writer.flush()
    put(writer, "tail", 2)
    kill(writer)
    disk = forget_lineages(store, image(disk))
    copy = image(disk)
    with start(store, disk) as again:
        assert again.local_recovery.uploaded_index == 3
        assert again.local_recovery.replayed == 2
        put(again, "new", 1)
    fold(Database(store), NAME)
    head = HeadFinder(store, USERS).find().manifest
    assert [point.index for point in head.stream_lineages[again._buffer.identity.stream]] == [5, 6]
    with start(store, copy) as other:
        assert other.local_recovery.replayed == 0
    assert len(arrived(store)) == 6


def test_H71_a_log_that_is_damaged_takes_no_role(store):
    """H27, H71: a writer that runs elsewhere is not fenced by a disk that cannot be read."""
    disk = one_log(store)
    writer = start(store, disk)
    put(writer, "tail", 30)
    kill(writer)
    content = disk.content()
    running = Database(store).writer(NAME, background=False)
    name = sorted(name for name in content if name.endswith(".wal"))[0]
    damaged = bytearray(content[name])
    damaged[damaged.index(b"tail/07")] ^= 1
    with pytest.raises(CorruptionError):
        start(store, SimulatedDisk({**content, name: bytes(damaged)}))
    running.put("a", b"1")
    running.close()


def test_H71_an_opening_that_dies_with_the_role_is_repeated(store, monkeypatch):
    """H71: the life is in the log before the role is taken with it. So an opening that died right
    after its publish was this log's own, and the next one continues without being asked to."""
    disk = one_log(store)
    writer = start(store, disk)
    mine = put(writer, "mine", 2)
    kill(writer)
    disk = image(disk)

    def die(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(LocalOpening, "_position", die)
        with pytest.raises(KeyboardInterrupt):
            start(store, disk)
    with start(store, image(disk)) as again:
        assert again.local_recovery.replayed == 2
    assert arrived(store)[5:] == mine


def test_H71_the_life_that_has_the_role_is_never_forgotten():
    """H71: however many openings died since, without the role: one more is not a takeover."""
    identity = LogIdentity("log", NAME, "memory:").born("holder")
    for number in range(3 * LIVES_MAX):
        identity = identity.born(f"died/{number}", held="holder")
    assert identity.lives[0] == "holder"
    assert len(identity.lives) <= LIVES_MAX + 1


def test_H71_a_digest_covers_all_entries_before_it():
    """H71: two copies with the same entry behind different ones do not have the same log."""
    batch = LocalBatch(b"record", BatchHeader(1, None, None), 1)
    point = point_of(encode_entry(7, 3, batch, 0, b"history one"))
    assert point_of(encode_entry(7, 3, batch, 0, b"history one")) == point
    other = point_of(encode_entry(7, 3, batch, 0, b"history two"))
    assert (other.epoch, other.index) == (point.epoch, point.index)
    assert other.digest != point.digest


@pytest.mark.parametrize("before", [b"the same entry 5", b"another entry 5!"])
def test_H71_the_entry_behind_the_mark_names_the_one_before_it(before):
    """H71: the entry at the mark was released from the disk. The next one has its digest, and so
    shows whether the entry that was committed there is this log's own."""
    batch = LocalBatch(b"record", BatchHeader(1, None, None), 1)
    entry = encode_entry(6, 2, batch, 0, before)
    history = StreamHistory(5, (StreamPoint(1, 5, b"the same entry 5"),))

    def entries(first):
        return [entry] if first <= entry.index else []

    histories = {"log": history}
    found = find_position(entries, lambda name: histories.get(name, StreamHistory()), "log", 5)
    assert found.uploaded == 5
    assert found.is_forked == (before != b"the same entry 5")


def test_H71_a_lineage_keeps_the_last_epochs():
    """H71: an entry of an epoch that is not remembered any more is not taken for committed."""
    points = [StreamPoint(epoch, 10 * epoch, b"%d" % epoch) for epoch in range(1, 30)]
    lineage = ()
    for point in points:
        lineage = extend_lineage(lineage, (point,))
    history = StreamHistory(290, lineage)
    assert len(lineage) == LINEAGE_MAX
    assert history.has(29, 281)
    assert not history.has(28, 281)
    assert history.has(14, 135)
    assert not history.has(5, 45), "its epoch is forgotten: nothing proves it"


def test_a_takeover_between_the_check_and_the_publish(store, monkeypatch):
    """A rival opens after the opener has read the head: the publish itself checks the claim, and
    the tail is not written over the rival's rows."""
    disk = one_log(store)
    writer = start(store, disk)
    writer.put("both/00", b"older")
    kill(writer)
    checked = LocalOpening._check_claim

    def late(self, *args):
        claim = checked(self, *args)
        with Database(store).writer(NAME, background=False) as rival:
            rival.put("both/00", b"newer")
        return claim

    with monkeypatch.context() as patch:
        patch.setattr(LocalOpening, "_check_claim", late)
        with pytest.raises(FencedError, match="another writer has taken over"):
            start(store, image(disk))
    assert Database(store).reader(NAME).get("both/00") == b"newer"
    assert read_pending("/log", store=store, files=image(disk)).batches == 1


def test_positions_noted_in_the_log_are_not_read_from_the_bucket(store):
    """After a takeover with everything noted as uploaded, the bucket's log is not read twice."""
    disk = one_log(store)
    Database(store).writer(NAME, background=False).close()
    reads = []

    class Counting(Log):
        def filled(self, first):
            reads.append(first)
            return super().filled(first)

    class CountingContext(NamespaceContext):
        @property
        def log(self):
            return Counting(self.store, self.names)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(opening, "NamespaceContext", CountingContext)
        start(store, disk).close()
    assert reads == []
