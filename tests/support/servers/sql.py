"""The two SQL servers that can hold registers: PostgreSQL and MariaDB.

Both are made from nothing in their directory, with a user named reef that owns a database, and
are reached over TCP only.
"""

import os
import pwd
import shutil
import signal
import socket
from pathlib import Path

from tests.support.servers.base import HOST, INSTALL_HINT, Server
from tests.support.servers.lookup import find_program, missing_programs, program_version

NAME = "reef"
POSTGRES_USER = "postgres"


class PostgreSQL(Server):
    """PostgreSQL, from Debian's packages or from the PATH."""

    name = "postgresql"
    # "Fast": SIGTERM would wait until every pooled connection of the tests is closed.
    stop_signal = signal.SIGINT

    def available(self) -> str | None:
        """Needs the server's programs and, for root, another user to run them as."""
        if postgres_program("initdb") is None or postgres_program("postgres") is None:
            return f"no postgres, initdb ({INSTALL_HINT})"
        if os.geteuid() == 0 and not user_exists(POSTGRES_USER):
            return f"it refuses to run as root, and there is no user {POSTGRES_USER}"
        return None

    def version(self) -> str | None:
        """Version that the program prints."""
        return program_version(postgres_program("postgres"))

    @property
    def url(self) -> str:
        """For SQLAlchemy, through psycopg."""
        return f"postgresql+psycopg://{NAME}@{self.address}/postgres"

    def bring_up(self) -> None:
        """No Unix socket: its path could be too long, and no test needs it."""
        user = POSTGRES_USER if os.geteuid() == 0 else None
        data = self.directory / "data"
        if user:
            shutil.chown(self.directory, user, pwd.getpwnam(user).pw_gid)
        made = ["--auth=trust", f"--username={NAME}", "--encoding=UTF8", "--locale=C", "--no-sync"]
        self.run([postgres_program("initdb"), *made, "-D", data], user=user)
        settings = {"listen_addresses": HOST, "port": self.port, "unix_socket_directories": ""}
        words = [f"--{key}={value}" for key, value in settings.items()]
        self.launch([postgres_program("postgres"), "-D", data, *words], user=user)

    def is_ready(self) -> bool:
        """A server that is still starting says so instead of asking for a password."""
        return first_byte(self.port, POSTGRES_HELLO) == b"R"


# A start-up packet of protocol 3: its length, the version, the user's name, an end mark.
POSTGRES_HELLO = b"\0\0\0\x13\0\3\0\0user\0reef\0\0"


class MariaDB(Server):
    """MariaDB, from Debian's packages or from the PATH."""

    name = "mariadb"

    def available(self) -> str | None:
        """Needs the server, the script for its system tables, and the programs that it calls."""
        missing = missing_programs("mariadbd", "mariadb-install-db", "my_print_defaults")
        return f"{missing} ({INSTALL_HINT})" if missing else None

    def version(self) -> str | None:
        """Version that the program prints."""
        return program_version(find_program("mariadbd"))

    @property
    def url(self) -> str:
        """For SQLAlchemy, through PyMySQL."""
        return f"mysql+pymysql://{NAME}:{NAME}@{self.address}/{NAME}"

    def bring_up(self) -> None:
        """System tables first; the server then runs the statements of the init file itself."""
        user = pwd.getpwuid(os.geteuid()).pw_name
        common = ["--no-defaults", f"--datadir={self.directory}/data", f"--user={user}"]
        made = ["--auth-root-authentication-method=normal", "--skip-test-db", "--skip-name-resolve"]
        self.run([find_program("mariadb-install-db"), *common, *made])
        init_path = self.directory / "init.sql"
        init_path.write_text(INIT_SQL)
        flags = [f"--bind-address={HOST}", f"--port={self.port}", f"--init-file={init_path}"]
        flags += [f"--socket={self.directory}/socket", f"--pid-file={self.directory}/pid"]
        flags += ["--skip-name-resolve", "--innodb-buffer-pool-size=64M"]
        self.launch([find_program("mariadbd"), *common, *flags])

    def is_ready(self) -> bool:
        """It greets first, after the init file is done: length, number, protocol 10."""
        return first_byte(self.port, b"", at=4) == b"\n"


INIT_SQL = f"""\
CREATE DATABASE {NAME};
CREATE USER '{NAME}'@'{HOST}' IDENTIFIED BY '{NAME}';
GRANT ALL ON {NAME}.* TO '{NAME}'@'{HOST}';
"""


def postgres_program(name: str) -> Path | None:
    """A PostgreSQL program: Debian keeps them off the PATH, in a folder for each version."""
    found = Path("/usr/lib/postgresql").glob(f"*/bin/{name}")
    newest_last = sorted(found, key=lambda path: int(path.parts[-3]))
    return newest_last[-1] if newest_last else find_program(name)


def user_exists(name: str) -> bool:
    """Whether the system knows this user."""
    try:
        pwd.getpwnam(name)
    except KeyError:
        return False
    return True


def first_byte(port: int, hello: bytes, at: int = 0) -> bytes | None:
    """First byte of a server's response, or None without one."""
    try:
        with socket.create_connection((HOST, port), timeout=5) as connection:
            connection.sendall(hello)
            return connection.recv(at + 1, socket.MSG_WAITALL)[at:]
    except OSError:
        return None
