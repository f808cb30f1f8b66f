"""From the URL of a register to the register: the value of a store's option `cas`.

    sqlite:///reef.db, sqlite:////var/lib/reef.db   a file, relative or absolute
    postgresql://user:password@host/database        PostgreSQL, by SQLAlchemy (the extra `sql`)
    mysql://…, mariadb://…                          MySQL or MariaDB, likewise
    dynamodb://table?region=eu-west-1               DynamoDB, by boto3 (the extra `s3`)

All of them take `scope=`: under which name this bucket's records are kept, where its URL is not
the same for everyone. A URL may hold a password; no message, name or repr ever shows it.
"""

import os
from typing import Any
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

from reef.errors import InvalidInputError, Kind
from reef.stores.two_phase.register import RESERVED, Register
from reef.stores.two_phase.sqlite import SqliteRegister

__all__ = ["open_register"]

SCHEMES = ("sqlite:///path", "postgresql://…", "mysql://…", "dynamodb://table")
SQL = ("postgresql", "postgres", "mysql", "mariadb")


def open_register(url: Any, store_url: str) -> Register:
    """Return the register at `url` for the bucket at `store_url`. Nothing is asked of it yet."""
    if not isinstance(url, str) or "://" not in url:
        raise _bad("option 'cas' is not the URL of a register")
    try:
        parts = urlsplit(url, allow_fragments=False)
    except ValueError:  # which may show what is in it
        raise _bad("option 'cas' is not the URL of a register") from None
    words = parse_qsl(parts.query, keep_blank_values=True)
    query = [word for word in words if word[0] != "scope"]  # a host may be named more than once
    scope = dict(words).get("scope", store_url)
    if scope == RESERVED:
        raise _bad(f"the scope {RESERVED!r} is the register's own", "Choose another scope")
    kind = parts.scheme.partition("+")[0]
    if kind == "sqlite":
        return _open_sqlite(parts.netloc, unquote(parts.path), dict(query), scope, store_url)
    if kind in SQL:
        return _open_sql(parts._replace(query=urlencode(query)).geturl(), kind, scope)
    if kind == "dynamodb":
        return _open_dynamodb(parts.netloc + parts.path, dict(query), scope)
    raise _bad(f"option 'cas' has the unknown scheme {parts.scheme!r}")


def _open_sqlite(
    host: str, path: str, query: dict[str, str], scope: str, store_url: str
) -> Register:
    if host or len(path) < 2 or path == "/:memory:":  # nobody else would see that one
        raise _bad(
            "option 'cas' names no file", "Write sqlite:///reef.db, or sqlite:////var/reef.db"
        )
    if query:
        raise _bad(f"a register of sqlite:// has no option {min(query)!r}")
    absolute = os.path.abspath(path[1:])
    if f"file://{absolute}".startswith(f"{store_url}/"):
        raise _bad(
            f"the register {absolute} lies inside of the store, and would be taken for objects",
            "Put it beside the directory",
        )
    return SqliteRegister(absolute, scope)


def _open_sql(url: str, kind: str, scope: str) -> Register:
    try:
        from reef.stores.two_phase.sql import SqlRegister

        return SqlRegister(url, scope)
    except ImportError as error:
        raise _missing(kind, error.name or "SQLAlchemy", "sql") from error


def _open_dynamodb(table: str, query: dict[str, str], scope: str) -> Register:
    try:
        from reef.stores.two_phase.dynamodb import DynamoRegister
    except ImportError as error:
        raise _missing("dynamodb", error.name or "boto3", "s3") from error
    return DynamoRegister.of(table, query, scope)


def _missing(kind: str, package: str, extra: str) -> InvalidInputError:
    return _bad(
        f"a register of {kind}:// needs the package {package}",
        f"Install it with: pip install 'reef[{extra}]'",
    )


def _bad(message: str, hint: str = "") -> InvalidInputError:
    return InvalidInputError(
        message, kind=Kind.INVALID_OPTION, hint=hint or f"Registers are {', '.join(SCHEMES)}"
    )
