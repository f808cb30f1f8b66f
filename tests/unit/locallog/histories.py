"""Histories of a log, the state after each step, and the check of a disk after a crash.

A log after a crash must be the one that its last acknowledged change left, or the one that the
change under way would have left: nothing in between, nothing older, and ready for more.
"""

from dataclasses import dataclass, field

from reef.locallog import LocalLog, LogEntry
from reef.locallog.encoding import FrameType, frames
from reef.locallog.metastore import read_meta_store
from reef.testing.disk import SimulatedDisk
from reef.testing.runtime import deferred_runtime

PATH = "/log"


@dataclass(frozen=True)
class Model:
    """Content of a log, in plain values."""

    entries: tuple = ()
    stable: tuple = ()

    @property
    def next_index(self):
        return self.entries[-1].index + 1 if self.entries else 1


@dataclass
class Run:
    """A history that was played on a disk, with the log as it was after each change."""

    disk: SimulatedDisk
    models: list[Model] = field(default_factory=lambda: [Model()])

    def allowed(self, done):
        """Return the allowed states of the log if the power fails after so many steps."""
        marks = [step.mark for step in self.disk.trace[:done] if step.kind == "mark"]
        acknowledged = max((number for word, number in marks if word == "acked"), default=0)
        begun = max((number for word, number in marks if word == "begun"), default=0)
        return [self.models[acknowledged], self.models[begun]]


def entry(index, size=20, term=1):
    """Return an entry whose bytes show where it belongs."""
    return LogEntry(index, term, data=(b"%d." % index * size)[:size], extensions=b"e" * (index % 3))


def content_of(log):
    """Return the content of a log."""
    return Model(tuple(log.entries()), tuple(sorted(log._meta.stable.items())))


def open_log(disk, segment_bytes=400):
    """Open a log on a simulated disk; rotations happen when a caller waits for them."""
    return LocalLog(PATH, segment_bytes, files=disk, runtime=deferred_runtime())


def play(changes, segment_bytes=400, content=None):
    """Play a history; a change is a function of the log and the model, and returns the next."""
    run = Run(SimulatedDisk(content))
    log = open_log(run.disk, segment_bytes)
    run.models[0] = content_of(log)
    for number, change in enumerate(changes, start=1):
        act, model = change(run.models[-1])
        run.models.append(model)
        run.disk.mark(("begun", number))
        act(log)
        run.disk.mark(("acked", number))
        assert content_of(log) == model, f"change {number} did something else"
    log.close()
    return run


def check_crash(run, done, content, segment_bytes=400):
    """Open the files after a crash: an allowed state, which accepts and keeps more entries."""
    disk = SimulatedDisk(content)
    log = open_log(disk, segment_bytes)
    content_now = content_of(log)
    allowed = run.allowed(done)
    assert content_now in allowed, f"after {done} steps: {content_now} is none of {allowed}"
    assert not log.recovery.damaged
    more = entry(content_now.next_index, 30, term=99)
    log.store_log(more)
    log.set(b"after", b"crash")
    log.close()
    again = open_log(disk, segment_bytes)
    assert tuple(again.entries()) == (*content_now.entries, more)
    assert again.get(b"after") == b"crash"
    again.close()
    check_shape(disk)
    return disk


def check_shape(disk):
    """Sealed segments end with their one index and its commit; the tail has none."""
    state, _ = read_meta_store(disk, PATH)
    for info in state.segments:
        file = disk.open(f"{PATH}/{info.name}")
        content_now = list(frames(file.read, file.size()))
        indexes = [n for n, frame in enumerate(content_now) if frame.type == FrameType.INDEX]
        assert indexes == ([len(content_now) - 2] if info.sealed else []), info
        if info.sealed:
            assert content_now[-2].offset + 8 == info.index_start


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
