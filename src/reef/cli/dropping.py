"""`reef drop`, `undrop` and `jobs`: namespaces that go and come back, and what runs in a bucket."""

import click

from reef.cli.options import ReefCommand, on_bucket, on_namespace
from reef.cli.output import Output
from reef.engine.database import Database
from reef.engine.jobs_seen import RunningJob

__all__ = ["drop", "jobs", "undrop"]

COLUMNS = ("namespace", "kind", "id", "where", "since", "heartbeat", "progress", "state")


@click.command(cls=ReefCommand)
@on_namespace
def drop(output: Output, db: Database, namespace: str) -> None:
    """Drop a namespace: its writer is fenced, and nobody can open it.

    It can be brought back with `undrop` until `gc` takes what was in it, a day later.

    Example: reef drop ./data users
    """
    db.drop(namespace)
    output.record("dropped", {"namespace": namespace})


@click.command(cls=ReefCommand)
@on_namespace
def undrop(output: Output, db: Database, namespace: str) -> None:
    """Bring a dropped namespace back, as it was.

    Example: reef undrop ./data users
    """
    info = db.undrop(namespace)
    output.record("brought back", {"namespace": namespace, "generation": info.generation})


@click.command(cls=ReefCommand)
@on_bucket
@click.argument("namespace", required=False)
def jobs(output: Output, db: Database, namespace: str | None) -> None:
    """Show what runs in a bucket, or in one namespace: where, since when, how far.

    Example: reef jobs ./data
    """
    found = db.jobs(namespace)
    if output.is_json:
        output.json([job.to_dict() for job in found])
        return
    output.table(f"jobs of {db.store.url}", COLUMNS, [_row(job) for job in found])


def _row(job: RunningJob) -> dict[str, str]:
    return {
        "namespace": job.namespace,
        "kind": job.kind,
        "id": job.id,
        "where": job.where or "?",
        "since": _age(job.since_s),
        "heartbeat": _age(job.heartbeat_s),
        "progress": ", ".join(f"{count:,} {what}" for what, count in job.progress.items()),
        "state": "stale" if job.is_stale else "running",
    }


def _age(seconds: float | None) -> str:
    return "?" if seconds is None else f"{seconds:,.0f} s ago"
