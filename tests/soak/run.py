"""The soak's driver: starts the processes, kills them, and checks the namespace at the end."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

import reef
from reef.formats.schema import DEFAULT_SCHEMA
from reef.jobs import fold, sweep, verify
from reef.manifest.edits import new_namespace
from reef.manifest.head import HeadFinder, Publisher
from reef.paths import Namespace
from tests.soak.worker import GRACE_S, NAME, acknowledged, number_of

USERS = Namespace(NAME)
ROLES = ["writer", "reader", "reader", "jobs", "loader"]
SWEEPS_MAX = 20
PROGRESS_S = 120
SLACK_BYTES = 32 << 20


@dataclass
class Soak:
    """One run, on one bucket."""

    url: str
    options: dict
    folder: Path
    seconds: float
    kills: int = 0
    bytes_seen: list = field(default_factory=list)
    """(seconds since the start, bytes in the bucket)"""

    def run(self):
        """Run the soak; return a report, or raise the first failure."""
        db = reef.open(self.url, **self.options)
        _create(db)
        processes = [(role, self._start(role)) for role in ROLES]
        start, measured_s = time.monotonic(), 0.0
        try:
            while time.monotonic() - start < self.seconds:
                self._wait_for_progress()
                time.sleep(random.uniform(0.5, 4.0))
                processes = self._kill_some(processes)
                self._check_failures()
                if time.monotonic() - measured_s > 5:
                    measured_s = time.monotonic()
                    self.bytes_seen.append((measured_s - start, _bytes(db)))
        finally:
            for _, process in processes:
                _kill(process)
        self._check_failures()
        return self._reckon(db)

    def _wait_for_progress(self):
        """On a busy machine a process may need long to begin: killed before, it shows nothing."""
        before, deadline = self._acknowledged(), time.monotonic() + PROGRESS_S
        while self._acknowledged() == before and time.monotonic() < deadline:
            self._check_failures()
            time.sleep(0.2)
        assert self._acknowledged() > before, f"nothing was acknowledged within {PROGRESS_S} s"

    def _acknowledged(self):
        return sum(_count(path) for path in self.folder.glob("writer-*.jsonl"))

    def _kill_some(self, processes):
        """Kill at least one; a writer's heir may come before or after its death."""
        chosen = [pair for pair in processes if random.random() < 0.6] or [random.choice(processes)]
        left = [pair for pair in processes if pair not in chosen]
        for role, process in chosen:
            if random.random() < 0.5:
                left.append((role, self._start(role)))
                time.sleep(random.uniform(0, 1.0))
                _kill(process)
            else:
                _kill(process)
                left.append((role, self._start(role)))
            self.kills += 1
        return left

    def _start(self, role):
        command = [sys.executable, "-m", "tests.soak.worker", role, self.url]
        with open(self.folder / f"{role}.log", "ab") as log:
            return subprocess.Popen(
                [*command, json.dumps(self.options), str(self.folder)],
                stdout=log,
                stderr=log,
                env={**os.environ, "PYTHONWARNINGS": "ignore"},
            )

    def _check_failures(self):
        failed = [path.read_text() for path in self.folder.glob("failed-*")]
        assert not failed, failed

    # --- the end ------------------------------------------------------------------
    def _reckon(self, db):
        """Nothing acknowledged is lost, nothing is damaged, and unneeded objects are deleted."""
        expected = acknowledged(self.folder)
        found = {key.decode(): number_of(value) for key, value in db.reader(NAME).scan()}
        lost = {key: n for key, n in expected.items() if found.get(key, 0) < n}
        assert not lost, f"acknowledged and lost: {sorted(lost.items())[:5]}"
        problems = verify(db, NAME, deep=True).problems
        assert not problems, problems
        left = self._swept(db)
        # Far more was written in all: only objects within the grace period may accumulate.
        assert self._half(1) <= 2 * self._half(0) + SLACK_BYTES, self.bytes_seen
        return {
            "seconds": round(self.seconds),
            "kills": self.kills,
            "acknowledged": self._acknowledged(),
            "keys": len(expected),
            "bytes_at_most": max(size for _, size in self.bytes_seen),
            "bytes_in_the_second_half": self._half(1),
            "bytes_in_the_first_half": self._half(0),
            "bytes_after_the_last_sweep": left,
        }

    def _half(self, which):
        sizes = [size for at, size in self.bytes_seen if (at >= self.seconds / 2) == bool(which)]
        return max(sizes, default=0)

    def _swept(self, db):
        """Fold, and sweep until no unneeded row is left; return the remaining bytes."""
        fold(db, NAME)
        # Every process of a job has ended: an hour, or a day, need not pass to know it.
        silent = {"silent_job_s": GRACE_S, "silent_compactor_s": GRACE_S}
        for _ in range(SWEEPS_MAX):
            report = sweep(db, NAME, apply=True, force=True, retain_generations_s=0, **silent)
            if _is_swept(db):
                return _bytes(db)
            time.sleep(GRACE_S / 2)
        raise AssertionError(f"unneeded objects are still there: {report}")


def _create(db):
    """Make the namespace, with a grace period on the scale of a soak."""
    manifest = msgspec.structs.replace(new_namespace(DEFAULT_SCHEMA), grace_ms=int(GRACE_S * 1000))
    db.writer("probe", background=False).close()  # proves the store
    Publisher(db.store, USERS).create(manifest)


def _is_swept(db):
    """Whether the bucket has the head's segments and no others: all that was dead is gone."""
    named = {segment.id for segment in HeadFinder(db.store, USERS).find().manifest.segments}
    listed = {info.key for info in db.store.list(USERS.segments)}
    return listed == {USERS.segment(name) for name in named}


def _bytes(db):
    return sum(info.size for info in db.store.list(f"{USERS.root}/"))


def _count(path):
    return path.read_text().count('"ack"')


def _kill(process):
    process.send_signal(signal.SIGKILL)
    process.wait()
