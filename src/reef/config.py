"""Settings, as frozen groups of values. Nothing here reads the environment.

Each has a reason for its default; sizes are in bytes, times say their unit.
"""

import math
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, Self

from reef.errors import InvalidInputError, Kind

__all__ = ["FoldSettings", "ReaderSettings", "SweepSettings", "WriterSettings"]

KIB, MIB = 1 << 10, 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class _Settings:
    def changed(self, words: dict[str, Any]) -> Self:
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
    """What may stand in the log unfolded, and so in memory; past it, writers wait."""
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

    def check(self) -> None:
        _Settings.check(self)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldSettings(_Settings):
    """How the log becomes segments."""

    segment_bytes_max: int = 64 * MIB
    group_bytes: int = 64 * KIB
    codec: Literal["zstd", "lz4", "none"] = "zstd"
    dedup_keys_max: int = 10_000
    dedup_age_s: float = 24 * 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepSettings(_Settings):
    """What a sweep keeps, and how much it takes on at once."""

    retain_generations_s: float = 24 * 3600.0
    """How long a generation can be read after another one took its place."""
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

    def check(self) -> None:
        _Settings.check(self)
        if self.retain_generations_max < 1:
            raise _bad("retain_generations_max", self.retain_generations_max, "1 or more")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)


def _bad(name: str, value: object, expected: str) -> InvalidInputError:
    return InvalidInputError(
        f"setting {name}={value!r} is not {expected}", kind=Kind.INVALID_OPTION
    )
