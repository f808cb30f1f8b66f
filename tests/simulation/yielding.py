"""Yield points on every line: other fibers may run between any two lines of chosen modules.

The simulator switches at store calls, locks and waits. A read of rows in memory has none of
these, and yet another thread of the process may run between any two of its lines. Within this
context a fiber may be switched away from at each line of the read path, with a chance that is
drawn once for each history; and a read may stay at one of its lines while others commit. Nothing
switches while a leaf lock is held: a fiber that wants the lock would have to wait for its holder
anyway, which is the same as to run later.
"""

import sys
from contextlib import contextmanager

import reef.runtime
from reef.engine.handles import local_writer, readable, transaction, writer
from reef.engine.local import buffer, uploader
from reef.engine.log import tail
from reef.engine.read import caches, memtable, runs, view

TRACED = frozenset(
    module.__file__
    for module in (
        *(readable, writer, transaction, tail),
        *(caches, memtable, runs, view),
        *(buffer, local_writer, uploader),
    )
)
"""Modules and not paths: a module that moves must not drop out unnoticed."""
CHANCES = (1, 5, 20, 100)
"""One line in so many is a yield point."""
LINES = 60
"""About as many as a point read has."""
NAP_S = 2.0
"""So long may a read stay at one line: others commit and load meanwhile."""


class _LeafLock:
    """A leaf lock that knows that it is held. All fibers run in one thread."""

    held = 0

    def __enter__(self):
        _LeafLock.held += 1

    def __exit__(self, *error):
        _LeafLock.held -= 1


class Lines:
    """Yields on lines; one for each history."""

    def __init__(self, sim, one_in=None):
        self._sim = sim
        self._one_in = CHANCES[sim.choices.pick(len(CHANCES))] if one_in is None else one_in
        self._left = {}
        """By fiber: after how many lines it stays where it is for a while."""

    def stay_at_one(self, line=None):
        """Let the calling fiber stay at one of its next lines."""
        line = 1 + self._sim.choices.pick(LINES) if line is None else line
        self._left[self._sim.scheduler.current] = line

    def has_stayed(self):
        """Whether the calling fiber has come to that line."""
        return not self._left.pop(self._sim.scheduler.current)

    def on_call(self, frame, event, argument):
        return self._on_line if frame.f_code.co_filename in TRACED else None

    def _on_line(self, frame, event, argument):
        """Decide here, where nothing is traced; most lines are not yield points."""
        if event == "line" and not _LeafLock.held:
            scheduler, choices = self._sim.scheduler, self._sim.choices
            fiber = scheduler.current
            left = self._left.get(fiber, 0)
            if left:
                self._left[fiber] = left - 1
            if fiber is None:
                pass
            elif left == 1:
                nap_s = choices.uniform(0.0, NAP_S) if self._one_in else NAP_S
                _traced(scheduler.park, nap_s)
            elif self._one_in and not choices.pick(self._one_in):
                _traced(scheduler.pause)
        return self._on_line


def _traced(call, *args):
    """Call from a trace function: otherwise no other fiber would be traced meanwhile."""
    sys.call_tracing(call, args)


@contextmanager
def yielding_on_every_line(sim, one_in=None):
    """Switch fibers between lines of the read path while this lasts; never, if `one_in` is 0."""
    modules = [m for n, m in list(sys.modules.items()) if n.startswith("reef.")]
    patched = [m for m in modules if getattr(m, "leaf_lock", None) is reef.runtime.leaf_lock]
    make, before, lines = reef.runtime.leaf_lock, sys.gettrace(), Lines(sim, one_in)
    _LeafLock.held = 0
    for module in patched:
        module.leaf_lock = _LeafLock
    sys.settrace(lines.on_call)
    try:
        yield lines
    finally:
        sys.settrace(before)
        for module in patched:
            module.leaf_lock = make
