"""Every changed bit and every cut of an object is detected, with its offset."""

import pytest

from reef.catalog import Catalog
from reef.catalog.head import CatalogHead, decode_document, encode_document
from reef.catalog.segments import CatalogSegment, decode_segment, encode_segment
from reef.errors import CorruptionError, UnsupportedFormatError
from reef.stores import Wrapper
from reef.stores.memory import MemoryStore
from tests.unit.catalog.conftest import AT_ONCE, put


def flips(body):
    """Yield a body with each of its bits changed, and each of its cuts."""
    for place in range(len(body)):
        for bit in range(8):
            yield body[:place] + bytes([body[place] ^ 1 << bit]) + body[place + 1 :]
    for length in range(len(body)):
        yield body[:length]
    yield body + b"\0"


@pytest.fixture
def kept():
    """Return a bucket with a checkpoint, a segment behind it, and a plan."""
    bucket = MemoryStore()
    catalog = Catalog(bucket, retention=AT_ONCE)
    put(catalog, **{f"key-{number:03}": b"value %d" % number for number in range(100)})
    catalog.compactor().compact_once()
    put(catalog, last=b"x")
    catalog.compactor().gc_compute()
    return bucket


def only(bucket, prefix):
    """Return the last object below a prefix."""
    return [info.key for info in bucket.list(prefix)][-1]


@pytest.mark.parametrize("prefix", ["segments/", "checkpoints/", "HEAD.json", "gc/"])
def test_every_bit_of_every_object_counts(kept, prefix):
    """`verify` names the object, and an offset in it, for each changed bit and each cut."""
    name = only(kept, prefix)
    intact = kept.get(name)
    assert Catalog(kept).verify().problems == []
    for damaged in flips(intact):
        kept.put(name, damaged)
        problems = Catalog(kept).verify().problems
        assert problems, damaged
        assert problems[0].object == name
        assert "offset" in problems[0].message


def scanned(bucket):
    """Return the context of the damage that a scan found, or its result."""
    try:
        return None, Catalog(bucket, cache=None).scan_latest()
    except CorruptionError as error:
        return error.context, None


@pytest.mark.parametrize("prefix", ["segments/", "checkpoints/", "HEAD.json"])
def test_a_read_that_meets_damage_says_so(kept, prefix):
    """CorruptionError with object and offset; never a wrong value, and never none."""
    name = only(kept, prefix)
    intact = kept.get(name)
    for damaged in list(flips(intact))[:: 1 if len(intact) < 500 else 7]:
        kept.put(name, damaged)
        context, pairs = scanned(kept)
        if context is not None:
            assert context["object"] == name
            assert 0 <= context["offset"] <= len(intact) + 1
        else:  # the first magic of a checkpoint is not read by a scan
            assert prefix == "checkpoints/"
            assert len(pairs) == 101


def test_a_missing_object_is_a_problem(kept):
    """Every object that the head names must exist."""
    for prefix in ("segments/", "checkpoints/"):
        name = only(kept, prefix)
        intact = kept.get(name)
        kept.delete(name)
        assert [problem.object for problem in Catalog(kept).verify().problems] == [name]
        with pytest.raises(CorruptionError, match="is incomplete"):  # not "no such key"
            Catalog(kept, cache=None).scan_latest()
        with Catalog(kept, cache=None).session_read() as session:
            with pytest.raises(CorruptionError, match="is incomplete") as found:
                session.scan()
            assert found.value.context["object"] == name
        kept.put(name, intact)
    assert Catalog(kept).verify().problems == []


def test_verify_during_a_collection_finds_no_problem(kept):
    """Objects that are collected meanwhile were not needed; those of the head are read again."""

    class Swept(Wrapper):
        sweeps = 0

        def get_tagged(self, key):
            if key.startswith(("segments/", "checkpoints/")) and self.sweeps < 3:
                self.sweeps += 1
                other = Catalog(self.inner, retention=AT_ONCE)
                put(other, sweep=b"%d" % self.sweeps)
                other.compactor().compact_and_gc()
            return self.inner.get_tagged(key)

    store = Swept(kept)
    report = Catalog(store).verify()
    assert store.sweeps == 3
    assert (report.problems, report.keys) == ([], 102)


def test_verify_does_not_miss_an_old_checkpoint(kept):
    """One that the head does not need goes between its listing and its reading: no problem."""
    catalog = Catalog(kept, retention=AT_ONCE)
    catalog.compactor().compact_once()
    old = next(kept.list("checkpoints/")).key

    class Swept(Wrapper):
        def get_tagged(self, key):
            if key == old:
                for _ in range(2):  # the plan that is there, then the next one
                    catalog.compactor().compact_and_gc()
            return self.inner.get_tagged(key)

    report = Catalog(Swept(kept)).verify()
    assert (report.problems, report.checkpoints, report.keys) == ([], 1, 101)
    assert len(list(kept.list("checkpoints/"))) == 1


def test_a_segment_under_another_name_is_found(kept):
    """Bytes of one segment in the place of another: the name says which it must be."""
    first, *_, last = [info.key for info in kept.list("segments/")]
    kept.put(last, kept.get(first))
    with pytest.raises(CorruptionError, match="holds segment 1"):
        Catalog(kept).scan_latest()


def test_a_checkpoint_with_another_state_is_found(kept, monkeypatch):
    """Intact bytes of a wrong state do not match the set hash that was continued."""
    from reef.catalog import checkpoints as checkpoint_format
    from reef.catalog import upkeep

    catalog = Catalog(kept)
    encode = checkpoint_format.encode_checkpoint
    monkeypatch.setattr(
        "reef.catalog.checkpoints.encode_checkpoint", lambda meta, pairs: encode(meta, pairs[1:])
    )
    catalog.compactor().compact_once()
    problems = Catalog(kept).verify().problems
    assert any("set hash" in problem.message for problem in problems)
    assert any("does not match the previous checkpoint" in problem.message for problem in problems)
    monkeypatch.setattr(upkeep, "apply_records", lambda state, records: state)
    put(catalog, more=b"x")
    with pytest.raises(Exception, match="the set hash of transaction"):
        catalog.compactor().compact_once()


def test_newer_formats_are_distinguished_from_damage():
    """Intact bytes of a newer release: upgrade, do not repair."""
    bucket = MemoryStore()
    put(Catalog(bucket), a=b"1")
    head = decode_document(bucket.get("HEAD.json"), CatalogHead, "HEAD.json")
    newer = CatalogHead(
        **{name: getattr(head, name) for name in CatalogHead.__struct_fields__} | {"version": 2}
    )
    bucket.put("HEAD.json", encode_document(newer))
    with pytest.raises(UnsupportedFormatError):
        Catalog(bucket).get_latest("a")


def test_a_segment_decodes_to_its_fields():
    """All fields come back, deletions too."""
    segment = CatalogSegment(7, 7, "W", "B", {b"a": b"1", b"b": None}, "lease", 12)
    assert decode_segment(encode_segment(segment), "s") == segment
