"""Bugs to find: each takes one protection away, as a careless change might."""

import sys
from dataclasses import replace

import msgspec

from reef.engine.commit.inflight import InflightSender
from reef.engine.commit.open_writer import WriterOpening
from reef.engine.handles.reader import Reader
from reef.formats.wal_object import WalKind
from reef.jobs.sweep.plan import SweepPlanner
from reef.manifest import edits, invariants
from reef.manifest import head as publish
from reef.manifest.dedup import DedupWindow
from reef.manifest.head import HeadFinder, ManifestHead, Publisher
from reef.stores import Outcome, WriteResult


def no_epoch_check(patch):
    """An opener does not check the epoch again after its fences."""
    patch.setattr(WriterOpening, "_check_epoch", lambda self, manifest: None)


def no_proof_of_slow_puts(patch):
    """A PUT that landed counts, however long it took."""
    patch.setattr(InflightSender, "_prove", lambda self, *_: WriteResult(Outcome.CREATED))


def no_proof_of_slow_publishes(patch):
    """A manifest that landed counts, however long it took."""

    class Trusting(ManifestHead):
        def is_quick(self, took_s):
            return True

    patch.setattr(publish, "ManifestHead", Trusting)


def folds_without_a_floor_check(patch):
    """A fold is published on whatever head there is."""
    original = edits.fold

    def fold(manifest, result):
        return original(manifest, replace(result, floor=manifest.wal_floor))

    patch.setattr(edits, "fold", fold)


def leases_before_the_cas(patch):
    """A sweep lists the leases, then condemns."""
    sweep = sys.modules["reef.jobs.sweep.job"]._Sweep
    condemn, find = sweep._condemn, sweep._find_leases
    listed = {}

    def condemn_late(self, *, force):
        listed[id(self)] = find(self)
        return condemn(self, force=force)

    def find_early(self):
        return replace(listed[id(self)], now_s=self.store.now())

    patch.setattr(sweep, "_condemn", condemn_late)
    patch.setattr(sweep, "_find_leases", find_early)


def fences_are_collected(patch):
    """A sweep takes every kind of object below the floor."""
    original = SweepPlanner._peek

    def peek(self, slots):
        found = original(self, slots)
        return {
            lsn: msgspec.structs.replace(header, kind=WalKind.BATCHES)
            if getattr(header, "kind", None) is WalKind.FENCE
            else header
            for lsn, header in found.items()
        }

    patch.setattr(SweepPlanner, "_peek", peek)


def window_without_the_tail(patch):
    """The dedup window is that of the manifest only."""
    patch.setattr(DedupWindow, "add", lambda self, header: None)


def reader_never_lists(patch):
    """A reader trusts its probes after any pause."""

    class Trusting(HeadFinder):
        def find(self, **options):
            if self._known is not None:
                self._known = ManifestHead(self._known.manifest, self._runtime.stopwatch())
            return super().find(**options)

    bind = Reader._bind

    def bind_trusting(self, heads):
        heads.__class__ = Trusting
        bind(self, heads)

    patch.setattr(Reader, "_must_list", lambda self: False)
    patch.setattr(Reader, "_bind", bind_trusting)


def publishes_condemned_segments(patch):
    """A publish does not check the condemned list."""
    patch.setattr(edits, "refuse_condemned", lambda head, ids: None)
    patch.setattr(invariants, "refuse_condemned", lambda head, ids: None)
    patch.setattr(Publisher, "_check_objects", lambda self, before, after: None)


def collected_fences_and_no_proof(patch):
    """Either alone is made up for by the other."""
    fences_are_collected(patch)
    no_proof_of_slow_puts(patch)
