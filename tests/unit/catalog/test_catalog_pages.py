"""The pages and the example of the catalog match the code."""

import re
import subprocess
import sys
from pathlib import Path

from reef.catalog import Catalog
from reef.catalog.segments import CatalogSegment, decode_segment, encode_segment
from reef.stores.memory import MemoryStore
from tests.golden.samples import dump
from tests.unit.catalog.conftest import AT_ONCE, put

ROOT = Path(__file__).parents[3]
FORMAT = (ROOT / "docs" / "format" / "catalog.md").read_text()
GUIDE = (ROOT / "docs" / "guide" / "catalog.md").read_text()
ROW = re.compile(r"^[0-9a-f]{4}  ((?:[0-9a-f]{2} ?){1,16})", re.MULTILINE)


def test_the_segment_on_the_page_is_read_for_ever():
    """Byte for byte: a change of format must change the page, and its version."""
    shown = b"".join(bytes.fromhex(row) for row in ROW.findall(FORMAT))
    segment = CatalogSegment(
        2,
        2,
        "01BX5ZZKBKACTAV9WEVGEMMVRZ",
        "01ARZ3NDEKTSV4RRFFQ69G5FAV",
        {b"user:1": b"alice", b"user:2": None},
    )
    assert decode_segment(shown, "page") == segment
    assert encode_segment(segment) == shown
    assert dump(shown) in FORMAT


def test_the_pages_name_every_field():
    """Head, meta, plan and lease: nothing is left out."""
    from reef.catalog.checkpoints import CheckpointMeta
    from reef.catalog.head import CatalogHead, CheckpointRef
    from reef.catalog.snapshot import SessionLease
    from reef.catalog.upkeep import GcPlan

    for struct in (CatalogHead, CheckpointRef, CheckpointMeta, GcPlan, SessionLease):
        for name in struct.__struct_fields__:
            assert f"`{name}`" in FORMAT, f"{struct.__name__}.{name}"


def test_every_metric_is_documented(monkeypatch):
    """The guide lists exactly the metrics that a catalog has after all kinds of work."""
    catalog = Catalog(MemoryStore(), retention=AT_ONCE)
    put(catalog, a=b"1")
    with catalog.session_write() as session:
        session.put("b", b"1")
        put(Catalog(catalog.store), c=b"1")
        session.commit()
    compactor = catalog.compactor()
    compactor.compact_once()
    compactor.gc_compute()
    catalog.store.put("segments/seg-00000000000000000001-" + "Z" * 26, b"late")
    compactor.gc_delete_and_reset()
    compactor.compact_and_gc()
    names = {name for name in catalog.metrics.to_dict() if name.startswith("catalog.")}
    section = GUIDE.split("`catalog.metrics.to_dict()` has ")[1].split("; `catalog.events`")[0]
    documented = {
        f"catalog.{name.removeprefix('catalog.')}" for name in re.findall(r"`(\S+)`", section)
    }
    assert documented == names
    assert catalog.metrics.histogram("catalog.commit_seconds").count == 2
    assert catalog.metrics.counter("catalog.cas_conflicts").value == 1
    assert catalog.metrics.histogram("catalog.segment_records", unit=1.0).total == 3
    assert catalog.metrics.counter("catalog.gc_segments").value == 5


def test_the_example_runs(tmp_path):
    """The worked program, in a directory of its own, with warnings as errors."""
    program = str(ROOT / "examples" / "catalog.py")
    done = subprocess.run(
        [sys.executable, "-W", "error", program, str(tmp_path / "bucket")],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "user:1 is alice in the snapshot of transaction 1" in done.stdout
    assert "two that touched nothing in common both committed" in done.stdout
    assert "conflict: transaction 4 changed b'user:4'" in done.stdout
    assert "counted 4 users" in done.stdout
    assert "elsewhere, transaction 1 still has 2 users" in done.stdout
    assert "5 keys, 0 problems" in done.stdout
