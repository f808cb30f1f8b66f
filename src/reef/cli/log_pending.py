"""`reef log pending` and `reapply`: what a writer's local log holds that is not in the bucket.

Both are for the time after something went wrong: a machine is down, or another writer has taken
over a namespace whose last writes are on this disk only.
"""

from typing import Any

import click

from reef import stores
from reef.cli.options import (
    ReefCommand,
    asking_to_take_over,
    on_bucket,
    parse_options,
    store_options,
    take_over_option,
)
from reef.cli.output import Output
from reef.engine.database import Database
from reef.engine.local.pending import identity_of, read_pending

__all__ = ["pending_command", "reapply_command"]


@click.command("pending", cls=ReefCommand)
@click.argument("path")
@click.option("--url", metavar="URL", help="Ask this bucket, instead of going by the log's notes.")
@store_options
@click.pass_obj
def pending_command(output: Output, path: str, url: str | None, options: tuple[str, ...]) -> None:
    """Print what a local log holds that was not uploaded.

    How many batches, how large, from which entry to which, and how old. The log may be in use,
    and nothing is changed. Without --url this goes by what the log has noted of its uploads,
    which may lag behind a little; with it, by what is in the bucket.

    Example: reef log pending ./users-log
    """
    store = None if url is None else stores.open(url, **parse_options(options))
    output.report(f"not uploaded from {path}", read_pending(path, store=store))


@click.command("reapply", cls=ReefCommand)
@click.argument("path")
@on_bucket
@take_over_option
def reapply_command(output: Output, db: Database, *, path: str, take_over: bool) -> None:
    """Write what a local log has left, though another writer has taken over.

    Takes the writer role, so that any writer is fenced. What was uploaded before is not written
    again, and what is written now lies over what others wrote to the same keys meanwhile: look at
    it first, with `reef log pending` and `reef log dump`. A batch that its client has sent again
    meanwhile, with the same idempotency key, is not written twice. It can be repeated. Refuses, and
    changes nothing, if another writer wrote within the last minute.

    Example: reef log reapply ./users-log ./data
    """
    identity, _ = identity_of(path)
    with asking_to_take_over():
        writer = db.writer(
            identity.namespace,
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
            "namespace": identity.namespace,
            "applied_batches": recovery.replayed,
            "repeated_batches": recovery.repeated,
            "uploaded_before": recovery.uploaded_index,
            "last_index": recovery.uploaded_index + recovery.replayed + recovery.repeated,
        }
    output.record(f"applied what was left in {path}", facts)
