"""Requests of the native reader, answered by the planner in this process."""

import json

import pyarrow as pa

from reef import files
from reef.spark import planner


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
