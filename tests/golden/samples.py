"""The objects that the format pages show byte by byte."""

import numpy as np
import pyarrow as pa

from reef.formats.coding import Codec
from reef.formats.manifest import Manifest, Recent, encode_manifest
from reef.formats.schema import DEFAULT_SCHEMA
from reef.formats.segment import Lineage
from reef.formats.segment_writer import SegmentWriter
from reef.formats.versions import Versions
from reef.formats.wal_object import BatchHeader, Ops, WalHeader, WalKind, WalObject, encode_ops


def wal_object():
    """One batch that puts u1 = Ada, at LSN 2, after the fence with the write id "a"."""
    ops = Ops(
        pa.array([b"u1"], pa.binary()),
        pa.array([0], pa.uint8()),
        fields={1: pa.array([b"Ada"], pa.binary())},
    )
    header = WalHeader(
        lsn=2,
        kind=WalKind.BATCHES,
        epoch=1,
        writer_id="w",
        write_id="b",
        created_at_ms=0,
        after=("a",),
        schema_id=1,
        batches=(BatchHeader(1),),
    )
    return WalObject.encode(header, (encode_ops(ops),))


def segment():
    """Two rows: u1 = Ada at LSN 2, and a tombstone of u2 at LSN 3; not compressed."""
    rows = Versions(
        pa.array([b"u1", b"u2"], pa.binary()),
        np.array([2, 3], np.int64),
        np.array([0, 0], np.uint32),
        np.array([0, 1], np.uint8),
        {1: pa.array([b"Ada", None], pa.binary())},
    )
    writer = SegmentWriter(DEFAULT_SCHEMA, 0, Lineage("s", 0), codec=Codec.NONE)
    return b"".join(writer.write([rows]))


def manifest():
    """The first generation of an empty namespace."""
    return encode_manifest(
        Manifest(generation=1, write_id="m", published_at_ms=0, recent=(Recent(1, "m", 0),))
    )


def dump(data):
    """Return a hex dump as the pages have it."""
    lines = []
    for offset in range(0, len(data), 16):
        row = data[offset : offset + 16]
        text = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in row)
        lines.append(f"{offset:04x}  {row.hex(' '):<47}  {text}")
    return "\n".join(lines)
