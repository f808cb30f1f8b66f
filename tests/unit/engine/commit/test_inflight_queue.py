"""Which batches go out together, and when: the queue in front of the log."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reef.config import WriterSettings
from reef.engine.commit.completions import new_future
from reef.engine.commit.inflight import HEADER_BYTES, GroupQueue, Pending
from reef.formats.wal_object import BatchHeader
from reef.runtime import REAL
from tests.unit.engine.model import few

NOW_S = 1000.0


def pending(size=100, decide=None, waited_ms=0.0):
    """Return a batch of so many bytes that has waited so long."""
    queued_s = NOW_S - waited_ms / 1000
    record = bytes(max(0, size - HEADER_BYTES))
    return Pending(None, record, BatchHeader(1), queued_s, decide, future=new_future(REAL))


def queue(*batches, **settings):
    """Return a queue with these batches in it."""
    made = GroupQueue(WriterSettings(**settings), lambda: NOW_S)
    for batch in batches:
        made.add(batch)
    return made


def test_a_lone_batch_goes_at_once():
    """Nothing is in flight: there is nothing to wait for."""
    one = pending()
    waiting = queue(one)
    assert waiting.next_group(0, flushing=False) == [one]
    assert waiting.next_group(0, flushing=False) == []
    assert (len(waiting), waiting.bytes) == (0, 0)


def test_batches_gather_while_others_are_in_flight():
    """Until the window closes, counted from the oldest; then they go together."""
    old, young = pending(), pending()
    waiting = queue(old, young, max_parallel_writes=2, group_window_ms=5)
    assert waiting.next_group(1, flushing=False) == []
    assert 0 < waiting.wait_s(1) <= 0.005
    old.queued_s = NOW_S - 0.006
    assert waiting.next_group(1, flushing=False) == [old, young]


def test_a_flush_does_not_wait_for_the_window():
    """A caller waits for all of it."""
    waiting = queue(pending(), max_parallel_writes=2)
    assert waiting.next_group(1, flushing=False) == []
    assert len(waiting.next_group(1, flushing=True)) == 1


def test_no_more_than_so_many_in_flight():
    """Not even for a flush; and time alone does not change it."""
    waiting = queue(pending(waited_ms=99), max_parallel_writes=2)
    assert waiting.next_group(2, flushing=True) == []
    assert waiting.wait_s(2) is None


def test_a_full_group_goes_before_its_window_closes():
    """Larger ones cost latency and save little."""
    batches = [pending(60) for _ in range(4)]
    waiting = queue(*batches, max_parallel_writes=2, group_bytes_max=150)
    assert waiting.next_group(1, flushing=False) == batches[:2]


def test_a_large_batch_goes_alone():
    """It does not hold up small ones, in front of it or behind it."""
    small, large, after = pending(80), pending(5000), pending(80)
    waiting = queue(small, large, after, skip_memtable_bytes=1000)
    assert waiting.next_group(0, flushing=False) == [small]
    assert waiting.next_group(0, flushing=False) == [large]
    assert waiting.next_group(0, flushing=False) == [after]


def test_H20_a_conditional_batch_is_a_barrier():
    """H20: it waits until nothing is in flight, goes alone, and nothing overtakes it."""
    before, conditional, after = pending(), pending(decide=lambda: None), pending()
    waiting = queue(before, conditional, after, max_parallel_writes=8)
    assert waiting.next_group(0, flushing=True) == [before]
    assert waiting.next_group(1, flushing=True) == []
    assert waiting.next_group(0, flushing=True) == [conditional]
    assert waiting.next_group(0, flushing=True) == [after]


def test_lost_batches_go_first_and_in_order():
    """H45: batches that lost their slots are in front again, as they were."""
    batches = [pending() for _ in range(4)]
    waiting = queue(*batches[2:])
    waiting.put_back(batches[:2])
    assert list(waiting) == batches
    assert waiting.bytes == sum(batch.size for batch in batches)
    assert waiting.clear() == batches
    assert waiting.bytes == 0


def test_an_empty_queue_has_all_the_time():
    """There is nothing that time would bring about."""
    assert queue().wait_s(1) is None


def test_H26_a_queued_batch_cannot_be_cancelled():
    """H26: its future refuses, so that its result can always be delivered."""
    batch = pending()
    assert not batch.future.cancel()
    batch.future.set_result("completed")


@few
@given(
    st.lists(st.tuples(st.integers(64, 400), st.booleans()), max_size=30),
    st.integers(1, 1000),
    st.lists(st.integers(0, 3), min_size=80, max_size=80),
)
def test_nothing_is_lost_doubled_or_overtaken(batches, group_bytes_max, in_flight):
    """Whatever is in flight when: batches come out once, in order, in groups within the bound."""
    made = [pending(size, (lambda: None) if barrier else None, 99) for size, barrier in batches]
    waiting = queue(*made, group_bytes_max=group_bytes_max, max_parallel_writes=3)
    out = []
    for busy in [*in_flight, *[0] * len(made)]:
        group = waiting.next_group(busy, flushing=False)
        out += group
        assert len(group) == 1 or sum(batch.size for batch in group) <= group_bytes_max
        assert busy < 3 or not group
        assert not any(batch.decide for batch in group) or (len(group), busy) == (1, 0)
        assert waiting.bytes == sum(batch.size for batch in waiting)
    assert out == made


@pytest.mark.parametrize("window_ms", [0.0, 5.0])
def test_patience_is_never_nothing(window_ms):
    """A wait of zero would be a busy loop."""
    waiting = queue(pending(waited_ms=50), max_parallel_writes=2, group_window_ms=window_ms)
    assert waiting.wait_s(1) > 0
