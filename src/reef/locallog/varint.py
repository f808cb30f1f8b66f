"""Numbers as Go writes them: seven bits a byte, the lowest first, a high bit where more follow."""

from functools import lru_cache

from reef.errors import InvalidInputError

__all__ = ["U64_MAX", "read_uvarint", "uvarint", "uvarints"]

U64_MAX = (1 << 64) - 1
UVARINT_BYTES_MAX = 10


@lru_cache(maxsize=1024)
def uvarints(*numbers: int) -> bytes:
    """Return numbers in a row; of those that entries have, few are different."""
    return b"".join(map(uvarint, numbers))


def uvarint(number: int) -> bytes:
    """Return seven bits a byte, the lowest first.

    >>> uvarint(300).hex()
    'ac02'
    """
    if not 0 <= number <= U64_MAX:
        raise InvalidInputError(f"{number} does not fit into 64 bits without a sign")
    coded = bytearray()
    while number >= 128:
        coded.append(number & 127 | 128)
        number >>= 7
    coded.append(number)
    return bytes(coded)


def read_uvarint(data: bytes, at: int) -> tuple[int, int]:
    """Return the number at `at`, and where the next one begins."""
    byte = data[at]
    if byte < 128:
        return byte, at + 1
    number, shift, start = byte & 127, 7, at
    while True:
        at += 1
        byte = data[at]
        number |= (byte & 127) << shift
        if byte < 128:
            break
        shift += 7
        if at - start >= UVARINT_BYTES_MAX - 1:
            raise InvalidInputError(f"the number at {start} does not end")
    if number > U64_MAX:
        raise InvalidInputError(f"the number at {start} does not fit into 64 bits")
    return number, at + 1
