"""Streams in a manifest: marks that never fall, and claims on the writer role."""

import pytest

from reef.errors import FencedError, InvalidInputError
from reef.formats.manifest import decode_manifest, encode_manifest
from reef.formats.schema import DEFAULT_SCHEMA
from reef.manifest.dedup import NO_STREAM, STREAMS_MAX, StreamClaim, advance_marks
from reef.manifest.edits import new_namespace, raise_writer_epoch

UNKNOWN, TAKEN = InvalidInputError("unknown"), FencedError("taken over")


def taken(head, claim):
    """Take the role with a claim."""
    return claim.register(raise_writer_epoch(head, 1), before=head)


def test_marks_never_fall():
    """An older fold that comes late takes nothing back."""
    assert advance_marks({"a": 5}, {"a": 3, "b": 1}) == {"a": 5, "b": 1}


def test_the_stream_that_rested_longest_is_forgotten_first():
    """A namespace remembers so many, and those that moved on lately."""
    marks = {f"s{n}": n for n in range(STREAMS_MAX)}
    moved = advance_marks(advance_marks(marks, {"s0": 7}), {"new": 1})
    assert len(moved) == STREAMS_MAX
    assert "s1" not in moved
    assert moved["s0"] == 7
    assert moved["new"] == 1


def test_taking_the_role_names_the_stream():
    """The same publish makes it known; another writer takes its name out, and keeps its mark."""
    head = taken(new_namespace(DEFAULT_SCHEMA), StreamClaim("a"))
    assert (head.writer_stream, head.stream_marks) == ("a", {"a": 0})
    after = taken(head, NO_STREAM)
    assert (after.writer_stream, after.stream_marks) == ("", {"a": 0})
    assert decode_manifest(encode_manifest(head), "x").writer_stream == "a"


def test_a_namespace_that_does_not_know_the_stream_refuses_it():
    """A stream that is registered elsewhere belongs elsewhere."""
    claim = StreamClaim("a", is_known=True, unknown=UNKNOWN)
    with pytest.raises(InvalidInputError):
        taken(new_namespace(DEFAULT_SCHEMA), claim)


def test_a_takeover_refuses_a_stream_with_pending_entries():
    """Another writer may come between the check and the publish: the publish checks again."""
    head = taken(new_namespace(DEFAULT_SCHEMA), StreamClaim("a"))
    claim = StreamClaim("a", is_known=True, must_hold=True, taken_over=TAKEN)
    assert taken(head, claim).writer_epoch == 2
    with pytest.raises(FencedError):
        taken(taken(head, NO_STREAM), claim)
