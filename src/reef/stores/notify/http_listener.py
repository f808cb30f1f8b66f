"""A bounded HTTP listener: accepts POST requests at one secret path.

One thread, non-blocking sockets and a selector serve all connections. Every bound applies before
the path is checked, because a client that does not know the path must not cost more than that:

    connections     connections_max at a time; the oldest one that has not named the path is
                    closed for a newcomer, so that slow clients cannot lock out quick ones
    time            header_s from accept to the end of the header, total_s to the close
    bytes           header_bytes_max, then body_bytes_max; of a rejected request, drain_bytes_max
                    are read and discarded
    descriptors     a quarter of RLIMIT_NOFILE, DESCRIPTORS_RESERVED at most, is left to the rest
                    of the process

A connection has three stages:

    HEADER ── POST at the path ──▶ BODY ── complete ──▶ 200, deliver, close
       └──── anything else ──────▶ DRAIN: response sent, body discarded until the client closes

DRAIN exists because closing a socket with unread bytes resets the connection, and the client
would see a broken pipe in place of the status.
"""

import hmac
import re
import resource
import selectors
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from http import HTTPStatus

from reef.runtime import Deadline, Runtime

__all__ = ["HttpListener", "ListenerLimits", "RequestHead", "descriptor_limit", "parse_head"]

BACKLOG = 128
ACCEPTS_PER_TURN = 64
RECEIVE_BYTES = 1 << 16
DESCRIPTORS_RESERVED = 256
STARVED_PAUSE_S = 1.0
REQUEST_LINE = re.compile(rb"([A-Z]{1,16}) ([!-~]{1,8192}) HTTP/1\.[01]")
FIELD_NAME = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
LENGTH_DIGITS_MAX = 18
"""Longer numbers are over any limit; int() would refuse some thousand digits with an error."""


@dataclass(frozen=True, slots=True)
class ListenerLimits:
    """Bounds on clients, whether or not they know the path."""

    connections_max: int = 64
    header_s: float = 5.0
    total_s: float = 15.0
    header_bytes_max: int = 16 << 10
    body_bytes_max: int = 1 << 20
    drain_bytes_max: int = 16 << 20


@dataclass(frozen=True, slots=True)
class RequestHead:
    """The parts of a request's header that decide what happens to it."""

    method: str
    target: str
    length: int | None
    """The declared body size; None if it is missing, chunked or too long to be a number."""
    expects_continue: bool = False


def parse_head(data: bytes) -> RequestHead | None:
    """Return the parsed header, without its final blank line; None if it is malformed.

    >>> parse_head(b"POST /x HTTP/1.1\\r\\nContent-Length: 2")
    RequestHead(method='POST', target='/x', length=2, expects_continue=False)
    """
    first, *lines = data.split(b"\r\n")
    request = REQUEST_LINE.fullmatch(first)
    fields = [line.partition(b":") for line in lines]
    if request is None or not all(FIELD_NAME.fullmatch(name) for name, _, _ in fields):
        return None
    named: dict[bytes, bytes] = {}
    for name, _, value in fields:
        known = named.setdefault(name.lower(), value.strip(b" \t"))
        if name.lower() == b"content-length" and known != value.strip(b" \t"):
            return None  # two lengths: a proxy and this listener might disagree on the body
    length = named.get(b"content-length", b"")
    is_number = length.isdigit() and len(length) <= LENGTH_DIGITS_MAX
    return RequestHead(
        request[1].decode(),
        request[2].decode(),
        int(length) if is_number and b"transfer-encoding" not in named else None,
        named.get(b"expect", b"").lower() == b"100-continue",
    )


def descriptor_limit() -> int | None:
    """Return the first descriptor number that connections may not have; None without a limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return None
    return soft - min(soft // 4, DESCRIPTORS_RESERVED)


class _Stage(StrEnum):
    HEADER = "header"
    BODY = "body"
    """The only stage of a client that has named the path."""
    DRAIN = "drain"


@dataclass(eq=False, slots=True)
class _Connection:
    socket: socket.socket
    header_by: Deadline
    closed_by: Deadline
    stage: _Stage = _Stage.HEADER
    data: bytearray = field(default_factory=bytearray)
    missing: int = 0
    """In BODY: bytes that are not here yet. In DRAIN: bytes that are still discarded."""

    @property
    def deadline(self) -> Deadline:
        return self.header_by if self.stage is _Stage.HEADER else self.closed_by


class HttpListener:
    """Serves one port; `deliver` receives each body that was posted at the path."""

    def __init__(
        self,
        address: tuple[str, int],
        path: str,
        deliver: Callable[[bytes], None],
        runtime: Runtime,
        limits: ListenerLimits,
    ) -> None:
        """Bind and listen; OSError if the address cannot be used."""
        self._path = path.encode()
        self._deliver = deliver
        self._runtime = runtime
        self._limits = limits
        self._connections: dict[_Connection, None] = {}  # in the order of their arrival
        self._stopped = False
        self._starved: Deadline | None = None
        self._socket = socket.create_server(address, backlog=BACKLOG)
        self._socket.setblocking(False)
        self.port: int = self._socket.getsockname()[1]
        self._waker, self._woken = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._socket, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)

    @property
    def is_starved(self) -> bool:
        """Whether nothing is accepted now, because the process has few descriptors left."""
        return self._starved is not None

    @property
    def connections(self) -> int:
        return len(self._connections)

    def serve(self, resumed: Callable[[], None]) -> None:
        """Serve until stopped; `resumed` is called when connections are accepted again."""
        try:
            while not self._stopped:
                for key, _ in self._selector.select(self._timeout_s()):
                    self._handle(key)
                self._expire()
                if self._starved is not None and self._starved.passed():
                    self._resume()
                    resumed()
        finally:
            self._close()

    def stop(self) -> None:
        """End `serve` soon; safe from any thread."""
        self._stopped = True
        with suppress(OSError):  # it has ended already
            self._waker.send(b"\0")

    def _handle(self, key: selectors.SelectorKey) -> None:
        if key.fileobj is self._socket:
            self._accept()
        elif key.data in self._connections:  # not closed for a newcomer in the same turn
            self._receive(key.data)

    def _timeout_s(self) -> float | None:
        deadlines = [connection.deadline for connection in self._connections]
        if self._starved is not None:
            deadlines.append(self._starved)
        return max(0.0, min(d.remaining_s() for d in deadlines)) if deadlines else None

    def _expire(self) -> None:
        for connection in [c for c in self._connections if c.deadline.passed()]:
            self._drop(connection)

    # --- accepting ------------------------------------------------------------------
    def _accept(self) -> None:
        for _ in range(ACCEPTS_PER_TURN):
            try:
                client, _ = self._socket.accept()
            except (BlockingIOError, ConnectionError):  # none left, or it is gone again
                return
            except OSError:  # EMFILE, ENFILE, ENOBUFS, ENOMEM: readable again at once
                self._starve()
                return
            # Numbers are given out lowest first: a high one shows how many are in use.
            limit = descriptor_limit()
            if limit is not None and client.fileno() >= limit:
                client.close()
                self._starve()
                return
            self._admit(client)

    def _admit(self, client: socket.socket) -> None:
        if len(self._connections) >= self._limits.connections_max and not self._evict():
            client.close()
            return
        client.setblocking(False)
        header_by = self._runtime.deadline(self._limits.header_s)
        connection = _Connection(client, header_by, self._runtime.deadline(self._limits.total_s))
        self._connections[connection] = None
        self._selector.register(client, selectors.EVENT_READ, connection)
        self._receive(connection)  # a request that has arrived is served before any eviction

    def _evict(self) -> bool:
        """Close the oldest connection that has not named the path; False if all have."""
        for connection in self._connections:
            if connection.stage is not _Stage.BODY:
                self._drop(connection)
                return True
        return False

    def _starve(self) -> None:
        """Stop accepting for a while, and return descriptors to the process."""
        while self._evict():
            pass
        if self._starved is None:
            self._selector.unregister(self._socket)
        self._starved = self._runtime.deadline(STARVED_PAUSE_S)

    def _resume(self) -> None:
        self._starved = None
        self._selector.register(self._socket, selectors.EVENT_READ)

    # --- one connection -------------------------------------------------------------
    def _receive(self, connection: _Connection) -> None:
        try:
            data = connection.socket.recv(RECEIVE_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        if not data:
            self._drop(connection)
        elif connection.stage is _Stage.HEADER:
            self._receive_header(connection, data)
        elif connection.stage is _Stage.BODY:
            self._receive_body(connection, data)
        else:
            connection.missing -= len(data)
            if connection.missing <= 0:
                self._drop(connection)

    def _receive_header(self, connection: _Connection, data: bytes) -> None:
        searched = max(0, len(connection.data) - 3)
        connection.data += data
        end = connection.data.find(b"\r\n\r\n", searched)
        if end > self._limits.header_bytes_max or (
            end < 0 and len(connection.data) > self._limits.header_bytes_max
        ):
            self._reject(connection, HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
        elif end >= 0:
            head, rest = bytes(connection.data[:end]), bytes(connection.data[end + 4 :])
            self._begin_body(connection, parse_head(head), rest)

    def _begin_body(self, connection: _Connection, head: RequestHead | None, rest: bytes) -> None:
        status = self._rejection(head)
        if status is not None or head is None or head.length is None:
            self._reject(connection, status or HTTPStatus.BAD_REQUEST)
            return
        connection.stage = _Stage.BODY
        connection.data = bytearray()
        connection.missing = head.length
        if head.expects_continue and not rest:
            self._send(connection, HTTPStatus.CONTINUE)
        self._receive_body(connection, rest)

    def _rejection(self, head: RequestHead | None) -> HTTPStatus | None:
        if head is None:
            return HTTPStatus.BAD_REQUEST
        if head.method != "POST":
            return HTTPStatus.NOT_IMPLEMENTED
        if not hmac.compare_digest(head.target.encode(), self._path):
            return HTTPStatus.NOT_FOUND
        if head.length is None or head.length > self._limits.body_bytes_max:
            return HTTPStatus.REQUEST_ENTITY_TOO_LARGE
        return None

    def _receive_body(self, connection: _Connection, data: bytes) -> None:
        taken = data[: connection.missing]
        connection.data += taken
        connection.missing -= len(taken)
        if connection.missing:
            return
        body = bytes(connection.data)
        self._send(connection, HTTPStatus.OK, "Content-Length: 0\r\nConnection: close\r\n")
        self._drop(connection)
        self._deliver(body)

    def _reject(self, connection: _Connection, status: HTTPStatus) -> None:
        connection.stage = _Stage.DRAIN
        connection.data = bytearray()
        connection.missing = self._limits.drain_bytes_max
        self._send(connection, status, "Content-Length: 0\r\nConnection: close\r\n")
        with suppress(OSError):
            connection.socket.shutdown(socket.SHUT_WR)

    def _send(self, connection: _Connection, status: HTTPStatus, fields: str = "") -> None:
        """Send a status; it fits into an empty send buffer, so it is sent whole or not at all."""
        with suppress(OSError):  # the client is gone, and nothing depends on its response
            text = f"HTTP/1.1 {status.value} {status.phrase}\r\n{fields}\r\n"
            connection.socket.send(text.encode())

    def _drop(self, connection: _Connection) -> None:
        del self._connections[connection]
        self._selector.unregister(connection.socket)
        with suppress(OSError):  # a forked child has the descriptor too: close() would send no FIN
            connection.socket.shutdown(socket.SHUT_RDWR)
        connection.socket.close()

    def _close(self) -> None:
        for connection in list(self._connections):
            self._drop(connection)
        self._selector.close()
        for sock in (self._socket, self._waker, self._woken):
            sock.close()
