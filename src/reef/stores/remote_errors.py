"""What an error of the remote client means to its caller.

obstore tells little by type and much by text: the HTTP status and the service's error
code stand in the message. They are read here and nowhere else.
"""

import re

from reef.errors import InvalidInputError, Kind, NotFoundError, ReefError, UnavailableError

__all__ = ["is_conflict", "never_sent", "translate"]

STATUS = re.compile(r"status code: (\d{3})")
CODE = re.compile(r"<Code>(\w+)</Code>")
TRANSIENT_CODES = {"RequestTimeout", "SlowDown", "InternalError", "ServiceUnavailable"}
CONFLICTS = {"AlreadyExistsError", "PreconditionError", "NotModifiedError"}


def translate(error: Exception, url: str, key: str) -> ReefError:
    """Return Reef's error for the client's."""
    text = str(error)
    status, code = _status(text), _code(text)
    if code == "NoSuchBucket":
        return InvalidInputError(
            f"the bucket of {url} does not exist",
            kind=Kind.BUCKET_MISSING,
            hint="Create it first, or check its name and the endpoint",
        )
    if isinstance(error, FileNotFoundError):
        return NotFoundError(f"no object {key} in {url}", object=key)
    if status in (401, 403) or _denied(error):
        return InvalidInputError(
            f"{url} refused these credentials for {key or 'a listing'} ({code or status})",
            kind=Kind.ACCESS_DENIED,
            hint="Check access_key_id, secret_access_key, region and the bucket's policy",
            object=key,
        )
    if status == 416:
        return InvalidInputError(
            f"object {key} is shorter than the range asked for",
            kind=Kind.INVALID_RANGE,
            object=key,
        )
    if status is not None and _final(status) and code not in TRANSIENT_CODES:
        return InvalidInputError(
            f"{url} refused the request for {key}: {_first_line(text)}",
            kind=Kind.REFUSED_BY_STORE,
            object=key,
        )
    return _passing(error, url, status)


def _passing(error: Exception, url: str, status: int | None) -> UnavailableError:
    """Return the error for what may go better next time."""
    text = str(error)
    if never_sent(error):
        return UnavailableError(
            f"{url} cannot be reached: {_first_line(text)}",
            hint="Check the endpoint, the network and the proxy",
        )
    return UnavailableError(f"{url}: {_first_line(text)}", kind=_transient(status, text))


def is_conflict(error: Exception) -> bool:
    """Whether the store said that the condition of a write does not hold."""
    return type(error).__name__ in CONFLICTS or _status(str(error)) in (409, 412)


def never_sent(error: Exception) -> bool:
    """Whether the request did not leave this machine, for certain."""
    return "kind: Connect" in str(error)


def _final(status: int) -> bool:
    """Whether the same request would be refused for ever."""
    return 400 <= status < 500 and status not in (408, 409, 425, 429)


def _denied(error: Exception) -> bool:
    names = ("PermissionDeniedError", "UnauthenticatedError")
    return type(error).__name__ in names or "CredentialsError" in str(error)


def _transient(status: int | None, text: str) -> Kind:
    if status in (429, 503) or _code(text) == "SlowDown":
        return Kind.THROTTLED
    return Kind.TIMEOUT if "timed out" in text or "Timeout" in text else Kind.UNAVAILABLE


def _status(text: str) -> int | None:
    match = STATUS.search(text)
    return int(match[1]) if match else None


def _code(text: str) -> str | None:
    match = CODE.search(text)
    return match[1] if match else None


def _first_line(text: str) -> str:
    return text.split("\n", 1)[0][:300]
