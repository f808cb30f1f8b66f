"""A worker: its own copy of the sources, and a process that forks a child for every run of pytest.

Starting Python and importing pytest, Hypothesis and pyarrow takes longer than most of the tests
that kill a mutant. The worker's process therefore imports these once; it never imports Reef, which
each child loads from the worker's copy. The copy is compiled once, into files that are valid by
the hash of their source: a planted line is compiled again, and never served from an older file.

    worker process          child, one per run
    import pytest …
    read a request    --->  own process group, limited CPU time, output into a file
    wait              <---  pytest.main, exit code
    kill the group
    write the result

A run is bounded by CPU time, because a loaded machine does not change that, and by a generous wall
time for a run that blocks. Both end as `None` instead of an exit code: neither counts as killed.
"""

import compileall
import contextlib
import importlib
import json
import os
import py_compile
import resource
import select
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.mutants.catalogue import ROOT, SOURCES, Mutant

PRELOADED = (
    "hypothesis",
    "msgspec",
    "numpy",
    "obstore",
    "pyarrow.compute",
    "pyarrow.fs",
    "pyarrow.parquet",
    "xxhash",
)
"""Imported before the fork, to save time."""

FOREIGN_SOURCES, BROKEN = 70, 71
"""Exit codes of a child that has imported Reef from elsewhere, or that could not run pytest."""

POLL_S = 0.01
PRELOADED_TOO = "ignore:Module already imported so cannot be rewritten"
OPTIONS = (
    *("-q", "-p", "no:cacheprovider", "-m", "slow or not slow"),
    *("-W", f"{PRELOADED_TOO}:pytest.PytestAssertRewriteWarning"),
    "--timeout=0",  # it would be reported as a failed test, that is as a killed mutant
)


@dataclass(frozen=True, slots=True)
class Run:
    """A run of pytest that has ended."""

    code: int | None
    """The exit code of pytest, negative after a signal; None after too long."""
    cpu_s: float
    output: str


class Worker:
    """Runs tests over its own copy of the sources, one run at a time."""

    def __init__(self, folder: Path, cpu_s: float, wall_s: float) -> None:
        self.sources = folder / "src"
        self._log = folder / "output"
        self._cpu_s, self._wall_s = cpu_s, wall_s
        shutil.copytree(
            SOURCES,
            self.sources,
            ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"),
            symlinks=True,
        )
        compileall.compile_dir(
            self.sources, quiet=2, invalidation_mode=py_compile.PycInvalidationMode.CHECKED_HASH
        )
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.mutants.worker", str(self.sources), str(folder / "tmp")],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(self.sources)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def close(self) -> None:
        """End the process; a run that is under way is killed."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    @contextlib.contextmanager
    def planted(self, mutant: Mutant) -> Iterator[None]:
        """The copy has this mistake in it; ValueError, SyntaxError, OSError if it cannot."""
        target = self.sources / mutant.path
        original = target.read_text()
        text = mutant.apply(original)
        compile(text, str(mutant.path), "exec")
        target.write_text(text)
        try:
            yield
        finally:
            target.write_text(original)

    def run(self, tests: Sequence[str], *options: str, times: float = 1) -> Run:
        """Run some tests over the copy, within so many times the limits of one mutant."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        request = {
            "arguments": [*options, *tests],
            "log": str(self._log),
            "cpu_s": times * self._cpu_s,
            "wall_s": times * self._wall_s,
        }
        print(json.dumps(request), file=self._process.stdin, flush=True)
        response = self._process.stdout.readline()
        if not response:
            raise RuntimeError(f"a worker ended with {self._process.wait()}")
        return Run(*json.loads(response), self._log.read_text(errors="replace"))


def serve(sources: Path, temporary: Path) -> None:
    """Handle requests until the standard input ends."""
    for name in PRELOADED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    loaded = [name for name in sys.modules if name.partition(".")[0] == "reef"]
    if loaded:
        raise RuntimeError(f"children would not load their own {', '.join(sorted(loaded))}")
    while request := sys.stdin.readline():
        result = _run_child(json.loads(request), sources, temporary)
        with contextlib.suppress(BrokenPipeError):  # the runner has ended
            print(json.dumps(result), flush=True)


def _run_child(request: dict, sources: Path, temporary: Path) -> tuple[int | None, float]:
    pid = os.fork()
    if pid == 0:
        code = BROKEN
        try:
            code = _child(request, sources, temporary)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    is_over = _wait(pid, time.monotonic() + request["wall_s"])
    _kill_group(pid)  # also processes that the tests have left
    _, status, used = os.wait4(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    is_killed = code in (-signal.SIGXCPU, -signal.SIGKILL)
    return None if is_killed or not is_over else code, used.ru_utime + used.ru_stime


def _wait(pid: int, deadline: float) -> bool:
    """Wait for a child's end; False after the deadline, or if the requests have ended meanwhile."""
    while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        if select.select([sys.stdin], [], [], POLL_S)[0] or time.monotonic() > deadline:
            return False
    return True


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _child(request: dict, sources: Path, temporary: Path) -> int:
    os.setpgid(0, 0)
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    cpu_s = int(request["cpu_s"])
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 5))
    arguments = [*OPTIONS, f"--basetemp={temporary}", *request["arguments"]]
    code = int(pytest.main(arguments))
    reef = sys.modules.get("reef")
    if reef is not None and not Path(str(reef.__file__)).is_relative_to(sources):
        print(f"the tests have imported {reef.__file__}")
        return FOREIGN_SOURCES
    return code


if __name__ == "__main__":
    serve(Path(sys.argv[1]).resolve(), Path(sys.argv[2]))
