"""Objects of Azure put together by the service, checked against Azurite's own signatures.

Azurite knows blocks, block lists and signed URLs, but not Put Block From URL. The proxy in front of
it does that one thing as documented: it reads the source with the signed URL that it was given,
at the range that it was given, and puts the block. Everything else is checked by Azurite itself.
"""

import http.client
from urllib.parse import parse_qs, urlsplit

import pytest

from reef import stores
from reef.errors import ErrorKind, InvalidInputError, NotFoundError
from reef.stores.azure import AzureOptions, AzureStore
from reef.telemetry import RequestMeter
from tests.support.http_proxy import Failing, Forwarding, Trouble, proxy

BIG = bytes(range(256)) * 5000
PARTS = [b"head", ("a", 16, 1_000_000), ("a", 5, 9), ("folder/b", 0, len(BIG)), b"tail", b" end"]
EXPECTED = b"head" + BIG[16:1_000_000] + BIG[5:9] + BIG + b"tail end"
QUICK = stores.RetryPolicy(attempts_max=3, first_delay_s=0.001, deadline_s=30)


class BlockFromUrl(Failing):
    """Azurite, with Put Block From URL."""

    def forward(self, method, path, body):
        source = self.headers.get("x-ms-copy-source")
        if source is None:
            return super().forward(method, path, body)
        parts = urlsplit(source)
        upstream = http.client.HTTPConnection(self.server.target, timeout=30)
        try:
            headers = {"Range": self.headers["x-ms-source-range"]}
            upstream.request("GET", f"{parts.path}?{parts.query}", headers=headers)
            response = upstream.getresponse()
            taken = response.read()
        finally:
            upstream.close()
        if response.status != 206:
            code = {404: "CannotVerifyCopySource", 416: "InvalidRange"}
            words = (
                f"<Error><Code>{code.get(response.status, 'AuthenticationFailed')}</Code></Error>"
            )
            return response.status, (), words.encode()
        for name in ("x-ms-copy-source", "x-ms-source-range", "Content-Length"):
            del self.headers[name]
        self.headers["Content-Length"] = str(len(taken))
        return super().forward(method, path, taken)


@pytest.fixture
def container(azurite):
    """Give the emulator with a container."""
    azurite.make_container("compose")
    return azurite


def _opened(container, endpoint, name, **words):
    options = {**container.options(), "endpoint": f"{endpoint}/{container.account_name}", **words}
    store = stores.open(f"az://compose/{name}", retry=QUICK, **options)
    store.put("a", BIG)
    store.put("folder/b", BIG)
    return store


def _copies(requests):
    """Give the headers, in small letters, of the requests that name a source."""
    lowered = [{name.lower(): value for name, value in h.items()} for _, _, h in requests]
    return [headers for headers in lowered if "x-ms-copy-source" in headers]


def test_ranges_are_copied_by_the_service(container):
    """Signed URLs for source and target; ranges as asked; requests as counted; bytes equal."""
    meter = RequestMeter()
    with proxy(BlockFromUrl, container.address) as wire:
        store = _opened(container, wire.endpoint, "copied", meter=meter)
        meter.reset()
        wire.requests.clear()
        assert store.compose("made", PARTS) == len(EXPECTED)
        sent = list(wire.requests)
        assert store.get("made") == EXPECTED
    assert len(sent) == sum({"put": 3, "copy": 3, "get": 1}.values())
    copies = _copies(sent)
    assert sorted(headers["x-ms-source-range"] for headers in copies) == [
        f"bytes=0-{len(BIG) - 1}",
        "bytes=16-999999",
        "bytes=5-8",
    ]
    for headers in copies:
        signed = parse_qs(urlsplit(headers["x-ms-copy-source"]).query)
        assert signed["sp"] == ["r"], "it may be read, and nothing else"
        assert headers["content-length"] == "0"
    for method, path, headers in sent:
        query = parse_qs(urlsplit(path).query)
        assert query["sp"] == [{"PUT": "w", "GET": "r"}[method]]
        assert "Authorization" not in headers
    assert [parse_qs(urlsplit(path).query)["comp"] for _, path, _ in sent][-2:] == [
        ["blocklist"],
        ["blocklist"],
    ]
    assert meter.requests()["copy"] == 3
    assert meter.to_dict()["put"]["bytes"] == len(b"headtail end")


class EmptyBlocks(Forwarding):
    """A service that does not know the header, and takes the request for an empty block."""

    def forward(self, method, path, body):
        del self.headers["x-ms-copy-source"]
        del self.headers["x-ms-source-range"]
        return super().forward(method, path, body)


@pytest.mark.parametrize("service", [Forwarding, EmptyBlocks])
def test_a_service_that_cannot_copy_blocks_is_read_from(container, service):
    """Azurite says so (501); with one that does not, the sizes show it. Nothing was visible yet."""
    with proxy(service, container.address) as wire:
        store = _opened(container, wire.endpoint, f"plain-{service.__name__}")
        assert store.compose("made", PARTS) == len(EXPECTED)
        assert store.get("made") == EXPECTED
        assert len(_copies(wire.requests)) == 3
        wire.requests.clear()
        assert store.compose("again", PARTS) == len(EXPECTED)
        assert store.get("again") == EXPECTED
        assert not _copies(wire.requests), "it has learnt"


@pytest.mark.parametrize("words", [{"block_copy": False}, {"sas_token": "sv=2021&sig=x"}])
def test_what_cannot_be_signed_is_not_tried(words):
    """With a signature or a token of one's own, URLs cannot be signed: ranges are read."""
    options = {"account_name": "a", "endpoint": "http://127.0.0.1:1/a", **words}
    store = AzureStore("compose", "x", AzureOptions.parse(options))
    assert not store.capabilities.compose


def test_a_lost_response_and_a_busy_service_are_retried(container):
    """503 to a block and a lost response to the block list: the object is made once, and whole."""
    with proxy(BlockFromUrl, container.address) as wire:
        store = _opened(container, wire.endpoint, "troubles")
        wire.troubles += [
            Trouble(503, "ServerBusy", method="PUT", path="*comp=block&*", times=2),
            Trouble(method="PUT", path="*comp=blocklist*", how="close", applied=True, times=1),
        ]
        assert store.compose("made", PARTS) == len(EXPECTED)
        assert store.get("made") == EXPECTED
        assert [trouble.struck for trouble in wire.troubles] == [2, 1]


@pytest.mark.parametrize(
    ("part", "error"),
    [(("missing", 0, 9), NotFoundError), (("a", 0, len(BIG) + 1), InvalidInputError)],
)
def test_a_missing_source_raises(container, part, error):
    """As by every other store, and no object is made."""
    with proxy(BlockFromUrl, container.address) as wire:
        store = _opened(container, wire.endpoint, "missing")
        with pytest.raises(error) as caught:
            store.compose("target", [b"new", part])
        if error is InvalidInputError:
            assert caught.value.kind is ErrorKind.INVALID_RANGE
        with pytest.raises(NotFoundError):
            store.head("target")
