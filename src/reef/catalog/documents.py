"""Documents: JSON with a checksum in front, for what people want to read with their own eyes.

    {"crc32c":"0f3a5c77","document":{…}}

The head and the plan are documents. The checksum covers the bytes of the inner object exactly as
they stand, and everything around them has to be as written, so that no bit can change unseen.
"""

import re
from typing import TypeVar

import msgspec

from reef.errors import UNDECODABLE, CorruptionError
from reef.formats.coding import corrupt, crc32c

__all__ = ["decode_document", "encode_document"]

OPENING = re.compile(rb'\{"crc32c":"([0-9a-f]{8})","document":')
OPENING_BYTES = 32
D = TypeVar("D", bound=msgspec.Struct)


def encode_document(document: msgspec.Struct) -> bytes:
    """Return the object's bytes."""
    inner = msgspec.json.encode(document)
    return b'{"crc32c":"%08x","document":%s}' % (crc32c(inner), inner)


def decode_document(data: bytes, kind: type[D], name: str) -> D:
    """Return the document; CorruptionError with the place of the damage."""
    opening = OPENING.match(data)
    if opening is None:
        raise corrupt(name, 0, f"begins with {data[:OPENING_BYTES]!r}, which no document does")
    inner = data[OPENING_BYTES:-1]
    if data[-1:] != b"}" or len(data) <= OPENING_BYTES + 1:
        raise corrupt(name, len(data), "the end of the document is missing")
    if f"{crc32c(inner):08x}".encode() != opening[1]:
        raise corrupt(name, OPENING_BYTES, "checksum of the document does not match")
    try:
        return msgspec.json.decode(inner, type=kind)
    except UNDECODABLE as error:
        raise _not_one(name, kind, error) from error


def _not_one(name: str, kind: type[msgspec.Struct], error: Exception) -> CorruptionError:
    return corrupt(name, OPENING_BYTES, f"not a {kind.__name__}: {error}")
