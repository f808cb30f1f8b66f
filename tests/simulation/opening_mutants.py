"""The opening with one protection removed each, for the exploration to find.

Each is a context manager that changes the real code, and a case that is small and shows it.
"""

from contextlib import ExitStack, contextmanager
from unittest import mock

import msgspec

from reef.engine.commit import inflight, open_writer
from reef.engine.commit.open_writer import WriterOpening
from reef.engine.log.log import contiguous
from reef.formats.wal_object import WalHeader
from tests.simulation.opening_explored import Case

_fence = WriterOpening._fence
_load_writer = WriterOpening._load_writer
_raise_epoch = WriterOpening._raise_epoch
_replay = WriterOpening._replay


def _changed(manifest, **changes):
    return msgspec.structs.replace(manifest, **changes)


def _patched(owner, **changes):
    @contextmanager
    def mutant():
        with ExitStack() as stack:
            for name, change in changes.items():
                stack.enter_context(mock.patch.object(owner, name, change))
            yield

    return mutant


class _Anywhere(int):
    """A fence that passes for one above any floor."""

    def __ge__(self, other):
        return True

    __hash__ = int.__hash__

    def __lt__(self, other):
        return False


def _list_first(self, manifest):
    start = max(manifest.wal_floor, manifest.wal_base)
    listed = [slot.lsn for slot in self._log.filled(start)]
    self.listed = start + len(contiguous(listed, start)) - 1
    return _fence(self, manifest)


def _keep_pinned(self):
    self.pinned = _raise_epoch(self)
    return self.pinned


def _open_from_pinned(self, manifest, fences):
    floor = {"wal_floor": manifest.wal_floor, "below_floor": manifest.below_floor}
    return _load_writer(self, _changed(self.pinned, **floor), fences)


def _only_the_direct_predecessor(**words):
    return WalHeader(**{**words, "after": words["after"] and words["after"][-1:]})


MUTANTS = {
    "H11 no epoch check after fencing": (
        _patched(WriterOpening, _check_epoch=lambda *_: None),
        Case("ab", in_flight=1, wanted=1, batches=0),
    ),
    "H11 fences fewer than M": (
        _patched(
            WriterOpening,
            _fence=lambda self, manifest: _fence(self, _changed(manifest, max_parallel_writes=1)),
        ),
        Case(ack="independent"),
    ),
    "H11 replays the listing from before fencing": (
        _patched(
            WriterOpening,
            _fence=_list_first,
            _replay=lambda self, manifest, _: _replay(self, manifest, self.listed),
        ),
        Case(ack="independent"),
    ),
    "H12 no floor check after fencing": (
        _patched(WriterOpening, _fence=lambda *given: [_Anywhere(n) for n in _fence(*given)]),
        Case(in_flight=1, wanted=1, batches=1, before=2, folds=True, collects=True),
    ),
    "H45 after names the direct predecessor only": (
        _patched(inflight, WalHeader=_only_the_direct_predecessor),
        Case(in_flight=3, wanted=3, batches=3),
    ),
    "H56 M is lowered with the epoch": (
        _patched(
            open_writer,
            raise_writer_epoch=lambda head, wanted: _changed(
                head, writer_epoch=head.writer_epoch + 1, max_parallel_writes=wanted
            ),
        ),
        Case(wanted=1, ack="independent"),
    ),
    "H61 segments and window of the pinned head": (
        _patched(WriterOpening, _raise_epoch=_keep_pinned, _load_writer=_open_from_pinned),
        Case(batches=0, before=2, folds=True),
    ),
}
