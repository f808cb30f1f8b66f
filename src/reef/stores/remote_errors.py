"""What an error of the remote client means to its caller.

obstore tells little by type and much by text. Its text has two halves: a sentence, which
holds keys and the service's own words as they are, and a report in which every field has
a line of its own and every foreign string is quoted and escaped:

    Generic S3 error: Error performing PUT http://… - Server returned non-2xx status code: …

    Debug source:
    …        inner: Status {
                 status: 503,
                 body: Some(
                     "<Error><Code>SlowDown</Code></Error>",

Only whole lines of the report are read, and only here: a key may be called
`status code: 403`, and must not be mistaken for an answer.
"""

import re
from dataclasses import dataclass

from reef.errors import InvalidInputError, Kind, NotFoundError, ReefError, UnavailableError

__all__ = ["Answer", "explain", "is_conflict", "never_sent", "translate"]

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
    # The upload may be gone because it is complete: whoever wrote must look (H3).
    "NoSuchUpload",
}


@dataclass(frozen=True, slots=True)
class Answer:
    """What the service said; nothing at all where there was no answer."""

    status: int | None = None
    code: str | None = None
    words: str = ""
    """For people; never matched against."""

    @property
    def said(self) -> str:
        return self.code or (str(self.status) if self.status else "no status")


def translate(error: Exception, url: str, key: str) -> ReefError:
    """Return Reef's error for the client's."""
    answer = _answer(error)
    known = explain(answer, url, key)
    if known is not None and known.kind is Kind.BUCKET_MISSING:
        return known
    if isinstance(error, FileNotFoundError) and answer.code not in TRANSIENT_CODES:
        return NotFoundError(f"no object {key} in {url}", object=key)
    if known is None and type(error).__name__ in DENIALS:
        return _denied(answer, url, key)
    if NOT_PARTIAL.search(_report(error)):
        return UnavailableError(
            f"{url} answers a request for a range of {key} as if it were for all of it",
            hint="Something in between, or a server without ranged GETs, which Reef needs",
            object=key,
            not_partial=True,
        )
    return known or _passing(error, answer, url)


def explain(answer: Answer, url: str, key: str) -> ReefError | None:
    """Return the error for an answer that is final; None if it may go better next time."""
    if answer.code in BUCKET_MISSING_CODES:
        return InvalidInputError(
            f"the bucket of {url} does not exist",
            kind=Kind.BUCKET_MISSING,
            hint="Create it first, or check its name and the endpoint",
        )
    if answer.code in TRANSIENT_CODES:
        return None
    if answer.status in (401, 403) or answer.code in DENIED_CODES:
        return _denied(answer, url, key)
    if answer.code == "NoSuchKey":
        return NotFoundError(f"no object {key} in {url}", object=key)
    if answer.status == 416:
        return InvalidInputError(
            f"object {key} is shorter than the range asked for",
            kind=Kind.INVALID_RANGE,
            object=key,
        )
    return _refused(answer, url, key) if _is_final(answer) else None


def is_conflict(error: Exception) -> bool:
    """Whether the store said that the condition of a write does not hold."""
    return type(error).__name__ in CONFLICTS or _answer(error).status in (409, 412)


def never_sent(error: Exception) -> bool:
    """Whether the request did not leave this machine, for certain."""
    return _answer(error).status is None and bool(NOT_CONNECTED.search(_report(error)))


def _is_final(answer: Answer) -> bool:
    """Whether the same request would be refused for ever."""
    if answer.status is None or answer.status == 200:  # errors inside an answer that went well
        return answer.code is not None
    if answer.status == 501:
        return True
    return 300 <= answer.status < 500 and answer.status not in (408, 409, 425, 429)


def _denied(answer: Answer, url: str, key: str) -> InvalidInputError:
    return InvalidInputError(
        f"{url} refused these credentials for {key or 'a listing'} ({answer.said})",
        kind=Kind.ACCESS_DENIED,
        hint=f"Check {CREDENTIALS.get(url[:5], 'the credentials')} and the bucket's policy",
        object=key,
    )


def _refused(answer: Answer, url: str, key: str) -> InvalidInputError:
    redirected = answer.status is not None and 300 <= answer.status < 400
    return InvalidInputError(
        f"{url} refused the request for {key or 'a listing'} ({answer.said}): {answer.words}",
        kind=Kind.REFUSED_BY_STORE,
        hint="The bucket is somewhere else: check region and endpoint" if redirected else "",
        object=key,
    )


def _passing(error: Exception, answer: Answer, url: str) -> UnavailableError:
    """Return the error for what may go better next time."""
    if never_sent(error):
        return UnavailableError(
            f"{url} cannot be reached: {answer.words}",
            hint="Check the endpoint, the network and the proxy",
        )
    return UnavailableError(f"{url}: {answer.words}", kind=_transient(answer, _report(error)))


def _transient(answer: Answer, report: str) -> Kind:
    if answer.status in (429, 503) or answer.code == "SlowDown":
        return Kind.THROTTLED
    late = answer.code == "RequestTimeout" or answer.status in (408, 504)
    return Kind.TIMEOUT if late or TIMED_OUT.search(report) else Kind.UNAVAILABLE


def _answer(error: Exception) -> Answer:
    report = _report(error)
    status = STATUS.search(report)
    code = BODY_CODE.search(report) or DELETE_CODE.search(report)
    return Answer(
        int(status[1]) if status else _implied(report),
        code[1] if code else None,
        str(error).split("\n", 1)[0][:300],
    )


def _implied(report: str) -> int | None:
    """Return the status of an answer whose number the client keeps to itself."""
    if STARTS_PAST_THE_END.search(report):
        return 416  # said as 206 with nothing in it
    return 301 if BARE_REDIRECT.search(report) else None


def _report(error: Exception) -> str:
    """Escaping leaves no line break in a foreign string: the last mark is the true one."""
    return str(error).rpartition(REPORT)[2]
