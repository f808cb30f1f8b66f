"""A namespace with something of everything in it, a model of its rows, and ways to damage it."""

from dataclasses import dataclass, field

import msgspec

import reef
from reef.formats.segment import decode_tail
from reef.formats.wal_object import Job, WalKind, WalObject
from reef.jobs import fold
from reef.manifest.head import HeadFinder, Publisher
from reef.manifest.roots import take_lease
from reef.paths import Namespace
from tests.support.bulk_jobs import append, ingest, stage
from tests.support.segment_copies import copy_segment

NAME = "users"
USERS = Namespace(NAME)


@dataclass
class Sample:
    """A namespace and the writes to it: by LSN, each key's value, None for a delete."""

    db: reef.Database
    written: dict[int, dict[bytes, bytes | None]] = field(default_factory=dict)
    places: dict[str, str] = field(default_factory=dict)
    """The object of each kind that the table damages."""

    @property
    def store(self):
        return self.db.store

    def head(self):
        return HeadFinder(self.store, USERS).find().manifest

    def note(self, lsn, rows):
        self.written[lsn] = dict(rows)

    def put(self, writer, key, value):
        lsn = writer.put(key, value).lsn
        self.note(lsn, {key: value})
        return USERS.wal_object(lsn)

    def rows(self, without=(), keys=()):
        """Return what should be there, if some LSNs and the rows of some keys are lost."""
        seen = {}
        for lsn in sorted(set(self.written) - set(without)):
            seen.update(self.written[lsn])
        return {k: v for k, v in seen.items() if v is not None and k not in keys}

    def snapshot_rows(self, last_lsn):
        seen = {}
        for lsn in sorted(n for n in self.written if n <= last_lsn):
            seen.update(self.written[lsn])
        return {key: value for key, value in seen.items() if value is not None}

    def keys(self):
        """Return every object there is, with its bytes."""
        return {info.key: self.store.get(info.key) for info in self.store.list(USERS.root + "/")}


def folded_part(sample):
    """Write and fold rows of all kinds: puts, deletes, range deletes, a bulk load; a snapshot."""
    db = sample.db
    with db.writer(NAME) as writer:
        for number in range(12):
            sample.put(writer, b"a%02d" % number, b"value %d " % number * 4)
        lsn = writer.delete("a03").lsn
        sample.note(lsn, {b"a03": None})
        lsn = writer.delete_range("a05", "a07").lsn
        sample.note(lsn, {b"a05": None, b"a06": None})
    fold(db, NAME, group_bytes=100)
    snapshot = db.snapshot(NAME, "first")
    sample.places["old segment"] = USERS.segment(sample.head().segments[0].id)
    sample.places["pinned manifest"] = USERS.manifest(snapshot.generation)
    replace_segments(db)
    with db.writer(NAME) as writer:
        for number in range(12):
            sample.put(writer, b"b%02d" % number, b"%d" % number * 4)
    rows = {b"bulk%d" % number: b"folded" for number in range(3)}
    sample.note(ingest(db.store, NAME, rows), rows)
    fold(db, NAME, group_bytes=100)


def replace_segments(db):
    """Put copies in the place of all segments, as a merge does."""
    old = HeadFinder(db.store, USERS).find().manifest.segments
    new = [copy_segment(db.store, USERS, entry) for entry in old]
    Publisher(db.store, USERS).publish(
        lambda head: msgspec.structs.replace(head, segments=tuple(new))
    )


def log_part(sample):
    """Leave every kind of object in the log, none of it folded."""
    store, places = sample.store, sample.places
    with sample.db.writer(NAME) as writer:
        lsn = writer.put("c0", b"0").lsn
        sample.note(lsn, {b"c0": b"0"})
        places["fence"] = USERS.wal_object(lsn - 1)
        places["wal middle"] = sample.put(writer, b"c1", b"1")
        sample.put(writer, b"c2", b"2")
    places["skip"] = USERS.wal_object(append(store, NAME, WalKind.SKIP))
    rows = {b"load%d" % number: b"in the log" for number in range(3)}
    job = Job("01J", key="load")
    places["begin"] = USERS.wal_object(append(store, NAME, WalKind.BEGIN, job))
    staged = stage(store, NAME, rows, job.id)
    lsn = append(store, NAME, WalKind.INGEST, msgspec.structs.replace(job, segments=(staged,)))
    sample.note(lsn, rows)
    places["ingest"] = USERS.wal_object(lsn)
    places["ingested segment"] = USERS.segment(staged.id)
    append(store, NAME, WalKind.BEGIN, Job("02J"))
    places["abort"] = USERS.wal_object(append(store, NAME, WalKind.ABORT, Job("02J")))
    with sample.db.writer(NAME) as writer:
        for number in range(3):
            places["wal head"] = sample.put(writer, b"d%d" % number, b"%d" % number)


def sample_of(db):
    """Make the whole namespace."""
    sample = Sample(db)
    folded_part(sample)
    log_part(sample)
    head = sample.head()
    by_size = sorted(head.segments, key=lambda entry: entry.rows)
    sample.places["bulk segment"] = USERS.segment(by_size[0].id)
    with_ranges = [entry for entry in head.segments if entry.tombstones]
    sample.places["segment"] = USERS.segment(with_ranges[0].id)
    sample.places["manifest head"] = USERS.manifest(head.generation)
    sample.places["old manifest"] = USERS.manifest(head.generation - 3)
    lease = take_lease(db.store, USERS, head, owner="a reader", ttl_s=3600.0)
    sample.places["lease"] = USERS.lease(lease.record.id)
    return sample


def flip(store, key, place):
    """Flip one bit of an object at rest."""
    damaged = bytearray(store.get(key))
    damaged[place] ^= 1
    store.put(key, bytes(damaged))


def header_of(store, key):
    """Return the header of an object of the log."""
    return WalObject.decode(store.get(key), key).header


class Copies:
    """One namespace, made once; a copy of it for every test."""

    def __init__(self):
        self.sample = sample_of(reef.open("memory://"))
        self.bodies = {
            info.key: self.sample.store.get(info.key) for info in self.sample.store.list()
        }

    def fresh(self):
        """Return a copy in a store of its own."""
        db = reef.open("memory://")
        for key, body in self.bodies.items():
            db.store.put(key, body)
        return Sample(db, self.sample.written, self.sample.places)


def sections(store, key):
    """Return an offset in each section of an object."""
    body = store.get(key)
    if key.endswith(".wal"):
        places = {"magic": 0, "version": 8, "header": 40, "footer": len(body) - 1}
        if header_of(store, key).batches:
            places["record"] = len(body) - 20
        return places
    if key.endswith(".seg"):
        return segment_sections(body, key)
    if key.endswith(".manifest.json"):
        return {"magic": 0, "header": 12, "body": len(body) // 2, "footer": len(body) - 1}
    return {"magic": 0, "name": 9, "text": 31}


def torn_text(store, key):
    """Set the high bit of a letter, so that the object is not valid text."""
    damaged = bytearray(store.get(key))
    damaged[sections(store, key)["text"]] |= 0x80
    store.put(key, bytes(damaged))


def segment_sections(body, key):
    """Return a place in each section of a segment."""
    tail = decode_tail(body, len(body), key)
    footer = tail.footer
    (number, *_) = tail.index.column_blocks
    places = {
        "magic": 0,
        "version": 8,
        "key block": tail.index.key_range(0)[0] + 17,
        "column block": tail.index.column_range(0, number)[0] + 17,
        "filter": footer.filter.offset + 17,
        "index": footer.index.offset + 17,
        "footer": footer.index.offset + footer.index.length + 3,
        "tail": len(body) - 3,
    }
    if footer.range_tombstones is not None:
        places["tombstone block"] = footer.range_tombstones.offset + 17
    return places


CUTS = {"truncated": lambda body: body[: len(body) // 2], "emptied": lambda body: b""}


def damage(store, key, how):
    """Damage an object: flip a bit of a section, cut it, empty it, or delete it."""
    if how == "deleted":
        store.delete(key)
    elif how in CUTS:
        store.put(key, CUTS[how](store.get(key)))
    elif how == "text":
        torn_text(store, key)
    else:
        flip(store, key, sections(store, key)[how])
