"""Signed URLs as a task of the native reader reads them: responses of a store, and errors."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

BODY = bytes(range(200)) * 5


class ScriptedStore(BaseHTTPRequestHandler):
    """Responds with the next status of a script, and with the requested bytes to a 206."""

    script: list[int]
    ranges: list[str]

    def do_GET(self):
        """Respond."""
        status = self.script.pop(0)
        self.ranges.append(self.headers["Range"])
        first, last = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
        body = {206: BODY[first : last + 1], 200: BODY}.get(status, b"")
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments):
        """Print nothing."""


@pytest.fixture(scope="module")
def probe(java_program):
    """The compiled program."""
    return java_program("UrlProbe")


@pytest.fixture
def fetch(probe):
    """Return a call that reads bytes 10 to 14 from a server with a script of statuses.

    Or of other `arguments`: none asks whether the object exists, by a request for its first byte.
    """
    servers = []

    def run(*script, arguments=(10, 5), expected="bytes=10-14"):
        handler = type("Handler", (ScriptedStore,), {"script": list(script), "ranges": []})
        server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        servers.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        done = probe(f"http://127.0.0.1:{server.server_port}/a.seg?signature=secret", *arguments)
        assert done.returncode == 0, done.stderr
        assert set(handler.ranges) == {expected}
        assert not handler.script
        return done.stdout

    yield run
    for server in servers:
        server.shutdown()
        server.server_close()


def test_ranges_are_read_and_a_busy_store_is_asked_again(fetch):
    """A status of the server's own is retried; each request is for the same range."""
    assert fetch(503, 429, 206) == "read 5 bytes from 10 with 5\n"


@pytest.mark.parametrize("status", [400, 401, 403])
def test_an_expired_url_is_a_clear_error(fetch, status):
    """No retry, no secret, and what to do next."""
    message = fetch(status)
    assert "segments/a.seg: the store refused the signed URL" in message
    assert "expired" in message
    assert "Load the table again" in message
    assert "secret" not in message


def test_a_deleted_object_names_the_lease(fetch):
    """A missing object was garbage-collected."""
    assert "segments/a.seg was garbage-collected: the lease of this read has expired" in fetch(404)


def test_a_store_without_ranges_is_refused(fetch):
    """The whole object instead of a range would be read for every page."""
    assert "ignored the Range header" in fetch(200)


def test_a_range_past_the_end_is_an_error(fetch):
    """The manifest has a size that the object has not."""
    assert "segments/a.seg: ends before 15" in fetch(416)


@pytest.mark.parametrize(
    ("status", "response"),
    [
        (206, "exists"),
        (416, "exists"),
        (404, "does not exist"),
        (403, "failed"),
        (503, "failed"),
    ],
)
def test_only_a_definite_response_says_whether_an_object_exists(fetch, status, response):
    """An empty object has no first byte; a refusal says nothing."""
    assert fetch(status, arguments=(), expected="bytes=0-0").startswith(response)
