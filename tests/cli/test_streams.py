"""Where a command's words go when something is wrong: full disks, closed streams, bad options."""

import json
import signal
import subprocess
import sys

import pytest

import reef
from tests.cli.process import REEF, heed_interrupts


@pytest.fixture
def users(data):
    """Return a bucket with one row."""
    with reef.open(str(data)).writer("users", background=False) as writer:
        writer.put("u1", b"Ada")
    return data


def shell(command):
    """Run a line of shell; return its exit code, stdout and stderr."""
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, timeout=240, check=False
    )
    return done.returncode, done.stdout, done.stderr


# --- streams ------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_full_disk_is_an_error(users, form):
    """stdout is closed or full: exit code 1, the reason, no traceback."""
    code, _, err = shell(f"{REEF} scan {users} users --output {form} > /dev/full")
    assert code == 1
    assert "No space left on device" in err
    assert "Traceback" not in err
    if form == "json":
        assert json.loads(err)["kind"] == "unavailable"


def test_a_closed_stdout_is_no_error(users):
    """As with a closed pipe: nothing reads it."""
    assert shell(f"{REEF} get {users} users u1 >&-") == (0, "", "")


def test_a_closed_stderr_does_not_lead_to_stdout(users):
    """A program that reads stdout gets the result, and nothing else."""
    assert shell(f"{REEF} scan {users} nobody --output json 2>&-") == (1, "", "")


def test_a_closed_stdin_is_no_empty_value(users):
    """`--from -` without a stdin is a wrong command line; nothing is written."""
    code, _, err = shell(f"{REEF} put {users} users u1 --from - --take-over <&-")
    assert code == 64
    assert "stdin is closed" in err
    assert "Traceback" not in err
    assert reef.open(str(users)).reader("users").get("u1") == b"Ada"


# --- Ctrl-C before the command has begun ---------------------------------------------


@pytest.mark.parametrize("module", ["reef._version", "pyarrow.lib", "reef.cli.options"])
def test_interrupted_while_it_is_loaded(users, module):
    """Ctrl-C in the first half second: exit code 130, one word, no traceback."""
    process = subprocess.Popen(
        [sys.executable, "-X", "importtime", REEF, "scan", users, "users"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=heed_interrupts,  # noqa: PLW1509 - one call
    )
    for line in process.stderr:
        if line.split("|")[-1].strip() == module:
            break
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=240)
    assert process.returncode == 130
    assert "interrupted" in err.splitlines()
    assert "Traceback" not in err


# --- what cannot be meant -------------------------------------------------------------

HUGE = str(10**30)


@pytest.mark.parametrize(
    "words",
    [
        ("get", "users", "u1", "--lsn", HUGE),
        ("get", "users", "u1", "--generation", "-1"),
        ("scan", "users", "--limit", HUGE),
        ("changes", "users", "--after", HUGE),
        ("inspect", "users", "--lsn", "0"),
        ("scan",),
        ("nonsense",),
    ],
    ids=" ".join,
)
def test_wrong_usage_for_programs(users, cli, words):
    """Exit code 64; with --output json, the error is JSON too, and stdout is empty."""
    command, *rest = words
    code, out, err = cli(command, users, *rest, "--output", "json")
    assert (code, out) == (64, "")
    report = json.loads(err)
    assert report["kind"] == "usage"
    assert report["message"]


def test_a_time_before_the_calendar(users, cli):
    """Not kept as far back as that: an error with its reason."""
    code, _, err = cli("get", users, "users", "u1", "--time", "0001-01-01")
    assert code == 1
    assert "was garbage-collected" in err


def test_a_row_too_deep_to_read(users, cli):
    """JSON that no row can be is refused as any other."""
    cli("create", users, "events", "-c", "n:int64")
    code, _, err = cli("put", "--create", users, "events", "e1", "[" * 100_000)
    assert code == 1
    assert "is not JSON" in err
