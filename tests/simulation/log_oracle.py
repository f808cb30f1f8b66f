"""An independent evaluation of a name's logs: of every object ever put, swept or not.

A slot counts by the object that was first put into it. One that lands there later, after the
first was collected, is below the floor and counts for no reader. A second implementation of the
rules of the log, applied from its beginning, then gives the state at every LSN and the verdict on
each write.

A name that was dropped and created again has several lives: each has a log of its own, below a
prefix of its own, or behind a base that its manifests name.
"""

from dataclasses import dataclass, field

from reef.engine.log.log import Verdict, contiguous
from reef.formats.manifest import decode_manifest
from reef.formats.schema import DEFAULT_SCHEMA
from reef.formats.wal_object import OpKind, WalKind, WalObject, decode_ops
from reef.paths import number_of

WAL = "/wal/"
MANIFEST = "/manifest/"


@dataclass
class EvaluatedLog:
    """A log, evaluated by its rules."""

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
    batches: set[int] = field(default_factory=set)
    """Numbers of the batches of streams that apply."""
    changed: dict[int, set[bytes]] = field(default_factory=dict)
    """The keys of rows that an object which applies has changed."""
    history: dict[bytes, list] = field(default_factory=dict)
    """By key all versions, by an oracle that needs them."""

    @property
    def last_lsn(self):
        return self.base - 1 + len(self.headers)

    def lsn_of(self, write_id):
        """Return where an object is, or None if this log has never had it."""
        return next((lsn for lsn, h in self.headers.items() if h.write_id == write_id), None)


class Rules:
    """The rules of the log, in their simplest form."""

    def __init__(self, base):
        self._base, self._ids, self._open, self._keys = base, {}, {}, set()
        self._marks = {}

    def evaluate(self, header):
        """Return the verdict on the next object."""
        verdict = Verdict.EMPTY
        if header.kind is WalKind.BATCHES:
            verdict = Verdict.VOID if self._is_void(header) else Verdict.APPLIES
        elif header.kind is WalKind.INGEST:
            job = header.job
            is_open = self._open.get(job.id) == (job.live_wins, job.begin_lsn)
            new = header.job.key is None or header.job.key not in self._keys
            verdict = Verdict.APPLIES if is_open and new else Verdict.IGNORED
        elif header.kind is WalKind.APPEND:
            verdict = Verdict.APPLIES
        if not header.kind.of_writer and any(
            place <= self._marks.get(stream, 0) for stream, place in header.marks.items()
        ):
            verdict = Verdict.IGNORED
        if header.kind is WalKind.BEGIN:
            begun = (True, header.lsn) if header.job.live_wins else (False, 0)
            self._open.setdefault(header.job.id, begun)
        elif header.kind in (WalKind.INGEST, WalKind.ABORT):
            self._open.pop(header.job.id, None)
        self._ids[header.lsn] = header.write_id
        if verdict is Verdict.APPLIES:
            self._keys.update(keys_of(header))
            self._marks.update(header.marks)
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


class LogOracle:
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
        """Record the rows that a job has staged, before it commits."""
        for segment in segments:
            low, high = segment.min_key, segment.max_key
            self.staged[segment.id] = {k: v for k, v in rows.items() if low <= k <= high}
            if replaces:
                self._replacing.add(segment.id)

    def filled_slots(self, prefix, first):
        """Return the LSNs from `first` on into which anything was ever put."""
        return sorted(lsn for lsn in self._bodies.get(prefix, ()) if lsn >= first)

    def evaluate(self):
        """Evaluate the log of a name with one life."""
        (evaluated,) = self.lives() or [EvaluatedLog()]
        return evaluated

    def lives(self):
        """Evaluate the log of each life."""
        lives = []
        for prefix in sorted(self._bodies.keys() | self._bases.keys()):
            bases = sorted(self._bases.get(prefix) or {1})
            for base, end in zip(bases, [*bases[1:], None], strict=True):
                lives.append(self._evaluate_life(prefix, base, end))
        return lives

    def _evaluate_life(self, prefix, base, end):
        evaluated = EvaluatedLog(prefix, base, states={base - 1: {}})
        bodies, rules = self._bodies.get(prefix, {}), Rules(base)
        for lsn in contiguous((n for n in bodies if end is None or n < end), base):
            found = WalObject.decode(bodies[lsn], f"LSN {lsn}")
            verdict = rules.evaluate(found.header)
            evaluated.headers[lsn], evaluated.verdicts[lsn] = found.header, verdict
            evaluated.states[lsn] = dict(evaluated.states[lsn - 1])
            if verdict is Verdict.APPLIES:
                self._apply(evaluated, found, evaluated.states[lsn])
                for key in keys_of(found.header):
                    evaluated.keys.setdefault(key, []).append(lsn)
        return evaluated

    def _apply(self, evaluated, found, state):
        header = found.header
        changed = evaluated.changed.setdefault(header.lsn, set())
        if header.kind is WalKind.INGEST:
            if any(segment.id in self._replacing for segment in header.job.segments):
                state.clear()
            beaten = _written_since(evaluated, header)
            for segment in header.job.segments:
                rows = self.staged[segment.id]
                _put_all(evaluated, header.lsn, {}, rows.items())
                won = {key: value for key, value in rows.items() if key not in beaten}
                state.update(won)
                changed.update(won)
            return
        for record in found.records:
            ops = decode_ops(record, DEFAULT_SCHEMA, f"LSN {header.lsn}")
            values = (ops.fields or {}).get(1)
            values = values.to_pylist() if values is not None else [None] * len(ops)
            rows = zip(ops.kinds.to_pylist(), ops.keys.to_pylist(), values, strict=True)
            for kind, key, value in rows:
                changed.add(key)
                if kind == OpKind.PUT:
                    _put_all(evaluated, header.lsn, state, [(key, value)])
                else:
                    assert kind == OpKind.DELETE
                    state.pop(key, None)


def _written_since(evaluated, ingest):
    """Return the keys that win over the rows of a load with `live_wins`.

    Those of another such load that began later do too, and of one that began earlier do not.
    """
    if not ingest.job.live_wins:
        return set()
    begin, beaten = ingest.job.begin_lsn, set()
    for lsn in range(begin + 1, ingest.lsn):
        header = evaluated.headers[lsn]
        late = header.kind is WalKind.INGEST and header.job.live_wins
        if (header.job.begin_lsn if late else lsn) > begin:
            beaten |= evaluated.changed.get(lsn, set())
    return beaten


def _put_all(evaluated, lsn, state, rows):
    for key, value in rows:
        state[key] = value
        evaluated.applied.setdefault(value, []).append(lsn)
