"""HTTP services: their options, their errors, and the requests that obstore does not offer.

A URL's query has only text, keyword arguments have types: both are parsed as the type of the
option's default. Options that are not given come from the provider's usual environment variables.

obstore's errors carry little in their type and much in their text, which has two halves: a
sentence, with keys and the service's message verbatim, and a report in which every field has a line
of its own and every foreign string is quoted and escaped:

    Generic S3 error: Error performing PUT http://… - Server returned non-2xx status code: …

    Debug source:
    …        inner: Status {
                 status: 503,
                 body: Some(
                     "<Error><Code>SlowDown</Code></Error>",

Only whole lines of the report are parsed, and only here: a key may be named `status code: 403`, and
must not be mistaken for a response.

`HttpSender` sends blocks by URL and compositions, which are idempotent: they name the object that
they write. So transient failures are retried, a bounded number of times.

**Composition.** `plan` decides which parts of an object a service copies by itself, and which are
sent:

    parts     | new | range of a, large        | range of b, small | range of c, large  | new |
    planned   | sent: new + head of a | copied | sent: b + head of c | copied           | sent |

A service composes an object of parts that must not be small, except for the last one. A range that
is too small to be a part is read and sent; a sent part that is too small itself is filled up with
the first bytes of the range that follows. So every byte that is not within a part's minimum of a
border is copied without passing through here.
"""

import re
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import Field, dataclass, fields
from datetime import timedelta
from http.client import HTTPException
from itertools import pairwise
from typing import Any, ClassVar, Literal, Self
from xml.etree import ElementTree

from reef.config import bad_option
from reef.errors import ErrorKind, InvalidInputError, NotFoundError, ReefError, UnavailableError
from reef.runtime import Runtime
from reef.stores.base import PIECE_BYTES, Part, Store, check_range
from reef.stores.wrappers.policies import Backoff, RetryPolicy

# --- options ------------------------------------------------------------------------


MIB = 1 << 20
TIMEOUT_S_MAX = 86_400
EXPECTED = {bool: "true or false", int: "a whole number", float: "a number"}
"""The types of options, as error messages name them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteOptions:
    """Options that all services share; subclasses add location and credentials."""

    scheme: ClassVar[str] = ""

    endpoint: str | None = None
    allow_http: bool = False
    allow_invalid_certificates: bool = False
    listing: Literal["sorted", "unsorted"] = "sorted"
    """"unsorted": whole folders are listed and sorted here, since the service keeps
    another order (S3 Express, SeaweedFS) and its start-after would skip keys."""
    proxy_url: str | None = None
    timeout_s: float = 30.0
    connect_timeout_s: float = 5.0
    part_bytes: int = 8 * MIB
    """Size of a part of an upload; S3 allows 10,000 parts of 5 MiB to 5 GiB."""
    upload_concurrency: int = 4

    @classmethod
    def parse(cls, given: dict[str, Any]) -> Self:
        """Return options from keyword arguments or a URL's query; both may be text."""
        known: dict[str, Field[Any]] = {option.name: option for option in fields(cls)}
        for name in given:
            if name not in known:
                raise InvalidInputError(
                    f"{cls.scheme}:// has no option {name!r}",
                    kind=ErrorKind.INVALID_OPTION,
                    hint=f"It takes: {', '.join(sorted(known))}",
                )
        options = cls(**{name: _coerce(known[name].default, name, given[name]) for name in given})
        options.check()
        return options

    def check(self) -> None:
        if self.listing not in ("sorted", "unsorted"):
            raise bad_option("listing", self.listing, "sorted or unsorted")
        if self.part_bytes < 5 * MIB:
            raise bad_option("part_bytes", self.part_bytes, "at least 5 MiB")
        for name in ("timeout_s", "connect_timeout_s"):
            seconds = getattr(self, name)
            if not 0 < seconds <= TIMEOUT_S_MAX:  # NaN is refused, too
                raise bad_option(name, seconds, f"a number of seconds up to {TIMEOUT_S_MAX}")
        if self.upload_concurrency < 1:
            raise bad_option("upload_concurrency", self.upload_concurrency, "at least 1")
        if self.endpoint is not None and not self.endpoint.startswith(("http://", "https://")):
            raise bad_option("endpoint", self.endpoint, "a URL with http:// or https://")

    @property
    def sorts_listings(self) -> bool:
        return self.listing == "sorted"

    def store_config(self) -> dict[str, Any]:
        """Return the configuration of the client, without settings left to the environment."""
        return {name: value for name, value in self._named().items() if value is not None}

    def _named(self) -> dict[str, Any]:
        """Return each setting by the client's name for it; None leaves it to the environment."""
        return {"endpoint": self.endpoint}

    def client_config(self) -> dict[str, Any]:
        config: dict[str, Any] = {
            "timeout": timedelta(seconds=self.timeout_s),
            "connect_timeout": timedelta(seconds=self.connect_timeout_s),
            "allow_http": self.allow_http or (self.endpoint or "").startswith("http://") or None,
            "allow_invalid_certificates": self.allow_invalid_certificates or None,
            "proxy_url": self.proxy_url,
            # A cache in front of the bucket must not respond for it (H9).
            "default_headers": {"Cache-Control": "no-cache"},
        }
        return {name: value for name, value in config.items() if value is not None}


def _coerce(default: object, name: str, value: Any) -> Any:
    """A URL's query has only text; read it as the type of the option's default."""
    try:
        if isinstance(default, bool) and isinstance(value, str):
            return {"true": True, "false": False}[value.lower()]
        if isinstance(default, int | float) and isinstance(value, str):
            return type(default)(value)
    except (KeyError, ValueError):
        raise bad_option(name, value, EXPECTED[type(default)]) from None
    if default is None and value is not None and not isinstance(value, str):
        raise bad_option(name, value, "text")
    return value


# --- errors -------------------------------------------------------------------------


REPORT = "\nDebug source:\n"
STATUS = re.compile(r"^\s*status: (\d{3}),$", re.MULTILINE)
BARE_REDIRECT = re.compile(r"^\s*inner: BareRedirect,$", re.MULTILINE)
BODY_CODE = re.compile(r'^\s*(?:body: )?"[^\n]*?<Code>(\w+)</Code>[^\n]*",$', re.MULTILINE)
DELETE_CODE = re.compile(r'^\s*code: "(\w+)",$', re.MULTILINE)
NOT_CONNECTED = re.compile(r"^\s*kind: Connect,$", re.MULTILINE)
STARTS_PAST_THE_END = re.compile(r"^\s*source: StartTooLarge \{$", re.MULTILINE)
NOT_PARTIAL = re.compile(r"^\s*source: NotPartial,$", re.MULTILINE)
TIMED_OUT = re.compile(r"^\s*kind: Timeout,$", re.MULTILINE)

BUCKET_MISSING_CODES = {"NoSuchBucket", "ContainerNotFound"}
CREDENTIALS = {
    "s3://": "access_key_id, secret_access_key, region",
    "az://": "account_name, account_key",
}
CONFLICTS = {"AlreadyExistsError", "PreconditionError", "NotModifiedError"}
DENIALS = {"PermissionDeniedError", "UnauthenticatedError"}
DENIED_CODES = {"AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken"}
TRANSIENT_CODES = {
    "InternalError",
    "OperationAborted",
    "RequestTimeout",
    "ServiceUnavailable",
    "SlowDown",
    # The upload may be gone because it is complete: its writer must check (H3).
    "NoSuchUpload",
}


@dataclass(frozen=True, slots=True)
class Response:
    """A response of the service; empty if there was none."""

    status: int | None = None
    code: str | None = None
    message: str = ""
    """For people; never parsed."""

    @property
    def summary(self) -> str:
        return self.code or (str(self.status) if self.status else "no status")


def translate(error: Exception, url: str, key: str) -> ReefError:
    """Translate an error of the client."""
    response = _response(error)
    known = final_error(response, url, key)
    if known is not None and known.kind is ErrorKind.BUCKET_MISSING:
        return known
    if isinstance(error, FileNotFoundError) and response.code not in TRANSIENT_CODES:
        return NotFoundError(f"no object {key} in {url}", object=key)
    if known is None and type(error).__name__ in DENIALS:
        return _denied_error(response, url, key)
    if NOT_PARTIAL.search(_report(error)):
        return UnavailableError(
            f"{url} ignores the range of a request for {key}",
            hint="Check proxies in between; Reef needs a server with ranged GETs",
            object=key,
            not_partial=True,
        )
    return known or _transient_error(error, response, url)


def final_error(response: Response, url: str, key: str) -> ReefError | None:
    """Return the error for a permanent response; None if a retry may succeed."""
    if response.code in BUCKET_MISSING_CODES:
        return InvalidInputError(
            f"the bucket of {url} does not exist",
            kind=ErrorKind.BUCKET_MISSING,
            hint="Create it first, or check its name and the endpoint",
        )
    if response.code in TRANSIENT_CODES:
        return None
    if response.status in (401, 403) or response.code in DENIED_CODES:
        return _denied_error(response, url, key)
    if response.code == "NoSuchKey":
        return NotFoundError(f"no object {key} in {url}", object=key)
    if response.status == 416:
        return InvalidInputError(
            f"object {key} is shorter than the requested range",
            kind=ErrorKind.INVALID_RANGE,
            object=key,
        )
    return _refused_error(response, url, key) if _is_final(response) else None


def is_conflict(error: Exception) -> bool:
    """Whether the condition of a write did not hold."""
    return type(error).__name__ in CONFLICTS or _response(error).status in (409, 412)


def never_sent(error: Exception) -> bool:
    """Whether the request did not leave this machine, for certain."""
    return _response(error).status is None and bool(NOT_CONNECTED.search(_report(error)))


def _is_final(response: Response) -> bool:
    """Whether the same request would always be refused."""
    if response.status is None or response.status == 200:  # errors inside a successful response
        return response.code is not None
    if response.status == 501:
        return True
    return 300 <= response.status < 500 and response.status not in (408, 409, 425, 429)


def _denied_error(response: Response, url: str, key: str) -> InvalidInputError:
    return InvalidInputError(
        f"{url} refused these credentials for {key or 'a listing'} ({response.summary})",
        kind=ErrorKind.ACCESS_DENIED,
        hint=f"Check {CREDENTIALS.get(url[:5], 'the credentials')} and the bucket's policy",
        object=key,
    )


def _refused_error(response: Response, url: str, key: str) -> InvalidInputError:
    redirected = response.status is not None and 300 <= response.status < 400
    return InvalidInputError(
        f"{url} refused the request for {key or 'a listing'} "
        f"({response.summary}): {response.message}",
        kind=ErrorKind.REFUSED_BY_STORE,
        hint="The bucket is somewhere else: check region and endpoint" if redirected else "",
        object=key,
    )


def _transient_error(error: Exception, response: Response, url: str) -> UnavailableError:
    """Return the error for a failure that a retry may resolve."""
    if never_sent(error):
        return UnavailableError(
            f"{url} cannot be reached: {response.message}",
            hint="Check the endpoint, the network and the proxy",
        )
    return UnavailableError(
        f"{url}: {response.message}", kind=_transient_kind(response, _report(error))
    )


def _transient_kind(response: Response, report: str) -> ErrorKind:
    if response.status in (429, 503) or response.code == "SlowDown":
        return ErrorKind.THROTTLED
    late = response.code == "RequestTimeout" or response.status in (408, 504)
    return ErrorKind.TIMEOUT if late or TIMED_OUT.search(report) else ErrorKind.UNAVAILABLE


def _response(error: Exception) -> Response:
    report = _report(error)
    status = STATUS.search(report)
    code = BODY_CODE.search(report) or DELETE_CODE.search(report)
    return Response(
        int(status[1]) if status else _implied(report),
        code[1] if code else None,
        str(error).split("\n", 1)[0][:300],
    )


def _implied(report: str) -> int | None:
    """Return the status of a response whose number the client does not report."""
    if STARTS_PAST_THE_END.search(report):
        return 416  # sent as 206 with an empty body
    return 301 if BARE_REDIRECT.search(report) else None


def _report(error: Exception) -> str:
    """Return the report; foreign strings are escaped, so the last mark is the real one."""
    return str(error).rpartition(REPORT)[2]


# --- plain HTTP ---------------------------------------------------------------------


ATTEMPTS_MAX = 5


class HttpSender:
    """Sends requests on behalf of one store."""

    def __init__(self, url: str, options: RemoteOptions, runtime: Runtime) -> None:
        self._url, self._runtime = url, runtime
        self._timeout_s = options.timeout_s
        self._policy = RetryPolicy(attempts_max=ATTEMPTS_MAX, deadline_s=options.timeout_s)
        self._opener = _opener(options)

    def send(
        self,
        method: str,
        url: str,
        key: str,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> bytes:
        """Send a request and return the body of the response; `key` is for errors."""
        backoff = Backoff(self._runtime, self._policy)
        while True:
            try:
                return self._send_once(method, url, key, body, headers or {})
            except UnavailableError:
                if not backoff.wait():
                    raise

    def _send_once(
        self, method: str, url: str, key: str, body: bytes | None, headers: Mapping[str, str]
    ) -> bytes:
        content = {"Content-Type": "application/octet-stream"} if body is not None else {}
        request = urllib.request.Request(url, body, {**content, **headers}, method=method)
        try:
            with self._opener.open(request, timeout=self._timeout_s) as response:
                read: bytes = response.read()
                return read
        except urllib.error.HTTPError as error:
            with error:
                response = Response(error.code, _code(error.read()), f"HTTP {error.code}")
            known = final_error(response, self._url, key)
            kind = ErrorKind.THROTTLED if error.code in (429, 503) else ErrorKind.UNAVAILABLE
            message = f"{self._url}: {response.summary} for {key}"
            raise known or UnavailableError(message, kind=kind) from error
        except (OSError, HTTPException) as error:
            raise UnavailableError(f"{self._url} cannot be reached: {error}") from error


def _opener(options: RemoteOptions) -> urllib.request.OpenerDirector:
    handlers: list[urllib.request.BaseHandler] = []
    if options.proxy_url:
        proxies = {"http": options.proxy_url, "https": options.proxy_url}
        handlers.append(urllib.request.ProxyHandler(proxies))
    if options.allow_invalid_certificates:
        handlers.append(urllib.request.HTTPSHandler(context=ssl._create_unverified_context()))
    return urllib.request.build_opener(*handlers)


def _code(body: bytes) -> str | None:
    try:
        return ElementTree.fromstring(body).findtext("Code")
    except ElementTree.ParseError:
        return None


@dataclass(frozen=True, slots=True)
class CopiedRange:
    """A part that the service copies from another object."""

    source: str
    start: int
    end: int

    @property
    def size(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Sent:
    """A part that is sent: new bytes, and ranges that are read first."""

    pieces: tuple[Part, ...]

    @property
    def size(self) -> int:
        return sum(map(_size, self.pieces))


Step = CopiedRange | Sent


def plan(
    parts: Sequence[Part], *, part_bytes_min: int, part_bytes: int, copy_bytes_max: int
) -> list[Step]:
    """Return the parts of the object; all but the last have `part_bytes_min` bytes or more."""
    planner = _Planner(part_bytes_min, part_bytes, copy_bytes_max)
    for part in parts:
        planner.add(part)
    return planner.finish()


class _Planner:
    def __init__(self, part_bytes_min: int, part_bytes: int, copy_bytes_max: int) -> None:
        self._min, self._part_bytes, self._copy_max = part_bytes_min, part_bytes, copy_bytes_max
        self._steps: list[Step] = []
        self._pending: list[Part] = []
        self._pending_bytes = 0

    def add(self, part: Part) -> None:
        if isinstance(part, bytes):
            self._send(part)
            return
        source, start, end = part
        check_range(source, start, end)
        if self._pending_bytes:
            missing = max(0, self._min - self._pending_bytes)
            if end - start < missing + self._min:
                self._send(part)
                return
            if missing:
                self._send((source, start, start + missing))
                start += missing
            self._flush()
        if end - start < self._min:
            self._send((source, start, end))
        else:
            self._copy(source, start, end)

    def finish(self) -> list[Step]:
        self._flush()
        return self._steps

    def _copy(self, source: str, start: int, end: int) -> None:
        """Cut evenly: none of the cuts is small."""
        count = -(-(end - start) // self._copy_max)
        cuts = [start + (end - start) * number // count for number in range(count + 1)]
        self._steps += [CopiedRange(source, *span) for span in pairwise(cuts)]

    def _send(self, part: Part) -> None:
        """Collect bytes to send, and cut them into parts of `part_bytes`."""
        while part and (room := self._part_bytes - self._pending_bytes) <= _size(part):
            taken, part = _split(part, room)
            self._keep(taken)
            self._flush()
        if part:
            self._keep(part)

    def _keep(self, part: Part) -> None:
        self._pending.append(part)
        self._pending_bytes += _size(part)

    def _flush(self) -> None:
        if self._pending_bytes:
            self._steps.append(Sent(tuple(self._pending)))
        self._pending, self._pending_bytes = [], 0


def reading(store: Store, pieces: Sequence[Part]) -> Iterator[bytes]:
    """Yield the bytes of a sent part, a bounded piece at a time."""
    for piece in pieces:
        if isinstance(piece, bytes):
            yield piece
            continue
        source, start, end = piece
        for at in range(start, end, PIECE_BYTES):
            yield store.get_range(source, at, min(at + PIECE_BYTES, end))


def read_requests(pieces: Sequence[Part]) -> tuple[int, int]:
    """Return how many requests `reading` sends, and for how many bytes."""
    sizes = [_size(piece) for piece in pieces if not isinstance(piece, bytes)]
    return sum(-(-size // PIECE_BYTES) for size in sizes), sum(sizes)


def _size(part: Part) -> int:
    return len(part) if isinstance(part, bytes) else part[2] - part[1]


def _split(part: Part, at: int) -> tuple[Part, Part]:
    """Return the first `at` bytes, and the rest; an empty rest is b""."""
    if isinstance(part, bytes):
        return part[:at], part[at:]
    source, start, end = part
    rest: Part = (source, start + at, end) if start + at < end else b""
    return (source, start, start + at), rest
