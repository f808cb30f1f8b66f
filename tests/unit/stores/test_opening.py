"""From a URL to a store; every bad input gets one clear error, soon."""

import importlib.util
import os
import pickle
import socket
import tempfile
import time

import pytest

from reef import stores
from reef.errors import ErrorKind, InvalidInputError, NotFoundError, UnavailableError
from reef.stores import RetryPolicy
from reef.stores.s3 import S3Options
from reef.telemetry import Metrics, RequestMeter
from reef.testing import open_store
from tests.support.child_process import in_child
from tests.support.faulty_files import FaultyFiles, failing

UNPRIVILEGED_UID = 65534
SOON = RetryPolicy(attempts_max=3, deadline_s=3.0)


@pytest.mark.parametrize("form", ["{}", "file://{}", "file://localhost{}"])
def test_forms_of_a_directory(tmp_path, form):
    """A path and a file:// URL name the same place."""
    stores.open(form.format(tmp_path)).put("k", b"v")
    assert (tmp_path / "k").read_bytes() == b"v"


def test_a_relative_directory(tmp_path, monkeypatch):
    """./data is made on the first write, not before."""
    monkeypatch.chdir(tmp_path)
    store = stores.open("./data")
    assert not (tmp_path / "data").exists()
    assert list(store.list()) == []
    store.put("a/b", b"v")
    assert (tmp_path / "data" / "a" / "b").read_bytes() == b"v"


def test_a_directory_url_may_hold_escaped_characters(tmp_path):
    """Spaces and umlauts are written as %20 and so on."""
    stores.open(f"file://{tmp_path}/my%20data").put("k", b"v")
    assert (tmp_path / "my data" / "k").exists()


def test_memory_stores_are_new_or_shared_by_name():
    """memory:// is a new one each time, memory://name the same in this process."""
    stores.open("memory://").put("k", b"v")
    with pytest.raises(NotFoundError):
        stores.open("memory://").get("k")
    stores.open("memory://shared-by-name").put("k", b"v")
    assert stores.open("memory://shared-by-name").get("k") == b"v"


@pytest.mark.parametrize(
    ("url", "kind", "says"),
    [
        ("ftp://host/x", ErrorKind.INVALID_URL, "unknown scheme 'ftp'"),
        ("", ErrorKind.INVALID_URL, "non-empty"),
        ("s3://", ErrorKind.INVALID_URL, "names no bucket"),
        ("s3:///prefix", ErrorKind.INVALID_URL, "names no bucket"),
        ("s3://bucket/a//b", ErrorKind.INVALID_KEY, "empty part"),
        ("s3://bucket?colour=red", ErrorKind.INVALID_OPTION, "no option 'colour'"),
        ("s3://bucket?timeout_s=soon", ErrorKind.INVALID_OPTION, "timeout_s='soon'"),
        ("s3://bucket?timeout_s=-1", ErrorKind.INVALID_OPTION, "timeout_s"),
        ("s3://bucket?timeout_s=inf", ErrorKind.INVALID_OPTION, "timeout_s"),
        ("s3://bucket?timeout_s=nan", ErrorKind.INVALID_OPTION, "timeout_s"),
        ("s3://bucket?connect_timeout_s=1e300", ErrorKind.INVALID_OPTION, "connect_timeout_s"),
        ("s3://user:password@bucket/x", ErrorKind.INVALID_URL, "has credentials in front"),
        ("s3://bucket?allow_http=maybe", ErrorKind.INVALID_OPTION, "allow_http='maybe'"),
        ("s3://bucket?if_match=often", ErrorKind.INVALID_OPTION, "quoted, bare or none"),
        ("s3://bucket?listing=random", ErrorKind.INVALID_OPTION, "sorted or unsorted"),
        ("s3://bucket?part_bytes=10", ErrorKind.INVALID_OPTION, "at least 5 MiB"),
        ("file://otherhost/x", ErrorKind.INVALID_URL, "names the host 'otherhost'"),
        ("file:///x?page=3", ErrorKind.INVALID_OPTION, "takes none"),
        ("memory://?colour=red", ErrorKind.INVALID_OPTION, "takes: page"),
        ("memory://?page=0", ErrorKind.INVALID_OPTION, "page='0'"),
        ("memory://?page=many", ErrorKind.INVALID_OPTION, "page='many'"),
        ("./data\0", ErrorKind.INVALID_URL, "NUL"),
        ("/" + "x" * 5000, ErrorKind.INVALID_URL, "cannot be opened"),
    ],
)
def test_bad_urls(url, kind, says):
    """Each is refused at once, names the mistake and the expected value."""
    with pytest.raises(InvalidInputError) as caught:
        stores.open(url)
    assert caught.value.kind is kind
    assert says in str(caught.value)


def test_a_hash_is_part_of_a_path(tmp_path):
    """Object stores know no fragments."""
    stores.open(f"file://{tmp_path}/a#b").put("k", b"v")
    assert (tmp_path / "a#b" / "k").exists()
    options = {"access_key_id": "a", "secret_access_key": "b", "region": "x"}
    assert stores.open("s3://bucket/pre#fix", **options).url == "s3://bucket/pre#fix"


def test_a_tilde_is_the_home_directory(tmp_path, monkeypatch):
    """As in a shell."""
    monkeypatch.setenv("HOME", str(tmp_path))
    stores.open("~/data").put("k", b"v")
    assert (tmp_path / "data" / "k").exists()


def test_a_page_in_the_query_is_a_number():
    """Options in a URL are text."""
    store = stores.open("memory://?page=2")
    for number in range(5):
        store.put(f"k{number}", b"")
    assert len(list(store.list())) == 5


@pytest.mark.parametrize(
    "url", ["ftp://b?secret_access_key=hidden", "s3://b?secret_access_key=hidden"]
)
def test_secrets_stay_out_of_messages(url):
    """Queries are cut off before a URL is shown."""
    with pytest.raises(InvalidInputError) as caught:
        stores.open(url, secret_access_key="hidden")
    assert "hidden" not in str(caught.value)


def test_an_option_of_the_wrong_type_is_named():
    """A number where text belongs."""
    with pytest.raises(InvalidInputError, match="region=5 is not text"):
        stores.open("s3://bucket", region=5)


def test_a_password_in_front_of_a_bucket_is_not_repeated():
    """The message does not show it."""
    with pytest.raises(InvalidInputError) as caught:
        stores.open("s3://user:password@bucket/x")
    assert "password" not in str(caught.value)


def test_an_option_given_twice_is_refused():
    """The URL and the argument might disagree."""
    with pytest.raises(InvalidInputError, match="'region' is given twice"):
        stores.open("s3://bucket?region=a", region="b")


def test_an_unknown_latency_profile_is_refused():
    """The names that exist are listed."""
    with pytest.raises(InvalidInputError, match="s3-standard, s3-express, minio-lan"):
        open_store("memory://", latency="warp")


@pytest.mark.parametrize("option", ["latency", "faults"])
def test_options_for_tests_are_refused_in_production(option):
    """Delays and failures on purpose are opened by `reef.testing`, which the error names."""
    with pytest.raises(InvalidInputError, match=f"'{option}' is for tests") as refused:
        stores.open("memory://", **{option: "s3-standard"})
    assert "reef.testing.open_store" in refused.value.hint


def test_a_path_that_is_a_file(tmp_path):
    """A file is not a bucket."""
    (tmp_path / "file").write_text("x")
    with pytest.raises(InvalidInputError, match="is a file, not a directory"):
        stores.open(str(tmp_path / "file"))


def test_a_path_below_a_file(tmp_path):
    """Nor is something below a file."""
    (tmp_path / "file").write_text("x")
    with pytest.raises(InvalidInputError, match="is a file, not a directory"):
        stores.open(str(tmp_path / "file" / "below"))


def test_an_object_and_others_below_its_name(tmp_path):
    """A directory cannot hold both; the error says so and nothing is changed."""
    store = stores.open(str(tmp_path))
    store.put("a", b"object")
    for write in (store.put, store.create):
        with pytest.raises(InvalidInputError, match="clashes"):
            write("a/b", b"x")
    store.put("d/e", b"x")
    for write in (store.put, store.create):
        with pytest.raises(InvalidInputError, match="clashes"):
            write("d", b"object")
    assert sorted(info.key for info in store.list()) == ["a", "d/e"]


def test_the_place_of_unfinished_writes_is_not_for_keys(tmp_path):
    """Keys below .tmp/ are refused."""
    with pytest.raises(InvalidInputError, match="unfinished writes"):
        stores.open(str(tmp_path)).put(".tmp/x", b"")


def test_a_name_longer_than_the_file_system_allows(tmp_path):
    """255 bytes are the usual limit of one part of a path."""
    with pytest.raises(InvalidInputError, match="longer than the file system allows"):
        stores.open(str(tmp_path)).put("k" * 300, b"")


def test_a_directory_without_permission():
    """The error names the object and the reason; root steps down to see it."""

    def write(root):
        if os.geteuid() == 0:
            os.setresuid(UNPRIVILEGED_UID, UNPRIVILEGED_UID, UNPRIVILEGED_UID)
        with pytest.raises(InvalidInputError, match="no permission for k") as caught:
            stores.open(root).put("k", b"")
        return caught.value.kind.value

    with tempfile.TemporaryDirectory() as root:
        os.chmod(root, 0o555)
        assert in_child(lambda: write(root)) == (0, "'access_denied'")


def test_a_full_disk_is_unavailable(tmp_path):
    """ENOSPC: nothing is written, the caller may try again later."""
    import errno

    from reef.stores.local import LocalStore

    full = FaultyFiles(before=failing("append", error=errno.ENOSPC))
    store = LocalStore(str(tmp_path), files=full)
    with pytest.raises(UnavailableError) as caught:
        store.create("k", b"x")
    assert caught.value.kind is ErrorKind.DISK_FULL
    assert list(store.list()) == []
    assert [p for p in (tmp_path / ".tmp").iterdir() if p.is_file()] == []


def test_a_directory_sync_that_fails_leaves_the_outcome_unknown(tmp_path):
    """The name is there, but its durability is not guaranteed."""
    from reef.files import OS, SyncFailed
    from reef.stores import Outcome
    from reef.stores.local import LocalStore

    class Flaky(type(OS)):
        fails = False

        def sync_directory(self, path):
            if self.fails:
                raise SyncFailed(5, "Input/output error")
            super().sync_directory(path)

    files = Flaky()
    store = LocalStore(str(tmp_path), files=files)
    store.create("wal/0", b"x")
    files.fails = True
    assert store.create("wal/1", b"x").outcome is Outcome.UNKNOWN
    assert store.create("wal/0", b"y").outcome is Outcome.UNKNOWN
    assert stores.ReadBack(store, SOON).create("wal/2", b"x").outcome is Outcome.UNKNOWN


# --- a disk cache -----------------------------------------------------------------


SEGMENT = "namespaces/users/segments/01J00000000000000000000000.seg"


@pytest.mark.parametrize("size", [None, 1 << 20, "1048576"])
def test_a_disk_cache(tmp_path, monkeypatch, size):
    """A path, with ~ for the home directory, and a bound that may be text."""
    monkeypatch.setenv("HOME", str(tmp_path))
    metrics = Metrics()
    store = stores.open(
        str(tmp_path / "data"), disk_cache="~/cache", disk_cache_bytes=size, metrics=metrics
    )
    store.put(SEGMENT, b"bytes")
    assert [store.get_range(SEGMENT, 0, 5) for _ in range(2)] == [b"bytes"] * 2
    assert metrics.to_dict()["disk_cache.hits"] == {"value": 1}
    assert (tmp_path / "cache" / "usage").exists()


def test_a_disk_cache_by_path_object(tmp_path):
    """What pathlib makes is a path too."""
    store = stores.open("memory://", disk_cache=tmp_path)
    store.put(SEGMENT, b"bytes")
    store.get_range(SEGMENT, 0, 5)
    assert (tmp_path / "usage").exists()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"disk_cache": ""}, "is not a path"),
        ({"disk_cache": 5}, "is not a path"),
        ({"disk_cache": b"cache"}, "is not a path"),
        ({"disk_cache": "a\0b"}, "is not a path"),
        ({"disk_cache": "file"}, "is a file, not a directory"),
        ({"disk_cache": "data"}, "is inside the store"),
        ({"disk_cache": "data/cache"}, "is inside the store"),
        ({"disk_cache": "cache", "disk_cache_bytes": 0}, "disk_cache_bytes='0'"),
        ({"disk_cache": "cache", "disk_cache_bytes": "1 GB"}, "disk_cache_bytes='1 GB'"),
        ({"disk_cache": "cache", "disk_cache_bytes": 1.5}, "disk_cache_bytes='1.5'"),
        ({"disk_cache_bytes": 1 << 20}, "without 'disk_cache'"),
    ],
)
def test_a_bad_disk_cache_is_refused(tmp_path, monkeypatch, options, says):
    """At once, rather than as a cache that never hits."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("x")
    with pytest.raises(InvalidInputError) as caught:
        stores.open("data", **options)
    assert caught.value.kind is ErrorKind.INVALID_OPTION
    assert says in str(caught.value)


def test_a_disk_cache_next_to_the_store(tmp_path):
    """A name that only begins like the store's is another directory."""
    store = stores.open(str(tmp_path / "data"), disk_cache=tmp_path / "data-cache")
    key = "namespaces/users/segments/1.seg"
    store.put(key, b"12345")
    assert store.get_range(key, 1, 3) == b"23"
    assert any((tmp_path / "data-cache").iterdir())


# --- S3 ---------------------------------------------------------------------------


def s3(server, bucket="opened", **options):
    """Open a bucket of a server with a short patience."""
    return stores.open(f"s3://{bucket}/x", retry=SOON, **{**server.options(), **options})


def test_a_missing_bucket(ministack):
    """Named by reads, writes and listings alike; never mistaken for a missing object."""
    store = s3(ministack, "no-such-bucket")
    for call in (
        lambda: store.get("k"),
        lambda: store.put("k", b""),
        lambda: store.create("k", b""),
        lambda: list(store.list()),
    ):
        with pytest.raises(InvalidInputError, match="does not exist") as caught:
            call()
        assert caught.value.kind is ErrorKind.BUCKET_MISSING


def test_wrong_credentials(seaweedfs):
    """Refused at once, without retries; the hint names the options."""
    seaweedfs.make_bucket("opened")
    meter = RequestMeter()
    store = s3(seaweedfs, secret_access_key="wrong", meter=meter)
    for call in (
        lambda: store.get("k"),
        lambda: store.create("k", b""),
        lambda: store.replace("k", b"", '"t"'),
        lambda: list(store.list()),
    ):
        with pytest.raises(InvalidInputError, match="secret_access_key") as caught:
            call()
        assert caught.value.kind is ErrorKind.ACCESS_DENIED
    assert sum(meter.requests().values()) == 4


def test_no_credentials_at_all(seaweedfs, monkeypatch):
    """No environment, no options: an error in bounded time, not a hang."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    seaweedfs.make_bucket("opened")
    store = stores.open(
        "s3://opened/x", endpoint=seaweedfs.endpoint, skip_signature=True, retry=SOON
    )
    with pytest.raises(InvalidInputError) as caught:
        store.put("k", b"")
    assert caught.value.kind is ErrorKind.ACCESS_DENIED


@pytest.fixture
def aws_home(seaweedfs, monkeypatch, tmp_path):
    """An environment without keys, whose `~/.aws` has two profiles, one with a wrong secret."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    options = seaweedfs.options()
    key, secret = options.pop("access_key_id"), options.pop("secret_access_key")
    (tmp_path / "credentials").write_text(
        f"[shop]\naws_access_key_id={key}\naws_secret_access_key={secret}\n"
        f"[other]\naws_access_key_id={key}\naws_secret_access_key=wrong\n"
    )
    (tmp_path / "config").write_text("[profile shop]\nregion=us-east-1\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    seaweedfs.make_bucket("opened")
    return options


@pytest.mark.parametrize("place", ["option", "environment"])
def test_credentials_of_a_profile(aws_home, monkeypatch, place):
    """Named by an option or by AWS_PROFILE; boto3's requests use it too, and a wrong one fails."""
    named = {"profile": "shop"} if place == "option" else {}
    if not named:
        monkeypatch.setenv("AWS_PROFILE", "shop")
    store = stores.open("s3://opened/profile", **aws_home, **named)
    store.put("k", b"v")
    assert pickle.loads(pickle.dumps(store)).get("k") == b"v"
    assert store.abort_stale(3600) == 0
    with pytest.raises(InvalidInputError, match="refused these credentials"):
        stores.open("s3://opened/profile", **aws_home, profile="other").get("k")
    with pytest.raises(InvalidInputError, match=r"profile.*the only credentials given"):
        stores.open("s3://opened/profile", **aws_home, profile="shop", access_key_id="a")


@pytest.mark.parametrize(
    "call",
    [
        lambda store: store.get("k"),
        lambda store: store.create("k", b""),
        lambda store: list(store.list()),
        lambda store: store.abort_stale(3600),
    ],
)
def test_missing_credentials_are_reported_as_missing(aws_home, call):
    """Not as refused ones; a store without any can be opened."""
    store = stores.open("s3://opened/x", **aws_home, retry=SOON)
    with pytest.raises(InvalidInputError, match="no credentials were found in options") as caught:
        call(store)
    assert "AWS_PROFILE" in caught.value.hint
    assert caught.value.kind is ErrorKind.ACCESS_DENIED


def test_a_profile_that_does_not_exist(aws_home):
    """Is found out when the store is opened."""
    with pytest.raises(InvalidInputError, match=r"profile \(nope\) could not be found"):
        stores.open("s3://opened/x", **aws_home, profile="nope")


def test_a_profile_without_boto3_is_an_error(aws_home, monkeypatch):
    """It says what to install; nothing is sent to a server with other credentials."""
    find = importlib.util.find_spec
    hidden = lambda name: None if name == "boto3" else find(name)  # noqa: E731
    monkeypatch.setattr(importlib.util, "find_spec", hidden)
    with pytest.raises(InvalidInputError, match=r"a profile needs boto3, pip install 'reef\[s3\]'"):
        stores.open("s3://opened/x", **aws_home, profile="shop")


def test_an_unreachable_endpoint():
    """Connection refused: UnavailableError within the deadline, for every kind of call."""
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))  # so that no other process listens there, either
        store = stores.open(
            "s3://bucket/x",
            endpoint=f"http://127.0.0.1:{deaf.getsockname()[1]}",
            access_key_id="a",
            secret_access_key="b",
            retry=RetryPolicy(attempts_max=1000, deadline_s=0.5),
        )
        start_s = time.perf_counter()
        for call in (
            lambda: store.get("k"),
            lambda: store.create("k", b""),  # never sent, so not unknown
            lambda: list(store.list()),
            lambda: store.upload("k", [b""]),
        ):
            with pytest.raises(UnavailableError, match="cannot be reached"):
                call()
        assert time.perf_counter() - start_s < 60, "a thousand attempts take an hour"


def test_an_endpoint_that_never_responds():
    """A request to a server that accepts and stays silent fails after the timeout."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        store = stores.open(
            "s3://bucket/x",
            endpoint=f"http://127.0.0.1:{silent.getsockname()[1]}",
            access_key_id="a",
            secret_access_key="b",
            timeout_s=0.3,
            retry=RetryPolicy(attempts_max=2, deadline_s=2),
        )
        start_s = time.perf_counter()
        with pytest.raises(UnavailableError) as caught:
            store.get("k")
        assert caught.value.kind is ErrorKind.TIMEOUT
        assert store.create("k", b"x").outcome is stores.Outcome.UNKNOWN
        assert time.perf_counter() - start_s < 25, "by default it would be two minutes"


def test_credentials_and_endpoint_from_the_environment(ministack, monkeypatch):
    """The usual AWS_ variables are enough."""
    ministack.make_bucket("opened")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ministack.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", ministack.secret_key)
    monkeypatch.setenv("AWS_ENDPOINT_URL", ministack.endpoint)
    monkeypatch.setenv("AWS_REGION", ministack.region)
    store = stores.open("s3://opened/from-environment")  # with http, as the variable says
    store.put("k", b"v")
    assert store.get("k") == b"v"


def test_options_in_the_query(ministack):
    """Everything that can be an argument can be given in the URL, as text."""
    ministack.make_bucket("opened")
    options = ministack.options()
    query = "&".join(f"{name}={value}" for name, value in options.items())
    store = stores.open(f"s3://opened/query?{query}&timeout_s=5&bulk_delete=false")
    store.put("k", b"v")
    store.delete_many(["k", "gone"])
    assert list(store.list()) == []


def test_the_prefix_separates(ministack):
    """Two roots in one bucket do not see each other."""
    ministack.make_bucket("opened")
    left, right = (
        stores.open(f"s3://opened/{side}", **ministack.options()) for side in ("left", "right")
    )
    left.put("k", b"left")
    assert list(right.list()) == []
    with ministack.client() as client:
        assert client.get_object(Bucket="opened", Key="left/k")["Body"].read() == b"left"


def test_options_reach_the_server(ministack):
    """Storage class and server-side encryption go with the object."""
    ministack.make_bucket("opened")
    store = s3(ministack, storage_class="STANDARD_IA", server_side_encryption="AES256")
    store.put("k", b"v")
    store.upload("big", [b"x" * 6_000_000, b"y" * 6_000_000])
    with ministack.client() as client:
        for key in ("x/k", "x/big"):
            head = client.head_object(Bucket="opened", Key=key)
            assert head["StorageClass"] == "STANDARD_IA"
            assert head["ServerSideEncryption"] == "AES256"


def test_a_proxy_is_used(ministack):
    """proxy_url: requests go through it."""
    from tests.support.http_proxy import Forwarding, proxy

    ministack.make_bucket("opened")
    with proxy(Forwarding, ministack.address) as between:
        store = s3(ministack, proxy_url=between.endpoint)
        store.put("through", b"v")
        assert store.get("through") == b"v"
        assert len(between.requests) == 2


def test_options_know_their_types():
    """Text from a query is converted to the option's type."""
    options = S3Options.parse({"timeout_s": "2.5", "s3_express": "true", "region": "x"})
    assert (options.timeout_s, options.s3_express, options.region) == (2.5, True, "x")
    assert not options.sorts_listings
