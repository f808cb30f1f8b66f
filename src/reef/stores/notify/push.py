"""News that a service sends by itself: one HTTP request for each event, as Ceph's topics do.

The listener answers at once and reads nothing but which objects are told of. Its path holds a
secret of its own, so that nobody who only knows the port can ring; and ringing is all that one
could do. A service that cannot reach it may hold its own clients up (Ceph's topics, unless they
are persistent), so it listens from its making on, and the topic should go with it.
"""

from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from reef.errors import InvalidInputError, Kind
from reef.runtime import REAL, Runtime
from reef.stores.notify.base import Notifier, matching, split_url
from reef.stores.notify.records import objects_of

__all__ = ["PushNotifier"]

BODY_BYTES_MAX = 1 << 20
LINGER_BYTES_MAX = 16 << 20
TIMEOUT_S = 5.0
LOOK_S = 0.1


class PushNotifier(Notifier):
    """Listens on a port of this machine; `endpoint` is what the service is to be told."""

    def __init__(
        self,
        store_url: str,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        path: str | None = None,
        runtime: Runtime = REAL,
    ) -> None:
        super().__init__(runtime)
        self._key_of = matching(*split_url(store_url))
        self._path = "/" + (path if path is not None else runtime.random_bytes(16).hex()).strip("/")
        try:
            self._server = ThreadingHTTPServer((host, port), self._handler())
        except OSError as error:
            raise InvalidInputError(
                f"cannot listen on {host}:{port}: {error.strerror}", kind=Kind.INVALID_OPTION
            ) from error
        self._server.daemon_threads = True
        self._host = host
        self._start()  # at once: a service may be waiting for the answer to its first event

    @property
    def endpoint(self) -> str:
        """Where the service is to send events."""
        return f"http://{self._host}:{self._server.server_port}{self._path}"

    def take(self, body: bytes) -> None:
        """Ring for what a request tells of."""
        told = objects_of(body)
        if told is None:
            self.notify_all()
            return
        keys = (self._key_of(bucket, name) for bucket, name in told)
        self.notify(key for key in keys if key is not None)

    def _listen(self) -> None:
        self._server.serve_forever(LOOK_S)
        self._server.server_close()

    def _stop(self) -> None:
        self._server.shutdown()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        notifier = self

        class Handler(_Handler):
            news = notifier

        return Handler


class _Handler(BaseHTTPRequestHandler):
    """Answers requests; every one has a thread, and a bound on its time."""

    news: PushNotifier
    timeout = TIMEOUT_S
    server_version = "reef"
    sys_version = ""

    def do_POST(self) -> None:
        length = self.headers.get("Content-Length", "")
        if self.path != self.news._path:
            self._refuse(404)
        elif not length.isdecimal() or int(length) > BODY_BYTES_MAX:
            self._refuse(413)
        else:
            body = self.rfile.read(int(length))
            self._answer(200)
            self.news.take(body)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """What the library refuses by itself: other methods, and what is no request at all."""
        super().send_error(code, message, explain)
        self._let_run_out()

    def _refuse(self, status: int) -> None:
        self._answer(status)
        self._let_run_out()

    def _let_run_out(self) -> None:
        """Take the body that comes behind an answer: closing on unread bytes resets the connection,
        and the sender would see a broken pipe in place of the answer.
        """
        headers = getattr(self, "headers", None) or {}
        length = headers.get("Content-Length", "")
        left = min(int(length), LINGER_BYTES_MAX) if length.isdecimal() else 0
        if "Transfer-Encoding" in headers:  # up to where the sender hangs up
            left = LINGER_BYTES_MAX
        deadline = self.news.runtime.deadline(TIMEOUT_S)
        try:
            while not deadline.passed() and (taken := len(self.rfile.read1(left))):
                left -= taken
        except OSError:  # it stopped sending, or is gone: nobody waits for us
            self.close_connection = True

    def _answer(self, status: int) -> None:
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *words: Any) -> None:
        """Events are too many to be told one by one."""
