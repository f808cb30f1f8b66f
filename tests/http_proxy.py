"""Small HTTP proxies in front of a real S3 server: one counts, one caches.

They sit where a proxy sits in life, between the client and the endpoint, so that what
they see is what goes over the wire.
"""

import http.client
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

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
            answer = upstream.getresponse()
            return answer.status, answer.getheaders(), answer.read()
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

    def log_message(self, *_):
        """Keep quiet."""


class Caching(Forwarding):
    """Keeps every answer to a GET, "not found" included, unless asked not to."""

    def respond(self, method, path, body):
        may_answer = "no-cache" not in (self.headers.get("Cache-Control") or "")
        key = (method, path, self.headers.get("Range"))
        if method == "GET" and may_answer and key in self.server.cache:
            self.server.hits += 1
            self.send(*self.server.cache[key])
            return
        answer = self.forward(method, path, body)
        if method == "GET":
            self.server.cache[key] = answer
        self.send(*answer)


@contextmanager
def proxy(handler, target):
    """Run a proxy in front of `target` (host:port); yield the server, with its `endpoint`."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    server.target, server.requests, server.cache, server.hits = target, [], {}, 0
    server.endpoint = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
