"""H7: the order of system calls, as the kernel sees them."""

import re
import subprocess
import sys

CREATE = """
from reef.stores.local import LocalStore
import sys
store = LocalStore(sys.argv[1])
store.create("warm/up", b"x")
print("MARK", flush=True)
{call}
print("MARK", flush=True)
"""
TRACED = (
    *("openat", "write", "fsync", "fdatasync", "link", "linkat", "rename", "renameat"),
    *("renameat2", "unlink", "mkdir", "utimensat", "flock"),
)
CALL = re.compile(r"^(?:\d+\s+)?(\w+)\((.*)\)\s+=\s+(-?\d+)")


def trace(servers, tmp_path, call):
    """Run one call of a directory store under strace; return (name, path or fd) in order."""
    strace = servers.use("strace")
    log = tmp_path / "strace.log"
    program = CREATE.format(call=call)
    command = [
        str(strace.path()), "-f", "-y", "-s", "64", "-o", str(log),
        "-e", f"trace={','.join(TRACED)}",
        sys.executable, "-c", program, str(tmp_path / "bucket"),
    ]  # fmt: skip
    subprocess.run(command, check=True, timeout=240, capture_output=True)
    calls, marked = [], False
    for line in log.read_text().splitlines():
        match = CALL.match(line)
        if not match:
            continue
        name, arguments, result = match.groups()
        if name == "write" and "MARK" in arguments:
            if marked:
                break
            marked = True
        elif marked and int(result) >= 0:
            calls.append((name, arguments))
    return calls


def steps(calls, root):
    """Shorten the calls to what matters: name, and which file."""
    short = []
    for name, arguments in calls:
        paths = re.findall(rf"{re.escape(str(root))}/?([^\"> ,]*)", arguments)
        files = ["temp" if path.startswith(".tmp/") else path or "." for path in paths]
        if files or name == "fsync":
            short.append(" ".join([name.replace("linkat", "link"), *files]))
    return short


def test_h7_create_syncs_before_it_returns(servers, tmp_path):
    """Temp file written and synced, then linked, then the directory synced, then acknowledged."""
    calls = trace(servers, tmp_path, 'store.create("wal/1", b"x" * 100)')
    assert steps(calls, tmp_path / "bucket") == [
        "openat temp",
        "write temp",
        "utimensat temp",
        "fsync temp",
        "mkdir wal",
        "openat .",
        "fsync .",
        "link temp wal/1",
        "openat wal",
        "fsync wal",
        "unlink temp",
    ]


def test_h7_a_second_create_in_a_known_directory_syncs_twice(servers, tmp_path):
    """In the steady state: one sync for the bytes, one for the name."""
    calls = trace(servers, tmp_path, 'store.create("warm/1", b"x" * 100)')
    assert [step for step in steps(calls, tmp_path / "bucket") if "sync" in step] == [
        "fsync temp",
        "fsync warm",
    ]


def test_h7_put_syncs_before_the_rename_and_after(servers, tmp_path):
    """An overwrite is as durable as a create, and holds the key's lock."""
    calls = trace(servers, tmp_path, 'store.put("warm/1", b"x" * 100)')
    short = steps(calls, tmp_path / "bucket")
    order = [short.index(step) for step in ("fsync temp", "rename temp warm/1", "fsync warm")]
    assert order == sorted(order)
    assert any(step.startswith("flock") for step in short)
