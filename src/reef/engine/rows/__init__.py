"""Rows in: what users give, checked whole, as the operations of one batch.

    data ── given ──▶ columns ── fit ──▶ arrays of the schema's types ──▶ Ops

Everything is checked before anything is written: names, keys, types, ranges, the length of
vectors. Columns are converted whole (`rows.arrow`), Python values by their few classes
(`rows.python`); an error names row and column. A key may come twice: the last one wins.

An upsert replaces the row: columns that it does not name are null. A patch changes what it
names, so it carries for each column and row whether it is touched, apart from null: a dict
touches what it has, a table touches all its columns in all rows.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa

from reef.engine.rows.fit import fit_column, fit_expiry, fit_keys
from reef.engine.rows.given import Given, read_given
from reef.engine.rows.out import EXPIRES_AT, to_python, to_record_batch, to_row, unknown_column
from reef.errors import InvalidInputError, Kind
from reef.formats.batch import OpKind, Ops
from reef.formats.schema import Schema

__all__ = ["EXPIRES_AT", "to_ops", "to_python", "to_record_batch", "to_row"]

EXPIRY_MS_MAX = 2**63 - 1


def to_ops(
    data: object, schema: Schema, *, kind: OpKind, ttl_s: float | None = None, now_ms: int = 0
) -> Ops:
    """Return rows in any form as puts or patches; InvalidInputError says what is wrong where.

    Rows expire at their `_expires_at` (a moment, UTC where it has no zone, or milliseconds
    since 1970; null: never), or all of them `ttl_s` after `now_ms`.
    """
    if kind not in (OpKind.PUT, OpKind.PATCH):
        raise InvalidInputError(f"rows are put or patched, got {kind!r}")
    given = read_given(data, schema.key.name)
    if not given.rows:
        raise InvalidInputError("a batch without operations")
    _check_names(given, schema)
    if kind is OpKind.PATCH:
        _check_patch(given, schema, ttl_s)
    named = [field for field in schema.fields if field.name in given.columns]
    return Ops(
        keys=fit_keys(given.columns[schema.key.name], schema.key),
        kinds=pa.array(np.full(given.rows, kind, np.uint8)),
        expires_at_ms=_expiry(given, ttl_s, now_ms),
        fields={field.number: fit_column(given.columns[field.name], field) for field in named},
        touched={field.number: _touched(given, field.name) for field in named}
        if kind is OpKind.PATCH
        else None,
    )


# --- names --------------------------------------------------------------------------


def _check_names(given: Given, schema: Schema) -> None:
    key = schema.key.name
    known = [key, *(field.name for field in schema.fields)]
    expected = {*known, EXPIRES_AT}
    for name in given.columns:
        if name not in expected:
            raise unknown_column(str(name), known, _row_with(given, name))
    if key not in given.columns:
        raise InvalidInputError(f"column {key}: the key column is missing", kind=Kind.INVALID_KEY)
    if given.dicts is not None:
        _check_keys_given(given.dicts, key)


def _check_keys_given(rows: Sequence[Mapping[str, object]], key: str) -> None:
    row = next((place for place, row in enumerate(rows) if row.get(key) is None), None)
    if row is not None:
        problem = "a key cannot be null" if key in rows[row] else "the key is missing"
        raise InvalidInputError(
            f"row {row}, column {key}: {problem}", kind=Kind.INVALID_KEY, row=row, column=key
        )


def _row_with(given: Given, name: object) -> str:
    if given.dicts is None:
        return ""
    return f"row {next(n for n, row in enumerate(given.dicts) if name in row)}, "


# --- patches ------------------------------------------------------------------------


def _check_patch(given: Given, schema: Schema, ttl_s: float | None) -> None:
    if ttl_s is not None or EXPIRES_AT in given.columns:
        raise InvalidInputError(
            f"a patch cannot change when a row expires ({EXPIRES_AT}, ttl_s)",
            hint="Use upsert, with the whole row",
        )
    key_only = 0 if given.columns.keys() == {schema.key.name} else None
    if given.dicts is not None:
        key_only = next((n for n, row in enumerate(given.dicts) if len(row) == 1), None)
    if key_only is not None:
        raise InvalidInputError(
            f"row {key_only}: a patch that names the key only, column {schema.key.name}",
            hint="Name the columns to change; None sets one to null",
            row=key_only,
            column=schema.key.name,
        )


def _touched(given: Given, name: str) -> pa.Array:
    if given.dicts is None:
        return pa.array(np.ones(given.rows, np.bool_))
    return pa.array([name in row for row in given.dicts], pa.bool_())


# --- expiry -------------------------------------------------------------------------


def _expiry(given: Given, ttl_s: float | None, now_ms: int) -> pa.Array | None:
    values = given.columns.get(EXPIRES_AT)
    if ttl_s is None:
        return None if values is None else fit_expiry(values, EXPIRES_AT)
    if values is not None:
        raise InvalidInputError(f"ttl_s and a column {EXPIRES_AT}: give one of them")
    return pa.array(np.full(given.rows, _expires_at_ms(ttl_s, now_ms), np.int64))


def _expires_at_ms(ttl_s: float, now_ms: int) -> int:
    if isinstance(ttl_s, bool) or not isinstance(ttl_s, int | float):
        raise InvalidInputError(f"ttl_s is a number of seconds, got {ttl_s!r}")
    if not 0 < ttl_s < (EXPIRY_MS_MAX - now_ms) / 1000:
        raise InvalidInputError(f"ttl_s={ttl_s}: a time to live is above 0 and below infinity")
    return now_ms + math.ceil(ttl_s * 1000)
