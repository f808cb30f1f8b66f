"""Puts at a steady rate, with all background work: `python -m tests.soak.commit_rate`.

One writer commits single rows, each a WAL object of its own, and its background folds, compacts and
sweeps. The unfolded part of the log must stay bounded, however long it runs (H75): the command
ends with 1 if it ever held more than ten seconds of commits, or if background work failed.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field

import reef
from reef.config import BackgroundSettings

NAME = "soak"
ROWS = 100_000
"""Distinct keys: overwritten in turn."""
BACKLOG_S = 10
"""Seconds of commits that may be unfolded at any time."""


def resident_mb():
    """Return the memory of this process."""
    with open("/proc/self/statm") as fields:
        return int(fields.read().split()[1]) * 4096 // 1_000_000


@dataclass
class RateSoak:
    """One run against one store."""

    url: str
    puts_per_s: float
    seconds: float
    background: BackgroundSettings = field(default_factory=BackgroundSettings)
    value: bytes = b"v" * 100
    put_times: list[float] = field(default_factory=list)

    def run(self) -> dict:
        """Commit at the rate; return the figures."""
        db = reef.open(self.url)
        figures = {"puts": 0, "unfolded_objects_max": 0, "unfolded_bytes_max": 0}
        minutes = []
        with db.writer(NAME, background=self.background) as writer:
            start_s = time.monotonic()
            while (now_s := time.monotonic() - start_s) < self.seconds:
                late = int(now_s * self.puts_per_s) - figures["puts"]
                if late <= 0:
                    time.sleep(0.5 / self.puts_per_s)
                for _ in range(min(late, 100)):
                    self._put(writer, figures)
                if now_s >= 60 * (len(minutes) + 1):
                    minutes.append(self._state(writer, figures))
                    print(json.dumps(minutes[-1]), flush=True)
            figures |= self._state(writer, figures)
            figures["puts_per_s"] = round(figures["puts"] / self.seconds)
            figures["background_failures"] = db.metrics.counter("background.failures").value
        return {**figures, **self._put_figures(), "minutes": minutes}

    def _put_figures(self):
        hundredths = statistics.quantiles(self.put_times, n=100)
        return {
            "put_ms_p50": round(1000 * hundredths[49], 2),
            "put_ms_p99": round(1000 * hundredths[98], 2),
            "put_ms_max": round(1000 * max(self.put_times), 2),
        }

    def bounded(self, figures):
        """Say whether folds kept up with the commits."""
        few = figures["unfolded_objects_max"] <= BACKLOG_S * self.puts_per_s
        return few and not figures["background_failures"]

    def _put(self, writer, figures):
        key = f"k{figures['puts'] * 7919 % ROWS:06}"
        started_s = time.perf_counter()
        writer.put(key, self.value)
        self.put_times.append(time.perf_counter() - started_s)
        figures["puts"] += 1
        unfolded = writer.unfolded
        figures["unfolded_objects_max"] = max(figures["unfolded_objects_max"], unfolded.objects)
        figures["unfolded_bytes_max"] = max(figures["unfolded_bytes_max"], unfolded.bytes)

    def _state(self, writer, figures):
        manifest = writer._manifest
        return {
            "puts": figures["puts"],
            "unfolded_objects": writer.unfolded.objects,
            "unfolded_objects_max": figures["unfolded_objects_max"],
            "segments": len(manifest.segments),
            "generation": manifest.generation,
            "condemned": len(manifest.condemned) + len(manifest.condemned_ranges),
            "resident_mb": resident_mb(),
        }


def main() -> int:
    """Run as the command line says, by default 20 minutes at 1,000 puts/s on a directory."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--puts-per-s", type=float, default=1000)
    parser.add_argument("--seconds", type=float, default=1200)
    parser.add_argument("--url", help="a store; a temporary directory by default")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="reef-rate-") as folder:
        soak = RateSoak(arguments.url or folder, arguments.puts_per_s, arguments.seconds)
        figures = soak.run()
    print(json.dumps(figures, indent=2))
    return 0 if soak.bounded(figures) else 1


if __name__ == "__main__":
    sys.exit(main())
