"""Objects composed of others: parts copied by the service, and parts that pass through."""

import os
import time
from concurrent.futures import ThreadPoolExecutor

import boto3
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reef import stores
from reef.errors import ErrorKind, InvalidInputError, NotFoundError
from reef.stores.memory import MemoryStore
from reef.stores.remote_http import CopiedRange, Sent, plan, reading
from reef.stores.s3 import S3Options, S3Store, s3_client
from reef.telemetry import RequestMeter
from tests.support.http_proxy import Failing, Forwarding, Trouble, proxy

MIB = 1 << 20
QUICK = stores.RetryPolicy(attempts_max=3, first_delay_s=0.001, deadline_s=30)
LARGE = os.urandom(11 * MIB)


# --- the plan ----------------------------------------------------------------------------
def _parts(draw_sizes):
    return [
        bytes([number % 256]) * size if kind == "new" else (f"o{number % 3}", start, start + size)
        for number, (kind, start, size) in enumerate(draw_sizes)
        if kind == "new" or size
    ]


PARTS = st.lists(
    st.tuples(st.sampled_from(["new", "range"]), st.integers(0, 40), st.integers(0, 60)),
    max_size=12,
).map(_parts)


@given(PARTS)
def test_a_plan_writes_the_requested_parts(parts):
    """Whatever is copied and whatever is sent: the bytes are those of the parts, in order."""
    store = MemoryStore()
    for number in range(3):
        store.put(f"o{number}", os.urandom(200))
    steps = plan(parts, part_bytes_min=5, part_bytes=8, copy_bytes_max=20)
    made = b"".join(
        store.get_range(step.source, step.start, step.end)
        if isinstance(step, CopiedRange)
        else b"".join(reading(store, step.pieces))
        for step in steps
    )
    assert made == b"".join(p if isinstance(p, bytes) else store.get_range(*p) for p in parts)
    assert sum(step.size for step in steps) == len(made)


@given(PARTS)
def test_no_part_but_the_last_is_small(parts):
    """A service refuses parts below its minimum; none is larger than it may be either."""
    steps = plan(parts, part_bytes_min=5, part_bytes=8, copy_bytes_max=20)
    assert all(step.size >= 5 for step in steps[:-1])
    assert all(step.size <= (20 if isinstance(step, CopiedRange) else 8) for step in steps)
    assert all(step.size for step in steps)


@given(PARTS)
def test_parts_that_can_be_copied_are_not_read(parts):
    """Of a range, less than 2 minimums are read: to fill a part, and parts that are too small."""
    steps = plan(parts, part_bytes_min=5, part_bytes=8, copy_bytes_max=20)
    read = sum(
        piece[2] - piece[1]
        for step in steps
        if isinstance(step, Sent)
        for piece in step.pieces
        if not isinstance(piece, bytes)
    )
    ranges = [part for part in parts if not isinstance(part, bytes)]
    assert read <= sum(min(end - start, 9) for _, start, end in ranges)


def test_the_plan_of_a_join():
    """The header is filled up from the first range; the second is copied as it is."""
    parts = [b"header", ("a", 16, 300), ("b", 16, 120), b"filter, index, footer"]
    steps = plan(parts, part_bytes_min=50, part_bytes=80, copy_bytes_max=1000)
    assert steps == [
        Sent((b"header", ("a", 16, 60))),
        CopiedRange("a", 60, 300),
        CopiedRange("b", 16, 120),
        Sent((b"filter, index, footer",)),
    ]


# --- on servers --------------------------------------------------------------------------
PARTS_ON_SERVER = [
    b"head",
    ("a", 16, 11 * MIB - 1),
    ("small", 2, 9),
    ("b", 0, 11 * MIB),
    b"tail",
]
EXPECTED = b"head" + LARGE[16:-1] + b"2345678" + LARGE + b"tail"
COST = {"get": 3, "put": 5, "copy": 2, "list": 1}
"""Begin, 3 sent parts (head + start of a, small + start of b, tail) and complete; the ranges of
those are read; 2 parts are copied, and their sizes are checked once."""


def _filled(store):
    store.put("a", LARGE)
    store.put("b", LARGE)
    store.put("small", b"0123456789")
    return store


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("ministack", {}),
        pytest.param("seaweedfs", {"listing": "unsorted"}, marks=pytest.mark.slow),
        pytest.param("ceph", {"if_match": "bare"}, marks=pytest.mark.slow),
    ],
)
def test_large_ranges_are_copied_by_the_service(servers, name, options):
    """Three servers: content equal, 22 MiB made, less than 11 MiB sent, requests as planned."""
    server = servers.use(name)
    server.make_bucket("compose")
    with proxy(Forwarding, server.address) as wire:
        words = {**server.options(), **options, "endpoint": wire.endpoint}
        meter = RequestMeter()
        store = _filled(stores.open("s3://compose/joined", **words, meter=meter))
        meter.reset()
        wire.requests.clear()
        assert store.compose("made", PARTS_ON_SERVER) == len(EXPECTED)
        assert meter.requests() == COST
        assert len(wire.requests) == sum(COST.values())
        copies = [headers for _, _, headers in wire.requests if _header(headers, "copy-source")]
        assert len(copies) == 2
        sent = sum(int(headers.get("Content-Length") or 0) for _, _, headers in wire.requests)
        assert sent < 11 * MIB
        assert meter.to_dict()["put"]["bytes"] < 11 * MIB
        assert store.get("made") == EXPECTED
        assert store.abort_stale(0.0) == 0, "no upload is left open"


def _header(headers, ending):
    return next((value for name, value in headers.items() if name.lower().endswith(ending)), None)


@pytest.fixture
def wired(ministack, request):
    """Give a bucket behind a wire that can fail."""
    ministack.make_bucket("compose")
    with proxy(Failing, ministack.address) as wire:
        options = {**ministack.options(), "endpoint": wire.endpoint}
        url = f"s3://compose/{abs(hash(request.node.nodeid)):x}"
        store = _filled(stores.open(url, **options, retry=QUICK))
        wire.requests.clear()
        yield store, wire


def test_h3_a_lost_response_to_the_completion_is_resolved(wired):
    """H3: it landed; sent again it is "no such upload": the object's size resolves it."""
    store, wire = wired
    wire.troubles += [
        Trouble(method="POST", path="*uploadId=*", how="close", applied=True, times=1),
        Trouble(404, "NoSuchUpload", method="POST", path="*uploadId=*", times=1),
    ]
    assert store.compose("made", PARTS_ON_SERVER) == len(EXPECTED)
    assert store.get("made") == EXPECTED
    assert _begun(wire) == 1


def test_a_part_that_fails_is_sent_again(wired):
    """503 to a copy: the client sends that part again, not the whole object."""
    store, wire = wired
    wire.troubles.append(Trouble(503, "SlowDown", method="PUT", path="*partNumber=2*", times=2))
    assert store.compose("made", PARTS_ON_SERVER) == len(EXPECTED)
    assert store.get("made") == EXPECTED
    assert _begun(wire) == 1


def _begun(wire):
    """Count the uploads that were begun."""
    return sum(method == "POST" and "uploads" in path for method, path, _ in wire.requests)


def test_what_fails_for_good_leaves_nothing(wired):
    """A copy that is refused ends the upload: no object, nothing that is billed."""
    store, wire = wired
    wire.troubles.append(
        Trouble(403, "AccessDenied", method="PUT", path="*partNumber=2*", times=None)
    )
    with pytest.raises(InvalidInputError) as caught:
        store.compose("made", PARTS_ON_SERVER)
    assert caught.value.kind is ErrorKind.ACCESS_DENIED
    wire.troubles.clear()
    with pytest.raises(NotFoundError):
        store.head("made")
    assert any(method == "DELETE" and "uploadId" in path for method, path, _ in wire.requests)
    assert store.abort_stale(0.0) == 0


@pytest.mark.parametrize(
    ("part", "error"),
    [
        (("missing", 0, 6 * MIB), NotFoundError),
        (("a", 8 * MIB, 15 * MIB), InvalidInputError),
        (("a", 15 * MIB, 21 * MIB), InvalidInputError),
    ],
)
def test_large_ranges_of_missing_objects(wired, part, error):
    """A missing object, or a range past the end, raises as for small ones; nothing is created."""
    store, _ = wired
    with pytest.raises(error) as caught:
        store.compose("made", [("b", 0, 6 * MIB), part, b"tail"])
    if error is InvalidInputError:
        assert caught.value.kind is ErrorKind.INVALID_RANGE
    assert caught.value.context["object"] == part[0]
    with pytest.raises(NotFoundError):
        store.head("made")
    assert store.abort_stale(0.0) == 0


class IgnoresRanges(Forwarding):
    """A service that copies whole objects, whatever range was asked for."""

    def respond(self, method, path, body):
        if method == "PUT" and "partNumber" in path:
            for name in list(self.headers):
                if name.lower() == "x-amz-copy-source-range":
                    self.headers.replace_header(name, "bytes=0-6291455")
        super().respond(method, path, body)


def test_a_service_that_copies_another_range_is_found_out(moto):
    """The parts' sizes are checked before the object is made, and the error names the option."""
    moto.make_bucket("compose")
    with proxy(IgnoresRanges, moto.address) as wire:
        options = {**moto.options(), "endpoint": wire.endpoint}
        store = _filled(stores.open("s3://compose/ranges", **options, retry=QUICK))
        with pytest.raises(InvalidInputError, match="part_copy=false"):
            store.compose("made", PARTS_ON_SERVER)
        with pytest.raises(NotFoundError):
            store.head("made")


def test_without_part_copy_everything_is_read_and_uploaded(ministack):
    """R2 wants parts of one size: with the option nothing is copied, and the result is the same."""
    ministack.make_bucket("compose")
    meter = RequestMeter()
    url = "s3://compose/plain"
    store = _filled(stores.open(url, **ministack.options(), part_copy=False, meter=meter))
    meter.reset()
    assert store.compose("made", PARTS_ON_SERVER) == len(EXPECTED)
    assert "copy" not in meter.requests()
    assert store.get("made") == EXPECTED
    options = S3Options.parse(ministack.options())
    assert S3Store("compose", "plain", options).capabilities.compose


# --- the client --------------------------------------------------------------------------
def test_clients_are_made_one_after_the_other(monkeypatch):
    """State shared by boto3's clients is not thread-safe, and compositions run concurrently."""
    original, busy, most = boto3.client, [], []

    def slow(*args, **words):
        busy.append(1)
        most.append(len(busy))
        time.sleep(0.02)
        busy.pop()
        return original(*args, **words)

    monkeypatch.setattr(boto3, "client", slow)
    options = S3Options.parse({"access_key_id": "a", "secret_access_key": "b"})
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: s3_client(options).close(), range(8)))
    assert (max(most), len(most)) == (1, 8)


def test_the_region_of_the_environment_is_that_of_both_clients(monkeypatch):
    """AWS_REGION, as for the other client: boto3 by itself knows only AWS_DEFAULT_REGION."""
    monkeypatch.setenv("AWS_REGION", "eu-north-7")
    monkeypatch.delenv("AWS_DEFAULT_REGION", raising=False)
    assert s3_client(S3Options()).meta.region_name == "eu-north-7"
    assert s3_client(S3Options(region="here")).meta.region_name == "here"


def test_a_service_that_has_no_uploads_has_none_to_end(wired):
    """rclone responds "no such upload" to a listing of uploads when there is none."""
    store, wire = wired
    wire.troubles.append(Trouble(404, "NoSuchUpload", method="GET", path="*uploads*", times=None))
    assert store.abort_stale(0.0) == 0
