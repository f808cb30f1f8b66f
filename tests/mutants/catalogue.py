"""The lists of mutants, and how one is planted."""

import tomllib
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SOURCES = ROOT / "src"
EQUIVALENT = "equivalent"

AREAS = (
    "backup",
    "branches",
    "catalog",
    "commit",
    "completions",
    "compact",
    "edges",
    "fold",
    "history",
    "incarnations",
    "ingest",
    "leases",
    "live_wins",
    "locallog",
    "log",
    "memtable",
    "merges",
    "opening",
    "publish",
    "purge",
    "reads",
    "rebuild",
    "registers",
    "renames",
    "repair",
    "resync",
    "search",
    "stores",
    "streams",
    "sweep",
    "text",
    "two_phase",
)


@dataclass(frozen=True, slots=True)
class Mutant:
    """One mistake, and the tests that must fail with it."""

    area: str
    id: str
    file: str
    old: str
    new: str
    killed_by: tuple[str, ...] = ()
    reason: str = ""
    """Why no test can notice it; of equivalent ones only."""

    @property
    def name(self) -> str:
        return f"{self.area}/{self.id}"

    @property
    def path(self) -> Path:
        return Path("reef") / self.file

    def apply(self, text: str) -> str:
        """Return the source with the mistake in it; ValueError if its place is not there once."""
        found = text.count(self.old)
        if found != 1:
            raise ValueError(f"{self.name}: {found} places in {self.file} read {self.old!r}")
        return text.replace(self.old, self.new)


def load(area: str) -> list[Mutant]:
    """Return the mutants of one list."""
    data = tomllib.loads((HERE / f"{area}.toml").read_text())
    return [
        Mutant(
            area,
            m["id"],
            m["file"],
            m["old"],
            m["new"],
            tuple(m.get("killed_by", ())),
            m.get("reason", ""),
        )
        for m in data["mutant"]
    ]


def load_all() -> list[Mutant]:
    """Return all mutants that some test kills."""
    return [mutant for area in AREAS if (HERE / f"{area}.toml").exists() for mutant in load(area)]
