"""Plain HTTP, for the few requests that obstore has no call for: blocks by URL, compositions.

Everything that is sent here may be sent twice: it names what it writes. So what fails in passing
is sent again, a bounded number of times, and every other error is Reef's own.
"""

import ssl
import urllib.error
import urllib.request
from collections.abc import Mapping
from http.client import HTTPException
from xml.etree import ElementTree

from reef.errors import Kind, UnavailableError
from reef.runtime import Runtime
from reef.stores.remote_errors import Answer, explain
from reef.stores.remote_options import RemoteOptions
from reef.stores.wrappers.retry import Backoff, RetryPolicy

__all__ = ["Sender"]

ATTEMPTS_MAX = 5


class Sender:
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
        """Return the answer's body; `key` is the object that errors name."""
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
        kind = {"Content-Type": "application/octet-stream"} if body is not None else {}
        request = urllib.request.Request(url, body, {**kind, **headers}, method=method)
        try:
            with self._opener.open(request, timeout=self._timeout_s) as answer:
                read: bytes = answer.read()
                return read
        except urllib.error.HTTPError as error:
            with error:
                answered = Answer(error.code, _code(error.read()), f"HTTP {error.code}")
            known = explain(answered, self._url, key)
            passing = Kind.THROTTLED if error.code in (429, 503) else Kind.UNAVAILABLE
            told = f"{self._url}: {answered.said} for {key}"
            raise known or UnavailableError(told, kind=passing) from error
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
