"""Entries, their times, and their bytes."""

import pickle
from array import array
from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reef.errors import CorruptionError, InvalidInputError
from reef.locallog import EntryTime, EntryType, LocalLog, LogEntry
from reef.locallog.encoding import BINARY, _by_columns, frame_all, frame_entries, uvarint

U64 = st.integers(0, (1 << 64) - 1)
TIMES = st.builds(
    lambda ns, zone: EntryTime.from_unix_ns(ns, zone_s=zone),
    st.integers(-(10**20), 10**20),
    st.none() | st.integers(-14 * 60, 14 * 60).filter(lambda m: m != -1).map(lambda m: m * 60),
)


@settings(deadline=None)
@given(U64, U64, st.integers(0, 255), st.binary(), st.binary(), TIMES)
def test_entries_come_back(index, term, kind, data, extensions, time):
    """Every field as it was, to the nanosecond and the zone."""
    entry = LogEntry(index, term, kind, data, extensions, time)
    encoded = entry.encode()
    assert LogEntry.decode(encoded) == entry
    assert (BINARY.encode(entry), BINARY.decode(encoded)) == (encoded, entry)
    assert len(encoded) >= 20
    assert pickle.loads(pickle.dumps(entry)) == entry


@settings(deadline=None)
@given(
    st.one_of(st.integers(1, 400), st.integers(1, 1 << 40), st.integers(16000, 16500)),
    st.lists(st.tuples(st.integers(1, 2), st.just(0), st.binary(max_size=2)), max_size=300),
    st.booleans(),
)
def test_batches_are_encoded_as_their_entries_are(first, facts, alike):
    """Columns give the bytes that the plain way gives, wherever indexes begin."""
    facts = [(1, 0, rest[2]) for rest in facts] if alike else facts
    entries = [LogEntry(first + place, *rest) for place, rest in enumerate(facts)]
    if not entries:
        return
    assert_as_plain(entries)


def assert_as_plain(entries):
    """The same bytes and sizes as entry by entry."""
    framed = frame_entries(BINARY, entries)
    plain = frame_all([BINARY.encode(entry) for entry in entries])
    assert b"".join(framed.pieces) == b"".join(plain.pieces)
    assert framed.sizes == plain.sizes


@pytest.mark.parametrize("lengths", [[1000], [1000, 1001]], ids=["one length", "two lengths"])
@pytest.mark.parametrize(
    "zones",
    [[None], [None, 3600], [3601], [3601, None]],
    ids=["one time", "two times", "one longer time", "times of two lengths"],
)
@pytest.mark.parametrize("first", [300, 16_380])
def test_lengths_and_times_of_a_batch(lengths, zones, first):
    """All alike, some alike, and times in both of their versions."""
    times = [EntryTime.from_unix_ns(10**18, zone_s=zone) for zone in zones]
    entries = [
        LogEntry(
            first + n,
            data=bytes(lengths[n % len(lengths)]),
            appended_at=times[n // 2 % len(times)],
        )
        for n in range(16)
    ]
    assert_as_plain(entries)


class Tagged(LogEntry, frozen=True):
    """An entry of a class of its own."""

    tag: str = ""


def test_a_subclass_is_written_as_the_entry_that_it_is():
    """With fields of its own, alone or among plain ones."""
    entries = [Tagged(300 + n, data=b"abc", tag="x") for n in range(8)]
    assert_as_plain(entries)
    entries[3] = LogEntry(303, data=b"abc")
    assert_as_plain(entries)


def test_columns_are_used_for_entries_that_are_alike():
    """And for nothing else: extensions, other times, other terms, short indexes."""
    alike = [LogEntry(index, 1, data=b"x" * (index % 2)) for index in range(200, 210)]
    assert len(_by_columns(alike).pieces) == 70
    assert _by_columns([LogEntry(index, data=bytes(index)) for index in range(200, 210)]) is None
    odd = EntryTime.from_unix_ns(0, zone_s=-1049)
    for other in (
        LogEntry(210, 2),
        LogEntry(210, 1, 1),
        LogEntry(210, 1, extensions=b"e"),
        LogEntry(210, 1, appended_at=odd),
        LogEntry(210, 1, data=bytearray(b"x")),
    ):
        assert _by_columns([*alike, other]) is None
    assert _by_columns([LogEntry(index) for index in range(120, 130)]) is None


@settings(deadline=None)
@given(st.binary(max_size=60))
def test_any_bytes_are_an_entry_or_damage(data):
    """Nothing else is ever raised; and a decoded entry is encoded to the same bytes, or shorter
    where a number was written longer than it must be."""
    try:
        entry = BINARY.decode(data)
    except CorruptionError:
        return
    assert len(BINARY.encode(entry)) <= len(data)


@pytest.mark.parametrize("cut", range(25))
def test_short_entries_are_damage(cut):
    """An entry's lengths must match exactly, whichever byte is missing or too many."""
    whole = BINARY.encode(LogEntry(1, 2, 0, b"data", b"x"))
    assert len(whole) == 25
    with pytest.raises(CorruptionError, match="are not an entry"):
        BINARY.decode(whole[:cut] + whole[cut + 1 :] if cut < 5 else whole[:cut])
    with pytest.raises(CorruptionError):
        BINARY.decode(whole + b"\0")


def test_numbers_that_do_not_end():
    """A number has ten bytes at most, and 64 bits."""
    assert uvarint((1 << 64) - 1) == b"\xff" * 9 + b"\x01"
    for wrong in (b"\xff" * 9 + b"\x02", b"\xff" * 11, b"\xff" * 3):
        with pytest.raises(CorruptionError):
            BINARY.decode(wrong + bytes(20))


def test_times_as_go_writes_them():
    """The zero time; UTC, which is not the zone of zero minutes; seconds in a zone."""
    assert LogEntry(1).appended_at.raw.hex() == "01" + "00" * 12 + "ffff"
    assert LogEntry(1).appended_at.is_zero
    assert str(LogEntry(1).appended_at) == "0001-01-01T00:00:00Z"
    time = EntryTime(bytes.fromhex("010000000edd7268c125293215014a"))
    assert str(time) == "2024-02-29T17:30:01.623456789+05:30"
    assert (time.nanoseconds, time.zone_s) == (623456789, 19800)
    assert time.to_datetime().isoformat() == "2024-02-29T17:30:01.623456+05:30"
    assert EntryTime.from_unix_ns(time.unix_ns, zone_s=19800) == time
    at_zero = EntryTime.from_unix_ns(time.unix_ns, zone_s=0)
    assert at_zero.raw.endswith(b"\0\0")
    assert str(at_zero) == "2024-02-29T12:00:01.623456789Z"
    odd = EntryTime.from_unix_ns(0, zone_s=-1049)
    assert (odd.raw[0], len(odd.raw), odd.zone_s) == (2, 16, -1049)
    assert BINARY.decode(BINARY.encode(LogEntry(1, appended_at=odd))).appended_at == odd
    assert not odd.is_zero


def test_times_from_datetimes():
    """Zones are kept; a datetime without one is refused."""
    zone = timezone(timedelta(hours=-7))
    time = EntryTime.from_datetime(datetime(1923, 3, 4, 5, 6, 7, 8, zone))
    assert str(time) == "1923-03-04T05:06:07.000008-07:00"
    assert time.to_datetime() == datetime(1923, 3, 4, 5, 6, 7, 8, zone)
    assert EntryTime.from_datetime(datetime(2024, 1, 1, tzinfo=UTC)).raw.endswith(b"\xff\xff")
    with pytest.raises(InvalidInputError, match="no time zone"):
        EntryTime.from_datetime(datetime(2024, 1, 1))
    with pytest.raises(InvalidInputError, match="cannot be distinguished from UTC"):
        EntryTime.from_unix_ns(0, zone_s=-60)
    with pytest.raises(InvalidInputError):
        EntryTime.from_unix_ns(10**30)


def test_times_without_a_date():
    """A time out of datetime's range is formatted as its bytes."""
    raw = b"\x01" + b"\x7f" + b"\xff" * 11 + b"\0\0"
    assert str(EntryTime(raw)) == raw.hex()
    with pytest.raises(InvalidInputError, match="invalid time"):
        EntryTime(b"\x03" + bytes(14))


def test_types():
    """As Raft numbers them."""
    assert [kind.value for kind in EntryType] == [0, 1, 2, 3, 4, 5]
    assert LogEntry(1, type=EntryType.BARRIER).type == 4


def test_a_datetime_is_a_time():
    """A datetime is converted; it must have a zone."""
    time = datetime(2026, 11, 15, 22, 30, 1, 250, tzinfo=timezone(timedelta(hours=2)))
    entry = LogEntry(1, 1, appended_at=time)
    assert entry.appended_at == EntryTime.from_datetime(time)
    assert LogEntry.decode(entry.encode()) == entry
    with pytest.raises(InvalidInputError, match="has no time zone"):
        LogEntry(1, appended_at=datetime(2026, 11, 15))


def test_the_bytes_of_an_entry():
    """As on the format page, number by number."""
    entry = LogEntry(300, 7, EntryType.BARRIER, b"da", b"e")
    assert entry.encode().hex() == "ac020704026461016501" + "00" * 12 + "ffff"
    with pytest.raises(CorruptionError, match="not an entry"):
        LogEntry.decode(entry.encode()[:-1])


@pytest.mark.parametrize("count", [1, 5])
def test_buffers_other_than_bytes(tmp_path, count):
    """Their bytes count, not their items."""
    words = memoryview(array("I", [1, 2]))
    entries = [LogEntry(200 + n, data=words, extensions=bytearray(b"x")) for n in range(count)]
    with LocalLog(tmp_path, 4096) as log:
        log.store_logs(entries)
        assert [entry.data for entry in log.entries()] == [words.tobytes()] * count
        assert log.get_log(200).extensions == b"x"


def test_zones_at_their_limits():
    """What does not fit is refused, not bent; seconds alone are no minutes to the west."""
    most = (1 << 15) - 1
    for zone_s in (most * 60, most * -60, 30, -30, most * 60 + 59):
        assert EntryTime.from_unix_ns(0, zone_s=zone_s).zone_s == zone_s
    for zone_s in ((most + 1) * 60, (most + 1) * -60):
        with pytest.raises(InvalidInputError, match="out of range"):
            EntryTime.from_unix_ns(0, zone_s=zone_s)
    assert str(EntryTime.from_unix_ns(0, zone_s=-30)) == "1969-12-31T23:59:30+00:00"
