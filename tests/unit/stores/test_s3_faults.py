"""What Reef makes of everything a wire can do to it: a real server behind a proxy that fails.

The table is the translation of single responses; below it, the whole stack of wrappers on the
same faults, and the errors inside of successful responses.
"""

import os
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

import pytest

from reef import stores
from reef.errors import ErrorKind, InvalidInputError, NotFoundError, UnavailableError
from reef.runtime import REAL
from reef.stores import Outcome, RetryPolicy, s3
from reef.stores.remote import abandoned
from reef.stores.s3 import S3Options, S3Store, s3_client
from tests.support.child_process import in_child
from tests.support.http_proxy import Failing, Forwarding, Trouble, Wired, proxy

MIB = 1 << 20
QUICK = RetryPolicy(attempts_max=4, deadline_s=10.0, first_delay_s=0.001, delay_max_s=0.01)
OLD, NEW = b"0123456789" * 3, b"epoch 1, write id 01J"


@pytest.fixture
def wired(ministack):
    """Give a bucket with one object, `k`, behind a wire without troubles yet."""
    ministack.make_bucket("faulty-wire")
    with proxy(Failing, ministack.address) as wire:
        wired = Wired(ministack, wire, "faulty-wire", QUICK)
        wired.direct.delete_many([info.key for info in wired.direct.list()])
        wired.direct.put("k", OLD)
        yield wired


CALLS = {
    "create": lambda s: s.create("n", NEW),
    "replace": lambda s: s.replace("k", NEW, s.tag),
    "put": lambda s: s.put("k", NEW),
    "get": lambda s: s.get("k"),
    "get_range": lambda s: s.get_range("k", 2, 9),
    "head": lambda s: s.head("k"),
    "list": lambda s: list(s.list()),
    "copy": lambda s: s.copy("k", "copied"),
    "delete": lambda s: s.delete("k"),
}

DENIED = (InvalidInputError, ErrorKind.ACCESS_DENIED)
REFUSED = (InvalidInputError, ErrorKind.REFUSED_BY_STORE)
MISSING = (InvalidInputError, ErrorKind.BUCKET_MISSING)
GONE = (NotFoundError, ErrorKind.NOT_FOUND)
THROTTLED = (UnavailableError, ErrorKind.THROTTLED)
DOWN = (UnavailableError, ErrorKind.UNAVAILABLE)
LATE = (UnavailableError, ErrorKind.TIMEOUT)

# fault: (what create says, what replace says, what everything else raises)
RESPONSES = {
    "409": (Trouble(409, "ConditionalRequestConflict"), "exists", "changed", DOWN),
    "412": (Trouble(412, "PreconditionFailed"), "exists", "changed", REFUSED),
    "429": (Trouble(429, "TooManyRequests"), "unknown", "unknown", THROTTLED),
    "500": (Trouble(500, "InternalError"), "unknown", "unknown", DOWN),
    "503": (Trouble(503, "SlowDown"), "unknown", "unknown", THROTTLED),
    "504": (Trouble(504), "unknown", "unknown", LATE),
    "400 late": (Trouble(400, "RequestTimeout"), "unknown", "unknown", LATE),
    "400": (Trouble(400, "InvalidArgument"), REFUSED, REFUSED, REFUSED),
    "400 token": (Trouble(400, "ExpiredToken"), DENIED, DENIED, DENIED),
    "401": (Trouble(401), DENIED, DENIED, DENIED),
    "403": (Trouble(403, "AccessDenied"), DENIED, DENIED, DENIED),
    "301": (Trouble(301, "PermanentRedirect"), REFUSED, REFUSED, REFUSED),
    "307": (Trouble(307, "TemporaryRedirect"), REFUSED, REFUSED, REFUSED),
    "404 bucket": (Trouble(404, "NoSuchBucket"), MISSING, MISSING, MISSING),
    "501": (Trouble(501, "NotImplemented"), REFUSED, REFUSED, REFUSED),
    "closed": (Trouble(how="close"), "unknown", "unknown", DOWN),
    "closed after": (Trouble(how="close", applied=True), "unknown", "unknown", DOWN),
    "garbage": (Trouble(how="garbage"), "unknown", "unknown", DOWN),
}
NO_BODY = {"400 late": REFUSED, "400 token": REFUSED, "404 bucket": GONE}
"""A response to HEAD has no body, and so no error code."""


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("fault", RESPONSES)
def test_the_outcome_of_one_response(wired, fault, call):
    """H1, H2, H6: a conditional write raises only where nothing was written, else says unknown."""
    trouble, created, replaced, other = RESPONSES[fault]
    expected = {"create": created, "replace": replaced}.get(call, other)
    if call == "head":
        expected = NO_BODY.get(fault, expected)
    wired.raw.tag = wired.direct.head("k").tag
    wired.meets(replace(trouble))
    if isinstance(expected, str):
        assert CALLS[call](wired.raw).outcome.value == expected
    else:
        with pytest.raises(expected[0]) as caught:
            CALLS[call](wired.raw)
        assert caught.value.kind is expected[1]
    assert len(wired.wire.requests) == 1


def test_a_redirect_names_region_and_endpoint(wired):
    """301: the bucket is elsewhere; the error names the options to check."""
    wired.meets(Trouble(301, "PermanentRedirect", times=None))
    for call in (lambda: wired.store.get("k"), lambda: wired.store.create("n", NEW)):
        with pytest.raises(InvalidInputError, match="check region and endpoint"):
            call()
    assert len(wired.wire.requests) == 2


@pytest.mark.parametrize(
    "key", ["CredentialsError", "status code: 403", "kind: Connect", "Timeout"]
)
@pytest.mark.parametrize("fault", ["503", "closed after", "409"])
def test_H1_an_error_code_in_a_key_is_not_a_response(wired, key, fault):
    """H1: a key that reads like an error changes nothing: landed and unanswered is unknown."""
    trouble, created, _, _ = RESPONSES[fault]
    echo = f"<Error><Code>SlowDown</Code><Key>{key}</Key></Error>".encode()
    wired.meets(replace(trouble, applied=True, body=echo if fault == "503" else None))
    result = wired.raw.create(f"wal/{key}", NEW)
    assert result.outcome.value == created
    assert wired.direct.get(f"wal/{key}") == NEW
    assert result.cause is None or result.cause.kind in (ErrorKind.THROTTLED, ErrorKind.UNAVAILABLE)
    wired.meets(replace(trouble, applied=True))
    assert wired.store.create(f"again/{key}", NEW).outcome is Outcome.CREATED


def test_H1_nothing_sent_is_an_error_and_not_unknown():
    """H1: a refused connection wrote nothing, for certain, whatever the key is called."""
    options = {"endpoint": "http://127.0.0.1:9", "access_key_id": "a", "secret_access_key": "b"}
    store = S3Store("bucket", "", S3Options.parse(options))
    with pytest.raises(UnavailableError, match="cannot be reached"):
        store.create("status: 503", NEW)


# --- the whole stack on the same wire ---------------------------------------------


def test_H2_a_conflict_with_nothing_there_is_sent_again(wired):
    """H2: wire 409 and the name still free: check, send again, land."""
    wired.meets(Trouble(409, "ConditionalRequestConflict", method="PUT", times=2))
    assert wired.store.create("wal/1", NEW).outcome is Outcome.CREATED
    assert [len(wired.sent(method)) for method in ("PUT", "GET")] == [3, 2]
    assert wired.direct.get("wal/1") == NEW


@pytest.mark.parametrize("applied", [False, True])
def test_H6_throttled_before_or_after_it_applied(wired, applied):
    """H6: wire 429 on either side of the write: it lands, exactly once."""
    wired.meets(Trouble(429, "SlowDown", method="PUT", times=2, applied=applied))
    assert wired.store.create("wal/1", NEW).outcome is Outcome.CREATED
    assert wired.direct.get("wal/1") == NEW
    assert wired.store.create("wal/1", b"another's").outcome is Outcome.EXISTS


@pytest.mark.parametrize("applied", [False, True])
def test_H1_a_replace_whose_response_was_lost(wired, applied):
    """H1: closed without a response, before or after: sent again, checked, and replaced."""
    tag = wired.direct.head("k").tag
    wired.meets(Trouble(how="close", method="PUT", applied=applied))
    assert wired.store.replace("k", NEW, tag).outcome is Outcome.REPLACED
    assert wired.direct.get("k") == NEW


def test_a_replace_of_a_deleted_object_lost_the_race(wired):
    """404 on replace means that the object with that tag is no more: CHANGED."""
    tag = wired.direct.head("k").tag
    wired.direct.delete("k")
    assert wired.raw.replace("k", NEW, tag).outcome is Outcome.CHANGED
    wired.meets(Trouble(404, "NoSuchKey", method="PUT"))
    assert wired.raw.replace("k", NEW, tag).outcome is Outcome.CHANGED


READS = {"get": (lambda s: s.get("k"), OLD), "range": (lambda s: s.get_range("k", 2, 9), OLD[2:9])}


@pytest.mark.parametrize(("read", "expected"), READS.values(), ids=READS)
def test_H8_a_short_body_is_read_again(wired, read, expected):
    """H8: fewer bytes than Content-Length says: read again, never handed out."""
    wired.meets(Trouble(how="short", method="GET", times=2))
    assert read(wired.store) == expected
    assert len(wired.sent("GET")) == 3


@pytest.mark.parametrize(("read", "expected"), READS.values(), ids=READS)
def test_H8_short_for_ever_is_unavailable(wired, read, expected):
    """H8: an error after as many tries as the policy allows."""
    wired.meets(Trouble(how="short", method="GET", times=None))
    with pytest.raises(UnavailableError) as caught:
        read(wired.store)
    assert caught.value.context["attempts"] == QUICK.attempts_max


@pytest.mark.parametrize("body", [b"", b"<html>Please log in</html>"])
@pytest.mark.parametrize("call", ["get", "get_range", "head"])
def test_H8_a_response_of_another_server_is_rejected(wired, call, body):
    """H8: a 204, or a portal's page under 200, has no ETag: asked again, not returned."""
    wired.meets(Trouble(200 if body else 204, body=body, times=2))
    found = CALLS[call](wired.store)
    assert found in (OLD, OLD[2:9]) or found.size == len(OLD)
    assert len(wired.wire.requests) == 3


def test_a_listing_that_breaks_off_resumes(wired):
    """H10: a short or failed page of a listing is asked for again."""
    wired.meets(Trouble(how="short"), Trouble(503, "SlowDown"))
    assert [info.key for info in wired.store.list()] == ["k"]
    assert len(wired.wire.requests) == 3


# --- uploads ----------------------------------------------------------------------


def test_H3_a_large_create_is_a_single_conditional_put(wired):
    """H3: the condition is checked by one request, however large the body."""
    assert wired.store.create("large", bytes(6 * MIB)).outcome is Outcome.CREATED
    [(method, _, headers)] = wired.wire.requests
    assert method == "PUT"
    assert headers["if-none-match"] == "*"


UPLOAD_FAULTS = {
    "single": ([b"small"], "*"),
    "begin": ([bytes(4 * MIB)] * 3, "*uploads*"),
    "part": ([bytes(4 * MIB)] * 3, "*partNumber=2*"),
    "complete": ([bytes(4 * MIB)] * 3, "*/n?uploadId=*"),
}


@pytest.mark.parametrize(("parts", "path"), UPLOAD_FAULTS.values(), ids=UPLOAD_FAULTS)
def test_an_upload_survives_a_passing_fault(wired, parts, path):
    """One 503 on any of its requests: sent again, the source is read once."""
    trouble = Trouble(503, "SlowDown", path=path)
    wired.meets(trouble)
    assert wired.raw.upload("n", iter(parts)) == sum(map(len, parts))
    assert trouble.struck == 1
    assert wired.direct.get("n") == b"".join(parts)


@pytest.mark.parametrize("fault", [{"how": "close"}, {"status": 500, "code": "InternalError"}])
def test_H3_a_completion_whose_response_was_lost_is_found(wired, fault):
    """H3: completed, unanswered, and sent again it is "no such upload": the object is there."""
    gone = Trouble(404, "NoSuchUpload", method="POST", path="*/n?uploadId=*")
    lost = Trouble(**fault, applied=True, method="POST", path="*/n?uploadId=*")
    wired.meets(lost, gone)
    assert wired.store.upload("n", [bytes(4 * MIB)] * 3) == 12 * MIB
    assert (lost.struck, gone.struck) == (1, 1)
    assert wired.direct.head("n").size == 12 * MIB


def test_an_upload_aborts_after_its_last_retry(wired):
    """Resending is bounded; the error is the store's, and nothing is visible."""
    wired.meets(Trouble(503, "SlowDown", method="PUT", times=None))
    with pytest.raises(UnavailableError) as caught:
        wired.raw.upload("n", [b"small"])
    assert caught.value.kind is ErrorKind.THROTTLED
    assert 2 <= len(wired.sent("PUT")) <= 6


def test_H51_uploads_are_sent_again_after_a_fork_too(wired):
    """H51: a child has clients of its own, the resending one among them; no None is kept."""
    wired.raw.upload("warm", [b"x"])

    def child_work():
        wired.raw.upload("n", [b"from the child"])
        return None in abandoned, len(abandoned)

    wired.meets(Trouble(503, "SlowDown", method="PUT"))
    code, output = in_child(child_work)
    assert (code, output) == (0, "(False, 1)")
    assert wired.direct.get("n") == b"from the child"


# --- deletes ----------------------------------------------------------------------


def delete_result(key, code):
    """A response 200 to a bulk delete, with an error for one key."""
    error = f"<Error><Key>x/{key}</Key><Code>{code}</Code><Message>no</Message></Error>"
    return f"<DeleteResult>{error}</DeleteResult>".encode()


def test_single_deletes_continue_past_a_missing_key(wired, ministack):
    """Without bulk deletes, a 404 for one key leaves no other key undeleted."""
    store = stores.open("s3://faulty-wire/x", bulk_delete=False, **wired.options)
    keys = [f"d/{number}" for number in range(20)]
    for key in keys:
        wired.direct.put(key, b"")
    wired.meets(Trouble(404, "NoSuchKey", method="DELETE", path="*/d/0"))
    store.delete_many(keys)
    assert [info.key for info in wired.direct.list("d/")] == ["d/0"]
    assert len(wired.sent("DELETE")) == 20


@pytest.mark.parametrize(
    ("code", "error", "kind"),
    [
        ("AccessDenied", *DENIED),
        ("InternalError", *DOWN),
        ("SlowDown", *THROTTLED),
        ("InvalidArgument", *REFUSED),
    ],
)
def test_an_error_inside_a_delete_that_went_well(wired, code, error, kind):
    """A 200 may carry an error for one key: it is raised as that error."""
    wired.meets(Trouble(200, body=delete_result("k", code)))
    with pytest.raises(error) as caught:
        wired.raw.delete_many(["k", "l"])
    assert caught.value.kind is kind


@pytest.mark.parametrize("status", [200, 404])
def test_a_missing_key_in_a_bulk_delete_hides_nothing(wired, status):
    """NoSuchKey for one, in the body or as the response: the others are deleted all the same."""
    body = delete_result("gone", "NoSuchKey") if status == 200 else None
    wired.meets(Trouble(status, "NoSuchKey", body=body, method="POST"))
    wired.raw.delete_many(["gone", "k"])
    assert list(wired.direct.list()) == []


# --- leftovers --------------------------------------------------------------------

SWEEP_FAULTS = ["403", "404 bucket", "503", "429", "500", "400", "closed", "garbage"]


@pytest.mark.parametrize("fault", SWEEP_FAULTS)
def test_sweeping_uploads_raises_errors_of_reef(wired, fault):
    """H3: boto's errors do not leak from abort_stale, and transient ones can be retried."""
    trouble, _, _, (error, kind) = RESPONSES[fault]
    wired.meets(replace(trouble, path="*[?]uploads*"))
    with pytest.raises(error) as caught:
        wired.raw.abort_stale(0)
    assert caught.value.kind is kind
    if error is UnavailableError:
        wired.meets(replace(trouble, path="*[?]uploads*"))
        assert wired.store.abort_stale(3600) == 0


def test_sweeping_uploads_knows_the_options(wired, monkeypatch):
    """H3: unsigned requests and unchecked certificates hold for abort_stale as for the rest."""
    import boto3
    from botocore import UNSIGNED

    seen = {}

    def client(*_, **options):
        seen.update(options)
        raise RuntimeError("seen")

    monkeypatch.setattr(boto3, "client", client)
    words = {"skip_signature": True, "allow_invalid_certificates": True}
    store = S3Store("faulty-wire", "x", S3Options.parse(wired.options | words))
    with pytest.raises(RuntimeError, match="seen"):
        store.abort_stale(0)
    assert seen["config"].signature_version is UNSIGNED
    assert seen["verify"] is False


# --- options ----------------------------------------------------------------------


def test_secrets_are_not_shown():
    """The options' repr, which ends up in logs, has no secret in it."""
    options = S3Options(access_key_id="who", secret_access_key="s3cret", session_token="t0ken")
    assert "who" in repr(options)
    assert "s3cret" not in repr(options)
    assert "t0ken" not in repr(options)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ({"upload_concurrency": 0}, "upload_concurrency=0 is not at least 1"),
        ({"endpoint": "127.0.0.1:9000"}, "endpoint='127.0.0.1:9000' is not a URL"),
        ({"endpoint": ""}, "endpoint='' is not a URL"),
    ],
)
def test_options_are_checked(words, says):
    """Each is refused at once, by name."""
    with pytest.raises(InvalidInputError) as caught:
        S3Options.parse(words)
    assert caught.value.kind is ErrorKind.INVALID_OPTION
    assert says in str(caught.value)


def test_threads_that_come_first_together_share_one_client(ministack):
    """The second check inside the lock: no client is made and discarded."""
    store = S3Store("faulty-wire", "x", S3Options.parse(ministack.options()))
    made = []
    new_clients = store._new_clients

    def slow(native):
        made.append(native)
        store.runtime.sleep(0.05)
        return new_clients(native)

    store._new_clients, store._clients = slow, None
    clients = store.runtime.gather([store._connect] * 8)
    assert len(made) == 1
    assert len({id(found) for found in clients}) == 1


# --- ranges with the wrong status -------------------------------------------------------
class Says200(Forwarding):
    """Sends a range as rclone's server does: the right bytes, which they are, and 200."""

    def send(self, status, headers, body):
        super().send(200 if status == 206 else status, headers, body)


class SendsAll(Forwarding):
    """Does not know ranges."""

    def respond(self, method, path, body):
        del self.headers["Range"]
        super().respond(method, path, body)


@pytest.fixture
def ranged(ministack):
    """Give what opens a bucket with one object, `k`, behind a proxy of some kind."""
    ministack.make_bucket("ranges")
    with ExitStack() as open_wires:

        def opened(kind):
            wire = open_wires.enter_context(proxy(kind, ministack.address))
            options = {**ministack.options(), "endpoint": wire.endpoint}
            store = stores.open("s3://ranges/x", retry=QUICK, **options)
            store.put("k", b"0123456789")
            wire.requests.clear()
            return store, wire

        yield opened


def test_ranges_that_come_with_200_are_read(ranged):
    """One request each, but for the first; ends and absences are reported as ever."""
    store, wire = ranged(Says200)
    assert [store.get_range("k", 2, 5), store.get_range("k", 9, 10)] == [b"234", b"9"]
    assert len(wire.requests) == 3
    for span in ((8, 11), (20, 25), (5, 5), (5, 2), (-1, 2)):
        with pytest.raises(InvalidInputError) as caught:
            store.get_range("k", *span)
        assert caught.value.kind is ErrorKind.INVALID_RANGE
    assert len(wire.requests) == 5, "what cannot be a range is not asked for"
    with pytest.raises(NotFoundError):
        store.get_range("missing", 0, 1)


def test_H51_the_client_for_such_ranges_is_kept_and_each_process_has_its_own(ranged, monkeypatch):
    """H51: making one takes longer than the read; a child shares no sockets with its parent."""
    makers = []

    def noted(*args, **kwargs):
        makers.append(os.getpid())
        return s3_client(*args, **kwargs)

    monkeypatch.setattr(s3, "s3_client", noted)
    store, _ = ranged(Says200)

    def read_all():
        starts = range(10)
        return b"".join(REAL.gather([partial(store.get_range, "k", at, at + 1) for at in starts]))

    def child_work():
        return read_all(), read_all(), len(makers), makers[-1] == os.getpid(), None in abandoned

    assert read_all() == read_all() == b"0123456789"
    assert makers == [os.getpid()]
    code, output = in_child(child_work)
    assert (code, output) == (0, "(b'0123456789', b'0123456789', 2, True, False)")
    assert read_all() == b"0123456789"


def test_a_server_without_ranges_raises(ranged):
    """It may be a portal in between, so it is tried again; the hint says what else it may be."""
    store, wire = ranged(SendsAll)
    with pytest.raises(UnavailableError, match="needs a server with ranged GETs"):
        store.get_range("k", 2, 5)
    assert store.get("k") == b"0123456789"
    assert len(wire.requests) < 12
