"""Frames: the unit that WAL objects are built from.

    0        4        8                  8 + length, padded to 8
    +--------+--------+----------+-------+
    | length | crc32c | payload… | zeros |
    +--------+--------+----------+-------+

The checksum covers the payload. A frame that ends past the object is damage: objects are
written whole, so a short one was never a crash.
"""

from struct import Struct

from reef.formats.coding import Buffer, Cursor, crc32c, padding

__all__ = ["FRAME_HEAD_BYTES", "encode_frame", "read_frame"]

HEAD = Struct("<II")
FRAME_HEAD_BYTES = HEAD.size


def encode_frame(payload: Buffer) -> bytes:
    """Return a frame around `payload`."""
    length = len(payload)
    return b"".join((HEAD.pack(length, crc32c(payload)), payload, padding(length)))


def read_frame(cursor: Cursor, what: str) -> memoryview:
    """Return the next frame's payload, checked."""
    length, expected = cursor.u32(), cursor.u32()
    if length > cursor.left:
        cursor.fail(f"{what} has {length} bytes, only {cursor.left} are left")
    start = cursor.offset
    payload = cursor.take(length)
    if crc32c(payload) != expected:
        cursor.position -= length
        cursor.fail(f"checksum of {what} does not match (at {start})")
    cursor.align()
    return payload
