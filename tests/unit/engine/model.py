"""A plain model of versions, for the tests of memtable, merge and view."""

import numpy as np
import pyarrow as pa
from hypothesis import settings
from hypothesis import strategies as st

from reef.formats.versions import RangeTombstone, Versions
from reef.formats.wal_object import OpKind, Ops

KEYS = [b"a", b"a\0", b"b", b"ba", b"c", b"d", b"d\xff", b"e"]
"""Neighbours on purpose: successors, prefixes, and the last before the next letter."""
LAST = b"f"

few = settings(max_examples=50, deadline=None)
"""Enough for small worlds like these; a busy machine is no failure."""

keys = st.sampled_from(KEYS)
values = st.binary(max_size=3)


@st.composite
def ranges(draw):
    """A range with an end behind its start."""
    start = draw(keys)
    return start, draw(st.sampled_from([key for key in [*KEYS, LAST] if key > start]))


operations = st.one_of(
    st.tuples(st.just(OpKind.PUT), keys, values),
    st.tuples(st.just(OpKind.DELETE), keys, st.none()),
    st.builds(lambda bounds: (OpKind.DELETE_RANGE, *bounds), ranges()),
)
batches = st.lists(operations, min_size=1, max_size=5)


def to_ops(operations):
    """Return operations as a batch's columns."""
    is_range = [kind == OpKind.DELETE_RANGE for kind, _, _ in operations]
    ends = [
        end if ranged else None for ranged, (_, _, end) in zip(is_range, operations, strict=True)
    ]
    put = [value if kind == OpKind.PUT else None for kind, _, value in operations]
    return Ops(
        pa.array([key for _, key, _ in operations], pa.binary()),
        pa.array([int(kind) for kind, _, _ in operations], pa.uint8()),
        pa.array(ends, pa.binary()) if any(is_range) else None,
        fields={1: pa.array(put, pa.binary())} if any(v is not None for v in put) else {},
    )


class Model:
    """All that was ever written, one operation after the other."""

    def __init__(self):
        self.written = []

    def apply(self, lsn, operations, first_seq=0):
        for seq, operation in enumerate(operations, first_seq):
            self.written.append((lsn, seq, operation))

    def newest(self, key, floor=0):
        """Return (lsn, seq, value or None) of the last operation on a key; None if there was
        none."""
        found = [
            (lsn, seq, value if kind == OpKind.PUT else None)
            for lsn, seq, (kind, start, value) in self.written
            if lsn >= floor
            and (start <= key < value if kind == OpKind.DELETE_RANGE else start == key)
        ]
        return max(found, key=lambda version: version[:2], default=None)

    def rows(self, floor=0):
        newest = {key: self.newest(key, floor) for key in KEYS}
        return {key: found[2] for key, found in newest.items() if found and found[2] is not None}


def to_versions(rows):
    """Return (key, lsn, seq, value or None) as sorted versions; None is a delete."""
    ordered = sorted(rows, key=lambda row: (row[0], -row[1], -row[2]))
    return Versions(
        pa.array([row[0] for row in ordered], pa.binary()),
        np.array([row[1] for row in ordered], np.int64),
        np.array([row[2] for row in ordered], np.uint32),
        np.array(
            [OpKind.PUT if row[3] is not None else OpKind.DELETE for row in ordered], np.uint8
        ),
        {1: pa.array([row[3] for row in ordered], pa.binary())},
    )


def to_rows(versions):
    """Return versions as a list of (key, value)."""
    return list(zip(versions.keys.to_pylist(), versions.fields[1].to_pylist(), strict=True))


def tombstone(lsn, seq, start, end):
    """Return a range tombstone."""
    return RangeTombstone(start, end, lsn, seq)
