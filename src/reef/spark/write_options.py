"""Options of a write: text in, checked values out, as for a read.

op               put (default), patch or delete: what rows do, unless a column _op says so
idempotencyKey   a write with a key that was committed before changes nothing
orderColumn      the column that decides between rows of one key: the highest counts
duplicates       refuse or order: the same in words; without an order column they are refused
key              the key column of a namespace that is yet to be made
vectors          its vector columns: embedding=384,other=16
segmentBytes     about how large segments get
sortBytes        what a task holds in memory before it sorts on disk
leaseSeconds     how long the job lives without any of its tasks
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from reef.config import IngestSettings
from reef.engine.batch import check_idempotency_key
from reef.errors import InvalidInputError, Kind
from reef.spark.options import Place, known_options
from reef.spark.rows import OP, OPS
from reef.spark.sorting import SORT_BYTES

__all__ = ["LEASE_S", "WriteOptions", "check_duplicates", "check_replacing"]

WRITING = (
    "op",
    "idempotencyKey",
    "duplicates",
    "orderColumn",
    "key",
    "vectors",
    "segmentBytes",
    "sortBytes",
    "leaseSeconds",
)
LEASE_S = 3600.0
"""Tasks renew it: it only has to outlast the time until the first and after the last."""


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """What a write is asked for."""

    place: Place
    op: str = "put"
    idempotency_key: str | None = None
    order_column: str | None = None
    key: str | None = None
    vectors: Mapping[str, int] = field(default_factory=dict)
    sort_bytes: int = SORT_BYTES
    settings: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, options: Mapping[str, str]) -> "WriteOptions":
        """Return what these options say; InvalidInputError names a wrong one."""
        place = Place.of(options)
        given = known_options(options, WRITING, "write")
        op = given.get("op", "put").lower()
        if op not in OPS:
            raise _bad(f"the option op={op!r} is not one of {', '.join(OPS)}")
        order = given.get("orderColumn")
        check_duplicates(given.get("duplicates"), order)
        check_idempotency_key(given.get("idempotencyKey"))
        settings = {
            "segment_bytes": _number(given, "segmentBytes", IngestSettings().segment_bytes),
            "lease_ttl_s": float(_number(given, "leaseSeconds", int(LEASE_S))),
        }
        IngestSettings().changed(settings)
        return cls(
            place,
            op,
            given.get("idempotencyKey"),
            order,
            given.get("key"),
            _vectors(given.get("vectors", "")),
            _number(given, "sortBytes", SORT_BYTES),
            settings,
        )


def check_duplicates(duplicates: str | None, order_column: str | None) -> None:
    """Raise unless it is clear what happens to rows of one key; an order column alone says it."""
    if duplicates is None:
        return
    wanted = str(duplicates).lower()
    if wanted not in ("refuse", "order"):
        raise _bad(f"duplicates={duplicates!r} is not 'refuse' or 'order'")
    if (wanted == "order") != (order_column is not None):
        raise _bad(
            "duplicates='order' and an order column go together",
            "The highest value of the order column decides which row of a key counts",
        )


def check_replacing(op: str, columns: Collection[str]) -> None:
    """Raise unless rows that replace everything are what is there afterwards."""
    if op != "put" or OP in columns:
        raise _bad(
            "an overwrite leaves exactly the rows of the DataFrame: it has puts only",
            'Use mode("append"), or no replace, for patches and deletes',
        )


def _number(given: Mapping[str, str], name: str, default: int) -> int:
    text = given.get(name, str(default))
    if not (text.isascii() and text.isdigit() and int(text) >= 1):
        raise _bad(f"the option {name}={text!r} is not a number from 1 on")
    return int(text)


def _vectors(text: str) -> dict[str, int]:
    found = {}
    for word in filter(None, (word.strip() for word in text.split(","))):
        name, _, size = word.rpartition("=")
        if not (name and size.isascii() and size.isdigit() and int(size) >= 1):
            raise _bad(f"the option vectors={text!r} is not such as embedding=384")
        found[name.strip()] = int(size)
    return found


def _bad(message: str, hint: str = "") -> InvalidInputError:
    return InvalidInputError(message, kind=Kind.INVALID_OPTION, hint=hint)
