"""Registers for tests: one URL for each kind, with records of a test's own.

And the store that needs one: rclone's S3 server, which ignores every condition. It answers a
ranged GET with the right bytes and the wrong status, 200 for 206, and a listing of uploads with an
error when there are none; a proxy mends both.
"""

from contextlib import contextmanager
from urllib.parse import urlencode

from tests.http_proxy import Forwarding, proxy
from tests.servers import SERVERS

REGISTERS = ("sqlite", "postgresql", "mariadb", "dynalite")


def register_url(servers, name, tmp_path):
    """Return the URL of a register; `servers` starts what it needs, tests share it by scope."""
    if name == "sqlite":
        return f"sqlite:///{tmp_path}/register.db"
    server = servers.use(name)
    if name in ("postgresql", "mariadb"):
        return f"{server.url}?{urlencode({'scope': str(tmp_path)})}"
    words = {
        "region": server.region,
        "endpoint": server.endpoint,
        "access_key_id": server.access_key,
        "secret_access_key": server.secret_key,
        "scope": str(tmp_path),
    }
    return f"dynamodb://reef?{urlencode(words)}"


class StartedServers:
    """Servers without pytest: started when they are asked for, stopped with the stack."""

    def __init__(self, folder, stack):
        self._folder, self._stack = folder, stack
        self._used = {}

    def use(self, name):
        """Return the running server of that name."""
        if name not in self._used:
            server = self._used[name] = SERVERS[name]
            server.start(self._folder / name)
            self._stack.callback(server.stop)
        return self._used[name]


class _Mending(Forwarding):
    """Says 206 where rclone sends a part, and lists no uploads where there are none."""

    def send(self, status, headers, body):
        if status == 200 and any(name.lower() == "content-range" for name, _ in headers):
            status = 206
        if status == 404 and self.command == "GET" and b"NoSuchUpload" in body:
            status, body = 200, b"<ListMultipartUploadsResult/>"
        super().send(status, headers, body)


@contextmanager
def unconditional_bucket(servers, bucket):
    """Yield the options of a bucket of rclone's."""
    server = servers.use("rclone")
    server.make_bucket(bucket)
    with proxy(_Mending, server.address) as wire:
        lacks = {"listing": "unsorted", "part_copy": False}
        yield {**server.options(), "endpoint": wire.endpoint, **lacks}
