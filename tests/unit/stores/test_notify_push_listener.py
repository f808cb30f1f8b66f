"""The push listener under hostile clients: bounded in connections, time, bytes and descriptors."""

import http.client
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, contextmanager, suppress

import pytest

import reef
from reef.errors import ErrorKind, InvalidInputError
from reef.stores.notify import PushNotifier, sources
from reef.stores.notify.sources import ListenerLimits, descriptor_limit, parse_head

WAKE_S = 60.0
QUICK = ListenerLimits(connections_max=8, header_s=0.5, total_s=1.0)
EVENT = json.dumps(
    {"Records": [{"s3": {"bucket": {"name": "bucket"}, "object": {"key": "root/x/1"}}}]}
).encode()


def listening(**options):
    """Open a notifier that listens on a free port."""
    return PushNotifier("s3://bucket/root", **options)


def connected(news):
    """Open a plain connection to the listener."""
    host, port = news.endpoint.removeprefix("http://").split("/")[0].split(":")
    return socket.create_connection((host, int(port)), timeout=WAKE_S)


def path_of(news):
    """Return the secret path of a listener's endpoint."""
    return "/" + news.endpoint.removeprefix("http://").partition("/")[2]


def received(client):
    """Return all that the listener sends until it closes; a reset is an end as well."""
    data = b""
    with suppress(ConnectionError):
        while more := client.recv(65536):
            data += more
    return data


def post(news, body=EVENT, timeout_s=WAKE_S):
    """Post an event at the secret path; return the status."""
    host = news.endpoint.removeprefix("http://").split("/")[0]
    connection = http.client.HTTPConnection(host, timeout=timeout_s)
    try:
        connection.request("POST", path_of(news), body)
        with connection.getresponse() as response:
            return response.status
    finally:
        connection.close()


def exchanged(news, request):
    """Send raw bytes; return the status of the response, None if there is none."""
    with connected(news) as client:
        client.sendall(request)
        first, _, _ = received(client).partition(b"\r\n")
    return int(first.split()[1]) if first else None


# --- the path ----------------------------------------------------------------------------
def test_the_default_path_is_a_secret():
    """128 random bits, different for each listener: '/' would let any client wake readers."""
    with listening() as one, listening() as other:
        assert path_of(one) != path_of(other)
        for news in (one, other):
            assert len(bytes.fromhex(path_of(news)[1:])) == 16
            subscription = news.subscribe("x/")
            assert exchanged(news, b"POST / HTTP/1.1\r\nContent-Length: 2\r\n\r\n{}") == 404
            assert exchanged(news, b"POST  HTTP/1.1\r\nContent-Length: 2\r\n\r\n{}") == 400
            assert not subscription.is_signaled


@pytest.mark.parametrize("path", ["", "/", "//", "a b", "ä", "a?b", "a#b", "a\r\nb", 7])
def test_a_path_that_protects_nothing_is_refused(path):
    """An empty path is known to every client; one that no request can name would hear nothing."""
    with pytest.raises(InvalidInputError) as caught:
        listening(path=path)
    assert caught.value.kind is ErrorKind.INVALID_OPTION


def test_a_named_path_is_used():
    """With or without its leading slash."""
    for path in ("hooks/reef", "/hooks/reef"):
        with listening(path=path) as news:
            assert path_of(news) == "/hooks/reef"
            assert post(news) == 200


# --- time --------------------------------------------------------------------------------
@pytest.mark.parametrize("start", [b"", b"POST /nobody-knows HTTP/1.1\r\nX: "])
def test_a_client_without_a_header_is_disconnected(start):
    """Whether it sends nothing or one byte at a time: `header_s` after it connected."""
    limits = ListenerLimits(header_s=0.5, total_s=10 * WAKE_S)
    with listening(limits=limits) as news, connected(news) as client:
        began_s = time.monotonic()
        client.sendall(start)
        with suppress(OSError):
            while time.monotonic() - began_s < WAKE_S:
                client.sendall(b"x" if start else b"")
                client.settimeout(0.05)
                try:
                    if not client.recv(1):
                        break
                except TimeoutError:
                    continue
        assert 0.4 < time.monotonic() - began_s < 20
        wait_for(lambda: news._http.connections == 0)


def test_a_body_that_does_not_come_is_disconnected():
    """Also behind the secret path: `total_s` after it connected."""
    with listening(limits=QUICK) as news, connected(news) as client:
        subscription = news.subscribe("x/")
        began_s = time.monotonic()
        client.sendall(f"POST {path_of(news)} HTTP/1.1\r\nContent-Length: 9\r\n\r\n".encode())
        assert received(client) == b""
        assert 0.9 < time.monotonic() - began_s < 20
        assert not subscription.is_signaled


def test_a_rejected_client_that_stays_is_disconnected():
    """Its body is discarded until `total_s`, not for as long as it sends."""
    with listening(limits=QUICK) as news, connected(news) as client:
        client.sendall(b"POST /guess HTTP/1.1\r\nContent-Length: 99999\r\n\r\n")
        assert received(client).startswith(b"HTTP/1.1 404 ")
        wait_for(lambda: news._http.connections == 0)


def test_a_rejected_body_is_read_within_its_bound():
    """A client that does not know the path is disconnected after `drain_bytes_max`."""
    limits = ListenerLimits(total_s=WAKE_S, drain_bytes_max=1 << 20)
    with listening(limits=limits) as news, connected(news) as client:
        client.sendall(b"POST /guess HTTP/1.1\r\nContent-Length: 999999999\r\n\r\n")
        sent = 0
        with suppress(ConnectionError):
            while sent < 64 << 20:
                client.sendall(bytes(1 << 16))
                sent += 1 << 16
        assert sent < 64 << 20, "the listener reads on and on"


def test_a_burst_of_clients_finds_room_in_the_backlog(monkeypatch):
    """A service that sends many events at once is not turned away by a short queue."""
    asked, original = [], socket.socket.listen

    def listen(self, backlog):
        asked.append(backlog)
        return original(self, backlog)

    monkeypatch.setattr(socket.socket, "listen", listen)
    with listening() as news:
        assert post(news) == 200
    assert news._listener.join(WAKE_S)
    (backlog,) = asked
    assert backlog >= 64


def test_the_default_times_are_short():
    """A connection costs seconds, not minutes."""
    limits = ListenerLimits()
    assert limits.header_s <= 10
    assert limits.total_s <= 30
    assert limits.connections_max <= 128


# --- bytes -------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),
        (b"GET\r\n\r\n", 400),
        (b"POST /x HTTP/2.0\r\n\r\n", 400),
        (b"POST /x HTTP/1.1\r\nno colon\r\n\r\n", 400),
        (b"POST /x HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n", 400),
        (b"POST /x HTTP/1.1\r\nX: " + b" " * 20_000, 431),
        (b"POST /x HTTP/1.1\r\nX: " + b" " * 20_000 + b"\r\n\r\n", 431),
        (b"POST /" + b"x" * 9_000 + b" HTTP/1.1\r\n\r\n", 400),
        (b"BREW /x HTTP/1.1\r\n\r\n", 501),
        (b"POST /x HTTP/1.1\r\nContent-Length: 5\r\n\r\n", 404),
    ],
)
def test_malformed_requests_are_rejected(request_bytes, status, capfd):
    """With a status, without a traceback, and without waking any reader."""
    with listening() as news:
        subscription = news.subscribe("x/")
        assert exchanged_and_hung_up(news, request_bytes) == status
        assert not subscription.is_signaled
        assert post(news) == 200
    assert capfd.readouterr().err == ""


def exchanged_and_hung_up(news, request):
    """Send raw bytes and no more; return the status of the response."""
    with connected(news) as client:
        client.sendall(request)
        client.shutdown(socket.SHUT_WR)
        return int(received(client).split()[1])


@pytest.mark.parametrize(
    ("length", "status"),
    [
        ("9" * 5_000, 413),
        ("٣", 413),
        ("-1", 413),
        ("1e3", 413),
        ("", 413),
        (str((1 << 20) + 1), 413),
        (str(1 << 20), 200),
    ],
)
def test_content_length_is_any_text(length, status, capfd):
    """A number of 5,000 digits, or none at all, is a body that is too large: no traceback."""
    with listening() as news:
        head = f"POST {path_of(news)} HTTP/1.1\r\nContent-Length: {length}\r\n\r\n".encode()
        body = b"{" * (1 << 20) if status == 200 else b""
        assert exchanged(news, head + body) == status
    assert capfd.readouterr().err == ""


def test_a_chunked_body_has_no_length():
    """A length next to a transfer encoding is not believed: a proxy reads another body."""
    both = b"Content-Length: 2\r\nTransfer-Encoding: chunked"
    assert parse_head(b"POST /x HTTP/1.1\r\n" + both).length is None
    with listening() as news:
        subscription = news.subscribe("x/")
        request = b"POST " + path_of(news).encode() + b" HTTP/1.1\r\n" + both + b"\r\n\r\n{}"
        assert exchanged(news, request) == 413
        assert not subscription.is_signaled


def test_a_header_in_single_bytes_is_understood():
    """How the network cuts a request does not matter."""
    with listening() as news, connected(news) as client:
        subscription = news.subscribe("x/")
        head = f"POST {path_of(news)} HTTP/1.1\r\nContent-Length: {len(EVENT)}\r\n\r\n".encode()
        for byte in head + EVENT:
            client.sendall(bytes([byte]))
        assert received(client).startswith(b"HTTP/1.1 200 OK\r\n")
        assert subscription.wait(WAKE_S)


def test_a_client_that_waits_for_100_continue_gets_it():
    """curl, and services built on it, hold the body back for a second without it."""
    with listening() as news, connected(news) as client:
        fields = f"Content-Length: {len(EVENT)}\r\nExpect: 100-continue\r\n"
        client.sendall(f"POST {path_of(news)} HTTP/1.1\r\n{fields}\r\n".encode())
        assert client.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.sendall(EVENT)
        assert received(client).startswith(b"HTTP/1.1 200 OK\r\n")


def test_a_header_is_parsed_in_linear_time():
    """A header full of blanks, colons or lines costs no more than its size."""
    for filler in (b" ", b":", b"\t", b"\r\na:", b"a: b \r\n"):
        data = b"POST /x HTTP/1.1\r\nX: " + filler * (16_000 // len(filler))
        began_s = time.process_time()
        parse_head(data)
        assert time.process_time() - began_s < 0.5


# --- connections and descriptors ---------------------------------------------------------
def wait_for(is_true):
    """Wait until a condition holds."""
    deadline_s = time.monotonic() + WAKE_S
    while not is_true():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_idle_connections_give_way_to_a_newcomer():
    """The oldest one that has not named the path is closed: an event passes while they wait."""
    limits = ListenerLimits(connections_max=8, header_s=WAKE_S, total_s=2 * WAKE_S)
    with listening(limits=limits) as news:
        idle = [connected(news) for _ in range(40)]
        wait_for(lambda: news._http.connections == 8)
        subscription = news.subscribe("x/")
        assert post(news) == 200
        assert subscription.wait(WAKE_S)
        assert news._http.connections <= 8
        for client in idle:
            client.close()


def test_rejected_connections_give_way_to_a_newcomer():
    """Clients that have their status and stay connected take no place from one with an event."""
    limits = ListenerLimits(connections_max=4, header_s=WAKE_S, total_s=2 * WAKE_S)
    with listening(limits=limits) as news, ExitStack() as clients:
        for _ in range(4):
            client = clients.enter_context(connected(news))
            client.sendall(b"POST /guess HTTP/1.1\r\nContent-Length: 99999\r\n\r\n")
            assert client.recv(100).startswith(b"HTTP/1.1 404 ")
        assert news._http.connections == 4
        assert post(news) == 200


def test_a_posted_body_is_not_closed_for_a_newcomer():
    """A client that has named the path keeps its place, however many come."""
    limits = ListenerLimits(connections_max=4, header_s=WAKE_S, total_s=2 * WAKE_S)
    with listening(limits=limits) as news, connected(news) as client:
        subscription = news.subscribe("x/")
        head = f"POST {path_of(news)} HTTP/1.1\r\nContent-Length: {len(EVENT)}\r\n\r\n".encode()
        client.sendall(head)
        wait_for(lambda: news._http.connections == 1)
        time.sleep(0.1)  # the header is parsed in the same turn or the next
        idle = [connected(news) for _ in range(20)]
        wait_for(lambda: news._http.connections == 4)
        client.sendall(EVENT)
        assert received(client).startswith(b"HTTP/1.1 200 ")
        assert subscription.wait(WAKE_S)
        for one in idle:
            one.close()


@contextmanager
def descriptors(soft):
    """Run with another soft limit of open files."""
    before, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (before, hard))


def test_descriptors_are_kept_in_reserve():
    """A quarter of the limit, 256 at most; none where there is no limit."""
    with descriptors(1024):
        assert descriptor_limit() == 768
    with descriptors(256):
        assert descriptor_limit() == 192


def test_a_process_short_of_descriptors_accepts_nothing(monkeypatch):
    """It says that it does not listen, so that readers poll, and rings when it does again."""
    monkeypatch.setattr(sources, "STARVED_PAUSE_S", 0.2)
    with listening() as news, connected(news) as idle:
        subscription = news.subscribe("x/")
        wait_for(lambda: news._http.connections == 1)
        monkeypatch.setattr(sources, "descriptor_limit", lambda: 0)
        with connected(news) as client:
            assert received(client) == b""
        assert received(idle) == b""
        assert news._http.connections == 0, "descriptors go back to the process"
        wait_for(lambda: not subscription.is_listening)
        assert not subscription.is_signaled
        monkeypatch.setattr(sources, "descriptor_limit", lambda: None)
        assert subscription.wait(WAKE_S), "events may have been missed"
        assert post(news) == 200
        assert subscription.is_listening


ATTACKER = """
import socket, sys, time
port, count, kind = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
starts = {
    "idle": b"",
    "slow": b"POST /nobody-knows HTTP/1.1\\r\\nX: ",
    "malformed": b"POST /x HTTP/1.1\\r\\nContent-Length: " + b"9" * 5000 + b"\\r\\n\\r\\n\\0\\xff",
}
clients = []
def connect():
    try:
        client = socket.create_connection(("127.0.0.1", port), timeout=5)
        client.sendall(starts[kind])
        return client
    except OSError:
        return None
clients = [connect() for _ in range(count)]
print("connected", flush=True)
while True:
    for at, client in enumerate(clients):
        try:
            if client is None:
                raise OSError
            if kind != "idle":
                client.sendall(b"x")
            client.setblocking(False)
            try:
                if not client.recv(4096):
                    raise OSError
            except BlockingIOError:
                pass
            client.setblocking(True)
        except OSError:
            if client is not None:
                client.close()
            clients[at] = connect()
    time.sleep(0.2)
"""


@contextmanager
def attacked(news, counts):
    """Hold so many connections of each kind, from processes of their own; replace closed ones."""
    port = news.endpoint.split(":")[2].split("/")[0]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", ATTACKER, port, str(count), kind], stdout=subprocess.PIPE
        )
        for kind, count in counts.items()
    ]
    try:
        for process in processes:
            assert process.stdout.readline() == b"connected\n"
        yield
    finally:
        for process in processes:
            process.send_signal(signal.SIGKILL)
            process.wait()
            process.stdout.close()


@pytest.mark.timeout(240)
def test_the_database_commits_under_2000_hostile_connections(tmp_path, capfd):
    """Idle, slow and malformed clients cost one thread and 64 descriptors, whatever they send.

    With one thread and one descriptor each, and no bound on either, 1,023 clients that know
    nothing but the port kept a process from opening its own files.
    """
    db = reef.open(str(tmp_path))
    with descriptors(1024), listening() as news, db.writer("users", background=False) as users:
        users.put("k", b"0")
        subscription = news.subscribe("x/")
        threads, files = threading.active_count(), open_files()
        rung = 0
        with attacked(news, {"idle": 700, "slow": 700, "malformed": 600}):
            began_s = time.monotonic()
            for number in range(40):
                users.put("k", str(number).encode())
                with db.reader("users") as reader:
                    assert reader.get("k") == str(number).encode()
                assert threading.active_count() <= threads + 64, "the engine's own pool"
                assert open_files() <= files + 64 + 64
                assert news._http.connections <= 64
                subscription.clear()
                with suppress(OSError):
                    rung += post(news, timeout_s=5.0) == 200 and subscription.wait(5.0)
                time.sleep(0.05)
            assert time.monotonic() - began_s < 200
        assert rung >= 20, "most events pass"
        assert subscription.is_listening
        wait_for(lambda: news._http.connections == 0)
    assert capfd.readouterr().err == ""


def open_files():
    """Return how many descriptors this process has open."""
    return len(os.listdir("/proc/self/fd"))


def sockets_and_selectors():
    """Return the sockets, pipes and selectors of this process, each by number and inode.

    A set, because leftovers of earlier tests may be collected at any time.
    """
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            target = os.readlink(f"/proc/self/fd/{number}")
            if not target.startswith("/"):
                found.add((number, target))
    return found


# --- its own end -------------------------------------------------------------------------
def test_closing_disconnects_every_client():
    """No connection and no descriptor stays behind."""
    before = sockets_and_selectors()
    news = listening()
    with connected(news) as client:
        wait_for(lambda: news._http.connections == 1)
        news.close()
        assert received(client) == b""
    assert news._listener.join(WAKE_S)
    wait_for(lambda: sockets_and_selectors() <= before)


def test_an_idle_listener_does_not_wake_up():
    """It waits in the selector without a period of its own."""
    with listening() as news:
        assert news._http._timeout_s() is None
