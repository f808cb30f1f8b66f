"""Servers that come from npm: Azurite for Azure's blobs, Dynalite for DynamoDB.

They are installed with exact versions into a folder of their own, REEF_SERVERS_DIR or
`.servers/npm` in the repository. A stamp written after the installation names the versions, so
that half an installation does not count.
"""

import base64
import contextlib
import hashlib
import hmac
import http.client
import os
from collections.abc import Iterator
from email.utils import formatdate
from pathlib import Path

from tests.support.servers.base import HOST, INSTALL_HINT, REPOSITORY, Server, http_status
from tests.support.servers.lookup import find_program, missing_programs
from tests.support.servers.s3 import boto_client

# Chosen so that Debian 12's Node 18 runs them.
VERSIONS = {"azurite": "3.35.0", "dynalite": "3.2.2"}
STAMP = " ".join(f"{name}@{version}" for name, version in VERSIONS.items())


def npm_folder() -> Path:
    """Where the packages are installed."""
    chosen = os.environ.get("REEF_SERVERS_DIR")
    return Path(chosen).resolve() if chosen else REPOSITORY / ".servers" / "npm"


def stamp_path() -> Path:
    """The file that says which versions are completely installed."""
    return npm_folder() / "installed"


def is_installed() -> bool:
    """Whether the folder holds exactly the versions that are asked for."""
    with contextlib.suppress(OSError):
        return stamp_path().read_text() == STAMP
    return False


class NpmServer(Server):
    """A server that Node runs."""

    def available(self) -> str | None:
        """Needs Node and the installed packages."""
        if missing := missing_programs("node"):
            return f"{missing} ({INSTALL_HINT})"
        return None if is_installed() else f"{self.name} is not installed ({INSTALL_HINT})"

    def version(self) -> str | None:
        """The version that is asked for, and so installed."""
        return VERSIONS[self.name]

    def is_ready(self) -> bool:
        """Any response will do."""
        return http_status(self.address) is not None


class Azurite(NpmServer):
    """Azure's own emulator of its blob storage, with the account that is the same everywhere."""

    name = "azurite"
    account_name = "devstoreaccount1"
    # No secret: it is printed in Azure's documentation and built into every client.
    account_key = (
        "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
    )

    @property
    def endpoint(self) -> str:
        """The address as a URL, with the account."""
        return f"http://{self.address}/{self.account_name}"

    def bring_up(self) -> None:
        """Blobs only; nothing is reported to anybody."""
        program = npm_folder() / "node_modules/azurite/dist/src/blob/main.js"
        flags = ["--blobHost", HOST, "--blobPort", str(self.port), "--location", self.directory]
        flags += ["--skipApiVersionCheck", "--disableTelemetry", "--silent"]
        self.launch([find_program("node"), program, *flags])

    def options(self) -> dict:
        """The keyword options for `reef.stores.open("az://container/prefix", **options)`."""
        return {
            "endpoint": self.endpoint,
            "account_name": self.account_name,
            "account_key": self.account_key,
        }

    def make_container(self, name: str) -> str:
        """Create a container, unless it is there already, and return its name."""
        resource = f"/{self.account_name}/{name}"
        headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-08-06"}
        headers["Authorization"] = self._signature("PUT", resource, headers)
        connection = http.client.HTTPConnection(self.address, timeout=10)
        with contextlib.closing(connection):
            connection.request("PUT", f"{resource}?restype=container", headers=headers)
            with connection.getresponse() as response:
                if response.status not in (201, 409):
                    raise RuntimeError(f"container {name}: {response.status} {response.read()}")
        return name

    def _signature(self, verb: str, resource: str, headers: dict[str, str]) -> str:
        """A shared-key signature. The account comes twice, as its name and as the URL's path."""
        fields = "".join(f"{key}:{headers[key]}\n" for key in sorted(headers))
        text = f"{verb}{NEWLINES}{fields}/{self.account_name}{resource}\nrestype:container"
        key = base64.b64decode(self.account_key)
        signed = hmac.new(key, text.encode(), hashlib.sha256).digest()
        return f"SharedKey {self.account_name}:{base64.b64encode(signed).decode()}"


# After the verb come eleven standard headers, none of which is sent.
NEWLINES = "\n" * 12


class Dynalite(NpmServer):
    """DynamoDB in memory. It knows no transactions; moto does."""

    name = "dynalite"
    access_key = "reeftestaccess"
    secret_key = "reeftestsecret"
    region = "us-east-1"

    @property
    def endpoint(self) -> str:
        """The address as a URL."""
        return f"http://{self.address}"

    @contextlib.contextmanager
    def client(self) -> Iterator:
        """A boto3 client for this server, closed at the end."""
        client = boto_client(self, "dynamodb")
        try:
            yield client
        finally:
            client.close()

    def bring_up(self) -> None:
        """Its own command listens on every interface, so Node runs a script instead."""
        module = npm_folder() / "node_modules/dynalite"
        times = "{createTableMs: 20, deleteTableMs: 20, updateTableMs: 20}"
        listen = f"listen({self.port}, '{HOST}')"
        self.launch([find_program("node"), "-e", f"require({str(module)!r})({times}).{listen}"])
