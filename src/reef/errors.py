"""Every error Reef raises, sorted by what the caller does next.

    ReefError                    .kind  .hint  .context  (picklable)
    ├── ConflictError            lost the race: refresh and retry
    ├── FencedError              a newer writer owns this namespace: reopen
    ├── OutcomeUnknownError      the write may have landed: resolve(receipt) before retrying
    ├── UnavailableError         store or network: retry later
    ├── NotFoundError            (also KeyError)
    ├── InvalidInputError        (also ValueError) the caller's words are wrong: change them
    ├── ConditionFailedError     a conditional write's predicate was false
    ├── ClosedError              the handle was closed: open another
    ├── CorruptionError          the bytes contradict themselves: stop, run verify
    ├── UnsupportedFormatError   valid bytes from a newer release: upgrade
    └── InternalError            our bug

`kind` is finer than the class, stable, and only ever grows; programs may match on it.
`hint` is one sentence that tells a person what to do. `context` holds the facts of the
message (object, offset, …) as values.
"""

from enum import StrEnum
from typing import Any, ClassVar

import msgspec

__all__ = [
    "ClosedError",
    "ConditionFailedError",
    "ConflictError",
    "CorruptionError",
    "FencedError",
    "InternalError",
    "InvalidInputError",
    "Kind",
    "NotFoundError",
    "OutcomeUnknownError",
    "ReefError",
    "UnavailableError",
    "UnsupportedFormatError",
]

UNDECODABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What decoding JSON or msgpack raises over bytes that are something else: wrong structure, text
that is not UTF-8, nesting without end."""


class Kind(StrEnum):
    """What happened, as a stable word. Append only: a kind that was published never goes."""

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
    LOG_FORKED = "log_forked"
    CHANGED_WINNER = "changed_winner"
    """A slot holds another write than the one that was seen there: the store overwrote it."""
    REGISTER_RESTORED = "register_restored"


class ReefError(Exception):
    """The root of the tree; every error of Reef's own is one."""

    default_kind: ClassVar[Kind] = Kind.INTERNAL

    def __init__(
        self, message: str, *, kind: Kind | None = None, hint: str = "", **context: Any
    ) -> None:
        super().__init__(message)
        self.message = message
        self.kind = kind or self.default_kind
        self.hint = hint
        self.context = context

    def __str__(self) -> str:
        return f"{self.message}. {self.hint}" if self.hint else self.message

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.message, self.kind, self.hint, self.context)


def _rebuild(
    cls: type[ReefError], message: str, kind: Kind, hint: str, context: dict[str, Any]
) -> ReefError:
    """Errors cross process borders (Spark, multiprocessing) with all their facts."""
    return cls(message, kind=kind, hint=hint, **context)


class ConflictError(ReefError):
    """Lost the race: refresh and retry."""

    default_kind = Kind.CONFLICT


class FencedError(ReefError):
    """A newer writer owns this namespace: reopen."""

    default_kind = Kind.FENCED


class OutcomeUnknownError(ReefError):
    """The write may have landed: resolve it before retrying."""

    default_kind = Kind.OUTCOME_UNKNOWN

    @property
    def receipt(self) -> Any:
        """What to resolve; None where the write was not a batch."""
        return self.context.get("receipt")


class UnavailableError(ReefError):
    """Store or network: retry later."""

    default_kind = Kind.UNAVAILABLE


class NotFoundError(ReefError, KeyError):
    """What was asked for is not there."""

    default_kind = Kind.NOT_FOUND

    __str__ = ReefError.__str__  # KeyError would print the message in quotes


class InvalidInputError(ReefError, ValueError):
    """The caller's words are wrong; nothing was changed."""

    default_kind = Kind.INVALID_INPUT


class ConditionFailedError(ReefError):
    """A conditional write's predicate was false."""

    default_kind = Kind.CONDITION_FAILED


class ClosedError(ReefError):
    """The handle was closed."""

    default_kind = Kind.CLOSED


class CorruptionError(ReefError):
    """The bytes contradict themselves: stop, and run verify."""

    default_kind = Kind.CORRUPTION


class UnsupportedFormatError(ReefError):
    """Valid bytes, written by a newer release: upgrade."""

    default_kind = Kind.UNSUPPORTED_FORMAT


class InternalError(ReefError):
    """A bug of Reef's own."""

    default_kind = Kind.INTERNAL
