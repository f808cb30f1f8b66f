"""Events that a service sends over HTTP, one request each, as Ceph's topics do.

The request's path holds a secret, so that knowing the port is not enough to wake readers, and
waking readers is all that a request can do. `reef.stores.notify.http_listener` bounds what clients
cost, whether or not they know the path.

A service that cannot reach the listener may delay its own clients (Ceph's topics, unless they are
persistent). So it listens from construction on, and the topic should be deleted with it.
"""

import re

from reef.errors import InvalidInputError, Kind
from reef.runtime import REAL, Runtime
from reef.stores.notify.base import Notifier, matching, split_url
from reef.stores.notify.http_listener import HttpListener, ListenerLimits
from reef.stores.notify.records import objects_of

__all__ = ["ListenerLimits", "PushNotifier"]

SECRET_BYTES = 16
PATH = re.compile(r"[!-~]{1,1024}")


class PushNotifier(Notifier):
    """Listens on a port of this machine; `endpoint` is the URL to configure in the service."""

    def __init__(
        self,
        store_url: str,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        path: str | None = None,
        limits: ListenerLimits | None = None,
        runtime: Runtime = REAL,
    ) -> None:
        super().__init__(runtime)
        self._key_of = matching(*split_url(store_url))
        self._path = _checked_path(
            runtime.random_bytes(SECRET_BYTES).hex() if path is None else path
        )
        self._host = host
        try:
            self._http = HttpListener(
                (host, port), self._path, self.take, runtime, limits or ListenerLimits()
            )
        except OSError as error:
            raise InvalidInputError(
                f"cannot listen on {host}:{port}: {error.strerror}", kind=Kind.INVALID_OPTION
            ) from error
        self._start()  # at once: a service may be waiting for the response to its first event

    @property
    def endpoint(self) -> str:
        """The URL that the service sends events to."""
        return f"http://{self._host}:{self._http.port}{self._path}"

    def take(self, body: bytes) -> None:
        """Ring for the objects that a request names; for all if it cannot be decoded."""
        named = objects_of(body)
        if named is None:
            self.notify_all()
            return
        keys = (self._key_of(bucket, name) for bucket, name in named)
        self.notify(key for key in keys if key is not None)

    def _listen(self) -> None:
        self._http.serve(resumed=self.notify_all)

    def _stop(self) -> None:
        self._http.stop()

    def _hears(self) -> bool:
        return not self._http.is_starved


def _checked_path(path: str) -> str:
    """Return the path with its leading slash; one that any client could name is refused."""
    name = path.strip("/") if isinstance(path, str) else ""
    if not PATH.fullmatch(name) or "?" in name or "#" in name:
        raise InvalidInputError(
            f"path={path!r:.80} is not a secret path",
            kind=Kind.INVALID_OPTION,
            hint="Printable ASCII without '?' and '#', or leave it out for a random one",
        )
    return f"/{name}"
