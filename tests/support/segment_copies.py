"""A segment under another name: a compaction, as far as names go."""

import msgspec

from reef.formats.coding import crc32c
from reef.formats.segment import END, MAGIC, covers_of, decode_footer


def copy_segment(store, names, entry, segment_id=None):
    """Store a copy of a segment under a new id; return its entry.

    The footer names the id, and the original as its ancestor, as that of a compaction's output.
    """
    segment_id = segment_id or store.runtime.ulid()
    body = store.get(names.segment(entry.id))
    length = END.unpack(body[-END.size :])[0]
    footer = decode_footer(body, len(body), entry.id)
    renamed = msgspec.structs.replace(
        footer,
        write_id=segment_id,
        ancestors=(entry.id, *footer.ancestors),
        covers=covers_of(footer, entry.visible_lsn),
    )
    encoded = msgspec.msgpack.encode(renamed)
    end = END.pack(len(encoded), crc32c(encoded), MAGIC)
    copied = body[: -END.size - length] + encoded + end
    store.upload(names.segment(segment_id), [copied])
    grown = len(copied) - len(body)
    return msgspec.structs.replace(
        entry,
        id=segment_id,
        size=len(copied),
        tail_bytes=entry.tail_bytes + grown,
        checksum=crc32c(copied),
    )
