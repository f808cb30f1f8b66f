"""Requests of the native reader, answered by the planner in this process."""

import gc
import json
import sys

import pyarrow as pa
import pytest

from reef import files
from reef.spark import planner, session
from reef.spark.source import ReefSource


def ask(url, operation, **request):
    """Return the planner's response."""
    text = json.dumps({"operation": operation, **request})
    schema = planner.respond({"path": url, "namespace": "t", "reef.request": text})
    return json.loads(schema.fields[0].metadata["response"])


def test_a_second_plan_syncs_only_its_lease(db, url, monkeypatch):
    """The planner's process keeps the store, which knows the directories that it has synced."""
    db.create("t", pa.schema([("id", pa.string())]))
    counts = []
    for name in ("_sync", "_sync_data"):
        monkeypatch.setattr(files, name, counting(counts, getattr(files, name)))
    plans = []
    for _ in range(2):
        counts.clear()
        assert "error" not in ask(url, "plan")
        plans.append(len(counts))
    assert plans[1] <= plans[0] // 2


def counting(counts, sync):
    """Return the function, which is counted."""

    def counted(number):
        counts.append(number)
        return sync(number)

    return counted


@pytest.mark.parametrize(("program", "expected"), [("pyspark/daemon.py", 1), ("etl.py", 0)])
def test_a_worker_collects_no_imports(db, url, monkeypatch, program, expected):
    """Spark collects garbage after each call; the driver's own process is left alone."""
    db.create("t", pa.schema([("id", pa.string())]))
    frozen = []
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append(True))
    monkeypatch.setattr(sys, "argv", [program, "pyspark.sql.worker.create_data_source"])
    session._exempt_imports_from_collection.cache_clear()
    for _ in range(2):
        ReefSource({"path": url, "namespace": "t"}).schema()
    assert len(frozen) == expected
    session._exempt_imports_from_collection.cache_clear()


def test_a_store_is_opened_again_for_other_options(db, url):
    """Opened stores are kept by URL and options, and only some of them."""
    planner._stores.clear()
    db.create("t", pa.schema([("id", pa.string())]))
    for _ in range(2):
        ask(url, "describe")
    assert len(planner._stores) == 1
    for number in range(planner.STORES_MAX):
        ask(url + "/." * (number + 1), "describe")
    assert len(planner._stores) <= planner.STORES_MAX
