"""What a log holds: entries, typed, with a time that keeps every bit it came with.

    uvarint index, uvarint term, uvarint type,
    uvarint length + data, uvarint length + extensions, time (15 or 16 bytes)

`EntryTime` is the binary form of a Go time: seconds since the year 1, nanoseconds and a zone.
Python's datetime has no nanoseconds, and a datetime that went through UTC has forgotten its
zone, so the bytes are kept as they are and only looked into when somebody asks.
"""

import struct
from datetime import UTC, datetime, timedelta, timezone
from enum import IntEnum
from typing import ClassVar

import msgspec

from reef.errors import CorruptionError, InvalidInputError
from reef.locallog.varint import read_uvarint, uvarint, uvarints

__all__ = ["EntryTime", "EntryType", "LogEntry"]

V1 = struct.Struct(">BqiH")
UNIX_EPOCH_S = 62_135_596_800
"""Unix time 0, in seconds since 0001-01-01T00:00:00Z."""
UTC_ZONE = 0xFFFF
"""Says UTC, rather than some zone that is 0 minutes off."""
ZONE_MINUTES_MAX = (1 << 15) - 1


class EntryType(IntEnum):
    """What an entry is to Raft. Others are kept as the numbers that they are."""

    COMMAND = 0
    NOOP = 1
    ADD_PEER_DEPRECATED = 2
    REMOVE_PEER_DEPRECATED = 3
    BARRIER = 4
    CONFIGURATION = 5


class EntryTime:
    """When an entry was appended, to the nanosecond, in the zone it was said in."""

    __slots__ = ("raw",)

    LENGTHS: ClassVar = {1: 15, 2: 16}
    """How long each version is; version 2 has seconds in its zone."""

    def __init__(self, raw: bytes) -> None:
        if not raw or self.LENGTHS.get(raw[0]) != len(raw):
            raise InvalidInputError(f"{raw.hex()} is not a time: 01 and 14 bytes, or 02 and 15")
        self.raw = raw

    @classmethod
    def from_unix_ns(cls, unix_ns: int, *, zone_s: int | None = None) -> "EntryTime":
        """Return a time in a zone that is `zone_s` seconds east of UTC, or plainly in UTC."""
        seconds, nanoseconds = divmod(unix_ns, 1_000_000_000)
        zone, odd_s = (-1, 0) if zone_s is None else _minutes(zone_s)
        try:
            head = V1.pack(2 if odd_s else 1, seconds + UNIX_EPOCH_S, nanoseconds, zone & 0xFFFF)
        except struct.error as error:
            raise InvalidInputError(f"{unix_ns} ns is no time that an entry can have") from error
        return cls(head + struct.pack(">b", odd_s) if odd_s else head)

    @classmethod
    def from_datetime(cls, moment: datetime) -> "EntryTime":
        """Return the time of a datetime that knows its zone."""
        offset = moment.utcoffset()
        if offset is None:
            raise InvalidInputError(f"{moment} has no zone", hint="Give it a tzinfo")
        micros = (moment - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1)
        zone_s = None if moment.tzinfo is UTC else int(offset.total_seconds())
        return cls.from_unix_ns(micros * 1000, zone_s=zone_s)

    @property
    def seconds(self) -> int:
        """Whole seconds since 0001-01-01T00:00:00Z."""
        return int.from_bytes(self.raw[1:9], "big", signed=True)

    @property
    def nanoseconds(self) -> int:
        return int.from_bytes(self.raw[9:13], "big", signed=True)

    @property
    def unix_ns(self) -> int:
        return (self.seconds - UNIX_EPOCH_S) * 1_000_000_000 + self.nanoseconds

    @property
    def zone_s(self) -> int:
        """Seconds east of UTC."""
        if self.raw[13:15] == b"\xff\xff":
            return 0
        zone = int.from_bytes(self.raw[13:15], "big", signed=True) * 60
        return zone + int.from_bytes(self.raw[15:], "big", signed=True)

    @property
    def is_zero(self) -> bool:
        """Whether it is the time that stands for none."""
        return self.unix_ns == -UNIX_EPOCH_S * 1_000_000_000

    def to_datetime(self) -> datetime:
        """Return the nearest datetime before it, in its zone: to the microsecond."""
        zone = timezone(timedelta(seconds=self.zone_s)) if self.zone_s else UTC
        local = datetime(1, 1, 1) + timedelta(
            seconds=self.seconds + self.zone_s, microseconds=self.nanoseconds // 1000
        )
        return local.replace(tzinfo=zone)

    def __str__(self) -> str:
        """RFC 3339, with as many digits of a second as it has; the bytes if it has no date."""
        try:
            moment = self.to_datetime()
        except (OverflowError, ValueError):
            return self.raw.hex()
        fraction = f".{self.nanoseconds:09}".rstrip("0").rstrip(".")
        sign = "-" if self.zone_s <= -60 else "+"  # seconds alone are not told
        hours, minutes = divmod(abs(self.zone_s) // 60, 60)
        zone = f"{sign}{hours:02}:{minutes:02}" if self.zone_s else "Z"
        return moment.replace(tzinfo=None, microsecond=0).isoformat() + fraction + zone

    def __repr__(self) -> str:
        return f"EntryTime({self})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, EntryTime) and self.raw == other.raw

    def __hash__(self) -> int:
        return hash(self.raw)

    def __reduce__(self) -> "tuple[type[EntryTime], tuple[bytes]]":
        return EntryTime, (self.raw,)


def _minutes(zone_s: int) -> tuple[int, int]:
    """Return whole minutes, and the seconds beyond, both with the zone's sign."""
    sign = -1 if zone_s < 0 else 1
    minutes, seconds = divmod(abs(zone_s), 60)
    if minutes * sign == -1:
        raise InvalidInputError("a zone of one minute west of UTC cannot be told from UTC")
    if minutes > ZONE_MINUTES_MAX:
        raise InvalidInputError(f"a zone {zone_s} s from UTC is none that an entry can have")
    return minutes * sign, seconds * sign


ZERO_TIME = EntryTime(V1.pack(1, 0, 0, UTC_ZONE))


class LogEntry(msgspec.Struct, frozen=True, gc=False):
    """One entry of the log."""

    index: int
    """Its place; each entry has the number after its predecessor's."""
    term: int = 0
    type: int = EntryType.COMMAND
    data: bytes = b""
    extensions: bytes = b""
    """For whatever is put between Raft and the log."""
    appended_at: EntryTime = ZERO_TIME
    """The leader's clock; the zero time if nobody said. A datetime is taken, too."""

    def __post_init__(self) -> None:
        given: object = self.appended_at
        if isinstance(given, datetime):
            msgspec.structs.force_setattr(self, "appended_at", EntryTime.from_datetime(given))

    def encode(self) -> bytes:
        """Return the entry's bytes in the format's own codec."""
        data, extensions = _plain(self.data), _plain(self.extensions)
        return b"".join(
            (
                uvarint(self.index),
                uvarints(self.term, self.type, len(data)),
                data,
                uvarints(len(extensions)),
                extensions,
                self.appended_at.raw,
            )
        )

    @classmethod
    def decode(cls, payload: bytes) -> "LogEntry":
        """Return the entry of such bytes; CorruptionError if they are none."""
        try:
            index, at = read_uvarint(payload, 0)
            term, at = read_uvarint(payload, at)
            kind, at = read_uvarint(payload, at)
            length, at = read_uvarint(payload, at)
            data = payload[at : at + length]
            at += length
            extension_length, at = read_uvarint(payload, at)
            extensions = payload[at : at + extension_length]
            appended_at = EntryTime(payload[at + extension_length :])
        except (IndexError, InvalidInputError) as error:
            raise CorruptionError(f"{len(payload)} bytes are not an entry: {error}") from error
        if len(data) != length or len(extensions) != extension_length:
            raise CorruptionError(f"{len(payload)} bytes are not an entry: lengths go beyond them")
        return cls(index, term, kind, data, extensions, appended_at)


def _plain(given: bytes) -> bytes:
    """Return bytes; the length of what is only like them may be one of larger items."""
    return given if type(given) is bytes else memoryview(given).tobytes()
