"""Requests to Google Cloud Storage and the meaning of its responses, over a real socket."""

import json

import pytest

from reef import stores
from reef.errors import ErrorKind, InvalidInputError, NotFoundError, UnavailableError
from reef.stores.base import Outcome
from reef.stores.gcs import GcsOptions, GcsStore, can_make_tokens, token_of
from reef.telemetry import RequestMeter
from tests.support.gcs_service import GcsService, Stored

ONCE = stores.RetryPolicy(attempts_max=1)
QUICK = stores.RetryPolicy(attempts_max=4, first_delay_s=0.001, deadline_s=10)


@pytest.fixture
def service():
    """Yield a service that behaves as documented and records its requests."""
    running = GcsService()
    yield running
    running.close()


@pytest.fixture
def raw(service):
    """Yield the backend alone: no retries, no read-back."""
    return GcsStore("bucket", "root", GcsOptions.parse(service.options))


def test_a_create_is_sent_with_generation_zero(service, raw):
    """Create-only is `x-goog-if-generation-match: 0`, in one PUT with all the bytes."""
    result = raw.create("wal/1", b"bytes")
    (sent,) = service.requests
    assert (sent.method, sent.path, sent.query) == ("PUT", "/bucket/root/wal/1", {})
    assert sent.headers["x-goog-if-generation-match"] == "0"
    assert sent.body == b"bytes"
    assert (result.outcome, result.tag) == (Outcome.CREATED, _generation(service, "root/wal/1"))


def test_a_tag_is_the_generation_and_goes_back_as_the_condition(service, raw):
    """H5: generations never repeat, so equal bytes have different tags; ETags are not used."""
    tags = [raw.put("head", b"same"), raw.put("head", b"same")]
    assert tags[0] != tags[1]
    assert raw.get_tagged("head").tag == raw.head("head").tag == tags[1]
    service.requests.clear()
    assert raw.replace("head", b"new", tags[1]).outcome is Outcome.REPLACED
    (sent,) = service.requests
    assert sent.headers["x-goog-if-generation-match"] == tags[1]
    assert "if-match" not in sent.headers
    assert raw.replace("head", b"newer", tags[1]).outcome is Outcome.CHANGED
    assert raw.get("head") == b"new"


def test_a_plain_put_has_no_condition(service, raw):
    """What may be overwritten is sent without a precondition."""
    raw.put("clock", b"x")
    assert "x-goog-if-generation-match" not in service.requests[0].headers


def test_listings_have_no_tags(raw):
    """A listing has no generations: better no tag than one that no condition accepts."""
    raw.put("a", b"1")
    assert [(info.key, info.tag) for info in raw.list()] == [("a", None)]


def test_a_listing_starts_at_its_prefix_and_key(service, raw):
    """`start-after` is sent, so that a page holds only the requested names."""
    for number in range(5):
        raw.put(f"wal/{number}", b"")
    service.requests.clear()
    assert [info.key for info in raw.list("wal/", "wal/2")] == ["wal/3", "wal/4"]
    (sent,) = service.requests
    assert (sent.method, sent.path) == ("GET", "/bucket")
    assert sent.query == {
        "list-type": "2",
        "prefix": "root/wal/",
        "start-after": "root/wal/2",
    }


def test_ranges_are_sent_with_both_ends(service, raw):
    """No suffix ranges: they are not the same everywhere."""
    raw.put("k", b"0123456789")
    raw.get_range("k", 3, 7)
    assert service.requests[-1].headers["range"] == "bytes=3-6"


def test_a_copy_names_its_source(service, raw):
    """One PUT without a body, with the source in `x-goog-copy-source`."""
    raw.put("a", b"bytes")
    raw.copy("a", "b")
    assert service.requests[-1].headers["x-goog-copy-source"] == "bucket/root%2Fa"
    assert service.requests[-1].body == b""


def test_every_request_forbids_cached_responses(service, raw):
    """H9: control objects come from the bucket."""
    raw.put("a", b"")
    raw.get("a")
    list(raw.list())
    assert {sent.headers["cache-control"] for sent in service.requests} == {"no-cache"}


@pytest.mark.parametrize(
    ("status", "code", "outcome"),
    [
        (412, "PreconditionFailed", Outcome.EXISTS),
        (409, "Conflict", Outcome.EXISTS),
        (429, "SlowDown", Outcome.UNKNOWN),
        (500, "InternalError", Outcome.UNKNOWN),
        (502, "", Outcome.UNKNOWN),
        (503, "ServiceUnavailable", Outcome.UNKNOWN),
        (408, "RequestTimeout", Outcome.UNKNOWN),
    ],
)
def test_outcome_of_a_create_by_response(service, raw, status, code, outcome):
    """A failed condition is reported as such; a response that proves nothing is unknown."""
    service.refuse(status, code)
    result = raw.create("wal/1", b"bytes")
    assert result.outcome is outcome
    throttled = status in (429, 503)
    if outcome is Outcome.UNKNOWN:
        assert (result.cause.kind is ErrorKind.THROTTLED) == throttled


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (401, "AuthenticationRequired", ErrorKind.ACCESS_DENIED),
        (403, "AccessDenied", ErrorKind.ACCESS_DENIED),
        (404, "NoSuchBucket", ErrorKind.BUCKET_MISSING),
        (400, "InvalidArgument", ErrorKind.REFUSED_BY_STORE),
    ],
)
def test_a_refusal_is_raised_at_once(service, raw, status, code, kind):
    """What would be refused for ever is an error, not an unknown outcome."""
    service.refuse(status, code)
    with pytest.raises(InvalidInputError) as caught:
        raw.create("wal/1", b"bytes")
    assert caught.value.kind is kind


def test_outcome_of_a_get_by_response(service, raw):
    """404 is not found; 304, without a condition, is refused; 429 and 503 are throttling."""
    with pytest.raises(NotFoundError):
        raw.get("missing")
    raw.put("k", b"v")
    for status in (429, 503):
        service.refuse(status)
        with pytest.raises(UnavailableError) as caught:
            raw.get("k")
        assert caught.value.kind is ErrorKind.THROTTLED
    service.refuse(304)
    with pytest.raises(InvalidInputError):
        raw.get("k")
    assert raw.get("k") == b"v"


@pytest.mark.parametrize("after", [False, True])
def test_h6_a_429_before_or_after_the_write(service, after):
    """H6: the hot object's 429 is resolved by sending again and reading, whichever it was."""
    store = stores.open("gs://bucket/root", **service.options, retry=QUICK)
    service.refuse(429, "SlowDown", after=after)
    result = store.create("head", b"mine, nonce 1")
    assert result.outcome is Outcome.CREATED
    assert result.doubt == after
    assert len(service.sent("PUT")) == 2
    assert service.objects["root/head"].body == b"mine, nonce 1"


def test_h3_a_multipart_upload_sends_no_condition(service):
    """H3: preconditions are not supported there; names are unique instead. Parts are equal."""
    store = stores.open("gs://bucket/root", **service.options)
    assert store.upload("segments/big", [b"x" * (9 << 20)]) == 9 << 20
    sizes = sorted(len(sent.body) for sent in service.sent("PUT"))
    assert sizes == [1 << 20, 8 << 20]
    assert [sorted(sent.query) for sent in service.sent("POST")] == [["uploads"], ["uploadId"]]
    assert all("x-goog-if-generation-match" not in sent.headers for sent in service.requests)


def test_requests_are_counted_as_sent(service):
    """The meter counts the requests that the service saw."""
    meter = RequestMeter()
    store = stores.open("gs://bucket/root", **service.options, meter=meter)
    store.create("a", b"1")
    store.put("b", b"2")
    store.get("a")
    list(store.list())
    store.delete_many(["a", "b", "missing"])
    store.upload("big", [b"x" * (9 << 20)])
    assert meter.requests() == {"get": 1, "list": 1, "put": 6, "delete": 3}
    assert len(service.requests) == sum(meter.requests().values())


def test_credentials_are_not_shown(raw):
    """Neither the options nor the store print a token or a key."""
    assert "t0ken" not in repr(raw.options)
    assert "t0ken" not in repr(raw)


def test_options_that_cannot_be_meant_are_refused():
    """An unknown option, two kinds of credentials, and a bucket without a name."""
    with pytest.raises(InvalidInputError, match="gs:// has no option 'region'"):
        stores.open("gs://bucket/x", region="eu")
    with pytest.raises(InvalidInputError, match="the only credentials"):
        stores.open("gs://bucket/x", service_account_path="/a", application_credentials="/b")
    with pytest.raises(InvalidInputError, match="names no bucket"):
        stores.open("gs:///x")


def _generation(service, key):
    return str(service.objects[key].generation)


# --- composing ---------------------------------------------------------------------------
MIB = 1 << 20


def _composing(service, **words):
    meter = RequestMeter()
    store = stores.open(
        "gs://bucket/root", **{**service.options, **words}, meter=meter, retry=QUICK
    )
    store.put("a", b"a" * MIB)
    store.put("b", b"b" * (2 * MIB))
    service.requests.clear()
    meter.reset()
    return store, meter


def test_whole_objects_are_joined_by_the_service(service):
    """PUT ?compose names each with its generation, and the target must not be there (0)."""
    store, meter = _composing(service)
    assert store.compose("made", [("a", 0, MIB), b"between", ("b", 0, 2 * MIB)]) == 3 * MIB + 7
    assert service.objects["root/made"].body == b"a" * MIB + b"between" + b"b" * (2 * MIB)
    (sent,) = [request for request in service.requests if "compose" in request.query]
    assert (sent.method, sent.path) == ("PUT", "/bucket/root/made")
    assert sent.headers["x-goog-if-generation-match"] == "0"
    generations = [_generation(service, f"root/{name}") for name in "ab"]
    for generation in generations:
        assert f"<Generation>{generation}</Generation>".encode() in sent.body
    assert meter.requests() == {"head": 2, "put": 2, "delete": 1}
    assert len(service.requests) == sum(meter.requests().values())
    assert meter.to_dict()["put"]["bytes"] == len(b"between")
    assert sorted(service.objects) == ["root/a", "root/b", "root/made"], "no part is left"


def test_more_than_32_are_joined_in_steps(service):
    """Joins of 32, then a join of those; the counted requests are the sent ones."""
    store, meter = _composing(service)
    parts = [("a", 0, MIB)] * 70
    assert store.compose("made", parts) == 70 * MIB
    composed = [request for request in service.requests if "compose" in request.query]
    assert [request.body.count(b"<Component>") for request in composed] == [32, 32, 6, 3]
    assert meter.requests() == {"head": 1, "put": 4, "delete": 3}
    assert len(service.requests) == 8
    assert sorted(service.objects) == ["root/a", "root/b", "root/made"]


def test_ranges_cannot_be_joined_and_are_read(service):
    """The service has no way to copy a range: nothing is composed, the result is the same."""
    store, meter = _composing(service)
    parts = [b"head", ("a", 16, MIB), ("b", 0, 2 * MIB - 1), b"tail"]
    assert store.compose("made", parts) == len(store.get("made"))
    assert (
        service.objects["root/made"].body
        == b"head" + b"a" * (MIB - 16) + b"b" * (2 * MIB - 1) + b"tail"
    )
    assert not [request for request in service.requests if "compose" in request.query]
    assert store.compose("again", [("a", 1, 9)]) == 8
    assert meter.requests()["get"] >= 3


def test_h3_a_lost_response_to_a_compose_is_resolved(service):
    """H3: it was made, and sent again it meets its own object: the size identifies it."""
    store, _ = _composing(service)
    original = service.act

    def act(request):
        response = original(request)
        if "compose" in request.query and response[0] == 200:
            return 503, {}, b""
        return response

    service.act = act
    assert store.compose("made", [("a", 0, MIB), ("b", 0, 2 * MIB)]) == 3 * MIB
    composed = [request for request in service.requests if "compose" in request.query]
    assert len(composed) == 2, "503 first, then 412"


@pytest.mark.parametrize(
    ("part", "error"),
    [(("missing", 0, MIB), NotFoundError), (("a", 0, 9 * MIB), InvalidInputError)],
)
def test_nothing_is_composed_of_missing_objects(service, part, error):
    """The error names the source, and no object is made."""
    store, _ = _composing(service)
    with pytest.raises(error) as caught:
        store.compose("made", [("b", 0, 2 * MIB), part])
    assert caught.value.context["object"] == part[0]
    assert sorted(service.objects) == ["root/a", "root/b"]


@pytest.mark.parametrize("how", ["deleted", "replaced"])
def test_a_source_that_goes_while_it_is_joined_is_named(service, how):
    """The service says only that something is missing: the error says which source."""
    store, _ = _composing(service)
    original = service.act

    def act(request):
        if "compose" in request.query and how == "deleted":
            service.objects.pop("root/b", None)
        elif "compose" in request.query:
            service.objects["root/b"] = Stored(b"other" * MIB, 7)
        return original(request)

    service.act = act
    with pytest.raises(NotFoundError) as caught:
        store.compose("made", [("a", 0, MIB), b"between", ("b", 0, 2 * MIB)])
    assert caught.value.context["object"] == "b"
    assert sorted(service.objects)[0] == "root/a"
    assert not any("made" in name or "parts" in name for name in service.objects)


def test_a_join_is_of_its_sources_storage_class(service):
    """The service composes only objects of the storage class of the result."""
    store, meter = _composing(service, storage_class="NEARLINE")
    parts = [("a", 0, MIB), b"between", ("b", 0, 2 * MIB)]
    assert store.compose("made", parts) == 3 * MIB + 7
    assert service.objects["root/made"].storage_class == "NEARLINE"
    assert "get" not in meter.requests()


def test_sources_of_another_storage_class_are_read(service):
    """Objects the service does not compose are read and uploaded; the attempt leaves nothing."""
    store, _ = _composing(service)
    service.objects["root/b"].storage_class = "COLDLINE"
    parts = [("a", 0, MIB), b"between", ("b", 0, 2 * MIB)]
    assert store.compose("made", parts) == 3 * MIB + 7
    assert store.get("made") == b"a" * MIB + b"between" + b"b" * (2 * MIB)
    assert sorted(service.objects) == ["root/a", "root/b", "root/made"]


def test_parts_that_were_left_are_swept(service):
    """A process that died between upload and join leaves parts; they go after their time."""
    store, _ = _composing(service)
    store.put("store/parts/left-behind", b"x")
    assert store.abort_stale(3600.0) == 0
    service.objects["root/store/parts/left-behind"].modified_s -= 7200
    assert store.abort_stale(3600.0) == 1
    assert "root/store/parts/left-behind" not in service.objects


def test_a_service_account_makes_tokens_of_its_own(service):
    """google-auth signs for a token at the account's own address; that token is sent."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import rsa

    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    pem = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    ).decode()
    account = {
        "type": "service_account",
        "client_email": "reef@example.iam.gserviceaccount.com",
        "private_key": pem,
        "private_key_id": "1",
        "token_uri": f"{service.endpoint}/token",
    }
    options = GcsOptions.parse({"service_account_key": json.dumps(account)})
    assert can_make_tokens(options)
    assert token_of(options) == "t0ken"
    assert service.requests[-1].path == "/token"
    assert b"grant_type=urn" in service.requests[-1].body


def test_bad_credentials_raise():
    """An invalid account key is refused with a hint, not as a failure of the network."""
    with pytest.raises(InvalidInputError) as caught:
        token_of(GcsOptions.parse({"service_account_key": "{}"}))
    assert caught.value.kind is ErrorKind.ACCESS_DENIED
