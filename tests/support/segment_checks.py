"""Check a whole segment in memory, as a reference for the checks of `reef verify`."""

import msgspec

from reef.formats.coding import ByteReader, corrupt
from reef.formats.segment import END, HEAD, MAGIC, decode_tail


def check_segment(data, name):
    """Decode everything: every bit of the object is covered by one check or another."""
    cursor = ByteReader(data, name)
    cursor.expect(MAGIC, "magic")
    version, zero = cursor.u32(), cursor.u32()
    tail = decode_tail(data, len(data), name)
    if version != tail.footer.version or zero:
        cursor.fail("version in front differs from the footer's")
    numbers = sorted(tail.footer.schema.types())
    for group in range(len(tail.index)):
        blocks = [data[slice(*span)] for span in tail.ranges(group, numbers)]
        tail.decode_group(group, numbers, blocks)
    footer = tail.footer
    tail_blocks = (footer.range_tombstones, footer.filter, footer.pages, footer.index)
    places = [place for place in tail_blocks if place]
    end = max(tail.index.end(), HEAD.size)
    for place in places:
        if place.offset != end:
            raise corrupt(name, end, "bytes that belong to no block")
        end = place.offset + place.length
    if end + len(msgspec.msgpack.encode(footer)) + END.size != len(data):
        raise corrupt(name, end, "bytes that belong to no block")
    return tail
