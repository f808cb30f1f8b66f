"""Histories of a log, what each step makes of it, and the judgement of a disk after a crash.

A log after a crash must be the one that its last acknowledged change left, or the one that the
change under way would have left: nothing in between, nothing older, and ready for more.
"""

from dataclasses import dataclass, field

from reef.locallog import LocalLog, LogEntry
from reef.locallog.frames import FrameType, frames
from reef.locallog.metastore import read_meta_store
from reef.testing.log_disk import LogDisk, later_runtime

PATH = "/log"


@dataclass(frozen=True)
class Model:
    """What a log holds, in plain values."""

    entries: tuple = ()
    stable: tuple = ()

    @property
    def next_index(self):
        return self.entries[-1].index + 1 if self.entries else 1


@dataclass
class Run:
    """A history that was played on a disk, with the log as it was after each change."""

    disk: LogDisk
    models: list[Model] = field(default_factory=lambda: [Model()])

    def allowed(self, done):
        """Return what the log may be if the power fails after so many steps."""
        marks = [step.mark for step in self.disk.trace[:done] if step.what == "mark"]
        acknowledged = max((number for word, number in marks if word == "acked"), default=0)
        begun = max((number for word, number in marks if word == "begun"), default=0)
        return [self.models[acknowledged], self.models[begun]]


def entry(index, size=20, term=1):
    """Return an entry whose bytes tell where it belongs."""
    return LogEntry(index, term, data=(b"%d." % index * size)[:size], extensions=b"e" * (index % 3))


def look(log):
    """Return what a log holds."""
    return Model(tuple(log.entries()), tuple(sorted(log._meta.stable.items())))


def open_log(disk, segment_bytes=400):
    """Open a log on a simulated disk; rotations happen when somebody waits for them."""
    return LocalLog(PATH, segment_bytes, files=disk, runtime=later_runtime())


def play(changes, segment_bytes=400, content=None):
    """Play a history; a change is a function of the log and the model, and returns the next."""
    run = Run(LogDisk(content))
    log = open_log(run.disk, segment_bytes)
    run.models[0] = look(log)
    for number, change in enumerate(changes, start=1):
        act, model = change(run.models[-1])
        run.models.append(model)
        run.disk.mark(("begun", number))
        act(log)
        run.disk.mark(("acked", number))
        assert look(log) == model, f"change {number} did something else"
    log.close()
    return run


def judge(run, done, content, segment_bytes=400):
    """Open what a crash has left: it is one of the allowed, takes more, and keeps it."""
    disk = LogDisk(content)
    log = open_log(disk, segment_bytes)
    found = look(log)
    allowed = run.allowed(done)
    assert found in allowed, f"after {done} steps: {found} is none of {allowed}"
    assert not log.recovery.damaged
    more = entry(found.next_index, 30, term=99)
    log.store_log(more)
    log.set(b"after", b"crash")
    log.close()
    again = open_log(disk, segment_bytes)
    assert tuple(again.entries()) == (*found.entries, more)
    assert again.get(b"after") == b"crash"
    again.close()
    check_shape(disk)
    return disk


def check_shape(disk):
    """Sealed segments end with their one index and its commit; the tail has none."""
    state, _ = read_meta_store(disk, PATH)
    for info in state.segments:
        file = disk.open(info.name, writable=False)
        found = list(frames(file.read, file.size()))
        indexes = [n for n, frame in enumerate(found) if frame.type == FrameType.INDEX]
        assert indexes == ([len(found) - 2] if info.sealed else []), info
        if info.sealed:
            assert found[-2].offset + 8 == info.index_start


# --- changes ------------------------------------------------------------------------


def append(*sizes, start=None, term=1):
    """Append a batch of entries of these sizes."""

    def change(model):
        first = start if start is not None and not model.entries else model.next_index
        batch = tuple(entry(first + place, size, term) for place, size in enumerate(sizes))
        return lambda log: log.store_logs(batch), Model(model.entries + batch, model.stable)

    return change


def remove_head(count):
    """Remove the first entries."""

    def change(model):
        left = model.entries[count:]
        gone = model.entries[:count]
        if not gone:
            return lambda log: log.delete_range(1, 0), model
        low, high = gone[0].index, gone[-1].index
        return lambda log: log.delete_range(low, high), Model(left, model.stable)

    return change


def remove_tail(count):
    """Remove the last entries."""

    def change(model):
        left, gone = model.entries[: len(model.entries) - count], model.entries[-count:]
        if not left or not gone:
            return lambda log: log.delete_range(1, 0), model
        low, high = gone[0].index, gone[-1].index
        return lambda log: log.delete_range(low, high), Model(left, model.stable)

    return change


def set_stable(key, value):
    """Keep a value, or remove one."""

    def change(model):
        stable = {**dict(model.stable), key: value}
        if value is None:
            del stable[key]
        return lambda log: log.set(key, value), Model(model.entries, tuple(sorted(stable.items())))

    return change
