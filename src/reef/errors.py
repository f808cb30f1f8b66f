"""Every error that Reef raises, by the caller's next step.

    ReefError                    .kind  .hint  .context  (picklable)
    ├── ConflictError            lost the race: refresh and retry
    ├── FencedError              a newer writer owns this namespace: reopen
    ├── OutcomeUnknownError      the write may have landed: resolve(receipt) before retrying
    ├── UnavailableError         store or network: retry later
    ├── NotFoundError            (also KeyError)
    ├── InvalidInputError        (also ValueError) an argument is wrong: change it
    ├── ConditionFailedError     a conditional write's predicate was false
    ├── ClosedError              the handle was closed: open another
    ├── CorruptionError          checksum or structure is broken: stop, run verify
    ├── UnsupportedFormatError   valid bytes from a newer release: upgrade
    └── InternalError            our bug

`kind` is finer than the class, stable, and append-only; programs may match on it. `hint` is one
sentence that says what to do. `context` holds the facts of the message (object, offset, …) as
values.
"""

import warnings
from enum import StrEnum
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

__all__ = [
    "ClosedError",
    "ConditionFailedError",
    "ConflictError",
    "CorruptionError",
    "ErrorKind",
    "FencedError",
    "InternalError",
    "InvalidInputError",
    "NotFoundError",
    "OutcomeUnknownError",
    "ReefError",
    "UnavailableError",
    "UnsupportedFormatError",
]

UNDECODABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""Raised by decoders of JSON and msgpack for foreign bytes: wrong structure, text that is not
UTF-8, unbounded nesting."""


class ErrorKind(StrEnum):
    """A stable name of the cause. Append-only: a published kind is never removed."""

    CONFLICT = "conflict"
    FENCED = "fenced"
    OUTCOME_UNKNOWN = "outcome_unknown"
    UNAVAILABLE = "unavailable"
    TIMEOUT = "timeout"
    THROTTLED = "throttled"
    SHORT_READ = "short_read"
    DISK_FULL = "disk_full"
    NOT_FOUND = "not_found"
    COLLECTED = "collected"
    INVALID_INPUT = "invalid_input"
    INVALID_KEY = "invalid_key"
    INVALID_RANGE = "invalid_range"
    INVALID_URL = "invalid_url"
    INVALID_OPTION = "invalid_option"
    BUCKET_MISSING = "bucket_missing"
    ACCESS_DENIED = "access_denied"
    REFUSED_BY_STORE = "refused_by_store"
    UNSUPPORTED_BY_STORE = "unsupported_by_store"
    NOT_EXCLUSIVE = "not_exclusive"
    OTHER_CAS = "other_cas"
    NOT_PICKLABLE = "not_picklable"
    FORKED = "forked"
    CONDITION_FAILED = "condition_failed"
    CLOSED = "closed"
    CORRUPTION = "corruption"
    UNSUPPORTED_FORMAT = "unsupported_format"
    INTERNAL = "internal"
    NOT_DURABLE = "not_durable"
    DROPPED = "dropped"
    RENAMED = "renamed"
    LOG_FORKED = "log_forked"
    CHANGED_WINNER = "changed_winner"
    """A slot has another write than the one that was read there before: the store overwrote it."""
    REGISTER_RESTORED = "register_restored"
    WRONG_CHECKPOINT = "wrong_checkpoint"
    """A checkpoint of Spark that was deleted, moved, copied or used with another namespace."""


MESSAGE_LENGTH_MAX = 2000
"""A longer message, such as one that quotes a query or a key, loses its middle."""


class ReefError(Exception):
    """The base class of all errors that Reef raises."""

    default_kind: ClassVar[ErrorKind] = ErrorKind.INTERNAL

    def __init__(
        self, message: str, *, kind: ErrorKind | None = None, hint: str = "", **context: Any
    ) -> None:
        self.message = _shorten(message)
        super().__init__(self.message)
        self.kind = kind or self.default_kind
        self.hint = _shorten(hint)
        self.context = context

    def __str__(self) -> str:
        return f"{self.message}. {self.hint}" if self.hint else self.message

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.message, self.kind, self.hint, self.context)


def _shorten(text: str) -> str:
    if len(text) <= MESSAGE_LENGTH_MAX:
        return text
    return f"{text[: MESSAGE_LENGTH_MAX - 500]} … {text[-490:]}"


def _rebuild(
    cls: type[ReefError], message: str, kind: ErrorKind, hint: str, context: dict[str, Any]
) -> ReefError:
    """Rebuild a pickled error, with its kind, hint and context."""
    return cls(message, kind=kind, hint=hint, **context)


class ConflictError(ReefError):
    """Lost the race: refresh and retry."""

    default_kind = ErrorKind.CONFLICT


class FencedError(ReefError):
    """A newer writer owns this namespace: reopen."""

    default_kind = ErrorKind.FENCED


class OutcomeUnknownError(ReefError):
    """The write may have landed: resolve it before retrying."""

    default_kind = ErrorKind.OUTCOME_UNKNOWN

    @property
    def receipt(self) -> Any:
        """The receipt to resolve; None where the write was not a batch."""
        return self.context.get("receipt")


class UnavailableError(ReefError):
    """Store or network: retry later."""

    default_kind = ErrorKind.UNAVAILABLE


class NotFoundError(ReefError, KeyError):
    """The object, row, generation or name does not exist, or not any more."""

    default_kind = ErrorKind.NOT_FOUND

    __str__ = ReefError.__str__  # KeyError would print the message in quotes


class InvalidInputError(ReefError, ValueError):
    """An argument is wrong; nothing was changed."""

    default_kind = ErrorKind.INVALID_INPUT


class ConditionFailedError(ReefError):
    """A conditional write's predicate was false."""

    default_kind = ErrorKind.CONDITION_FAILED


class ClosedError(ReefError):
    """The handle was closed."""

    default_kind = ErrorKind.CLOSED


class CorruptionError(ReefError):
    """A checksum or structure is broken: stop, and run verify."""

    default_kind = ErrorKind.CORRUPTION


class UnsupportedFormatError(ReefError):
    """Valid bytes, written by a newer release: upgrade."""

    default_kind = ErrorKind.UNSUPPORTED_FORMAT


class InternalError(ReefError):
    """A bug in Reef."""

    default_kind = ErrorKind.INTERNAL


if not TYPE_CHECKING:  # type checkers would otherwise accept any misspelt name

    def __getattr__(name: str) -> Any:
        if name != "Kind":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        warnings.warn("reef.errors.Kind is now ErrorKind", DeprecationWarning, stacklevel=2)
        return ErrorKind
