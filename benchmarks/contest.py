"""Engines over the same rows on one disk, and the sizes at which they are compared."""

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from benchmarks.engines import Reef
from benchmarks.harness import Case, Result, measure
from benchmarks.rows import Rows

CACHED, LARGE = "cached", "10 × caches"
CACHES_MIN = 1 << 20


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much of everything a run measures."""

    rows: int = 200_000
    wide_rows: int = 30_000
    rounds: int = 5
    scale: float = 1.0
    """Of the number of operations in a round."""
    minutes: float = 30.0
    """Groups that have not begun by then are left out, and named."""

    def calls(self, count: int) -> int:
        return max(2, int(count * self.scale))


QUICK = Sizes(rows=20_000, wide_rows=5_000, scale=0.2)


@dataclass(slots=True)
class Contest:
    """Engines that hold the same rows."""

    rows: Rows
    size: str
    engines: dict[str, Any]
    sizes: Sizes
    results: list[Result] = field(default_factory=list)

    @property
    def reef(self) -> Reef:
        found: Reef = self.engines["reef"]
        return found

    def run(
        self,
        group: str,
        name: str,
        method: str,
        bind: Callable[[Any], Callable[[int], object]],
        *,
        without: Sequence[str] = (),
        **options: Any,
    ) -> Result:
        """Measure the engines that have a method; `bind` returns the work of one of them."""
        works = {
            engine: bind(getattr(found, method))
            for engine, found in self.engines.items()
            if hasattr(found, method) and engine not in without
        }
        options["calls"] = self.sizes.calls(options.get("calls", 100))
        options.setdefault("rounds", self.sizes.rounds)
        result = measure(Case(group, name, works, size=self.size, meter=self.reef.meter, **options))
        self.results.append(result)
        return result


@contextmanager
def contest(
    rows: Rows,
    size: str,
    engines: Sequence[Callable[..., Any]],
    sizes: Sizes,
    *,
    load: bool = True,
    **reef: Any,
) -> Iterator[Contest]:
    """Open engines, with the rows loaded or empty; remove them at the end."""
    cache_bytes = 4 * rows.bytes if size == CACHED else max(CACHES_MIN, rows.bytes // 10)
    with tempfile.TemporaryDirectory(dir=".", prefix="bench-") as root:
        opened: dict[str, Any] = {}
        for make in engines:
            os.makedirs(f"{root}/{make.name}")  # type: ignore[attr-defined]
            options = reef if make is Reef else {}
            engine = make(f"{root}/{make.name}", cache_bytes, **options)  # type: ignore[attr-defined]
            opened[engine.name] = engine
            if load:
                engine.load(rows)
                if size == CACHED and hasattr(engine, "full"):
                    engine.full()
            elif make is Reef:
                engine.create(rows)
        try:
            yield Contest(rows, size, opened, sizes)
        finally:
            for engine in opened.values():
                engine.close()
