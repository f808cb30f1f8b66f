"""Settings, as frozen groups of values. Nothing here reads the environment.

Each has a reason for its default; sizes are in bytes, times say their unit.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, Self, TypedDict

from reef.errors import InvalidInputError, Kind

__all__ = [
    "BackgroundSettings",
    "CompactSettings",
    "FoldSettings",
    "IngestSettings",
    "ReaderOptions",
    "ReaderSettings",
    "SweepSettings",
    "WriterOptions",
    "WriterSettings",
]

KIB, MIB = 1 << 10, 1 << 20
WAIT_MAX_S = 1e9
"""Thirty years: what is longer, or has no end, is a mistake, and more than clocks can count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Settings:
    def changed(self, words: Mapping[str, Any]) -> Self:
        """Return the settings with these changes; InvalidInputError names a wrong one."""
        known = [field.name for field in fields(self)]
        for name in words:
            if name not in known:
                raise InvalidInputError(
                    f"there is no setting {name!r}",
                    kind=Kind.INVALID_OPTION,
                    hint=f"There are: {', '.join(known)}",
                )
        changed = replace(self, **words)
        changed.check()
        return changed

    def check(self) -> None:
        """Types too: some settings are recorded in the bucket, for everyone to read."""
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type is int and (not isinstance(value, int) or isinstance(value, bool)):
                raise _bad(field.name, value, "a whole number")
            if field.type is float and not _is_number(value):
                raise _bad(field.name, value, "a number")
            if field.type is bool and not isinstance(value, bool):
                raise _bad(field.name, value, "True or False")
            if isinstance(value, int | float) and value < 0:
                raise _bad(field.name, value, "zero or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class WriterSettings(_Settings):
    """How a writer gathers, sends and bounds what it is given."""

    group_window_ms: float = 5.0
    """How long batches gather while others are in flight: short next to any PUT."""
    group_bytes_max: int = 4 * MIB
    """A group this large goes out at once: larger ones cost latency and save little."""
    batch_bytes_max: int = 64 * MIB
    """The largest batch; larger loads are for bulk jobs."""
    skip_memtable_bytes: int = 1 * MIB
    """A batch above this becomes a WAL object of its own, and does not hold up small ones."""
    max_parallel_writes: int = 1
    """PUTs in flight; recorded in the manifest, since a new writer must fence as many."""
    ack: Literal["prefix", "independent"] = "prefix"
    """Acknowledge in order, or each object as it lands."""
    queue_bytes_max: int = 64 * MIB
    """What may wait to be sent; past it, writers wait."""
    unfolded_bytes_max: int = 256 * MIB
    """What may stand in the log unfolded, and so in memory, where a row takes some 150 bytes more
    than in the log; past it, writers wait."""
    write_deadline_s: float = 30.0
    """How long a writer waits for room before it is told UnavailableError."""
    commit_deadline_s: float = 120.0
    """How long a PUT without an answer is sent again before its outcome is told as unknown."""
    lease_ttl_s: float = 60.0
    cache_bytes: int = 256 * MIB
    """Decoded groups and segment tails in memory."""
    row_cache_bytes: int = 64 * MIB
    """Rows that were read by key, ready to hand out."""
    footprint_bytes_max: int = 64 * MIB
    """Keys remembered for open transactions; one that is older than that has to begin anew."""
    transaction_reads_max: int = 100_000
    """Keys and ranges that one transaction may read."""
    stale_reads: bool = False
    """Whether reads are served after another writer has taken over: from rows as old as that.
    Otherwise they raise FencedError, as writes do."""
    upload_interval_ms: float = 100.0
    """With a local log: how long batches gather before they are uploaded. Ten objects a second
    cost less than one put each, and a disk that dies takes a tenth of a second with it."""
    upload_bytes: int = 4 * MIB
    """With a local log: so many bytes are uploaded at once, as one object."""
    local_backlog_bytes_max: int = 256 * MIB
    """What may stand in a local log and not in the bucket, and so in memory; past it, writers
    wait."""
    local_segment_bytes: int = 64 * MIB
    """How large the files of a local log are; one goes when all in it is uploaded."""

    def check(self) -> None:
        _Settings.check(self)
        _check_waits(self)
        if not 1 <= self.max_parallel_writes <= 64:
            raise _bad("max_parallel_writes", self.max_parallel_writes, "1 to 64")
        if self.ack not in ("prefix", "independent"):
            raise _bad("ack", self.ack, "'prefix' or 'independent'")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReaderSettings(_Settings):
    """How often a reader looks, and how much it keeps."""

    refresh_interval_ms: float = 2000.0
    """Two probes each: about one request a second."""
    list_interval_s: float = 60.0
    """How often it lists instead, since a probe past swept ids would miss them for ever."""
    cache_bytes: int = 256 * MIB
    """Decoded groups and segment tails in memory."""
    row_cache_bytes: int = 64 * MIB
    """Rows that were read by key, ready to hand out."""
    lease_ttl_s: float = 60.0
    """How long a pinned view holds what it needs after its process has died."""

    def check(self) -> None:
        _Settings.check(self)
        _check_waits(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldSettings(_Settings):
    """How the log becomes segments."""

    log_bytes: int = 128 * MIB
    """How much of the log one publish takes: it is in memory, decoded, while it is sorted."""
    stretches_max: int = 10_000
    """How many publishes one call makes; the rest of a longer log waits for the next."""
    shuffle_bytes_min: int = 32 * MIB
    """From how long a log on an executor that can shuffle folds it in ranges of keys, side by
    side, all of it in one publish; a shorter one is one task."""
    segment_bytes_max: int = 64 * MIB
    group_bytes: int = 64 * KIB
    codec: Literal["zstd", "lz4", "none"] = "zstd"

    def check(self) -> None:
        _Settings.check(self)
        if self.segment_bytes_max < 1:
            raise _bad("segment_bytes_max", self.segment_bytes_max, "1 or more")
        if self.codec not in ("zstd", "lz4", "none"):
            raise _bad("codec", self.codec, "'zstd', 'lz4' or 'none'")


@dataclass(frozen=True, slots=True, kw_only=True)
class IngestSettings(_Settings):
    """How a bulk job stages its rows."""

    segment_bytes: int = 256 * MIB
    """About how large a staged segment is as stored: few objects, and yet many tasks."""
    group_bytes: int = 64 * KIB
    codec: Literal["zstd", "lz4", "none"] = "zstd"
    lease_ttl_s: float = 120.0
    """How long after its driver's death a job counts as alive, and keeps what it has staged."""

    def check(self) -> None:
        _Settings.check(self)
        if self.codec not in ("zstd", "lz4", "none"):
            raise _bad("codec", self.codec, "'zstd', 'lz4' or 'none'")


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactSettings(_Settings):
    """When segments are merged, into what, and how much memory that may take."""

    tier_bytes: int = 256 * MIB
    """Tiered: level 0 is merged once its smallest segments add up to this: some four folds."""
    tier_growth: int = 8
    """Tiered: how much larger that threshold is from level to level. A row is then rewritten
    once for every eightfold growth of the namespace."""
    tier_segments_min: int = 4
    """Tiered: fewer are not worth a rewrite, however large they are."""
    level0_bytes: int = 512 * MIB
    """Leveled: level 0 goes down once it holds this much: as much as one level-1 segment."""
    level0_segments_max: int = 8
    """Leveled: this many small ones are merged among themselves before that, since every read
    looks into each of them."""
    segment_bytes_min: int = 512 * MIB
    """Leveled: a smaller segment is joined with its neighbour."""
    segment_bytes: int = 768 * MIB
    """What outputs aim at: half-way between the bounds, so that neither is met soon."""
    segment_bytes_max: int = 1024 * MIB
    """A join above this is split in two; and what a store copies in one request."""
    segment_rows_max: int = 6_000_000
    """Whatever their size: a filter is built from 8 bytes a row, in memory."""
    inputs_max: int = 64
    """Segments that one merge of a level takes: each is a source with a buffer of its own."""
    merge_bytes: int = 8 * MIB
    """Decoded rows of all inputs that one task holds; it needs a few times as much at its peak."""
    tasks_max: int = 1
    """Tasks at once in this process. Two take nearly 500 MB at their peak, and background work is
    not to starve serving."""
    rounds_max: int = 1000
    """Jobs of one call: a bound, for what ought to end by itself."""
    expiry_margin_s: float = 600.0
    """How long after its expiry a row is dropped: readers judge by clocks of their own."""
    patience_s: float = 900.0
    """How long a background compactor waits for another one, before it takes its place."""
    group_bytes: int = 64 * KIB
    codec: Literal["zstd", "lz4", "none"] = "zstd"

    def check(self) -> None:
        _Settings.check(self)
        for name in ("tier_growth", "tier_segments_min", "level0_segments_max", "inputs_max"):
            if getattr(self, name) < 2:
                raise _bad(name, getattr(self, name), "2 or more")
        for name in ("segment_bytes", "segment_rows_max", "tasks_max", "group_bytes"):
            if getattr(self, name) < 1:
                raise _bad(name, getattr(self, name), "1 or more")
        if not 2 * self.segment_bytes_min <= self.segment_bytes_max:
            most = f"at most half of segment_bytes_max={self.segment_bytes_max}"
            raise _bad("segment_bytes_min", self.segment_bytes_min, most)
        if self.codec not in ("zstd", "lz4", "none"):
            raise _bad("codec", self.codec, "'zstd', 'lz4' or 'none'")


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepSettings(_Settings):
    """What a sweep keeps, and how much it takes on at once."""

    retain_generations_s: float = 24 * 3600.0
    """How long a generation can be read after another one took its place."""
    dropped_s: float = 24 * 3600.0
    """How long a dropped namespace can be brought back."""
    retain_generations_max: int = 900
    """Whatever their age: a listing of them fits into one page."""
    condemned_max: int = 10_000
    """Keys in the manifest's list: it is read with every manifest."""
    deletes_max: int = 10_000
    """Objects deleted by one call; the rest waits for the next."""
    share_max: float = 0.5
    """A larger share of all segments' bytes goes only with `force`: it may be a mistake."""
    share_bytes_min: int = 64 * MIB
    """Below this, any share may go."""
    stale_upload_s: float = 24 * 3600.0
    """Parts of an upload that was begun longer ago than this are given up."""
    silent_job_s: float = 3600.0
    """A bulk job that began longer ago than this and has no lease is aborted: its driver died."""

    silent_compactor_s: float = 24 * 3600.0
    """What a compactor staged longer ago than this and has not published is not kept for it."""

    def check(self) -> None:
        _Settings.check(self)
        if self.retain_generations_max < 1:
            raise _bad("retain_generations_max", self.retain_generations_max, "1 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class BackgroundSettings(_Settings):
    """When a writer's process folds, compacts and sweeps by itself, and how hard it works."""

    fold_bytes: int = 16 * MIB
    """The log is folded when it holds so much: it is in memory, and is read at every open."""
    fold_objects: int = 256
    """Or so many objects: each is a request at every open."""
    fold_interval_s: float = 60.0
    """Or something that has stood there so long."""
    compact: bool = True
    strategy: Literal["tiered", "leveled"] = "tiered"
    sweep: bool = True
    sweep_interval_s: float = 300.0
    """A third of the grace period: what is condemned goes soon after its time."""
    retain_generations_s: float = 24 * 3600.0
    """How long the sweep lets a generation be read after another one took its place."""
    requests_per_s: float = 100.0
    """Of all background work together; 0: no limit. A bucket's prefix takes thousands."""
    bytes_per_s: float = 128.0 * MIB
    """In both directions; 0: no limit."""
    look_s: float = 0.5
    """How often it looks, in memory only, whether something is due."""

    def check(self) -> None:
        _Settings.check(self)
        if self.strategy not in ("tiered", "leveled"):
            raise _bad("strategy", self.strategy, "'tiered' or 'leveled'")
        if self.look_s <= 0:
            raise _bad("look_s", self.look_s, "more than zero")


class WriterOptions(TypedDict, total=False):
    """`WriterSettings` as words, so that an editor knows them; a test keeps the two alike."""

    group_window_ms: float
    group_bytes_max: int
    batch_bytes_max: int
    skip_memtable_bytes: int
    max_parallel_writes: int
    ack: Literal["prefix", "independent"]
    queue_bytes_max: int
    unfolded_bytes_max: int
    write_deadline_s: float
    commit_deadline_s: float
    lease_ttl_s: float
    cache_bytes: int
    row_cache_bytes: int
    footprint_bytes_max: int
    transaction_reads_max: int
    stale_reads: bool
    upload_interval_ms: float
    upload_bytes: int
    local_backlog_bytes_max: int
    local_segment_bytes: int


class ReaderOptions(TypedDict, total=False):
    """`ReaderSettings` as words."""

    refresh_interval_ms: float
    list_interval_s: float
    cache_bytes: int
    row_cache_bytes: int
    lease_ttl_s: float


def _check_waits(settings: _Settings) -> None:
    """Refuse times for which nobody can wait: a lock would raise in the middle of a commit."""
    for field in fields(settings):
        value, unit = getattr(settings, field.name), 1000 if field.name.endswith("_ms") else 1
        if field.name.endswith(("_s", "_ms")) and value > WAIT_MAX_S * unit:
            raise _bad(field.name, value, f"at most {WAIT_MAX_S * unit:.0e}")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)


def _bad(name: str, value: object, expected: str) -> InvalidInputError:
    return InvalidInputError(
        f"setting {name}={value!r} is not {expected}", kind=Kind.INVALID_OPTION
    )
