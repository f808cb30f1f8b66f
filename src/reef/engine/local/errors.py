"""Errors of a writer with a local log."""

from reef.engine.local.stream import LogIdentity, PendingUploads
from reef.errors import (
    ErrorKind,
    FencedError,
    InternalError,
    InvalidInputError,
    OutcomeUnknownError,
    UnavailableError,
)
from reef.types import Receipt


def no_room(namespace: str, why: str) -> UnavailableError:
    """Return the error for a batch that was not admitted within its deadline."""
    return UnavailableError(
        f"{namespace} has no room: {why}",
        hint="Check whether the bucket is reachable, write more slowly, or raise "
        "local_backlog_bytes_max",
        namespace=namespace,
    )


def late(namespace: str, pending: PendingUploads, path: str, seconds: float) -> UnavailableError:
    """Return the error for an upload that takes longer than the caller's timeout."""
    return UnavailableError(
        f"{_count(pending)} of {namespace} are not in the bucket after {seconds:g} s; "
        f"they are safe in {path}",
        hint="Wait longer: they are uploaded as soon as the bucket is reachable",
        namespace=namespace,
    )


def left_behind(namespace: str, pending: PendingUploads, path: str) -> UnavailableError:
    """Return the error for a writer that was closed before every batch was uploaded."""
    return UnavailableError(
        f"the writer of {namespace} is closed, and {_count(pending)} are not in the bucket; "
        f"they are safe in {path}",
        hint=f"Open the writer again with this local log; `reef log pending {path}` shows them",
        namespace=namespace,
    )


def fenced(cause: str, identity: LogIdentity, pending: PendingUploads, path: str) -> FencedError:
    """Return the error for a local log whose namespace another writer has acquired."""
    return FencedError(
        f"{cause}; {_count(pending)} are on this disk only, in {path}",
        hint=f"See them with `reef log pending {path}`; "
        f"apply them with `reef log reapply {path} {identity.url}`",
        namespace=identity.namespace,
        path=path,
    )


def forked(identity: LogIdentity, pending: PendingUploads, path: str) -> FencedError:
    """Return the error for a log of which a copy has committed other entries."""
    first = f", the first of them entry {pending.first_index}" if pending.batches else ""
    return FencedError(
        f"{path} has forked: a copy of this local log has uploaded other entries to "
        f"{identity.namespace} under the same numbers; {_count(pending)} are on this disk only"
        f"{first}",
        kind=ErrorKind.LOG_FORKED,
        hint=f"Nothing was changed. See them with `reef log pending {path} --url {identity.url}`; "
        f"apply them with `reef log reapply {path} {identity.url}`",
        namespace=identity.namespace,
        path=path,
        first_index=pending.first_index,
    )


def foreign(identity: LogIdentity, path: str, url: str) -> InvalidInputError:
    """Return the error for a log whose stream a namespace does not know."""
    return InvalidInputError(
        f"{path} is a local log of another database: namespace {identity.namespace} of {url} "
        f"does not know it; it was last used with {identity.url}",
        hint="Choose another directory, or open the database that it belongs to; if this is the "
        f"one, and it was rebuilt, `reef log reapply {path} {url}` applies the rest",
        namespace=identity.namespace,
        path=path,
    )


def no_schema(index: int, schema_id: int, identity: LogIdentity, path: str) -> InvalidInputError:
    """Return the error for a batch whose schema its namespace does not have."""
    return InvalidInputError(
        f"batch {index} of {path} was written with schema {schema_id}, which namespace "
        f"{identity.namespace} does not have: it was re-created since",
        hint=f"The batches stay in {path}; `reef log dump {path}` shows them",
        namespace=identity.namespace,
        path=path,
    )


def unknown(index: int, path: str, cause: BaseException, receipt: Receipt) -> OutcomeUnknownError:
    """Return the error for a batch that was being written when the disk failed."""
    return OutcomeUnknownError(
        f"batch {index} of {path} may be on the disk: {cause}",
        kind=cause.kind if isinstance(cause, OutcomeUnknownError) else None,
        hint="Open the writer again: it recovers the batches on the disk",
        receipt=receipt,
    )


def broken(namespace: str, cause: BaseException) -> InternalError:
    """Return the error for a writer whose state cannot be trusted any more."""
    return InternalError(
        f"the writer of {namespace} failed while it wrote its local log: {cause!r}",
        hint="Open the writer again",
        namespace=namespace,
    )


def _count(pending: PendingUploads) -> str:
    return f"{pending.batches} batches ({pending.bytes} bytes)"
