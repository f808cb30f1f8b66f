"""What a namespace is: its columns, its size, where its log stands."""

from dataclasses import dataclass

import pyarrow as pa

from reef.engine.display import columns_line, html_table, human_bytes, human_count
from reef.formats.manifest import Manifest, SegmentEntry

__all__ = ["Info"]


@dataclass(frozen=True, slots=True)
class Info:
    """A namespace, as of one generation."""

    name: str
    generation: int
    schema: pa.Schema
    key: str
    schema_id: int
    fingerprint: str
    rows: int
    """Versions in segments, loads that are not folded included: an upper bound of the rows,
    without the batches in the log."""
    segments: int
    bytes: int
    wal_floor: int
    writer_epoch: int

    @classmethod
    def of(cls, name: str, manifest: Manifest, ingested: tuple[SegmentEntry, ...] = ()) -> "Info":
        """Describe a generation, with the segments of loads that it does not name yet."""
        segments = (*manifest.segments, *ingested)
        return cls(
            name,
            manifest.generation,
            manifest.schema.arrow(),
            manifest.schema.key.name,
            manifest.schema.id,
            manifest.schema.fingerprint,
            sum(segment.rows for segment in segments),
            len(segments),
            sum(segment.size for segment in segments),
            manifest.wal_floor,
            manifest.writer_epoch,
        )

    def facts(self) -> dict[str, str]:
        """Return what there is to show of it, beside its columns."""
        return {
            "generation": str(self.generation),
            "rows in segments": f"at most {self.rows:,}" if self.rows else "none",
            "segments": f"{self.segments}, {human_bytes(self.bytes)}" if self.segments else "none",
            "folded up to LSN": str(self.wal_floor - 1),
        }

    def __repr__(self) -> str:
        size = f"{human_count(self.rows, 'row')} and {human_bytes(self.bytes)} in segments"
        where = f"generation {self.generation}, folded up to LSN {self.wal_floor - 1}"
        return f"<Info {self.name}, {where}, {size}, {columns_line(self.schema)}>"

    def _repr_html_(self) -> str:
        return html_table(f"Namespace {self.name}", self.facts(), self.schema, self.key)

    def html_of_handle(self, what: str, facts: dict[str, str]) -> str:
        """Return the table of a handle on this namespace."""
        return html_table(f"{what} {self.name}", {**facts, **self.facts()}, self.schema, self.key)
