"""`reef log …`: a local log, as it lies in its directory."""

from collections.abc import Iterator
from typing import Any

import click

from reef.cli.log_pending import pending_command, reapply_command
from reef.cli.options import EXIT_PROBLEMS, ReefCommand, encoding_option
from reef.cli.output import Output
from reef.errors import InvalidInputError
from reef.locallog.codec import BINARY
from reef.locallog.entry import EntryType
from reef.locallog.inspecting import dump_entries, dump_frames, frame_name, verify_log

__all__ = ["log"]

ENTRY_COLUMNS = ("index", "term", "type", "appended_at", "data", "extensions")
FRAME_COLUMNS = ("segment", "offset", "frame", "bytes", "checksum", "valid")


@click.group()
def log() -> None:
    """Local logs: what is in them, is it sound, and what was not uploaded."""


log.add_command(pending_command)
log.add_command(reapply_command)


@log.command("inspect", cls=ReefCommand)
@click.argument("path")
@click.pass_obj
def inspect_command(output: Output, path: str) -> int:
    """Print the segments of a log, and what is damaged.

    Every checksum is checked; entries are not looked into, so the codec does not matter. The log
    may be in use. Exits with 2 if there is damage.

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

    Changes nothing, and the log may be in use. A batch that a crash has torn is no damage: it was
    never acknowledged, and the next opening drops it. Exits with 2 if there is damage.

    Example: reef log verify ./log
    """
    report = verify_log(path)
    output.report(f"verified {path}", report)
    return EXIT_PROBLEMS if report.problems else 0


@log.command("dump", cls=ReefCommand)
@click.argument("path")
@click.option("--frames", is_flag=True, help="The frames of the files instead of the entries.")
@click.option("--first", type=click.IntRange(min=1), metavar="N", help="From this entry on.")
@click.option("--last", type=click.IntRange(min=1), metavar="N", help="Up to this entry.")
@encoding_option
@click.pass_obj
def dump_command(
    output: Output, path: str, *, frames: bool, first: int | None, last: int | None
) -> int:
    """Print the entries of a log, or its frames with their offsets and checksums.

    The log may be in use. Stops with exit code 2 at the first entry that cannot be read; frames
    are printed as far as there are any, and the exit code is 2 if a commit before the last has
    another checksum than its bytes.

    Example: reef log dump ./log --first 2
    """
    if frames:
        if first or last:
            raise InvalidInputError("--first and --last choose entries, not --frames")
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
