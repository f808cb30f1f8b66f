"""Power failures at every step: nothing acknowledged is lost, nothing torn is shown."""

import random
from itertools import count

import pytest

from reef.errors import ClosedError
from reef.locallog import LocalLog, LogEntry
from reef.testing.disk import SimulatedDisk
from reef.testing.power_failures import crashes, random_crash
from reef.testing.runtime import deferred_runtime
from tests.support.faulty_files import FaultyFiles, Killed, killing
from tests.unit.locallog.histories import (
    PATH,
    Model,
    append,
    check_crash,
    check_shape,
    content_of,
    entry,
    open_log,
    play,
    remove_head,
    remove_tail,
    set_stable,
)

HISTORIES = {
    "append": [append(20), append(0, 30), append(7)],
    "first index": [append(5, start=1000), append(5)],
    "seal and rotate": [append(100), append(200), append(20), append(300, 10)],
    "head": [append(40, 40, 40), remove_head(1), append(300), append(9), remove_head(3)],
    "all": [append(20, 20), remove_head(2), append(20, start=77)],
    "tail": [append(30, 30, 30), remove_tail(1), append(31), remove_tail(2), append(32)],
    "tail across segments": [append(300), append(300), append(300), remove_tail(2), append(9)],
    "stable": [set_stable(b"term", b"1"), append(9), set_stable(b"term", b"2" * 5000)],
    "stable removed": [set_stable(b"a", b""), set_stable(b"b", b"1"), set_stable(b"a", None)],
}


@pytest.mark.parametrize("name", HISTORIES)
def test_every_crash_of_a_short_history(name):
    """Every subset of unsynced writes and names, and every tear: the log is old or new."""
    run = play(HISTORIES[name])
    seen = set()
    for done, content in crashes(run.disk):
        state = (tuple(sorted(content.items())), tuple(map(id, run.allowed(done))))
        if hash(state) in seen:
            continue
        seen.add(hash(state))
        check_crash(run, done, content)
    assert len(seen) > 50


@pytest.mark.parametrize("name", HISTORIES)
def test_a_process_dies_and_then_the_power_fails(name):
    """Everything that the next process reads is durable, though the first one was killed
    before its syncs: at any call, in the middle of a meta commit too."""
    for calls in count():
        disk, models = SimulatedDisk(), [Model()]
        files = FaultyFiles(disk)
        files.before = killing(calls)
        try:
            log = LocalLog(PATH, 400, files=files, runtime=deferred_runtime())
            for change in HISTORIES[name]:
                act, model = change(models[-1])
                act(log)
                models.append(model)
            log.close()
        except (Killed, ClosedError):
            disk.restart()
        else:
            break
        last = len(models) - 1
        log = open_log(disk)
        shown = content_of(log)
        assert shown in [models[-1], *HISTORIES[name][last](models[-1])[1:]]
        _check_durable(disk, shown)
        more = entry(shown.next_index, 30, term=99)
        log.store_log(more)
        _check_durable(disk, Model((*shown.entries, more), shown.stable))
        log.close()
    assert calls > 15


def _check_durable(disk, model):
    for _, content in crashes(disk, first=len(disk.trace)):
        with open_log(SimulatedDisk(content)) as log:
            assert content_of(log) == model


def test_a_seal_that_the_meta_store_does_not_know():
    """Better than the Go library: opening switches to a new tail, and the log continues."""
    disk = SimulatedDisk()
    log = open_log(disk)
    log.store_logs([LogEntry(index, data=bytes(100)) for index in range(1, 6)])
    content = disk.content()
    log.close()
    again = SimulatedDisk(content)
    log = open_log(again)
    assert log.recovery.sealed_at_open
    assert (log.first_index, log.last_index, log.get_log(5).index) == (1, 5, 5)
    log.store_log(LogEntry(6))
    log.close()
    check_shape(again)
    assert len([name for name in again.content() if name.endswith(".wal")]) == 2


def _random_change(rng, model):
    kind = rng.randrange(12)
    if kind < 6 or not model.entries:
        sizes = [rng.choice((0, 1, 7, 8, 40, 150, 700)) for _ in range(rng.randint(1, 4))]
        return append(*sizes, start=rng.randint(1, 50), term=rng.randint(1, 300))
    if kind < 8:
        return remove_head(rng.randint(1, len(model.entries)))
    if kind < 10 and len(model.entries) > 1:
        return remove_tail(rng.randint(1, len(model.entries) - 1))
    key = b"k%d" % rng.randrange(4)
    kept = key in dict(model.stable)
    return set_stable(key, None if kept and rng.randrange(2) else bytes(rng.randrange(3000)))


def _random_run(seed, length, content=None):
    rng = random.Random(seed)
    changes = [lambda model, rng=rng: _random_change(rng, model)(model) for _ in range(length)]
    return play(changes, content=content), rng


def _random_histories(seeds, length=25, failures=12):
    """Long histories; the power fails at some step, again while the log is opened, and again
    after it has continued from there."""
    for seed in seeds:
        run, rng = _random_run(seed, length)
        for _ in range(failures):
            done, content = random_crash(run.disk, rng.randrange)
            check_crash(run, done, content)
            opening = SimulatedDisk(content)
            open_log(opening).close()
            _, twice = random_crash(opening, rng.randrange)
            check_crash(run, done, twice)
            later, _ = _random_run(rng.random(), 5, twice)
            check_crash(later, *random_crash(later.disk, rng.randrange))


def test_random_crashes_of_long_histories():
    """Appends, seals, rotations, both truncations, stable values; and crashes of recoveries."""
    _random_histories(range(25))


@pytest.mark.slow
def test_many_random_crashes():
    """The same with more seeds and longer histories."""
    _random_histories(range(1000, 1150), length=60, failures=25)


def test_a_log_within_a_log():
    """A payload that is itself a log, and a torn frame header that leads the scan into it.

    It takes 264 bytes, so that without the length's second byte it seems to end after 8, where
    the inner frames begin. From their second commit on, these have valid checksums; only their
    indexes show that they do not belong here.
    """
    inner = SimulatedDisk()
    log = open_log(inner)
    for index in range(500, 504):
        log.store_log(LogEntry(index, 1, data=b"inner"))
    log.close()
    (image,) = [data for name, data in inner.content().items() if name.endswith(".wal")]
    payload = (bytes(3) + image[32:].rstrip(b"\0")).ljust(243, b"\0")

    run = play([append(10), lambda model: _append_raw(model, payload)], 4096)
    strayed = 0
    for done, content in crashes(run.disk):
        check_crash(run, done, content, 4096)
        strayed += any(b"inner" in data for data in content.values())
    assert strayed > 100


def _append_raw(model, payload):
    added = LogEntry(model.next_index, 1, data=payload)
    return lambda log: log.store_log(added), Model((*model.entries, added), model.stable)


def test_writes_of_the_same_bytes_are_separated_by_syncs():
    """The simulator rejects them: their order would matter."""
    run, _ = _random_run(7, 40)
    for done, _content in zip(range(3), crashes(run.disk), strict=False):
        assert done < 3
    disk = SimulatedDisk()
    file = disk.create("x")
    file.write(b"ab", 0)
    file.write(b"c", 1)
    with pytest.raises(AssertionError, match="twice without a sync"):
        list(crashes(disk))


def test_the_simulated_disk_is_the_real_one(tmp_path):
    """The same history leaves the same bytes on both, file by file."""
    run, _ = _random_run(3, 30)
    with LocalLog(tmp_path, 400) as log:
        for change in _replayed(3, 30):
            change(log)
        real = content_of(log)
    assert real == run.models[-1]
    names = {path.name for path in tmp_path.iterdir()}
    assert {f"{PATH}/{name}" for name in names} == run.disk.content().keys()
    for path, data in run.disk.content().items():
        if path.endswith(".wal"):
            assert (tmp_path / path.removeprefix(f"{PATH}/")).read_bytes() == data


def _replayed(seed, length):
    rng, model = random.Random(seed), Model()
    for _ in range(length):
        act, model = _random_change(rng, model)(model)
        yield act
