"""The truth about a name: every object that was ever put into its logs, swept or not.

A slot counts by the object that was first put into it. One that lands there later, after the
first was collected, is below the floor and counts for no reader. The rules of the log, applied
here from its very beginning and written down a second time, then give the state at every LSN
and the fate of each write.

A name that was dropped and created again has several lives: each has a log of its own, below a
prefix of its own, or behind a base that its manifests name.
"""

from dataclasses import dataclass, field

from reef.engine.log_rules import Verdict, contiguous
from reef.formats.batch import OpKind, decode_ops
from reef.formats.manifest import decode_manifest
from reef.formats.schema import DEFAULT_SCHEMA
from reef.formats.wal_object import WalKind, WalObject
from reef.paths import number_of

WAL = "/wal/"
MANIFEST = "/manifest/"


@dataclass
class Judged:
    """A log at rest, by its rules."""

    prefix: str = ""
    base: int = 1
    headers: dict[int, object] = field(default_factory=dict)
    verdicts: dict[int, Verdict] = field(default_factory=dict)
    states: dict[int, dict[bytes, bytes]] = field(default_factory=dict)
    """The rows as of each LSN; there are none before the first."""
    applied: dict[bytes, list[int]] = field(default_factory=dict)
    """Where a value was put by an object that applies. Values are unique to a write."""
    keys: dict[str, list[int]] = field(default_factory=dict)
    """Where an idempotency key was used by an object that applies."""
    changed: dict[int, set[bytes]] = field(default_factory=dict)
    """The keys of rows that an object which applies has changed."""

    @property
    def last_lsn(self):
        return self.base - 1 + len(self.headers)

    def lsn_of(self, write_id):
        """Return where an object is, or None if this log has never had it."""
        return next((lsn for lsn, h in self.headers.items() if h.write_id == write_id), None)


class Rules:
    """The rules of the log, in their plainest form."""

    def __init__(self, base):
        self._base, self._ids, self._open, self._keys = base, {}, set(), set()

    def judge(self, header):
        """Return what the next object amounts to."""
        verdict = Verdict.EMPTY
        if header.kind is WalKind.BATCHES:
            verdict = Verdict.VOID if self._is_void(header) else Verdict.APPLIES
        elif header.kind is WalKind.INGEST:
            is_open = header.job.id in self._open
            new = header.job.key is None or header.job.key not in self._keys
            verdict = Verdict.APPLIES if is_open and new else Verdict.IGNORED
        if header.kind is WalKind.BEGIN:
            self._open.add(header.job.id)
        elif header.kind in (WalKind.INGEST, WalKind.ABORT):
            self._open.discard(header.job.id)
        self._ids[header.lsn] = header.write_id
        if verdict is Verdict.APPLIES:
            self._keys.update(keys_of(header))
        return verdict

    def _is_void(self, header):
        expected = header.after or ()
        first = header.lsn - len(expected)
        slots = [(first + place, write_id) for place, write_id in enumerate(expected)]
        return any(self._ids.get(lsn) != write_id for lsn, write_id in slots if lsn >= self._base)


def keys_of(header):
    """Return the idempotency keys that an object commits."""
    keys = [batch.key for batch in header.batches]
    keys += [header.job.key] if header.job is not None else []
    return [key for key in keys if key is not None]


class Truth:
    """Watches a bucket from before anything is in it."""

    def __init__(self, sim, name):
        self._root = f"/{name}/"
        self._bodies = {}
        """By prefix and LSN: the first object there was."""
        self._bases = {}
        """By prefix: the first LSNs of the lives below it."""
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
        if self._root not in f"/{key}":
            return
        if WAL in key:
            prefix = key.partition(WAL)[0]
            self._bodies.setdefault(prefix, {}).setdefault(number_of(key), body)
        elif MANIFEST in key:
            prefix = key.partition(MANIFEST)[0]
            base = max(1, decode_manifest(body, key).wal_base)
            self._bases.setdefault(prefix, set()).add(base)

    def note_staged(self, segments, rows, *, replaces=False):
        """Note what a job has staged, in one segment or more, before it commits."""
        for segment in segments:
            low, high = segment.min_key, segment.max_key
            self.staged[segment.id] = {k: v for k, v in rows.items() if low <= k <= high}
            if replaces:
                self._replacing.add(segment.id)

    def judge(self):
        """Return what the log of a name with one life amounts to."""
        (judged,) = self.lives() or [Judged()]
        return judged

    def lives(self):
        """Return what the log of each life amounts to."""
        lives = []
        for prefix in sorted(self._bodies.keys() | self._bases.keys()):
            bases = sorted(self._bases.get(prefix) or {1})
            for base, end in zip(bases, [*bases[1:], None], strict=True):
                lives.append(self._judge_life(prefix, base, end))
        return lives

    def _judge_life(self, prefix, base, end):
        judged = Judged(prefix, base, states={base - 1: {}})
        bodies, rules = self._bodies.get(prefix, {}), Rules(base)
        for lsn in contiguous((n for n in bodies if end is None or n < end), base):
            found = WalObject.decode(bodies[lsn], f"LSN {lsn}")
            verdict = rules.judge(found.header)
            judged.headers[lsn], judged.verdicts[lsn] = found.header, verdict
            judged.states[lsn] = dict(judged.states[lsn - 1])
            if verdict is Verdict.APPLIES:
                self._apply(judged, found, judged.states[lsn])
                for key in keys_of(found.header):
                    judged.keys.setdefault(key, []).append(lsn)
        return judged

    def _apply(self, judged, found, state):
        header = found.header
        changed = judged.changed.setdefault(header.lsn, set())
        if header.kind is WalKind.INGEST:
            if any(segment.id in self._replacing for segment in header.job.segments):
                state.clear()
            for segment in header.job.segments:
                _put_all(judged, header.lsn, state, self.staged[segment.id].items())
                changed.update(self.staged[segment.id])
            return
        for record in found.records:
            ops = decode_ops(record, DEFAULT_SCHEMA, f"LSN {header.lsn}")
            values = (ops.fields or {}).get(1)
            values = values.to_pylist() if values is not None else [None] * len(ops)
            rows = zip(ops.kinds.to_pylist(), ops.keys.to_pylist(), values, strict=True)
            for kind, key, value in rows:
                changed.add(key)
                if kind == OpKind.PUT:
                    _put_all(judged, header.lsn, state, [(key, value)])
                else:
                    assert kind == OpKind.DELETE
                    state.pop(key, None)


def _put_all(judged, lsn, state, rows):
    for key, value in rows:
        state[key] = value
        judged.applied.setdefault(value, []).append(lsn)
