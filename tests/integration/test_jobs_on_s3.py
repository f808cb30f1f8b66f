"""Jobs on a real S3 server, with segments that are larger than one part of an upload."""

import os

import pyarrow as pa
import pytest

import reef
from reef.jobs import compact, fold, rebuild, repair, sweep, verify
from reef.manifest.head import HeadFinder
from reef.paths import Namespace

NAME = "large"
ROWS = 1500


@pytest.mark.timeout(600)
def test_merges_larger_than_a_part_are_uploaded_while_they_are_read(ministack):
    """A merge reads its inputs from the store that its output goes to, at the same time."""
    ministack.make_bucket("jobs")
    options = {**ministack.options(), "part_bytes": 5 << 20}
    db = reef.open("s3://jobs/large", **options)
    expected = {}
    with db.writer(NAME, background=False) as writer:
        for part in range(3):
            keys = [b"%d-%05d" % (number % 7, number + part * 700) for number in range(ROWS)]
            values = [os.urandom(6000) for _ in keys]
            writer.upsert(pa.table({"id": keys, "value": values}))
            expected |= dict(zip(keys, values, strict=True))
            fold(db, NAME, codec="none")
    report = compact(db, NAME, full=True, codec="none")
    assert (report.outcome, report.inputs) == ("compacted", 3)
    (merged,) = HeadFinder(db.store, Namespace(NAME)).find().manifest.segments
    assert merged.size > 3 * options["part_bytes"]
    assert dict(db.reader(NAME).scan()) == expected
    assert verify(db, NAME, deep=True).problems == []
    assert rebuild(db, NAME).rows_equal
    assert not repair(db, NAME).problems
    assert sweep(db, NAME).condemned == ()
