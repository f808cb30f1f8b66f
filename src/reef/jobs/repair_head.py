"""A damaged head: the next generation, made from the newest sound one (H18).

The damaged manifest stays where it is; the next one says `skipped`. It takes over what the newest
sound one says, what other readable generations know (`manifest.repairs`, H70), and what the bucket
tells of the time since: nothing in it may move backwards. An epoch rises by one per generation at
most, and the log's fences tell theirs, so the next is above all that were ever given out. Parallel
writes and schemas come from the fences too.

The newest sound manifest may need what a sweep has taken since: segments that were merged, and the
part of the log that was folded. Then segments and floor are derived as `rebuild` does it, from
what the segments in the bucket say that they stand for.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import msgspec

from reef.engine.commit.opening import WriterOpening
from reef.engine.database import Database
from reef.engine.log_rules import Verdict
from reef.engine.reading.cache import ByteCache
from reef.engine.reading.segments import SegmentStore
from reef.errors import ConflictError, OutcomeUnknownError
from reef.formats.covers import Cover, without
from reef.formats.manifest import Manifest, SegmentEntry, encode_manifest
from reef.formats.segment import covers_of
from reef.jobs.executor import Executor
from reef.jobs.rebuild_evidence import (
    Evidence,
    compactor_epoch_of,
    gather_evidence,
    read_checksums,
    readable_manifests,
)
from reef.jobs.rebuild_state import Derived, derive
from reef.jobs.segment_entries import entry_of
from reef.jobs.verify_problems import Problem
from reef.jobs.verify_survey import Survey
from reef.manifest.head import HeadFinder
from reef.manifest.invariants import check_next
from reef.manifest.publish import Publisher
from reef.manifest.repairs import Restart, restart_after
from reef.paths import Namespace
from reef.stores import ObjectInfo, Outcome, Store, Tagged, Wrapper

__all__ = ["Published", "fence_off", "publish_after_damage", "restart_of"]

RESENDS_MAX = 10
LEASE_TTL_S = 60.0


def fence_off(
    db: Database, names: Namespace, given_up: frozenset[int], raised: Manifest | None = None
) -> None:
    """Take the writer role, with fences behind all slots that are about to be given up.

    Before anything is given up or replaced: a writer that has it in memory would commit on it.
    """
    WriterOpening(
        db.store,
        names,
        Publisher(db.store, names, metrics=db.metrics),
        SegmentStore(db.store, names, ByteCache(0)),
        writer_id=db.store.runtime.ulid(),
        max_parallel_writes=1,
        lease_ttl_s=LEASE_TTL_S,
    ).fence_off(given_up, raised)


def restart_of(store: Store, names: Namespace, executor: Executor, survey: Survey) -> Restart:
    """Return what the bucket tells of the time since the newest sound manifest."""
    headers = survey.log.headers()
    found_all = readable_manifests(store, names)
    known = tuple(m for m in found_all if m.generation != survey.head.generation)
    staged = [i.key.removeprefix(names.segments) for i in store.list(names.segments)]
    found = Restart(
        newest=survey.chain.newest,
        epoch=max((header.epoch for header in headers), default=0),
        max_parallel_writes=max((header.max_parallel_writes for header in headers), default=1),
        schemas=tuple(header.schema for header in headers if header.schema is not None),
        last_lsn=survey.log.end - 1,
        compactor_epoch=max([0, *map(compactor_epoch_of, staged)]),
        oldest_retained=_oldest(survey),
        known=known,
    )
    missing = [p for p in survey.problems if p.is_missing and p.generation is None]
    if not missing:
        return found
    evidence = _not_condemned(gather_evidence(store, names, executor), (*known, survey.head))
    derived = derive(evidence) if _was_swept(survey.head, missing, evidence) else None
    if derived is None or derived.wal_floor < survey.head.wal_floor:
        return found
    checksums = read_checksums(store, names, executor, derived.written)
    # As they were published: the checksum of one that is damaged must not be made to fit.
    published = {s.id: s for manifest in (*known, survey.head) for s in manifest.segments}
    written = [
        published.get(s.id) or entry_of(s.id, s.summary(checksums[s.id])) for s in derived.written
    ]
    schemas = (*found.schemas, *derived.schemas)
    rebuilt = _rebuilt(survey.head, derived, [*derived.ingested, *written])
    holes = (*derived.problems, *_holes(survey, derived))
    return replace(found, schemas=schemas, rebuilt=rebuilt, holes=holes)


def _oldest(survey: Survey) -> int:
    """Return the first retained generation whose manifest is there: those below it were swept."""
    base, oldest = survey.head, survey.head.oldest_retained
    lost, skipped = survey.chain.lost, set(base.skipped_generations)
    while oldest < base.generation and (
        oldest in skipped or (oldest in lost and lost[oldest].is_missing)
    ):
        oldest += 1
    return oldest


def _not_condemned(evidence: Evidence, known: Sequence[Manifest]) -> Evidence:
    """Leave out what a sweep may be deleting: a condemned key is never named again."""
    condemned = {entry.key for manifest in known for entry in manifest.condemned}
    kept = [s for s in evidence.segments if f"segments/{s.id}.seg" not in condemned]
    return replace(evidence, segments=tuple(kept))


def _was_swept(base: Manifest, missing: Sequence[Problem], evidence: Evidence) -> bool:
    """Whether what the newest sound manifest lacks was swept, once there were newer ones.

    A segment that is gone may have been merged. An object of the log was folded if a segment
    that this manifest does not name stands for it; otherwise it is just gone.
    """
    named = {segment.id for segment in base.segments}
    newer = [c for s in evidence.segments if s.id not in named for c in s.footer.covers]
    return any(
        problem.segment in named
        or (problem.lsn is not None and any(c.first <= problem.lsn < c.end for c in newer))
        for problem in missing
    )


def _holes(survey: Survey, derived: Derived) -> Iterator[str]:
    """Yield what the newest sound manifest had and nothing in the bucket stands for any more."""
    there = {segment.id for segment in derived.written} | {s.id for s in derived.ingested}
    covers = [c for segment in derived.written for c in covers_of(segment.footer, 0)]
    covers += [Cover(s.lsn_min, s.lsn_max + 1, s.min_key) for s in derived.ingested]
    for entry in survey.head.segments:
        if not entry.rows and not entry.tombstones:
            continue  # it said only that nothing is left
        bounds = Cover(entry.lsn_min, entry.lsn_max + 1, entry.min_key, entry.max_key + b"\0")
        if entry.id not in there:
            for hole in without([bounds], covers):
                yield f"nothing is left of {hole}, which was in segment {entry.id}"
    gone = [p.lsn for p in survey.log.problems if p.is_missing and p.lsn is not None]
    gone += [lsn for lsn, verdict in survey.log.verdicts.items() if verdict is Verdict.APPLIES]
    folded = sorted(n for n in gone if survey.head.wal_floor <= n < derived.wal_floor)
    for hole in without([Cover(lsn, lsn + 1) for lsn in folded], covers):
        yield f"nothing is left of {hole}"


def _rebuilt(base: Manifest, derived: Derived, segments: Sequence[SegmentEntry]) -> Manifest:
    return msgspec.structs.replace(
        base,
        segments=tuple(sorted(segments, key=lambda s: (-s.lsn_max, s.id))),
        wal_floor=derived.wal_floor,
        wal_id_last_seen=derived.log_end - 1,
        dedup=derived.dedup,
        stream_marks=derived.stream_marks,
        stream_lineages=derived.stream_lineages,
        open_jobs=derived.open_jobs,
        below_floor=derived.below_floor,
        # Those that cannot be read are looked at again: something in them may be sound.
        skipped_lsns=base.skipped_lsns,
        dropped_lsn=derived.wal_floor - 1,
    )


def _following(store: Store, base: Manifest, found: Restart) -> Manifest:
    now_ms = int(store.runtime.wall_s() * 1000)
    return check_next(base, restart_after(base, found, store.runtime.ulid(), now_ms))


class Published(Wrapper):
    """A bucket as it would be with the generation after the damaged ones: for a dry run."""

    def __init__(self, inner: Store, names: Namespace, base: Manifest, found: Restart) -> None:
        super().__init__(inner)
        following = _following(inner, base, found)
        self._key, self._body = names.manifest(following.generation), encode_manifest(following)
        self._date_s = inner.now()

    def get_tagged(self, key: str) -> Tagged:
        if key != self._key:
            return self.inner.get_tagged(key)
        return Tagged(self._body, None)

    def head(self, key: str) -> ObjectInfo:
        return self._info() if key == self._key else self.inner.head(key)

    def list(self, prefix: str = "", start_after: str = "") -> Iterator[ObjectInfo]:
        yield from self.inner.list(prefix, start_after)  # it is the newest, and so the last
        if self._key.startswith(prefix) and self._key > start_after:
            yield self._info()

    def _info(self) -> ObjectInfo:
        return ObjectInfo(self._key, len(self._body), None, self._date_s)


def publish_after_damage(
    store: Store, names: Namespace, base: Manifest, found: Restart
) -> Manifest:
    """Publish the generation after the damaged ones; ConflictError if another repair was first."""
    following = _following(store, base, found)
    key, body = names.manifest(following.generation), encode_manifest(following)
    for _ in range(RESENDS_MAX):
        outcome = store.create(key, body).outcome
        if outcome is Outcome.CREATED:
            return following
        if outcome is Outcome.EXISTS:
            winner = HeadFinder(store, names).load(following.generation)
            if winner.write_id == following.write_id:
                return following
            raise ConflictError(
                f"generation {following.generation} of {names.name} was published by another "
                f"repair",
                hint="Run the repair again: it goes on from there",
                namespace=names.name,
            )
    raise OutcomeUnknownError(
        f"generation {following.generation} of {names.name} may have been published",
        hint="Run the repair again: it goes on from wherever this one came to",
        namespace=names.name,
    )
