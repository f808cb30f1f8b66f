"""Catalogs on every kind of head: replaced by tag, and numbered."""

from dataclasses import replace

import pytest

from reef import stores
from reef.catalog import Catalog, Retention
from reef.stores.memory import MemoryStore

AT_ONCE = Retention(checkpoints_last=1, checkpoints_min_age_s=0.0, grace_s=0.0)


def without_if_match():
    """Return a store in memory that only knows create-only."""
    store = MemoryStore()
    store.capabilities = replace(store.capabilities, if_match=False)
    return store


@pytest.fixture(params=["memory", "directory", "numbered"])
def store(request, tmp_path):
    """Return a store of each kind, with the wrappers that `stores.open` gives."""
    if request.param == "directory":
        return stores.open(str(tmp_path / "bucket"))
    inner = MemoryStore() if request.param == "memory" else without_if_match()
    return stores.ReadBack(stores.Retry(stores.Meter(inner)))


@pytest.fixture
def catalog(store):
    """Return a catalog that collects at once."""
    return Catalog(store, retention=AT_ONCE)


def put(catalog, **pairs):
    """Commit some pairs; None deletes."""

    def change(session):
        for key, value in pairs.items():
            if value is None:
                session.delete(key)
            else:
                session.put(key, value)

    catalog.transact(change)
