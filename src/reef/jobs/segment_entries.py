"""How a manifest names a segment: from what the segment says of itself, the same for every job."""

from reef.formats.manifest import SegmentEntry
from reef.formats.segment import SegmentSummary

__all__ = ["entry_of"]


def entry_of(segment_id: str, summary: SegmentSummary) -> SegmentEntry:
    """Return the entry of a segment that was just written, or found in the bucket."""
    footer = summary.footer
    return SegmentEntry(
        id=segment_id,
        level=footer.level,
        size=summary.size,
        checksum=summary.checksum,
        rows=footer.rows,
        tombstones=footer.tombstones,
        min_key=footer.min_key,
        max_key=footer.max_key,
        lsn_min=footer.lsn_min,
        lsn_max=footer.lsn_max,
        tail_bytes=summary.tail_bytes,
        schema_id=footer.schema.id,
        set_hash=footer.set_hash,
        patches=footer.patches,
    )
