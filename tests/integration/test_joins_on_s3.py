"""Compaction joins neighbours on a real S3 server: the service copies, requests are exact."""

import os

import pyarrow as pa
import pytest

import reef
from reef.jobs import compact, fold
from reef.jobs.compact.plan import STRATEGIES, CompactPlan
from reef.paths import Namespace
from reef.telemetry import RequestMeter
from tests.support.compaction import choose, head_of
from tests.support.segment_checks import check_segment

NAME = "large"
MIB = 1 << 20
WHOLE_JOB = {"get": 16, "head": 2, "list": 3, "put": 8, "copy": 2}
"""Of a compaction that joins two segments: the object itself is 2 COPY, 4 PUT (begin, the header
with the first 5 MiB, the tail, complete), 1 GET for those 5 MiB and 1 LIST of the parts. The rest
reads both inputs once, in pieces of 8 MiB, and publishes."""


def _level_one(db, monkeypatch, first, rows):
    """Write rows from `first` on, and make one level-1 segment of them."""
    keys = [b"%08d" % number for number in range(first, first + rows)]
    values = [os.urandom(8000) for _ in keys]
    with db.writer(NAME, background=False) as writer:
        writer.upsert(pa.table({"id": keys, "value": values}))
    fold(db, NAME, codec="none")
    choose(monkeypatch, lambda segments: [s for s in segments if s.level == 0])
    compact(db, NAME, strategy="chosen", codec="none", rounds_max=1)
    return dict(zip(keys, values, strict=True))


@pytest.mark.parametrize("name", ["ministack", pytest.param("ceph", marks=pytest.mark.slow)])
def test_a_join_copies_on_the_server(servers, monkeypatch, name):
    """Two of 12 MiB: 2 part copies; of the 24 MiB of the result less than 6 are sent."""
    server = servers.use(name)
    server.make_bucket("joins")
    meter = RequestMeter()
    db = reef.open("s3://joins/here", **server.options(), meter=meter)
    rows = _level_one(db, monkeypatch, 0, 1500) | _level_one(db, monkeypatch, 9000, 1500)
    left, right = sorted(head_of(db, NAME).segments, key=lambda s: s.min_key)
    assert min(left.size, right.size) > 11 * MIB

    def join(segments, settings):
        return CompactPlan(1, (left, right), join=True) if len(segments) == 2 else None

    monkeypatch.setitem(STRATEGIES, "join", join)
    meter.reset()
    report = compact(db, NAME, strategy="join", codec="none", rounds_max=1)
    assert (report.joined, report.outputs) == (1, 1)
    assert meter.requests() == WHOLE_JOB
    assert meter.to_dict()["put"]["bytes"] < 6 * MIB
    (joined,) = head_of(db, NAME).segments
    check_segment(db.store.get(Namespace(NAME).segment(joined.id)), joined.id)
    assert dict(db.reader(NAME).scan()) == rows
