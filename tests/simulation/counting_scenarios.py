"""Merges under the simulator: counters and sets that many processes change without reading.

Each merge adds one to a counter and a name of its own to a set, so that both show which merges
count: an acknowledged one exactly once, an unknown one once or never. Puts, patches, deletes and
loads of several kinds come between them. The oracle computes every row by a few lines of its own.
"""

from bisect import bisect_right
from contextlib import suppress
from dataclasses import dataclass

import pyarrow as pa

from reef.config import BackgroundSettings, CompactSettings
from reef.engine.handles.database import Database
from reef.engine.rows.input import to_ops
from reef.engine.rows.merges import add, merge_rows_ops, union
from reef.formats.schema import Operator, Schema
from reef.formats.wal_object import OpKind, WalKind, decode_ops
from reef.jobs import BulkJob
from reef.jobs.background import Background
from reef.jobs.ingest.append import StreamAppender
from reef.jobs.ingest.job import sorted_merges, sorted_rows, staged_rows
from tests.simulation.actors import (
    EXPECTED_ERRORS,
    GRACE_S,
    KEYS,
    NAME,
    STREAM,
    fold_some,
    keep_house,
    open_writer,
    read_some,
    resolving,
    sweep_some,
)
from tests.simulation.job_scenarios import TINY, JobWorld, compact_some, snapshot_some
from tests.simulation.log_oracle import LogOracle

COLUMNS = pa.schema(
    [
        ("id", pa.binary()),
        ("n", pa.int64()),
        ("tags", pa.list_(pa.string())),
        ("last", pa.string()),
    ]
)
SCHEMA = Schema.of(COLUMNS)
OPERATORS = {"n": "add", "tags": "union"}


# --- the oracle -------------------------------------------------------------------------


@dataclass(frozen=True)
class Version:
    """One operation on a key."""

    key: bytes
    kind: OpKind
    columns: dict[str, object]
    codes: dict[str, int]

    @property
    def is_whole(self):
        return self.kind in (OpKind.PUT, OpKind.DELETE)

    @property
    def token(self):
        """The name of the write that it belongs to; None for deletes."""
        return self.columns["tags"][0] if self.kind is OpKind.MERGE else self.columns.get("last")

    def over(self, row):
        """Return the row of its key, where `row` was there before."""
        if self.kind is OpKind.DELETE:
            return None
        if self.kind is OpKind.PUT:
            return {"id": self.key, **self.columns}
        if self.kind is OpKind.PATCH:
            changed = {name: self.columns[name] for name, code in self.codes.items() if code}
            return None if row is None else row | changed
        row = row or {"id": self.key, **dict.fromkeys(OPERATORS), "last": None}
        tags = sorted({*(row["tags"] or ()), *self.columns["tags"]})
        return row | {"n": (row["n"] or 0) + self.columns["n"], "tags": tags}


def versions_of(ops):
    """Return the operations of a decoded batch."""
    count = len(ops)
    columns, codes = {}, {}
    for field in SCHEMA.fields:
        values, touched = (
            (ops.fields or {}).get(field.number),
            (ops.touched or {}).get(field.number),
        )
        columns[field.name] = [None] * count if values is None else values.to_pylist()
        codes[field.name] = [0] * count if touched is None else touched.to_pylist()
    found = []
    for place, (key, kind) in enumerate(
        zip(ops.keys.to_pylist(), ops.kinds.to_pylist(), strict=True)
    ):
        own = {name: int(values[place] or 0) for name, values in codes.items()}
        if kind == OpKind.MERGE:
            assert own == {"n": Operator.ADD, "tags": Operator.UNION, "last": 0}
        row = {name: values[place] for name, values in columns.items()}
        found.append(Version(key, OpKind(kind), row, own))
    return found


class CountingOracle(LogOracle):
    """Keeps all versions of each key, in the order in which they sort."""

    def note_staged(self, segments, versions):
        """Record what a job has staged, before it commits."""
        for segment in segments:
            low, high = segment.min_key, segment.max_key
            self.staged[segment.id] = [v for v in versions if low <= v.key <= high]

    def _apply(self, evaluated, found, state):
        header, job = found.header, found.header.job
        sorts_at = job.begin_lsn if job is not None and job.live_wins else header.lsn
        changed = evaluated.changed.setdefault(header.lsn, set())
        for version in self._versions(found):
            if version.token is not None:
                evaluated.applied.setdefault(version.token, []).append(header.lsn)
            history = evaluated.history.setdefault(version.key, [])
            place = bisect_right(history, sorts_at, key=lambda item: item[0])
            history.insert(place, (sorts_at, version))
            if any(later.is_whole for _, later in history[place + 1 :]):
                continue  # something newer hides it
            changed.add(version.key)
            row = None
            for _, each in history:
                row = each.over(row)
            state.pop(version.key, None)
            if row is not None:
                state[version.key] = row

    def _versions(self, found):
        if found.header.kind is WalKind.INGEST:
            return [v for segment in found.header.job.segments for v in self.staged[segment.id]]
        name = f"LSN {found.header.lsn}"
        return [
            v for record in found.records for v in versions_of(decode_ops(record, SCHEMA, name))
        ]


class CountingWorld(JobWorld):
    """A world whose name has a counter, a set, and the name of the last put or patch."""

    columns = COLUMNS

    def __init__(self, sim, *, grace_s):
        super().__init__(sim, grace_s=grace_s, schema=SCHEMA, oracle=CountingOracle)


# --- actors -----------------------------------------------------------------------------


def merge(world, writer, key, token, **options):
    """Count one; note the outcome under a name of its own."""
    if "idempotency_key" in options:
        world.clients.keyed.add(token)
    with world.clients.trying([token]):
        receipt = writer.merge(key, {"n": add(1), "tags": union([token])}, **options)
    return world.clients.acknowledge(token, receipt)


def merge_in_transaction(world, writer, key, token):
    """Count one if the row that was read is still the same."""
    with world.clients.trying([token]), writer.transaction() as tx:
        tx.get(key)
        tx.merge(key, {"n": add(1), "tags": union([token])})
    return world.clients.acknowledge(token, tx.receipt)


def put(world, writer, key, token):
    """Set the counter to a number, and the set to one element."""
    with world.clients.trying([token]):
        receipt = writer.upsert([put_row(key, token)])
    return world.clients.acknowledge(token, receipt)


def patch(world, writer, key, token):
    """Change the column that merges leave alone."""
    with world.clients.trying([token]):
        receipt = writer.patch([{"id": key.encode(), "last": token}])
    return world.clients.acknowledge(token, receipt)


def put_row(key, token):
    """Return a whole row."""
    return {"id": key.encode(), "n": 100, "tags": [f"{token} was put"], "last": token}


CALLS = (merge, merge, put, merge, patch, merge, merge_in_transaction, None)
"""None deletes the row."""


def count(world, node, times, *, pause_s=1.0, background=False, **settings):
    """Merge, with other writes between, and now and then a step of background work."""
    with suppress(*EXPECTED_ERRORS):
        writer = open_writer(world, node, **settings)
        worker = _background(node, writer) if background else None
        for number in range(times):
            if worker is not None and node.runtime.uniform(0.0, 1.0) < 0.5:
                with suppress(*EXPECTED_ERRORS):
                    worker.step()
            key, token = KEYS[number % len(KEYS)], f"{node.name}-{number}"
            call = CALLS[world.sim.choices.pick(len(CALLS))]
            if call is None:
                world.clients.delete(writer, key)
            else:
                resolving(world, node, writer, token, call, world, writer, key, token)
            node.runtime.sleep(node.runtime.uniform(0.0, pause_s))


def _background(node, writer):
    wanted = BackgroundSettings(
        fold_bytes=1,
        fold_interval_s=0.0,
        sweep_interval_s=1.0,
        retain_generations_s=0.0,
        requests_per_s=0,
        bytes_per_s=0,
    )
    worker = Background(Database(node.store()), writer, wanted)
    worker._compactor.settings = CompactSettings().changed(TINY)
    return worker


def merge_again(world, node, times, tries, **settings):
    """Send keyed merges, which others send too, until each is acknowledged: each counts once."""
    todo = [f"once-{number}" for number in range(times)]
    for _ in range(tries):
        with suppress(*EXPECTED_ERRORS):
            writer = open_writer(world, node, **settings)
            while todo:
                key = KEYS[len(todo) % len(KEYS)]
                merge(world, writer, key, todo[0], idempotency_key=todo[0])
                todo.pop(0)
            return
        node.runtime.sleep(node.runtime.uniform(0.0, 5.0))


def load_by_job(world, node, times, *, live_wins=False, merges=False):
    """Run bulk jobs: of whole rows, which may lose against live writes, or of merges."""
    for number in range(times):
        with suppress(*EXPECTED_ERRORS):
            tokens = {key: f"{node.name}-{number}-{key}" for key in KEYS[:2]}
            db = Database(node.store())
            with world.clients.trying(tokens.values()):
                job = BulkJob(db, NAME, live_wins=live_wins, lease_ttl_s=GRACE_S)
                if live_wins:  # for as long as others write, fold and merge
                    node.runtime.sleep(node.runtime.uniform(0.0, 12.0))
                receipt = job.commit(_stage(world, job, tokens, merges=merges))
                world.clients.loaded(tokens, receipt.lsn)
        node.runtime.sleep(node.runtime.uniform(0.0, 2.0))


def _stage(world, job, tokens, *, merges):
    ops = _merges(tokens) if merges else _puts(tokens)
    rows = staged_rows(ops)
    staged = job.staging.stage([sorted_merges(rows, SCHEMA) if merges else sorted_rows(rows)])
    world.oracle.note_staged(staged, versions_of(ops))
    return staged


def _puts(tokens):
    return to_ops([put_row(*item) for item in tokens.items()], SCHEMA, kind=OpKind.PUT)


def _merges(tokens):
    rows = [{"id": key.encode(), "n": 1, "tags": [token]} for key, token in tokens.items()]
    return merge_rows_ops(rows, OPERATORS, SCHEMA)


def stream_counts(world, node, times):
    """Commit the merges of one stream, which several drivers may do, in the log or by jobs: each
    number counts once, with the rows of one try (H40).
    """
    for number in range(1, times + 1):
        for attempt in range(4):
            with suppress(*EXPECTED_ERRORS):
                tokens = {key: f"{node.name}-{number}-{attempt}-{key}" for key in KEYS[1:]}
                with world.clients.trying(tokens.values()):
                    receipt = _commit_counts(world, Database(node.store()), number, tokens)
                if not receipt.replayed:
                    world.clients.loaded(tokens, receipt.lsn)
                world.clients.committed_batches.add(number)
                break
            node.runtime.sleep(node.runtime.uniform(0.0, 5.0))
        else:
            return


def _commit_counts(world, db, number, tokens):
    if world.sim.choices.pick(2):
        return StreamAppender(db, NAME).append(STREAM, number, [_merges(tokens)])
    with BulkJob(db, NAME, lease_ttl_s=world.grace_s) as job:
        return job.commit(_stage(world, job, tokens, merges=True), marks={STREAM: number})


def keep_copy(world, node, rounds):
    """Apply a stream of changes to a copy, with long pauses: it is the state of its position."""
    for _ in range(rounds):
        with suppress(*EXPECTED_ERRORS):
            reader = Database(node.store()).reader(NAME)
            rows = dict(reader.scan())
            changes = reader.changes(after_lsn=reader.last_lsn)
            for _ in range(4):
                for change in changes:
                    _apply_change(rows, change)
                world.clients.seen.append(
                    (f"the copy of {node.name}", changes.position, dict(rows))
                )
                node.runtime.sleep(node.runtime.uniform(0.0, 5 * world.grace_s))


def _apply_change(rows, change):
    kind = OpKind[change.op.upper()]
    columns = {name: value for name, value in (change.row or {}).items() if name != "id"}
    if kind is OpKind.MERGE:
        columns = {name: operand.value for name, operand in columns.items()}
    codes = dict.fromkeys(columns, 1)
    row = Version(change.key, kind, columns, codes).over(rows.pop(change.key, None))
    if row is not None:
        rows[change.key] = row


# --- scenarios --------------------------------------------------------------------------


def counters_and_sets(sim):
    """Writers that take over from each other, keyed merges that are sent again, two folders, a
    compactor, loads of merges, a copy that follows.
    """
    world = CountingWorld(sim, grace_s=GRACE_S)
    parallel = 1 + sim.choices.pick(2)
    world.start("w1", count, 7, pause_s=2.0, max_parallel_writes=parallel)
    world.start("w2", count, 5, pause_s=2.0, after_s=12.0)
    world.start("k1", merge_again, 3, 3, after_s=4.0)
    world.start("k2", merge_again, 3, 3, after_s=16.0)
    world.start("j1", load_by_job, 2, merges=True, after_s=8.0)
    world.start("f1", fold_some, 4, 3.0)
    world.start("f2", fold_some, 3, 4.0)
    world.start("c1", compact_some, 4, 4.0)
    world.start("copy", keep_copy, 2)
    world.start("reader", read_some, 2, 8.0)
    world.start("sweeper", sweep_some, 3)
    world.finish()


def counters_and_backfills(sim):
    """Loads that lose against live writes, under patches and merges that were written meanwhile
    and that folds and compactions must keep for them (H50).
    """
    world = CountingWorld(sim, grace_s=GRACE_S)
    world.start("w1", count, 8, pause_s=2.0, background=True)
    world.start("b1", load_by_job, 2, live_wins=True, after_s=4.0)
    world.start("b2", load_by_job, 1, live_wins=True, after_s=6.0)
    world.start("j1", load_by_job, 1, merges=True, after_s=8.0)
    world.start("folder", fold_some, 4, 3.0)
    world.start("c1", compact_some, 4, 4.0)
    world.start("s1", snapshot_some, 1)
    world.start("copy", keep_copy, 2)
    world.start("sweeper", sweep_some, 3)
    world.finish()


def two_drivers_of_counters(sim):
    """A driver that was restarted and its zombie commit the same merges, in the log or by jobs,
    while a writer, folds, compactions and sweeps are at work.
    """
    world = CountingWorld(sim, grace_s=GRACE_S)
    nodes = [
        world.start("d1", stream_counts, 4),
        world.start("d2", stream_counts, 5, after_s=8.0),
    ]
    world.start("w1", count, 4, pause_s=2.0)
    world.start("house", keep_house, 3)
    world.start("c1", compact_some, 2, 6.0)
    world.start("copy", keep_copy, 2)
    world.suspend_some(nodes, 1, (1.0, 40.0))
    world.finish()
