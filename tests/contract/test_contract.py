"""Every backend, and every wrapper at rest, passes the same suite."""

from functools import cache
from typing import ClassVar

import pytest

from reef import stores
from reef.stores.local import LocalStore
from reef.stores.memory import MemoryStore
from reef.stores.wrappers import DiskCache, Meter
from reef.testing import Faults, Latency, LatencyProfile, Recorder
from reef.testing.contract import StoreContract
from tests.support.gcs_service import GcsService


class TestMemory(StoreContract):
    @pytest.fixture
    def store(self):
        return MemoryStore()


class TestMemoryOnePerPage(StoreContract):
    """Pages of one object: a listing must span them."""

    @pytest.fixture
    def store(self):
        return MemoryStore(page=1)


class TestDirectory(StoreContract):
    @pytest.fixture
    def store(self, tmp_path):
        return LocalStore(str(tmp_path / "bucket"))


class TestOpenedDirectory(StoreContract):
    """The whole stack that users get."""

    @pytest.fixture
    def store(self, tmp_path):
        return stores.open(str(tmp_path / "bucket"))


class TestFaultsSwitchedOff(StoreContract):
    @pytest.fixture
    def store(self, tmp_path):
        return Faults(LocalStore(str(tmp_path / "bucket")), [])


class TestQuietWrappers(StoreContract):
    @pytest.fixture
    def store(self):
        instant = LatencyProfile((1e-6, 2e-6), (1e-6, 2e-6), (1e-6, 2e-6), 1e15)
        return Recorder(Meter(Latency(MemoryStore(), instant)))


def _everything(key):
    return True


class TestDiskCache(StoreContract):
    """Ranges of all keys are kept on disk, not only those of segments."""

    @pytest.fixture
    def store(self, tmp_path):
        opened = stores.open(str(tmp_path / "bucket"))
        return DiskCache(opened, str(tmp_path / "cache"), is_immutable=_everything)


@cache
def _make_bucket_once(server):
    server.make_bucket("contract")


class OnServer(StoreContract):
    """A fresh prefix of a bucket for each test."""

    server = ""
    options: ClassVar = {}

    @pytest.fixture
    def store(self, servers, request):
        server = servers.use(self.server)
        _make_bucket_once(server)
        prefix = f"{type(self).__name__}/{abs(hash(request.node.nodeid)):x}"
        return stores.open(f"s3://contract/{prefix}", **server.options(), **self.options)


class TestMinistack(OnServer):
    server = "ministack"


class TestSeaweedFS(OnServer):
    server = "seaweedfs"
    options: ClassVar = {"listing": "unsorted"}


class TestCeph(OnServer):
    server = "ceph"
    options: ClassVar = {"if_match": "bare"}


class TestWithoutIfMatch(OnServer):
    """A store that lacks If-Match says so; the rest holds."""

    server = "ministack"
    options: ClassVar = {"if_match": "none"}


del OnServer  # it has no server of its own


class TestAzurite(StoreContract):
    """Azure's own emulator of its blob storage."""

    @pytest.fixture
    def store(self, azurite, request):
        azurite.make_container("contract")
        return stores.open(f"az://contract/{abs(hash(request.node.nodeid)):x}", **azurite.options())


class TestGcsAsDocumented(StoreContract):
    """The real client, and a service that responds as Google documents."""

    @pytest.fixture
    def store(self):
        service = GcsService()
        yield stores.open("gs://bucket/contract", **service.options)
        service.close()
