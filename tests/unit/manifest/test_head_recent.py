"""`recent`: the bounded list of publishes that proves a slow one (protocols §5, ADR 0023)."""

import math
from itertools import product

import pytest

import reef
from reef.errors import ConflictError, OutcomeUnknownError, UnavailableError
from reef.formats.manifest import encode_manifest
from reef.formats.schema import DEFAULT_SCHEMA
from reef.manifest import edits
from reef.manifest import head as publish
from reef.manifest.head import HeadFinder, Publisher, PublishPolicy
from reef.paths import Namespace
from reef.stores import Wrapper
from reef.stores.base import StoreDates
from reef.stores.memory import MemoryStore

NAME = "users"
USERS = Namespace(NAME)
RECENT_MAX = 3


def raise_epoch(manifest):
    """An edit that always changes something."""
    return edits.raise_compactor_epoch(manifest)


def publish_others(bucket, count):
    """Publish so many generations by another process, quickly."""
    for _ in range(count):
        head = HeadFinder(bucket, USERS).find().manifest
        publisher = Publisher(bucket, USERS)
        bucket.create(
            USERS.manifest(head.generation + 1),
            encode_manifest(publisher._stamp(head, raise_epoch(head))),
        )


def sweep(bucket):
    """Delete every generation but the newest, as a sweep may after a grace."""
    publish_others(bucket, 1)
    head = HeadFinder(bucket, USERS).find().manifest
    for generation in range(1, head.generation):
        bucket.delete(USERS.manifest(generation))


class Interposed(Wrapper):
    """Runs something before and after the next PUT of some folder."""

    folder = "/manifest/"
    before = after = None

    def create(self, key, body):
        if self.folder not in key or self.before is None:
            return self.inner.create(key, body)
        before, self.before = self.before, None
        before()
        result = self.inner.create(key, body)
        self.after()
        return result


def outcome_of(store):
    """Publish once; return the verdict of the publisher."""
    publisher = Publisher(store, USERS, policy=PublishPolicy(losses_max=1))
    try:
        publisher.publish(raise_epoch)
    except ConflictError:
        return "lost"
    except OutcomeUnknownError:
        return "unknown"
    return "published"


def test_H14_no_history_gives_a_wrong_verdict(monkeypatch):
    """H14: a slow publish, other publishes and a sweep before and after it, three entries kept.

    A publish is in the chain if its generation was the next one when its PUT was executed, and
    only then. Its publisher may learn that it does not know, but never the wrong outcome, and it
    knows for as long as its generation is in the list.
    """
    monkeypatch.setattr(publish, "RECENT_MIN", 1)
    monkeypatch.setattr(publish, "RECENT_MAX", RECENT_MAX)
    monkeypatch.setattr(StoreDates, "took_s", lambda *_: math.inf)  # slow: only a proof counts
    seen = set()
    for before, is_swept, after in product(range(6), (False, True), range(6)):
        bucket = MemoryStore()
        Publisher(bucket, USERS).create(edits.new_namespace(DEFAULT_SCHEMA))
        store = Interposed(bucket)

        def overtake(bucket=bucket, before=before, is_swept=is_swept):
            publish_others(bucket, before)
            if is_swept:
                sweep(bucket)

        store.before = overtake
        store.after = lambda bucket=bucket, after=after: publish_others(bucket, after)
        verdict = outcome_of(store)
        is_published = not before and not is_swept
        behind = before + is_swept + after - (not is_published)
        truth = "published" if is_published else "lost"
        assert verdict == (truth if behind < RECENT_MAX else "unknown"), (before, is_swept, after)
        seen.add(verdict)
    assert seen == {"published", "lost", "unknown"}


@pytest.mark.parametrize("publishes", [RECENT_MAX - 1, RECENT_MAX])
def test_H14_an_epoch_that_recent_does_not_cover_is_unknown(monkeypatch, publishes):
    """H14: an opening during which many publish is not fenced; it cannot prove its epoch."""
    monkeypatch.setattr(publish, "RECENT_MIN", 1)
    monkeypatch.setattr(publish, "RECENT_MAX", RECENT_MAX)
    bucket = MemoryStore()
    reef.Database(bucket).writer(NAME).put("k", b"1")
    store = Interposed(bucket)
    database = reef.Database(store)
    store.folder = "/wal/"
    store.before, store.after = lambda: publish_others(bucket, publishes), lambda: None
    if publishes < RECENT_MAX:
        assert database.writer(NAME).get("k") == b"1"
    else:
        with pytest.raises(UnavailableError, match="does not prove epoch 2"):
            database.writer(NAME)
    assert reef.Database(bucket).writer(NAME).get("k") == b"1", "another opening succeeds"


def test_the_bytes_of_a_publish_do_not_grow_with_the_publishes_of_a_day():
    """A cursor that commits every second publishes 86,400 times a day: 1.2 MB each, once."""
    bucket, sizes = MemoryStore(), {}
    publisher = Publisher(bucket, USERS)
    publisher.create(edits.new_namespace(DEFAULT_SCHEMA))
    for number in range(1, 5001):
        manifest = publisher.publish(raise_epoch)
        if number in (50, 500, 5000):
            sizes[number] = len(encode_manifest(manifest))
    assert sizes[500] <= 10 * sizes[50]
    assert sizes[5000] <= sizes[500] * publish.RECENT_MAX / 500 * 1.1, "10 × without a bound"
