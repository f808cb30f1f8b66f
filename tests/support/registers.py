"""Registers for tests: one URL for each kind, with records of a test's own.

And the store that needs one: rclone's S3 server, which ignores every condition.
"""

from urllib.parse import urlencode

from tests.support.servers import SERVERS

REGISTERS = ("sqlite", "postgresql", "mariadb", "dynalite")


def register_url(servers, name, tmp_path):
    """Return the URL of a register; `servers` starts its server, which tests share by scope."""
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


def unconditional_bucket(servers, bucket):
    """Return the options of a bucket of rclone's."""
    server = servers.use("rclone")
    server.make_bucket(bucket)
    return {**server.options(), "listing": "unsorted", "part_copy": False}
