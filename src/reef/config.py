"""Settings, as frozen groups of values. Nothing here reads the environment.

Each default has its reason next to it; sizes are in bytes, names of times end with their unit.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, Self, TypedDict

from reef.errors import ErrorKind, InvalidInputError

KIB, MIB = 1 << 10, 1 << 20
WAIT_MAX_S = 1e9
"""Thirty years: a longer or infinite time is a mistake, and more than clocks can count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Settings:
    def changed(self, changes: Mapping[str, Any]) -> Self:
        """Return the settings with these changes; InvalidInputError names a wrong one."""
        known = [field.name for field in fields(self)]
        for name in changes:
            if name not in known:
                raise InvalidInputError(
                    f"there is no setting {name!r}",
                    kind=ErrorKind.INVALID_OPTION,
                    hint=f"There are: {', '.join(known)}",
                )
        changed = replace(self, **changes)
        changed.check()
        return changed

    def check(self) -> None:
        """Check values and types: some settings are stored in the bucket."""
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
    """How a writer groups, sends and bounds its batches."""

    group_window_ms: float = 5.0
    """How long batches gather while others are in flight: short next to any PUT."""
    group_bytes_max: int = 4 * MIB
    """A group this large is sent at once: larger ones cost latency and save little."""
    batch_bytes_max: int = 64 * MIB
    """The largest batch; larger loads are for bulk jobs."""
    skip_memtable_bytes: int = 1 * MIB
    """A batch above this becomes a WAL object of its own, and does not hold up small ones."""
    max_parallel_writes: int = 1
    """PUTs in flight; recorded in the manifest, since a new writer must fence as many."""
    ack: Literal["prefix", "independent"] = "prefix"
    """Acknowledge in order, or each object as it lands."""
    queue_bytes_max: int = 64 * MIB
    """Bytes that may be queued; beyond it, writers wait."""
    unfolded_bytes_max: int = 256 * MIB
    """Bytes of the log that may be unfolded, and so in memory, where they take up to twice as
    much; beyond it, writers wait."""
    unindexed_rows_max: int = 1_000_000
    """With search indexes: rows in segments that are too small to have any, which searches read
    one by one; beyond it, writers wait for a compaction."""
    write_deadline_s: float = 30.0
    """How long a writer waits for room before it raises UnavailableError."""
    commit_deadline_s: float = 120.0
    """How long a PUT without a response is sent again before its outcome is reported as unknown."""
    lease_ttl_s: float = 60.0
    cache_bytes: int = 256 * MIB
    """Decoded groups and segment tails in memory."""
    row_cache_bytes: int = 64 * MIB
    """Decoded rows that were read by key."""
    footprint_bytes_max: int = 64 * MIB
    """Keys remembered for open transactions; an older transaction has to be restarted."""
    transaction_reads_max: int = 100_000
    """Keys and ranges that one transaction may read."""
    stale_reads: bool = False
    """Whether reads are served after another writer has acquired the role, with rows as of then.
    Otherwise they raise FencedError, as writes do."""
    upload_interval_ms: float = 100.0
    """With a local log: how long batches are collected before they are uploaded. Ten objects a
    second cost less than one PUT each, and a disk failure loses a tenth of a second."""
    upload_bytes: int = 4 * MIB
    """With a local log: so many bytes are uploaded at once, as one object."""
    local_backlog_bytes_max: int = 256 * MIB
    """Bytes that may be in a local log and not yet in the bucket, and so in memory; beyond it,
    writers wait."""
    local_segment_bytes: int = 64 * MIB
    """Size of the files of a local log; one is deleted when all its entries are uploaded."""

    def check(self) -> None:
        _Settings.check(self)
        _check_waits(self)
        if not 1 <= self.max_parallel_writes <= 64:
            raise _bad("max_parallel_writes", self.max_parallel_writes, "1 to 64")
        if self.ack not in ("prefix", "independent"):
            raise _bad("ack", self.ack, "'prefix' or 'independent'")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReaderSettings(_Settings):
    """How often a reader polls, and how much it caches."""

    refresh_interval_ms: float = 2000.0
    """Two probes each: about one request a second."""
    list_interval_s: float = 60.0
    """How often it lists instead, since a probe past swept ids would miss them for ever."""
    cache_bytes: int = 256 * MIB
    """Decoded groups and segment tails in memory."""
    row_cache_bytes: int = 64 * MIB
    """Decoded rows that were read by key."""
    lease_ttl_s: float = 60.0
    """How long the objects of a pinned view are kept after its process has crashed."""

    def check(self) -> None:
        _Settings.check(self)
        _check_waits(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldSettings(_Settings):
    """How the log becomes segments."""

    log_bytes: int = 128 * MIB
    """How much of the log one publish folds: it is in memory, decoded, while it is sorted."""
    stretches_max: int = 10_000
    """How many publishes one call makes; the rest of a longer log waits for the next."""
    shuffle_bytes_min: int = 32 * MIB
    """From how long a log on an executor that can shuffle folds it in ranges of keys, in
    parallel, all of it in one publish; a shorter one is one task."""
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
    """How long after its driver's crash a job counts as alive, and its staged segments are kept."""

    def check(self) -> None:
        _Settings.check(self)
        if self.codec not in ("zstd", "lz4", "none"):
            raise _bad("codec", self.codec, "'zstd', 'lz4' or 'none'")


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactSettings(_Settings):
    """When segments are merged, into which sizes, and how much memory that may take."""

    tier_bytes: int = 256 * MIB
    """Tiered: level 0 is merged once its smallest segments add up to this: some four folds."""
    tier_growth: int = 8
    """Tiered: how much larger that threshold is from level to level. A row is then rewritten
    once for every eightfold growth of the namespace."""
    tier_segments_min: int = 4
    """Tiered: fewer are not worth a rewrite, however large they are."""
    level0_bytes: int = 512 * MIB
    """Leveled: level 0 is merged into level 1 at this size: that of one level-1 segment."""
    level0_segments_max: int = 8
    """Leveled: this many small ones are merged among themselves before that, since every read
    checks each of them."""
    segment_bytes_min: int = 512 * MIB
    """Leveled: a smaller segment is joined with its neighbour."""
    segment_bytes: int = 768 * MIB
    """Target size of outputs: half-way between the bounds."""
    segment_bytes_max: int = 1024 * MIB
    """A join above this is split in two; also the most that a store copies in one request."""
    segment_rows_max: int = 6_000_000
    """Independent of their size: a filter is built from 8 bytes a row, in memory."""
    inputs_max: int = 64
    """Inputs of one merge of a level: each has a buffer of its own."""
    merge_bytes: int = 8 * MIB
    """Decoded rows of all inputs that one task holds; it needs a few times as much at its peak."""
    tasks_max: int = 1
    """Tasks at once in this process. Two take nearly 500 MB at their peak, and background work is
    not to starve serving."""
    rounds_max: int = 1000
    """Jobs of one call: a bound on a loop that ends by itself."""
    expiry_margin_s: float = 600.0
    """How long after its expiry a row is dropped: readers use their own clocks."""
    patience_s: float = 900.0
    """How long a background compactor waits for another one before it replaces it."""
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
    """How long a sweep retains objects, and how much it deletes at once."""

    retain_generations_s: float = 24 * 3600.0
    """How long a generation can be read after it was replaced."""
    dropped_s: float = 24 * 3600.0
    """How long a dropped namespace can be undropped."""
    retain_generations_max: int = 900
    """Independent of their age: a listing of them fits into one page."""
    condemned_max: int = 10_000
    """Keys, and ranges of slots and manifests, in the manifest: they are read with each."""
    deletes_max: int = 500_000
    """Objects deleted by one call; the rest waits for the next."""
    share_max: float = 0.5
    """A larger share of all segments' bytes is deleted only with `force`: it may be a mistake."""
    share_bytes_min: int = 64 * MIB
    """Below this, any share may be deleted."""
    stale_upload_s: float = 24 * 3600.0
    """Uploads that began longer ago than this are aborted."""
    silent_job_s: float = 3600.0
    """A bulk job that began longer ago than this and has no lease is aborted: its driver died."""

    silent_compactor_s: float = 24 * 3600.0
    """Segments that a compactor staged longer ago than this and did not publish are collected."""

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
    """Or when its oldest object is this old."""
    compact: bool = True
    strategy: Literal["tiered", "leveled"] = "tiered"
    sweep: bool = True
    sweep_interval_s: float = 300.0
    """A third of the grace period: condemned objects are deleted soon after it."""
    retain_generations_s: float = 24 * 3600.0
    """How long a generation can be read after it was replaced."""
    requests_per_s: float = 100.0
    """Limit of all background work together; 0: none. A bucket's prefix takes thousands."""
    bytes_per_s: float = 128.0 * MIB
    """In both directions; 0: no limit."""
    poll_interval_s: float = 0.5
    """How often it checks, in memory only, whether a job is due."""

    def check(self) -> None:
        _Settings.check(self)
        if self.strategy not in ("tiered", "leveled"):
            raise _bad("strategy", self.strategy, "'tiered' or 'leveled'")
        if self.poll_interval_s <= 0:
            raise _bad("poll_interval_s", self.poll_interval_s, "more than zero")


class WriterOptions(TypedDict, total=False):
    """`WriterSettings` as keyword arguments, for editors; a test keeps the two equal."""

    group_window_ms: float
    group_bytes_max: int
    batch_bytes_max: int
    skip_memtable_bytes: int
    max_parallel_writes: int
    ack: Literal["prefix", "independent"]
    queue_bytes_max: int
    unfolded_bytes_max: int
    unindexed_rows_max: int
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
    """`ReaderSettings` as keyword arguments."""

    refresh_interval_ms: float
    list_interval_s: float
    cache_bytes: int
    row_cache_bytes: int
    lease_ttl_s: float


class FoldOptions(TypedDict, total=False):
    """`FoldSettings` as keyword arguments."""

    log_bytes: int
    stretches_max: int
    shuffle_bytes_min: int
    segment_bytes_max: int
    group_bytes: int
    codec: Literal["zstd", "lz4", "none"]


class IngestOptions(TypedDict, total=False):
    """`IngestSettings` as keyword arguments."""

    segment_bytes: int
    group_bytes: int
    codec: Literal["zstd", "lz4", "none"]
    lease_ttl_s: float


class CompactOptions(TypedDict, total=False):
    """`CompactSettings` as keyword arguments."""

    tier_bytes: int
    tier_growth: int
    tier_segments_min: int
    level0_bytes: int
    level0_segments_max: int
    segment_bytes_min: int
    segment_bytes: int
    segment_bytes_max: int
    segment_rows_max: int
    inputs_max: int
    merge_bytes: int
    tasks_max: int
    rounds_max: int
    expiry_margin_s: float
    patience_s: float
    group_bytes: int
    codec: Literal["zstd", "lz4", "none"]


class SweepOptions(TypedDict, total=False):
    """`SweepSettings` as keyword arguments."""

    retain_generations_s: float
    dropped_s: float
    retain_generations_max: int
    condemned_max: int
    deletes_max: int
    share_max: float
    share_bytes_min: int
    stale_upload_s: float
    silent_job_s: float
    silent_compactor_s: float


def _check_waits(settings: _Settings) -> None:
    """Raise if a time is longer than a lock can wait: it would raise in the middle of a commit."""
    for field in fields(settings):
        value, unit = getattr(settings, field.name), 1000 if field.name.endswith("_ms") else 1
        if field.name.endswith(("_s", "_ms")) and value > WAIT_MAX_S * unit:
            raise _bad(field.name, value, f"at most {WAIT_MAX_S * unit:.0e}")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)


def bad_option(
    name: str, value: object, expected: str, *, noun: str = "option"
) -> InvalidInputError:
    """Return the error for an invalid value of an option or a setting."""
    return InvalidInputError(
        f"{noun} {name}={value!r} is not {expected}", kind=ErrorKind.INVALID_OPTION
    )


def _bad(name: str, value: object, expected: str) -> InvalidInputError:
    return bad_option(name, value, expected, noun="setting")
