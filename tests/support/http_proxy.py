"""Small HTTP proxies in front of a real S3 server: one counts, one caches, one fails by script.

They sit where a proxy sits in life, between the client and the endpoint, so that what
they see is what goes over the wire.

    with proxy(Failing, server.address, [Trouble(503, "SlowDown", method="PUT")]) as wire:
        ...  # the first PUT gets a 503, the following requests are forwarded

A `Trouble` strikes the first `times` requests that match it. `applied` decides whether the
server sees the request before its response is lost: the two halves of every unknown outcome.
"""

import http.client
import socket
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from reef import stores
from reef.stores.s3 import S3Options, S3Store

HOP_BY_HOP = {"connection", "transfer-encoding", "content-length", "keep-alive"}


class Forwarding(BaseHTTPRequestHandler):
    """Passes requests on to `server.target`, byte for byte."""

    protocol_version = "HTTP/1.1"

    def handle_any(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.respond(self.command, self.path, body)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = handle_any  # noqa: N815 - http.server's names

    def respond(self, method, path, body):
        self.server.requests.append((method, path, dict(self.headers)))
        self.send(*self.forward(method, path, body))

    def forward(self, method, path, body):
        upstream = http.client.HTTPConnection(self.server.target, timeout=30)
        try:
            headers = {k: v for k, v in self.headers.items() if k.lower() != "connection"}
            upstream.request(method, path, body, headers)
            response = upstream.getresponse()
            return response.status, response.getheaders(), response.read()
        finally:
            upstream.close()

    def send(self, status, headers, body):
        self.send_response_only(status)
        declared = str(len(body))
        for name, value in headers:
            if name.lower() == "content-length" and self.command == "HEAD":
                declared = value
            if name.lower() not in HOP_BY_HOP:
                self.send_header(name, value)
        self.send_header("Content-Length", declared)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def handle_one_request(self):
        """A client that has hung up is not news."""
        try:
            super().handle_one_request()
        except ConnectionError:
            self.close_connection = True

    def log_message(self, *_):
        """Keep quiet."""


class Caching(Forwarding):
    """Caches every response to a GET, "not found" included, unless it is uncacheable."""

    def respond(self, method, path, body):
        may_use_cache = "no-cache" not in (self.headers.get("Cache-Control") or "")
        key = (method, path, self.headers.get("Range"))
        if method == "GET" and may_use_cache and key in self.server.cache:
            self.server.hits += 1
            self.send(*self.server.cache[key])
            return
        response = self.forward(method, path, body)
        if method == "GET":
            self.server.cache[key] = response
        self.send(*response)


@dataclass
class Trouble:
    """What goes wrong on the wire, for which requests and how often."""

    status: int = 200
    code: str = ""
    """The error code, such as SlowDown, in the body of the response."""
    how: str = "response"
    """response: with `status` and `code` · close: without a response · short: half of the true
    response's body under its full Content-Length · garbage: bytes that are not HTTP."""
    method: str = "*"
    path: str = "*"
    """A pattern for the path and its query."""
    times: int | None = 1
    skip: int = 0
    applied: bool = False
    """Whether the server sees the request; a short response always is."""
    headers: tuple = ()
    body: bytes | None = None
    struck: int = field(default=0, init=False)

    def strikes(self, method, path):
        """Whether this request is one of those; counts it."""
        if not (fnmatchcase(method, self.method) and fnmatchcase(path, self.path)):
            return False
        if self.skip > 0:
            self.skip -= 1
            return False
        if self.struck == self.times:
            return False
        self.struck += 1
        return True


class Failing(Forwarding):
    """Forwards every request that no trouble matches."""

    def respond(self, method, path, body):
        self.server.requests.append((method, path, dict(self.headers)))
        with self.server.lock:
            trouble = next((t for t in self.server.troubles if t.strikes(method, path)), None)
        if trouble is None:
            self.send(*self.forward(method, path, body))
            return
        response = None
        if trouble.applied or trouble.how == "short":
            response = self.forward(method, path, body)
        getattr(self, f"fail_by_{trouble.how}")(trouble, response)

    def fail_by_response(self, trouble, _):
        body = trouble.body
        if body is None:
            body = f"<Error><Code>{trouble.code}</Code></Error>".encode() if trouble.code else b""
        self.send(trouble.status, trouble.headers, body)

    def fail_by_close(self, *_):
        self.hang_up()

    def fail_by_short(self, _, response):
        status, headers, body = response
        self.send_response_only(status)
        for name, value in headers:
            if name.lower() not in HOP_BY_HOP:
                self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: len(body) // 2])
        self.hang_up()

    def fail_by_garbage(self, *_):
        self.wfile.write(b"\x00\xff this is not HTTP at all\r\n\r\n")
        self.hang_up()

    def hang_up(self):
        self.wfile.flush()
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)


@contextmanager
def proxy(handler, target, troubles=()):
    """Run a proxy in front of `target` (host:port); yield the server, with its `endpoint`."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    server.target, server.requests, server.cache, server.hits = target, [], {}, 0
    server.troubles, server.lock = list(troubles), threading.Lock()
    server.endpoint = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class Wired:
    """A bucket seen through a failing wire: bare, as users get it, and past the wire."""

    def __init__(self, server, wire, bucket, policy):
        self.wire = wire
        self.options = {**server.options(), "endpoint": wire.endpoint, "part_bytes": 5 << 20}
        self.raw = S3Store(bucket, "x", S3Options.parse(self.options))
        self.store = stores.open(f"s3://{bucket}/x", retry=policy, **self.options)
        self.direct = stores.open(f"s3://{bucket}/x", **server.options())

    def meets(self, *troubles):
        """Set the troubles from now on, and forget the recorded requests."""
        self.wire.troubles[:] = troubles
        self.wire.requests.clear()

    def sent(self, method):
        """Return the requests of that method that came by."""
        return [request for request in self.wire.requests if request[0] == method]
