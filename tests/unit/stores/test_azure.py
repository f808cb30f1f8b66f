"""Azure Blob Storage, on its emulator: its particularities."""

import re
from dataclasses import fields
from importlib import import_module
from pathlib import Path

import pytest

from reef import stores
from reef.errors import ErrorKind, InvalidInputError
from reef.stores.base import Outcome
from reef.stores.probe import probe
from reef.telemetry import RequestMeter


@pytest.fixture
def opened(azurite, request):
    """Open a store of its own for the test, by options."""
    azurite.make_container("azure")
    url = f"az://azure/{request.node.name.replace('[', '-').strip(']')}"
    return lambda **words: stores.open(url, **{**azurite.options(), **words})


def test_the_probe_accepts_it(opened):
    """Create-only and If-Match exclude, and listings are in order: nothing to be set."""
    verdict = probe(opened())
    assert (verdict.cas, verdict.if_match) == ("native", True)


def test_a_listing_is_cut_at_start_after_here(opened):
    """The service starts every listing at the folder's first name: nothing before it is listed."""
    store = opened()
    for number in range(6):
        store.put(f"wal/{number}", b"")
    assert [info.key for info in store.list("wal/", "wal/3")] == ["wal/4", "wal/5"]
    assert [info.key for info in store.list("wal/4")] == ["wal/4"]


def test_pages_are_counted_as_the_service_counts_them(opened):
    """5,000 names a page: a folder below that costs one LIST, wherever the listing starts."""
    meter = RequestMeter()
    store = opened(meter=meter)
    for number in range(3):
        store.put(f"wal/{number}", b"")
    meter.reset()
    list(store.list("wal/", "wal/1"))
    assert meter.requests() == {"list": 1}
    assert store.capabilities.list_page == 5000


def test_a_tag_is_opaque_and_holds(opened):
    """H5: A → B → A with the stale tag must fail, also for equal bytes: tags are not hashes."""
    store = opened()
    store.put("head", b"A")
    stale = store.get_tagged("head").tag
    store.put("head", b"B")
    store.put("head", b"A")
    assert store.replace("head", b"C", stale).outcome is Outcome.CHANGED


def test_a_missing_container_raises(azurite):
    """Not as missing objects: every call would say "not found" for ever."""
    store = stores.open("az://no-such-container/x", **azurite.options())
    for call in (lambda: store.get("k"), lambda: store.put("k", b""), lambda: list(store.list())):
        with pytest.raises(InvalidInputError) as caught:
            call()
        assert caught.value.kind is ErrorKind.BUCKET_MISSING


def test_wrong_credentials_raise(opened):
    """A key that does not fit is refused at once, for reads and for conditional writes."""
    store = opened(account_key="d3Jvbmc=")
    for call in (lambda: store.get("k"), lambda: store.create("k", b"")):
        with pytest.raises(InvalidInputError) as caught:
            call()
        assert caught.value.kind is ErrorKind.ACCESS_DENIED
    inner = store
    while hasattr(inner, "inner"):
        inner = inner.inner
    assert "d3Jvbmc" not in repr(inner.options)


def test_nothing_is_left_to_be_ended(opened):
    """Uncommitted blocks are the service's own business: no request is sent for them."""
    meter = RequestMeter()
    store = opened(meter=meter)
    assert store.abort_stale(0.0) == 0
    assert meter.requests() == {}


def test_options_that_cannot_be_meant_are_refused():
    """An unknown option names those that there are."""
    with pytest.raises(InvalidInputError, match="az:// has no option 'region'") as caught:
        stores.open("az://container/x", region="eu")
    assert "account_name" in caught.value.hint


@pytest.mark.parametrize(
    ("heading", "module", "name"),
    [
        ("## Azure options", "reef.stores.azure", "AzureOptions"),
        ("## GCS options", "reef.stores.gcs", "GcsOptions"),
    ],
)
def test_every_option_is_documented(heading, module, name):
    """The page lists each option of az:// and gs://, and only those."""
    page = (Path(__file__).parents[3] / "docs" / "operations" / "azure-gcs.md").read_text()
    section = page.split(heading)[1].split("\n## ")[0]
    listed = {
        option
        for row in section.splitlines()
        if row.startswith("| `")
        for option in re.findall(r"`(\w+)`", row.split("|")[1])
    }
    assert listed == {field.name for field in fields(getattr(import_module(module), name))}
