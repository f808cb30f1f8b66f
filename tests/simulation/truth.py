"""The truth about a namespace: every object that was ever put into its log, swept or not.

A slot counts by what was first put into it. What lands there later, after the first was
collected, lies below the floor and counts for nobody. The rules of the log, applied from its
very beginning, then say what the state is at every LSN, and what of each write became of it.
"""

from dataclasses import dataclass, field

from reef.engine.log_rules import LogReader, Verdict, contiguous
from reef.formats.batch import OpKind, decode_ops
from reef.formats.manifest import Manifest
from reef.formats.schema import DEFAULT_SCHEMA
from reef.formats.wal_object import WalKind, WalObject
from reef.paths import Namespace, number_of


@dataclass
class Judged:
    """A log at rest, by its rules."""

    headers: dict[int, object] = field(default_factory=dict)
    verdicts: dict[int, Verdict] = field(default_factory=dict)
    states: list[dict[bytes, bytes]] = field(default_factory=lambda: [{}])
    """The rows as of each LSN; at 0 there are none."""
    applied: dict[bytes, list[int]] = field(default_factory=dict)
    """Where a value was put by an object that applies. Values are unique to a write."""
    keys: dict[str, list[int]] = field(default_factory=dict)
    """Where an idempotency key was used by an object that applies."""

    @property
    def last_lsn(self):
        return len(self.states) - 1


class Truth:
    """Watches a bucket from before anything is in it."""

    def __init__(self, sim, name):
        self._wal = Namespace(name).wal
        self._bodies = {}
        self.staged = {}
        """Rows of the segments that bulk jobs have staged, by segment id."""
        self._replacing = set()
        create = sim.bucket.create

        def watched(key, body):
            result = create(key, body)
            if result.landed:
                self._note(key, body)
            return result

        sim.bucket.create = watched
        sim.appeared = self._note  # where objects are made by a copy

    def _note(self, key, body):
        if key.startswith(self._wal):
            self._bodies.setdefault(number_of(key), body)

    def note_staged(self, segments, rows, *, replaces=False):
        """Note what a job has staged, in one segment or more, before it commits."""
        for segment in segments:
            low, high = segment.min_key, segment.max_key
            self.staged[segment.id] = {k: v for k, v in rows.items() if low <= k <= high}
            if replaces:
                self._replacing.add(segment.id)

    def judge(self):
        """Return what the log amounts to."""
        judged = Judged()
        rules = LogReader(Manifest(generation=1, write_id="", published_at_ms=0))
        for lsn in contiguous(self._bodies, 1):
            found = WalObject.decode(self._bodies[lsn], f"LSN {lsn}")
            verdict = rules.judge(found.header).verdict
            judged.headers[lsn], judged.verdicts[lsn] = found.header, verdict
            state = dict(judged.states[-1])
            if verdict is Verdict.APPLIES:
                self._apply(judged, found, state)
            judged.states.append(state)
        return judged

    def _apply(self, judged, found, state):
        header = found.header
        if header.kind is WalKind.INGEST:
            if any(segment.id in self._replacing for segment in header.job.segments):
                state.clear()
            for segment in header.job.segments:
                _put_all(judged, header.lsn, state, self.staged[segment.id].items())
            if header.job.key is not None:
                judged.keys.setdefault(header.job.key, []).append(header.lsn)
            return
        for record in found.records:
            ops = decode_ops(record, DEFAULT_SCHEMA, f"LSN {header.lsn}")
            values = (ops.fields or {}).get(1)
            values = values.to_pylist() if values is not None else [None] * len(ops)
            rows = zip(ops.kinds.to_pylist(), ops.keys.to_pylist(), values, strict=True)
            for kind, key, value in rows:
                if kind == OpKind.PUT:
                    _put_all(judged, header.lsn, state, [(key, value)])
                else:
                    assert kind == OpKind.DELETE
                    state.pop(key, None)
        for batch in header.batches:
            if batch.key is not None:
                judged.keys.setdefault(batch.key, []).append(header.lsn)


def _put_all(judged, lsn, state, rows):
    for key, value in rows:
        state[key] = value
        judged.applied.setdefault(value, []).append(lsn)
