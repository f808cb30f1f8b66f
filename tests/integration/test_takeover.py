"""Two real processes on one namespace: the second fences the first under load."""

import json
import subprocess
import sys
from contextlib import contextmanager

import pytest

import reef
from tests.integration.takeover_worker import ROWS, row

BATCHES = 200


@contextmanager
def worker(url, options, name, batches):
    """Start a writer process; end it whatever happens."""
    command = [sys.executable, "-m", "tests.integration.takeover_worker"]
    process = subprocess.Popen(
        [*command, url, json.dumps(options), name, str(batches)], stdout=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def lines(process, until=None):
    """Return the output of a worker, up to a line, or to its end."""
    first_output = []
    for line in process.stdout:
        first_output.append(line.strip())
        if first_output[-1] == until:
            break
    return first_output


@pytest.mark.timeout(600)
@pytest.mark.parametrize("place", ["directory", "ceph"])
def test_a_takeover_under_load_loses_no_acknowledged_row(place, tmp_path, request):
    """Of 200,000 rows and more not one that was acknowledged is missing."""
    url, options = str(tmp_path), {}
    if place == "ceph":
        ceph = request.getfixturevalue("ceph")
        ceph.make_bucket("takeover")
        url, options = "s3://takeover/load", {**ceph.options(), "if_match": "bare"}
    with worker(url, options, "first", 100 * BATCHES) as first:
        first_output = lines(first, until=str(BATCHES))
        with worker(url, options, "second", BATCHES) as second:
            second_output = lines(second)
            first_output += lines(first)
    assert first_output[-1] == "fenced", "the first writer must not be able to continue"
    assert second_output[-1] == "done"
    seen = dict(reef.open(url, **options).reader("load").scan())
    for name, acknowledged in (("first", first_output), ("second", second_output)):
        numbers = [int(word) for word in acknowledged if word.isdigit()]
        assert numbers == list(range(len(numbers)))
        for number in range(len(numbers) * ROWS):
            key, value = row(name, number)
            assert seen.get(key) == value, f"{key} was acknowledged and is lost"
    assert len(seen) >= 2 * BATCHES * ROWS == 200_000
