"""Options of streams: those of `writeStream` and of `readStream`.

A streaming write has the options of a write, but for idempotencyKey, liveWins, createOnly and the
conditions:

checkpointLocation   Spark's own option; the namespace remembers it for the query
queryName        likewise, in its place if the session has a folder for checkpoints
adoptCheckpoint  accept a checkpoint that does not continue where the namespace is
appendBytes      micro-batches with so many bytes of rows go into the log itself; larger ones are
                 staged as segments
applyChanges     the rows are change rows of a stream, applied in the order of the log
background       fold and compact after a micro-batch, when that is due (true)

A streaming read has exactly one of the first four, which say where it begins:

starting             all: all rows as puts, then changes; now: changes from now on
startingSnapshot     all rows of a snapshot, by name or id, then the changes since
startingGeneration   the changes since a generation
startingLsn          the changes after an LSN; 0: all that there ever were
maxRowsPerTrigger    rows of a micro-batch; whole objects of the log, or pages of a load
maxBytesPerTrigger   likewise in stored bytes
cursor               the name of the registered cursor; by default one is made up
images               add the rows before and after each change, _before and _after
pollMs               how often the end of the log is checked for more
cursorSeconds        how often the cursor is moved: each time is a manifest
snapshotSeconds      how long the snapshot of `all` is kept without progress
splitBytes, leaseSeconds   as in a read of rows
"""

from collections.abc import Mapping
from dataclasses import dataclass

from reef.spark.options import (
    HADOOP_PATH,
    SPLIT_BYTES,
    SparkWriteOptions,
    TableLocation,
    _bad,
    _count_option,
    _flag,
    _number,
    _seconds,
    known_options,
)

STREAM_WRITING = (
    "checkpointLocation",
    "queryName",
    "adoptCheckpoint",
    "appendBytes",
    "applyChanges",
    "background",
)
BATCH_WRITING = (
    "idempotencyKey",
    "liveWins",
    "createOnly",
    "unlessChangedSince",
    "unlessChangedIn",
    "unlessChangedInFile",
)
"""Options of a batch write that a stream cannot have."""
APPEND_BYTES = 4 << 20
"""Rows of a micro-batch that go into the log itself. Below some 8 MiB that is quicker on an object
store and takes less than half of the requests; from there on staging is (`benchmarks.streams`)."""


@dataclass(frozen=True, slots=True)
class StreamSinkOptions:
    """The options of a streaming write: those of a write, and its checkpoint."""

    write: SparkWriteOptions
    checkpoint: str
    """Where the checkpoint is, as far as the sink can know it."""
    adopt_checkpoint: bool = False
    append_bytes: int = APPEND_BYTES
    apply_changes: bool = False
    background: bool = True
    """Fold and compact after a micro-batch, when that is due."""

    @classmethod
    def of(cls, options: Mapping[str, str]) -> "StreamSinkOptions":
        """Parse options; InvalidInputError names a wrong one."""
        proper = {name.lower(): name for name in STREAM_WRITING}
        own = {proper[n.lower()]: v for n, v in options.items() if n.lower() in proper}
        rest = {n: v for n, v in options.items() if n.lower() not in proper}
        for name in BATCH_WRITING:
            if name.lower() in {given.lower() for given in rest}:
                raise _bad(
                    f"a stream has no option {name}",
                    "Each micro-batch is committed once, by its number",
                )
        return cls(
            SparkWriteOptions.of(rest),
            _checkpoint(own),
            _flag(own, "adoptCheckpoint"),
            _count_option(own, "appendBytes", APPEND_BYTES),
            _flag(own, "applyChanges"),
            _flag(own, "background", default=True),
        )


def _checkpoint(given: Mapping[str, str]) -> str:
    """Return the location of a checkpoint; under a location of the session, the query's name."""
    if given.get("checkpointLocation"):
        path = HADOOP_PATH.sub("file:///", given["checkpointLocation"])
        return path.removeprefix("file://").rstrip("/") or "/"
    if given.get("queryName"):
        return f"queryName={given['queryName']}"
    raise _bad(
        "a stream into Reef needs the option checkpointLocation, or a queryName",
        "Without either, a lost checkpoint could not be recognised",
    )


# --- reading --------------------------------------------------------------------------

STARTS = ("starting", "startingLsn", "startingGeneration", "startingSnapshot")
STREAM_READING = (
    *STARTS,
    "images",
    "splitBytes",
    "leaseSeconds",
    "maxRowsPerTrigger",
    "maxBytesPerTrigger",
    "cursor",
    "pollMs",
    "cursorSeconds",
    "snapshotSeconds",
    "engine",
)
BYTES_PER_TRIGGER = 256 << 20
POLL_MS = 1000
CURSOR_S = 10
SNAPSHOT_S = 7 * 24 * 3600


@dataclass(frozen=True, slots=True)
class StreamSourceOptions:
    """The options of a streaming read."""

    location: TableLocation
    start: tuple[str, str]
    """Which option says where it begins, and its value."""
    images: bool
    split_bytes: int
    lease_s: float
    rows_max: int | None
    bytes_max: int
    cursor: str | None
    poll_s: float
    cursor_s: float
    snapshot_s: float

    @classmethod
    def of(cls, options: Mapping[str, str]) -> "StreamSourceOptions | None":
        """Parse options; None if they are a batch's. InvalidInputError names an invalid option."""
        names = {name.lower() for name in options}
        if not any(name.lower() in names for name in STARTS):
            return None
        location = TableLocation.of(options)
        given = known_options(options, STREAM_READING, "stream of changes")
        return cls(
            location,
            _start(given),
            _flag(given, "images"),
            _number(given, "splitBytes", 1) or SPLIT_BYTES,
            _seconds(given),
            _number(given, "maxRowsPerTrigger", 1),
            _count_option(given, "maxBytesPerTrigger", BYTES_PER_TRIGGER),
            given.get("cursor"),
            _from_zero(given, "pollMs", POLL_MS) / 1000,
            float(_from_zero(given, "cursorSeconds", CURSOR_S)),
            float(_count_option(given, "snapshotSeconds", SNAPSHOT_S)),
        )


def _start(given: Mapping[str, str]) -> tuple[str, str]:
    """Return the option that says where a stream begins."""
    chosen = [(name, given[name]) for name in STARTS if name in given]
    if len(chosen) > 1:
        raise _bad(f"only one of the options {', '.join(name for name, _ in chosen)} can be set")
    name, value = chosen[0]
    if name == "starting" and value not in ("all", "now"):
        raise _bad(f"the option starting={value!r} is not all or now")
    if name in ("startingLsn", "startingGeneration"):
        _number(given, name, 0 if name == "startingLsn" else 1)
    return name, value


def _from_zero(given: Mapping[str, str], name: str, default: int) -> int:
    number = _number(given, name, 0)
    return default if number is None else number
