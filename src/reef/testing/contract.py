"""The suite that every store must pass.

Subclass it, give it a fixture `store` that returns an empty store, and let pytest find
it. It checks the guarantees that Reef relies on, and no others:

    class TestMyStore(StoreContract):
        @pytest.fixture
        def store(self): return MyStore(...)
"""

import pickle
from functools import partial

import pytest

from reef.errors import ErrorKind, InvalidInputError, NotFoundError
from reef.runtime import REAL
from reef.stores.base import Outcome, Part, Store

MIB = 1 << 20


class StoreContract:
    """The guarantees of a store, one test each."""

    @pytest.fixture
    def store(self) -> Store:
        raise NotImplementedError("a subclass provides the store")

    # --- objects ------------------------------------------------------------------
    @pytest.mark.parametrize("body", [b"", b"x", bytes(range(256)) * 300], ids=len)
    def test_a_stored_object_is_read_back(self, store: Store, body: bytes) -> None:
        """An object comes back byte for byte, empty ones included."""
        store.put("a/b/c.bin", body)
        assert store.get("a/b/c.bin") == body
        assert store.head("a/b/c.bin").size == len(body)

    def test_a_put_takes_the_place_of_the_old_object(self, store: Store) -> None:
        """The last put wins."""
        store.put("k", b"old")
        store.put("k", b"newer")
        assert store.get("k") == b"newer"

    @pytest.mark.parametrize("method", ["get", "get_tagged", "head"])
    def test_a_missing_object_is_not_found(self, store: Store, method: str) -> None:
        """Reading a missing object raises NotFoundError, which is also a KeyError."""
        with pytest.raises(NotFoundError) as caught:
            getattr(store, method)("no/such/object")
        assert isinstance(caught.value, KeyError)
        assert caught.value.context["object"] == "no/such/object"

    def test_missing_objects_have_no_ranges(self, store: Store) -> None:
        """Reading a range of a missing object raises NotFoundError too."""
        with pytest.raises(NotFoundError):
            store.get_range("no/such/object", 0, 1)

    @pytest.mark.parametrize("span", [(0, 1), (3, 7), (9, 10), (0, 10)])
    def test_a_range_is_exact(self, store: Store, span: tuple[int, int]) -> None:
        """[start, end) gives just those bytes."""
        store.put("k", b"0123456789")
        assert store.get_range("k", *span) == b"0123456789"[slice(*span)]

    @pytest.mark.parametrize("span", [(0, 11), (5, 100), (10, 11), (500, 600)])
    def test_a_range_past_the_end_is_an_error(self, store: Store, span: tuple[int, int]) -> None:
        """Fewer bytes than asked for are never returned."""
        store.put("k", b"0123456789")
        with pytest.raises(InvalidInputError) as caught:
            store.get_range("k", *span)
        assert caught.value.kind is ErrorKind.INVALID_RANGE

    @pytest.mark.parametrize("span", [(0, 0), (5, 5), (5, 4), (-1, 3)])
    def test_a_range_without_bytes_is_an_error(self, store: Store, span: tuple[int, int]) -> None:
        """Empty and negative ranges are refused before anything is sent."""
        store.put("k", b"0123456789")
        with pytest.raises(InvalidInputError) as caught:
            store.get_range("k", *span)
        assert caught.value.kind is ErrorKind.INVALID_RANGE

    def test_ranges_come_in_the_order_asked(self, store: Store) -> None:
        """Overlapping, repeated and distant ranges all come back as asked."""
        body = bytes(i % 251 for i in range(300_000))
        store.put("k", body)
        spans = [(290_000, 300_000), (0, 10), (5, 20), (0, 10), (150_000, 150_001)]
        assert store.get_ranges("k", spans) == [body[slice(*span)] for span in spans]

    @pytest.mark.parametrize("key", ["", "/a", "a/", "a//b", "a/../b", ".", "a\nb", "k" * 1100])
    def test_a_bad_key_is_refused(self, store: Store, key: str) -> None:
        """A key that some store could not hold is refused by all of them."""
        for call in (store.get, store.head, lambda k: store.put(k, b""), store.delete):
            with pytest.raises(InvalidInputError) as caught:
                call(key)
            assert caught.value.kind is ErrorKind.INVALID_KEY

    # --- conditional writes -------------------------------------------------------
    def test_create_where_there_is_nothing(self, store: Store) -> None:
        """The first create lands, and says so."""
        result = store.create("wal/1", b"one")
        assert result.outcome is Outcome.CREATED
        assert result.landed
        assert store.get("wal/1") == b"one"

    def test_create_where_there_is_something(self, store: Store) -> None:
        """The second one changes nothing, and says so."""
        store.create("wal/1", b"one")
        result = store.create("wal/1", b"two")
        assert result.outcome is Outcome.EXISTS
        assert not result.landed
        assert store.get("wal/1") == b"one"

    def test_create_after_delete(self, store: Store) -> None:
        """A deleted name is free again: that is why Reef never counts on it being taken."""
        store.create("wal/1", b"one")
        store.delete("wal/1")
        assert store.create("wal/1", b"two").outcome is Outcome.CREATED

    def test_one_of_many_racing_creates_wins(self, store: Store) -> None:
        """Exactly one of racing creates wins, and its bytes are stored."""
        bodies = [f"racer {number}".encode() for number in range(4)]
        for round_number in range(5):
            key = f"race/{round_number}"
            results = REAL.map(partial(store.create, key), bodies)
            winners = [b for b, r in zip(bodies, results, strict=True) if r.landed]
            assert len(winners) == 1
            assert store.get(key) == winners[0]

    def test_replace_with_the_current_tag(self, store: Store) -> None:
        """A replace with the current tag succeeds, and returns a new tag."""
        if not store.capabilities.if_match:
            self._refuses_replace(store)
            return
        store.put("head", b"one")
        tag = store.get_tagged("head").tag
        assert tag is not None
        result = store.replace("head", b"two", tag)
        assert result.outcome is Outcome.REPLACED
        assert store.get_tagged("head").body == b"two"
        assert store.get_tagged("head").tag != tag

    def test_replace_with_a_stale_tag(self, store: Store) -> None:
        """A tag of an earlier version changes nothing, even if the bytes have come back (H5)."""
        if not store.capabilities.if_match:
            self._refuses_replace(store)
            return
        store.put("head", b"A, nonce 1")
        tag = store.get_tagged("head").tag
        assert tag is not None
        store.put("head", b"B, nonce 2")
        store.put("head", b"A, nonce 3")
        assert store.replace("head", b"C", tag).outcome is Outcome.CHANGED
        assert store.get("head") == b"A, nonce 3"

    def test_replace_where_there_is_nothing(self, store: Store) -> None:
        """A deleted object cannot be replaced."""
        if not store.capabilities.if_match:
            self._refuses_replace(store)
            return
        store.put("head", b"one")
        tag = store.get_tagged("head").tag
        assert tag is not None
        store.delete("head")
        assert store.replace("head", b"two", tag).outcome is Outcome.CHANGED
        with pytest.raises(NotFoundError):
            store.get("head")

    def _refuses_replace(self, store: Store) -> None:
        """A store without If-Match says so, and writes nothing."""
        store.put("head", b"one")
        with pytest.raises(InvalidInputError) as caught:
            store.replace("head", b"two", '"tag"')
        assert caught.value.kind is ErrorKind.UNSUPPORTED_BY_STORE
        assert store.get("head") == b"one"

    # --- listing ------------------------------------------------------------------
    def test_a_listing_is_sorted_and_complete(self, store: Store) -> None:
        """All keys below a prefix, in the order of their bytes, with sizes."""
        keys = ["b/2", "b/10", "b.txt", "b-x", "a", "b/c/d", "bb", "b/c.d"]
        for key in keys:
            store.put(key, key.encode())
        listed = list(store.list())
        assert [info.key for info in listed] == sorted(keys)
        assert [info.size for info in listed] == [len(info.key) for info in listed]
        assert [info.key for info in store.list("b/")] == ["b/10", "b/2", "b/c.d", "b/c/d"]

    def test_a_prefix_may_end_within_a_name(self, store: Store) -> None:
        """Prefixes are text, not folders."""
        for key in ["wal/001", "wal/002", "wal/010", "walrus"]:
            store.put(key, b"")
        assert [info.key for info in store.list("wal/00")] == ["wal/001", "wal/002"]
        assert [info.key for info in store.list("wal")] == [
            "wal/001",
            "wal/002",
            "wal/010",
            "walrus",
        ]
        assert list(store.list("nothing/here/")) == []

    def test_a_listing_starts_after_a_key(self, store: Store) -> None:
        """`start_after` is left out itself, and need not exist."""
        for number in range(10):
            store.put(f"wal/{number:03}", b"")
        assert [i.key for i in store.list("wal/", "wal/007")] == ["wal/008", "wal/009"]
        assert [i.key for i in store.list("wal/", "wal/0075")] == ["wal/008", "wal/009"]
        assert list(store.list("wal/", "wal/009")) == []
        assert len(list(store.list("wal/", "a"))) == 10

    def test_a_listing_shows_what_was_just_written(self, store: Store) -> None:
        """Listings are strongly consistent: no acknowledged write is missing."""
        for number in range(5):
            store.create(f"wal/{number}", b"x")
            assert [i.key for i in store.list("wal/")] == [f"wal/{n}" for n in range(number + 1)]
            store.delete(f"wal/{number}") if number == 4 else None
        assert [i.key for i in store.list("wal/")] == [f"wal/{n}" for n in range(4)]

    # --- the rest -----------------------------------------------------------------
    def test_deleting_is_idempotent(self, store: Store) -> None:
        """Objects that are not there are fine, alone and among others."""
        store.put("a", b"")
        store.put("b", b"")
        store.delete_many(["a", "missing", "b"])
        store.delete("a")
        store.delete_many([])
        assert list(store.list()) == []

    def test_a_copy_has_the_same_bytes(self, store: Store) -> None:
        """A copy does not depend on its source."""
        store.put("source", b"bytes")
        store.copy("source", "folder/target")
        store.put("source", b"changed")
        assert store.get("folder/target") == b"bytes"

    def test_copying_nothing_is_not_found(self, store: Store) -> None:
        """A copy of a missing object creates no target."""
        with pytest.raises(NotFoundError):
            store.copy("missing", "target")
        assert list(store.list()) == []

    def test_an_object_is_composed_of_ranges_and_new_bytes(self, store: Store) -> None:
        """In the order given; ranges may overlap, and come from one object or from several."""
        store.put("a", b"0123456789")
        store.put("folder/b", bytes(range(256)) * 100_000)
        parts: list[Part] = [
            b"head ",
            ("a", 2, 5),
            ("folder/b", 255, 25_000_000),
            b"",
            ("a", 0, 10),
            ("a", 9, 10),
            b" tail",
        ]
        middle = (bytes(range(256)) * 100_000)[255:25_000_000]
        expected = b"head 234" + middle + b"01234567899 tail"
        assert store.compose("folder/composed", parts) == len(expected)
        assert store.get("folder/composed") == expected
        store.delete_many(["a", "folder/b"])
        assert store.get("folder/composed") == expected, "it depends on its parts"

    def test_missing_objects_cannot_be_composed(self, store: Store) -> None:
        """A missing object, or a range past an object's end, leaves no target."""
        store.put("a", b"0123456789")
        with pytest.raises(NotFoundError):
            store.compose("target", [b"new", ("missing", 0, 1)])
        for span in ((0, 11), (10, 11), (5, 5), (-1, 3)):
            with pytest.raises(InvalidInputError) as caught:
                store.compose("target", [b"new", ("a", *span)])
            assert caught.value.kind is ErrorKind.INVALID_RANGE
        assert [info.key for info in store.list()] == ["a"]

    @pytest.mark.parametrize("sizes", [[], [0], [10, 20], [5 * MIB, 6 * MIB, 1]], ids=str)
    def test_an_upload_is_one_object(self, store: Store, sizes: list[int]) -> None:
        """Parts of any size become one object."""
        parts = [bytes([number + 1]) * size for number, size in enumerate(sizes)]
        assert store.upload("big", iter(parts)) == sum(sizes)
        assert store.get("big") == b"".join(parts)

    def test_a_broken_upload_leaves_no_object(self, store: Store) -> None:
        """If the source fails half-way, nothing is visible."""

        def parts() -> object:
            yield b"x" * 6 * MIB
            yield b"x" * 6 * MIB
            raise ZeroDivisionError("the source broke")

        with pytest.raises(ZeroDivisionError, match="the source broke"):
            store.upload("big", parts())  # type: ignore[arg-type]
        assert list(store.list()) == []

    def test_the_clock_dates_objects(self, store: Store) -> None:
        """now() and last_modified are the same clock, to its resolution."""
        resolution_s = store.capabilities.clock_resolution_s
        before_s = store.now()
        store.put("k", b"")
        after_s = store.now()
        assert before_s - resolution_s <= store.head("k").last_modified_s
        assert store.head("k").last_modified_s <= after_s + resolution_s

    def test_abort_stale_touches_no_object(self, store: Store) -> None:
        """Only unfinished writes go."""
        store.put("k", b"kept")
        assert store.abort_stale(0.0) == 0
        assert store.get("k") == b"kept"

    def test_a_store_travels_if_it_can_be_shared(self, store: Store) -> None:
        """A pickled store opens the same bucket."""
        store.put("k", b"v")
        assert pickle.loads(pickle.dumps(store)).get("k") == b"v"
