"""The record of one creation, and the name of the temporary object that it is made from.

A source is named `<destination>.<uuid>.<checksum>`, next to its destination. The uuid keeps
writers apart, and the checksum tells whether the bytes at the destination are the right ones
without asking anybody. Names of that shape are reserved: the two-phase store hides them from
listings and refuses to write them for anyone else.

A writer whose INSERT was never answered may have to report "exists" while that INSERT is still on
its way. Before it does, it puts a withdrawal next to its source, `<destination>.<uuid>.<zeros>`:
a record of that uuid that arrives later counts for nothing.
"""

import hashlib
import re
from dataclasses import dataclass

from reef.runtime import Runtime

__all__ = [
    "Record",
    "checksum_of",
    "destination_of",
    "is_temporary",
    "new_record",
    "same_attempt",
    "withdrawal_of",
]

CHECKSUM_BYTES = 16
UUID = r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"
WITHDRAWN = "0" * 2 * CHECKSUM_BYTES
TEMPORARY = re.compile(rf"(.+)\.{UUID}\.[0-9a-f]{{32}}", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Record:
    """Who won a name. Inserted once, committed once, and deleted after its object."""

    destination: str
    source: str
    checksum: str
    """Of the object's bytes."""
    committed: bool = False
    """Whether the object was seen at the destination: the source is not needed any more."""


def new_record(runtime: Runtime, destination: str, body: bytes) -> Record:
    """Return a record whose source nobody else uses."""
    checksum = checksum_of(body)
    return Record(destination, f"{destination}.{_uuid(runtime)}.{checksum}", checksum)


def checksum_of(body: bytes) -> str:
    """Return 128 bits as text: enough that bytes with the same checksum are the same bytes."""
    return hashlib.blake2b(body, digest_size=CHECKSUM_BYTES).hexdigest()


def destination_of(key: str) -> str | None:
    """Return the destination that a temporary object is for; None if it is an ordinary object.

    >>> destination_of("w/7.8d1f0c1e-93a4-4b0e-9f52-6f0a7c1d2e3f.00112233445566778899aabbccddeeff")
    'w/7'
    >>> destination_of("w/7")
    """
    match = TEMPORARY.fullmatch(key)
    return match[1] if match else None


def is_temporary(key: str) -> bool:
    """Whether a key is the name of a source, or of a withdrawal."""
    return destination_of(key) is not None


def withdrawal_of(source: str) -> str:
    """Return the name of the object that withdraws the attempt of this source.

    >>> withdrawal_of("w/7.8d1f0c1e-93a4-4b0e-9f52-6f0a7c1d2e3f.00112233445566778899aabbccddeeff")
    'w/7.8d1f0c1e-93a4-4b0e-9f52-6f0a7c1d2e3f.00000000000000000000000000000000'
    """
    return f"{source.rpartition('.')[0]}.{WITHDRAWN}"


def same_attempt(source: str, other: str) -> bool:
    """Whether two temporary objects belong to one attempt: they differ in the checksum at most."""
    return source.rpartition(".")[0] == other.rpartition(".")[0]


def _uuid(runtime: Runtime) -> str:
    """Return a random uuid (version 4) in its usual spelling."""
    number = int.from_bytes(runtime.random_bytes(16), "big")
    number = number & ~(0xF << 76) | 4 << 76
    number = number & ~(0x3 << 62) | 2 << 62
    digits = f"{number:032x}"
    return "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))
