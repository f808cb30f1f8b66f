"""`reef log …`: inspect local logs, and upload their pending batches.

`pending` and `reapply` are for recovery: after a crash, or when another writer took over a
namespace whose last writes are on this disk only.
"""

from collections.abc import Iterator
from typing import Any

import click

from reef import stores
from reef.cli.options import (
    EXIT_PROBLEMS,
    ReefCommand,
    encoding_option,
    on_bucket,
    parse_options,
    store_options,
    suggesting_take_over,
    take_over_option,
)
from reef.cli.output import Output
from reef.engine.handles.database import Database
from reef.engine.local.open import namespace_of, read_pending
from reef.errors import InvalidInputError
from reef.locallog.encoding import BINARY, EntryType
from reef.locallog.inspect import dump_entries, dump_frames, frame_name, verify_log


@click.command("pending", cls=ReefCommand)
@click.argument("path")
@click.option("--url", metavar="URL", help="Check this bucket instead of the notes in the log.")
@store_options
@click.pass_obj
def pending_command(output: Output, path: str, url: str | None, options: tuple[str, ...]) -> None:
    """Print the batches of a local log that are not uploaded.

    Print their number, size, entries and age. Change nothing; the log may be in use. Without --url,
    use the uploads that are noted in the log, which may lag behind; with it, use the bucket.

    Example: reef log pending ./users-log
    """
    store = None if url is None else stores.open(url, **parse_options(options))
    output.report(f"not uploaded from {path}", read_pending(path, store=store))


@click.command("reapply", cls=ReefCommand)
@click.argument("path")
@on_bucket
@take_over_option
def reapply_command(output: Output, db: Database, *, path: str, take_over: bool) -> None:
    """Write the pending batches of a local log, though another writer has taken over.

    Acquire the writer role, which fences any other writer. Uploaded batches are not written again.
    The others overwrite newer rows of the same keys: inspect them first with `reef
    log pending` and `reef log dump`. A batch whose idempotency key was committed meanwhile is not
    written again. Can be repeated. Fail without a change if another writer is active.

    Example: reef log reapply ./users-log ./data
    """
    namespace = namespace_of(path, db.store)
    with suggesting_take_over():
        writer = db.writer(
            namespace,
            durability="local",
            local_log=path,
            reapply=True,
            take_over=take_over,
            background=False,
        )
    with writer:
        recovery = writer.local_recovery
        writer.flush()
        facts: dict[str, Any] = {
            "namespace": namespace,
            "applied_batches": recovery.replayed,
            "repeated_batches": recovery.repeated,
            "uploaded_before": recovery.uploaded_index,
            "last_index": recovery.uploaded_index + recovery.replayed + recovery.repeated,
        }
    output.record(f"applied the pending batches of {path}", facts)


ENTRY_COLUMNS = ("index", "term", "type", "appended_at", "data", "extensions")
FRAME_COLUMNS = ("segment", "offset", "frame", "bytes", "checksum", "valid")


@click.group()
def log() -> None:
    """Inspect, verify and recover local logs."""


log.add_command(pending_command)
log.add_command(reapply_command)


@log.command("inspect", cls=ReefCommand)
@click.argument("path")
@click.pass_obj
def inspect_command(output: Output, path: str) -> int:
    """Print the segments of a log, and their damage.

    Check every checksum; entries are not decoded, so the codec does not matter. The log may be in
    use. Exit with 2 if there is damage.

    Example: reef log inspect ./log
    """
    report = verify_log(path, deep=False)
    output.report(f"log {path}", report)
    return EXIT_PROBLEMS if report.problems else 0


@log.command("verify", cls=ReefCommand)
@click.argument("path")
@click.pass_obj
def verify_command(output: Output, path: str) -> int:
    """Check every checksum, every index and every entry.

    Change nothing; the log may be in use. A batch that a crash has torn is not damage: it was never
    acknowledged, and the next open drops it. Exit with 2 if there is damage.

    Example: reef log verify ./log
    """
    report = verify_log(path)
    output.report(f"verified {path}", report)
    return EXIT_PROBLEMS if report.problems else 0


@log.command("dump", cls=ReefCommand)
@click.argument("path")
@click.option("--frames", is_flag=True, help="Print the frames of the files instead of entries.")
@click.option("--first", type=click.IntRange(min=1), metavar="N", help="Start at this entry.")
@click.option("--last", type=click.IntRange(min=1), metavar="N", help="Stop after this entry.")
@encoding_option
@click.pass_obj
def dump_command(
    output: Output, path: str, *, frames: bool, first: int | None, last: int | None
) -> int:
    """Print the entries of a log, or its frames with their offsets and checksums.

    The log may be in use. Stop with exit code 2 at the first entry that cannot be read. With
    --frames, print all of them, and exit with 2 if a commit before the last has a wrong checksum.

    Example: reef log dump ./log --first 2
    """
    if frames:
        if first or last:
            raise InvalidInputError("--frames excludes --first and --last")
        output.stream(FRAME_COLUMNS, _frame_rows(path))
        return EXIT_PROBLEMS if verify_log(path, deep=False).problems else 0
    output.stream(ENTRY_COLUMNS, _entry_rows(path, first or 1, last))
    return 0


def _entry_rows(path: str, first: int, last: int | None) -> Iterator[dict[str, Any]]:
    for entry in dump_entries(path, codec=BINARY):
        if last is not None and entry.index > last:
            return
        if entry.index >= first:
            yield {
                "index": entry.index,
                "term": entry.term,
                "type": _type_name(entry.type),
                "appended_at": str(entry.appended_at),
                "data": entry.data,
                "extensions": entry.extensions,
            }


def _type_name(kind: int) -> str:
    return EntryType(kind).name.lower() if kind in set(EntryType) else str(kind)


def _frame_rows(path: str) -> Iterator[dict[str, Any]]:
    for name, frame in dump_frames(path):
        row = {"segment": name, "offset": frame.offset, "frame": frame_name(frame)}
        if frame_name(frame) == "commit":
            yield {**row, "checksum": f"{frame.checksum:08x}", "valid": frame.valid}
        else:
            yield {**row, "bytes": frame.length}
