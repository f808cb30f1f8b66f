"""What a writer with a local log says when something goes wrong, and what to do about it."""

from reef.engine.local.backlog import Left
from reef.engine.local.identity import LogIdentity
from reef.errors import (
    FencedError,
    InternalError,
    InvalidInputError,
    Kind,
    OutcomeUnknownError,
    UnavailableError,
)
from reef.types import Receipt

__all__ = [
    "broken",
    "fenced",
    "foreign",
    "forked",
    "late",
    "left_behind",
    "no_room",
    "no_schema",
    "unknown",
]


def no_room(namespace: str, why: str) -> UnavailableError:
    """Return the error for a batch that was not let in within its deadline."""
    return UnavailableError(
        f"{namespace} has no room: {why}",
        hint="Look whether the bucket can be reached, write more slowly, or raise "
        "local_backlog_bytes_max",
        namespace=namespace,
    )


def late(namespace: str, left: Left, path: str, seconds: float) -> UnavailableError:
    """Return the error for an upload that takes longer than the caller waits."""
    return UnavailableError(
        f"{_some(left)} of {namespace} are not in the bucket after {seconds:g} s; "
        f"they are safe in {path}",
        hint="Wait on: they are uploaded as soon as the bucket can be reached",
        namespace=namespace,
    )


def left_behind(namespace: str, left: Left, path: str) -> UnavailableError:
    """Return what a writer says that was closed before all was uploaded."""
    return UnavailableError(
        f"the writer of {namespace} is closed, and {_some(left)} are not in the bucket; "
        f"they are safe in {path}",
        hint=f"Open the writer again with this local log; `reef log pending {path}` shows them",
        namespace=namespace,
    )


def fenced(cause: str, identity: LogIdentity, left: Left, path: str) -> FencedError:
    """Return the error for a local log whose namespace another writer has taken over."""
    return FencedError(
        f"{cause}; {_some(left)} are on this disk only, in {path}",
        hint=f"See them with `reef log pending {path}`; "
        f"apply them with `reef log reapply {path} {identity.url}`",
        namespace=identity.namespace,
        path=path,
    )


def forked(identity: LogIdentity, left: Left, path: str) -> FencedError:
    """Return the error for a log of which a copy has committed other entries."""
    first = f", the first of them entry {left.first_index}" if left.batches else ""
    return FencedError(
        f"{path} has forked: a copy of this local log has uploaded other entries to "
        f"{identity.namespace} under the same numbers; {_some(left)} are on this disk only{first}",
        kind=Kind.LOG_FORKED,
        hint=f"Nothing was changed. See them with `reef log pending {path} --url {identity.url}`; "
        f"apply them with `reef log reapply {path} {identity.url}`",
        namespace=identity.namespace,
        path=path,
        first_index=left.first_index,
    )


def foreign(identity: LogIdentity, path: str, url: str) -> InvalidInputError:
    """Return the error for a log that a namespace does not know."""
    return InvalidInputError(
        f"{path} is a local log of another database: namespace {identity.namespace} of {url} "
        f"does not know it; it was last used with {identity.url}",
        hint="Choose another directory, or open the database that it belongs to; if this is the "
        f"one, and it was rebuilt, `reef log reapply {path} {url}` writes what is left",
        namespace=identity.namespace,
        path=path,
    )


def no_schema(index: int, schema_id: int, identity: LogIdentity, path: str) -> InvalidInputError:
    """Return the error for a batch whose columns its namespace does not know any more."""
    return InvalidInputError(
        f"batch {index} of {path} was written with schema {schema_id}, which namespace "
        f"{identity.namespace} does not have: it was created anew since",
        hint=f"What is left stays in {path}; `reef log dump {path}` shows its entries",
        namespace=identity.namespace,
        path=path,
    )


def unknown(index: int, path: str, cause: BaseException, receipt: Receipt) -> OutcomeUnknownError:
    """Return the error for a batch over which the disk failed."""
    return OutcomeUnknownError(
        f"batch {index} of {path} may be on the disk: {cause}",
        kind=cause.kind if isinstance(cause, OutcomeUnknownError) else None,
        hint="Open the writer again: it takes up what the disk has",
        receipt=receipt,
    )


def broken(namespace: str, cause: BaseException) -> InternalError:
    """Return the error for a writer whose books cannot be trusted any more."""
    return InternalError(
        f"the writer of {namespace} broke off over its local log: {cause!r}",
        hint="Open the writer again",
        namespace=namespace,
    )


def _some(left: Left) -> str:
    return f"{left.batches} batches ({left.bytes} bytes)"
