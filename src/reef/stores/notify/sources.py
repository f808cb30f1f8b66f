"""Sources of events: a directory on this machine, a service that sends them over HTTP, a queue.

**Directory.** Events come from the kernel (inotify, Linux). The store gives a file its name when
its bytes are durable, by link or rename: that is the event. Folders are watched one by one, each
with those above it up to the root, so that one that does not exist yet, or is moved away, is
noticed when it is created. Files that it has by then were missed, so every subscription is
signaled.

The kernel reports the changes of this machine only. Files that another machine writes over a
network are not reported: there readers poll at intervals.

**Push**, as by topics of Ceph. A service sends one request for each event. The request's path holds
a secret, so that knowing the port is not enough to wake readers, and waking readers is all that a
request can do. A service that cannot reach the listener may delay its own clients (Ceph's topics,
unless they are persistent). So the notifier listens from construction on, and the topic should be
deleted with it.

`HttpListener` accepts POST requests at one secret path. One thread, non-blocking sockets and a
selector serve all connections. Every bound applies before the path is checked, because a client
that does not know the path must not cost more than that:

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

**Queue**, as by S3. It sends events to SQS, and `QueueNotifier` reads them (boto3). Each process
needs a queue of its own, fed by an SNS topic or by EventBridge where there are several: a message
goes to one receiver only. Received messages are deleted; one that could not be deleted is received
again, and costs one more poll. While the queue cannot be reached, readers poll at intervals; when
it responds again, every subscription is signaled.
"""

import ctypes
import errno
import hmac
import os
import re
import resource
import select
import selectors
import socket
import struct
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from http import HTTPStatus
from typing import Any
from urllib.parse import unquote, urlsplit

from reef.config import bad_option
from reef.errors import ErrorKind, InvalidInputError, ReefError, UnavailableError
from reef.runtime import REAL, Deadline, Runtime, leaf_lock
from reef.stores.notify.base import Notifier, key_matcher, parse_event, split_url
from reef.stores.s3 import S3Options, s3_client, translated

IN_MOVED_FROM, IN_MOVED_TO, IN_CREATE, IN_DELETE_SELF = 0x40, 0x80, 0x100, 0x400
IN_Q_OVERFLOW, IN_IGNORED, IN_ISDIR = 0x4000, 0x8000, 0x40000000
IN_ONLYDIR = 0x01000000
WATCHED = IN_MOVED_FROM | IN_MOVED_TO | IN_CREATE | IN_DELETE_SELF | IN_ONLYDIR
EVENT = struct.Struct("iIII")
READ_BYTES = 1 << 16


class DirectoryNotifier(Notifier):
    """Watches a directory, given by its path or by the URL of the store in it."""

    def __init__(self, path: str | os.PathLike[str], *, runtime: Runtime = REAL) -> None:
        super().__init__(runtime)
        self._root = os.path.abspath(_path_of(os.fspath(path)))
        self._inotify = _Inotify()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._folders: dict[int, str] = {}
        self._watched_folders: set[str] = set()
        self._arming = leaf_lock()
        self._is_open = True

    def _listen(self) -> None:
        poll = select.poll()
        poll.register(self._inotify.fd, select.POLLIN)
        poll.register(self._wake, select.POLLIN)
        try:
            while not self._closed:
                poll.poll()
                self._receive_events()
        finally:
            self._close_files()

    def _receive_events(self) -> None:
        moved = False
        keys = []
        for watch, mask, name in self._inotify.read():
            folder = self._folders.get(watch, self._root)
            if mask & IN_IGNORED:  # the folder is gone, and the number is not used again
                self._folders.pop(watch, None)
            if mask & (IN_Q_OVERFLOW | IN_ISDIR | IN_DELETE_SELF | IN_IGNORED):
                moved = True
            elif mask & (IN_CREATE | IN_MOVED_TO):
                keys.append(os.path.relpath(os.path.join(folder, name), self._root))
        if moved:  # folders came or went, or there were too many events: the watches are renewed
            self._arm()
            self.notify_all()
        self.notify(keys)

    def _on_subscribe(self, prefixes: tuple[str, ...]) -> None:
        with self._arming:
            self._watched_folders.update(
                os.path.join(self._root, prefix).rstrip("/") for prefix in prefixes
            )
        self._arm()

    def _arm(self) -> None:
        with self._arming:
            for folder in sorted(self._watched_folders) if self._is_open else ():
                self._watch(folder)

    def _watch(self, folder: str) -> bool:
        """Watch a folder and its existing parents, up to and including the root."""
        parent = os.path.dirname(folder)
        is_top = len(folder) <= len(self._root) and self._try(folder)
        if is_top or parent == folder:
            return is_top
        # Its parent first: a folder created between the two calls is reported there.
        return self._watch(parent) and self._try(folder)

    def _try(self, folder: str) -> bool:
        watch = self._inotify.watch(folder)
        if watch is not None:
            self._folders[watch] = folder
        return watch is not None

    def _stop(self) -> None:
        if self._listener is None:
            self._close_files()
            return
        with self._arming:
            if self._is_open:  # else it has ended by itself
                os.eventfd_write(self._wake, 1)

    def _close_files(self) -> None:
        """Close under the lock: the descriptor may be reused by another file right away."""
        with self._arming:
            self._is_open = False
            os.close(self._wake)
            self._inotify.close()


class _Inotify:
    """The kernel's interface, through the C library."""

    def __init__(self) -> None:
        if sys.platform != "linux":
            raise InvalidInputError(
                "directories are watched on Linux only",
                kind=ErrorKind.UNSUPPORTED_BY_STORE,
                hint="Readers poll at intervals: set refresh_interval_ms",
            )
        self._libc = ctypes.CDLL(None, use_errno=True)
        self.fd = self._libc.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK)
        if self.fd < 0:
            raise _watch_error("watching a directory", ctypes.get_errno())

    def watch(self, folder: str) -> int | None:
        """Return the number of the watch; None if the folder is not there."""
        watch: int = self._libc.inotify_add_watch(self.fd, os.fsencode(folder), WATCHED)
        if watch >= 0:
            return watch
        error = ctypes.get_errno()
        if error in (errno.ENOENT, errno.ENOTDIR):
            return None
        raise _watch_error(f"watching {folder}", error)

    def read(self) -> Iterator[tuple[int, int, str]]:
        """Yield watch, mask and name of each pending event."""
        try:
            data = os.read(self.fd, READ_BYTES)
        except BlockingIOError:
            return
        at = 0
        while at < len(data):
            watch, mask, _, length = EVENT.unpack_from(data, at)
            at += EVENT.size
            yield watch, mask, os.fsdecode(data[at : at + length].rstrip(b"\0"))
            at += length

    def close(self) -> None:
        os.close(self.fd)


def _path_of(url: str) -> str:
    """Return the path as the store resolves it: a watch on another path would never fire."""
    if "://" not in url:
        return os.path.expanduser(url)
    parts = urlsplit(url, allow_fragments=False)
    if parts.scheme != "file":
        raise InvalidInputError(
            f"{url.split('?', 1)[0]!r} is not a directory",
            kind=ErrorKind.INVALID_URL,
            hint="Use QueueNotifier or PushNotifier for a bucket",
        )
    return unquote(parts.path)


def _watch_error(action: str, error: int) -> UnavailableError:
    limits = error in (errno.ENOSPC, errno.EMFILE)
    return UnavailableError(
        f"{action} failed: {os.strerror(error)}",
        hint="Raise fs.inotify.max_user_watches or max_user_instances" if limits else "",
    )


# --- the listener -----------------------------------------------------------------


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
                self._pause_accepting()
                return
            # Numbers are given out lowest first: a high one shows how many are in use.
            limit = descriptor_limit()
            if limit is not None and client.fileno() >= limit:
                client.close()
                self._pause_accepting()
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

    def _pause_accepting(self) -> None:
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


# --- the notifier -----------------------------------------------------------------


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
        self._key_of = key_matcher(*split_url(store_url))
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
                f"cannot listen on {host}:{port}: {error.strerror}", kind=ErrorKind.INVALID_OPTION
            ) from error
        self._start()  # at once: a service may be waiting for the response to its first event

    @property
    def endpoint(self) -> str:
        """The URL that the service sends events to."""
        return f"http://{self._host}:{self._http.port}{self._path}"

    def take(self, body: bytes) -> None:
        """Signal the subscriptions to the objects of an event; all if it cannot be parsed."""
        named = parse_event(body)
        if named is None:
            self.notify_all()
            return
        keys = (self._key_of(bucket, name) for bucket, name in named)
        self.notify(key for key in keys if key is not None)

    def _listen(self) -> None:
        self._http.serve(resumed=self.notify_all)

    def _stop(self) -> None:
        self._http.stop()

    def _is_receiving(self) -> bool:
        return not self._http.is_starved


def _checked_path(path: str) -> str:
    """Return the path with its leading slash; one that any client could name is refused."""
    name = path.strip("/") if isinstance(path, str) else ""
    if not PATH.fullmatch(name) or "?" in name or "#" in name:
        raise InvalidInputError(
            f"path={path!r:.80} is not a secret path",
            kind=ErrorKind.INVALID_OPTION,
            hint="Printable ASCII without '?' and '#', or leave it out for a random one",
        )
    return f"/{name}"


WAIT_S = 20
"""How long the service holds a request open until there is a message; its own maximum."""
MESSAGES_MAX = 10
PAUSE_S = (0.5, 30.0)


class QueueNotifier(Notifier):
    """Listens to a queue. `options` are those of `s3://` stores: region, endpoint, credentials."""

    def __init__(
        self,
        queue_url: str,
        store_url: str,
        *,
        wait_s: int = WAIT_S,
        runtime: Runtime = REAL,
        **options: Any,
    ) -> None:
        super().__init__(runtime)
        if not 1 <= wait_s <= WAIT_S:  # without waiting it would poll all the time
            raise bad_option("wait_s", wait_s, f"a number of seconds from 1 to {WAIT_S}")
        self._queue_url, self._wait_s = queue_url, wait_s
        self._key_of = key_matcher(*split_url(store_url))
        self._options = S3Options.parse({"timeout_s": wait_s + 10.0, **options})
        self._client = s3_client(self._options, "sqs")
        self._pause_s = 0.0
        self.failure: ReefError | None = None
        """Why the queue cannot be read now; None if it can."""

    def _listen(self) -> None:
        try:
            while not self._closed:
                self._step()
        finally:
            self._client.close()

    def _step(self) -> None:
        try:
            self._receive()
        except ReefError as error:
            self.failure = error
            self._pause_s = min(max(self._pause_s * 2, PAUSE_S[0]), PAUSE_S[1])
            self.runtime.sleep(self._pause_s)
            return
        if self.failure is not None:
            self.failure, self._pause_s = None, 0.0
            self.notify_all()  # events may have been missed meanwhile

    def _receive(self) -> None:
        with translated(self._queue_url):
            response = self._client.receive_message(
                QueueUrl=self._queue_url,
                MaxNumberOfMessages=MESSAGES_MAX,
                WaitTimeSeconds=self._wait_s,
            )
        messages = response.get("Messages", [])
        for message in messages:
            self._take(message["Body"])
        if messages:
            with translated(self._queue_url):
                self._client.delete_message_batch(
                    QueueUrl=self._queue_url,
                    Entries=[
                        {"Id": str(number), "ReceiptHandle": message["ReceiptHandle"]}
                        for number, message in enumerate(messages)
                    ],
                )

    def _take(self, body: str) -> None:
        objects = parse_event(body)
        if objects is None:
            self.notify_all()
            return
        keys = (self._key_of(bucket, name) for bucket, name in objects)
        self.notify(key for key in keys if key is not None)

    def _is_receiving(self) -> bool:
        return self.failure is None

    def _stop(self) -> None:
        """The request that is open ends by itself, within `wait_s`."""
        if self._listener is None:
            self._client.close()
