"""Opens stores and registers from their URLs.

    ./data, /var/data, file:///var/data    a directory
    memory://, memory://name               this process's memory
    s3://bucket/prefix?region=eu-west-1    a bucket; the query holds options too
    az://container/prefix, gs://bucket/…   the same at Azure and Google
    …?cas=sqlite:///reef.db                any of them, written with two-phase compare-and-swap

Registers, the value of the option `cas`:

    sqlite:///reef.db, sqlite:////var/lib/reef.db   a file, relative or absolute
    postgresql://user:password@host/database        PostgreSQL, by SQLAlchemy (the extra `sql`)
    mysql://…, mariadb://…                          MySQL or MariaDB, likewise
    dynamodb://table?region=eu-west-1               DynamoDB, by boto3 (the extra `s3`)

All registers take `scope=`, the name under which this bucket's records are kept, where its URL is
not the same for all processes. A URL may hold a password; no message, name or repr ever shows it.
"""

import os
import re
from typing import Any
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

from reef.config import bad_option
from reef.errors import ErrorKind, InvalidInputError
from reef.runtime import REAL, Runtime
from reef.stores.base import Store, check_key
from reef.stores.local import LocalStore
from reef.stores.memory import open_memory
from reef.stores.two_phase.register import RESERVED, Register, SqliteRegister
from reef.stores.two_phase.store import TwoPhase
from reef.stores.wrappers import (
    DiskCache,
    Meter,
    ReadBack,
    Retry,
    RetryPolicy,
    Throttle,
)
from reef.stores.wrappers.disk_cache import DISK_CACHE_BYTES
from reef.stores.wrappers.policies import WAIT_MAX_S
from reef.telemetry import Metrics, RequestMeter

BUCKETS = ("s3", "az", "gs")
FOR_ALL = (
    "cas",
    "disk_cache",
    "disk_cache_bytes",
    "meter",
    "metrics",
    "retry",
)
"""Options that every store takes."""
FOR_TESTS = ("faults", "latency")
"""Options of `reef.testing.open_store` only."""
SCHEMES = ("a directory", "file://", "memory://", *(f"{scheme}://" for scheme in BUCKETS))


def open(
    url: str | os.PathLike[str],
    *,
    runtime: Runtime = REAL,
    retry: RetryPolicy | None = None,
    cas: str | None = None,
    meter: RequestMeter | None = None,
    metrics: Metrics | None = None,
    disk_cache: str | os.PathLike[str] | None = None,
    disk_cache_bytes: int | None = None,
    **options: Any,
) -> Store:
    """Open the store at `url`; a path is always that of a directory.

    `options` are the backend's own (`S3Options`, `AzureOptions`, `GcsOptions`); `disk_cache` names
    a local directory that caches ranges of segments; `cas` is the URL of a register, for stores
    without conditional writes (`reef.stores.two_phase`).
    """
    backend, cas = open_backend(url, cas, runtime, options)
    return with_policies(
        backend,
        retry=retry,
        cas=cas,
        meter=meter,
        metrics=metrics,
        disk_cache=disk_cache,
        disk_cache_bytes=disk_cache_bytes,
    )


def open_backend(
    url: str | os.PathLike[str], cas: str | None, runtime: Runtime, options: dict[str, Any]
) -> tuple[Store, str | None]:
    """Return the bare store at `url`, and the register that the URL or the option names."""
    for name in FOR_TESTS:
        if name in options:
            raise InvalidInputError(
                f"option {name!r} is for tests",
                kind=ErrorKind.INVALID_OPTION,
                hint="Use reef.testing.open_store",
            )
    text, cas = _without_cas(_text(url), cas)
    return _backend(text, runtime, options), cas


def with_policies(
    backend: Store,
    *,
    retry: RetryPolicy | None = None,
    cas: str | None = None,
    meter: RequestMeter | None = None,
    metrics: Metrics | None = None,
    disk_cache: str | os.PathLike[str] | None = None,
    disk_cache_bytes: int | None = None,
) -> Store:
    """Return a bare store with the policies of `open`: metered, throttled, retried, read back."""
    store: Store = Throttle(Meter(backend, meter, metrics), wait_max_s=_wait_max_s(retry))
    store = Retry(store, retry)
    if cas is not None:
        store = TwoPhase(store, open_register(cas, store.url), retry)
    store = ReadBack(store, retry)
    return _add_disk_cache(store, disk_cache, disk_cache_bytes, metrics)


def _text(url: str | os.PathLike[str]) -> str:
    """Return a URL or a path as text; `_split` rejects other values."""
    if not isinstance(url, os.PathLike):
        if isinstance(url, str):
            _check_encodes(url)
        return url
    path = os.fspath(url)
    if isinstance(path, str) and re.match(r"[a-z]\w+:/", path):
        raise InvalidInputError(
            f"{path!r} is a path, and has lost a slash of the URL that it was made from",
            kind=ErrorKind.INVALID_URL,
            hint="Give the URL as text",
        )
    return path


def _check_encodes(url: str) -> None:
    """Raise InvalidInputError for text that can be neither a URL nor a path: it is no Unicode."""
    try:
        os.fsencode(url)
    except UnicodeEncodeError as error:
        raise InvalidInputError(
            f"{url!r} cannot be encoded: {error}", kind=ErrorKind.INVALID_URL
        ) from error


def _without_cas(url: str, cas: str | None) -> tuple[str, str | None]:
    """Take the register out of a URL's query; a plain path may have one, too.

    It is a URL itself, so a plus in it is a plus: in a password, or in postgresql+psycopg://.
    """
    base, _, query = url.partition("?") if isinstance(url, str) else ("", "", "")
    terms = query.split("&")
    given = [term.removeprefix("cas=") for term in terms if term.startswith("cas=")]
    if not given:
        return url, cas
    if cas is not None or len(given) > 1:
        raise InvalidInputError("option 'cas' is given twice", kind=ErrorKind.INVALID_OPTION)
    rest = "&".join(term for term in terms if not term.startswith("cas="))
    return f"{base}?{rest}" if rest else base, unquote(given[0])


def _backend(url: str, runtime: Runtime, options: dict[str, Any]) -> Store:
    scheme, rest, query = _split(url)
    options = _merge_options(url, query, options)
    if scheme in BUCKETS:
        return _open_bucket(scheme, url, rest, options, runtime)
    if scheme == "memory":
        return open_memory(url, rest, runtime=runtime, page=_page(_only(scheme, options, "page")))
    if scheme == "file":
        _only(scheme, options)
        return _open_directory(url, rest, runtime)
    raise InvalidInputError(
        f"{_strip_query(url)!r} has the unknown scheme {scheme!r}",
        kind=ErrorKind.INVALID_URL,
        hint=f"Reef opens {', '.join(SCHEMES)}",
    )


def _split(url: str) -> tuple[str, str, str]:
    """Return scheme, the rest, and the query. A path without a scheme is a directory."""
    if not isinstance(url, str) or not url:
        raise InvalidInputError(
            f"a store's URL is a non-empty text, or a path, got {url!r:.80}",
            kind=ErrorKind.INVALID_URL,
            hint=f"Reef opens {', '.join(SCHEMES)}",
        )
    if "\0" in url:
        raise InvalidInputError(
            f"{_strip_query(url)!r} has a NUL character", kind=ErrorKind.INVALID_URL
        )
    if "://" not in url:
        return "file", os.path.expanduser(url), ""
    try:
        parts = urlsplit(url, allow_fragments=False)
    except ValueError as error:  # of brackets that hold no address
        raise InvalidInputError(
            f"{_strip_query(url)!r} is not a URL: {error}", kind=ErrorKind.INVALID_URL
        ) from None
    if parts.scheme == "file":
        if parts.netloc not in ("", "localhost"):
            raise InvalidInputError(
                f"{_strip_query(url)!r} names the host {parts.netloc!r}",
                kind=ErrorKind.INVALID_URL,
                hint="A directory's URL has three slashes: file:///var/data",
            )
        return "file", unquote(parts.path), parts.query
    return parts.scheme, parts.netloc + parts.path, parts.query


def _merge_options(url: str, query: str, options: dict[str, Any]) -> dict[str, Any]:
    terms = parse_qsl(query, keep_blank_values=True)
    names = [*(name for name, _ in terms), *options]
    for name in names:
        if names.count(name) > 1:
            raise InvalidInputError(
                f"option {name!r} is given twice, in {_strip_query(url)!r} or as an argument",
                kind=ErrorKind.INVALID_OPTION,
            )
    return {**dict(terms), **options}


def _only(scheme: str, options: dict[str, Any], *known: str) -> dict[str, Any]:
    own = f": {', '.join(known)}" if known else " none of its own"
    for name in options:
        if name not in known:
            raise InvalidInputError(
                f"{scheme}:// has no option {name!r}",
                kind=ErrorKind.INVALID_OPTION,
                hint=f"It takes{own}; all stores take {', '.join(FOR_ALL)}",
            )
    return options


def _strip_query(url: str) -> str:
    """Return a URL without its query, which may hold secrets, for messages."""
    return url.split("?", 1)[0]


def _page(options: dict[str, Any]) -> int:
    return _positive("page", options.get("page", 1000))


def _positive(name: str, value: object) -> int:
    """Return a number that may have come as text."""
    text = str(value)
    if not (text.isascii() and text.isdigit() and int(text) >= 1):
        raise bad_option(name, text, "a positive number")
    return int(text)


def _add_disk_cache(store: Store, path: Any, bytes_max: Any, metrics: Metrics | None) -> Store:
    if path is None:
        if bytes_max is not None:
            raise InvalidInputError(
                "option 'disk_cache_bytes' is given without 'disk_cache'",
                kind=ErrorKind.INVALID_OPTION,
                hint="disk_cache names the directory",
            )
        return store
    size = DISK_CACHE_BYTES if bytes_max is None else _positive("disk_cache_bytes", bytes_max)
    return DiskCache(store, _cache_path(store, path), size, metrics=metrics)


def _cache_path(store: Store, path: Any) -> str:
    """Return an absolute path that can be a directory, outside of the bucket itself."""
    text = os.fspath(path) if isinstance(path, os.PathLike) else path
    if not isinstance(text, str) or not text or "\0" in text:
        raise _bad_cache(path, "is not a path")
    absolute = os.path.abspath(os.path.expanduser(text))
    if os.path.exists(absolute) and not os.path.isdir(absolute):
        raise _bad_cache(path, "is a file, not a directory")
    if f"file://{absolute}/".startswith(f"{store.url}/"):
        raise _bad_cache(path, "is inside the store, where its files would be objects")
    return absolute


def _bad_cache(path: object, why: str) -> InvalidInputError:
    return InvalidInputError(f"option disk_cache={path!r} {why}", kind=ErrorKind.INVALID_OPTION)


def _open_directory(url: str, path: str, runtime: Runtime) -> Store:
    try:
        return LocalStore(path, runtime=runtime)
    except NotADirectoryError as error:
        raise InvalidInputError(
            f"{_strip_query(url)} is a file, not a directory",
            kind=ErrorKind.INVALID_URL,
            hint="Name a directory; it is made if it does not exist",
        ) from error
    except OSError as error:
        raise InvalidInputError(
            f"{_strip_query(url)[:200]} cannot be opened: {error.strerror}",
            kind=ErrorKind.INVALID_URL,
        ) from error


def _open_bucket(
    scheme: str, url: str, rest: str, options: dict[str, Any], runtime: Runtime
) -> Store:
    bucket, _, prefix = rest.partition("/")
    prefix = prefix.strip("/")
    if "@" in bucket:
        raise InvalidInputError(
            f"the bucket of {scheme}://…@{bucket.rsplit('@', 1)[1]} has credentials in front",
            kind=ErrorKind.INVALID_URL,
            hint="Give them as options or in the environment",
        )
    if not bucket:
        raise InvalidInputError(
            f"{_strip_query(url)!r} names no bucket",
            kind=ErrorKind.INVALID_URL,
            hint=f"Write {scheme}://bucket/prefix",
        )
    if prefix:
        check_key(prefix)
    return _bucket(scheme, bucket, prefix, options, runtime)


def _bucket(
    scheme: str, bucket: str, prefix: str, options: dict[str, Any], runtime: Runtime
) -> Store:
    """Loaded on demand: a process that uses only directories starts no native threads."""
    if scheme == "az":
        from reef.stores.azure import AzureOptions, AzureStore

        return AzureStore(bucket, prefix, AzureOptions.parse(options), runtime=runtime)
    if scheme == "gs":
        from reef.stores.gcs import GcsOptions, GcsStore

        return GcsStore(bucket, prefix, GcsOptions.parse(options), runtime=runtime)
    from reef.stores.s3 import S3Options, S3Store

    return S3Store(bucket, prefix, S3Options.parse(options), runtime=runtime)


def _wait_max_s(retry: RetryPolicy | None) -> float:
    """Return how long a throttled request may wait for its turn: within the overall deadline."""
    return min(WAIT_MAX_S, (retry or RetryPolicy()).deadline_s)


# --- registers --------------------------------------------------------------------


REGISTERS = ("sqlite:///path", "postgresql://…", "mysql://…", "dynamodb://table")
SQL = ("postgresql", "postgres", "mysql", "mariadb")


def open_register(url: Any, store_url: str) -> Register:
    """Return the register at `url` for the bucket at `store_url`. It is not connected yet."""
    if not isinstance(url, str) or "://" not in url:
        raise _bad("option 'cas' is not the URL of a register")
    try:
        parts = urlsplit(url, allow_fragments=False)
    except ValueError:  # its text may show the password
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
    if host or len(path) < 2 or path == "/:memory:":  # no other process would see that one
        raise _bad(
            "option 'cas' names no file", "Write sqlite:///reef.db, or sqlite:////var/reef.db"
        )
    if query:
        raise _bad(f"a register of sqlite:// has no option {min(query)!r}")
    absolute = os.path.abspath(path[1:])
    if f"file://{absolute}".startswith(f"{store_url}/"):
        raise _bad(
            f"the register {absolute} is inside the store, where its files would be objects",
            "Put it next to the directory",
        )
    return SqliteRegister(absolute, scope)


def _open_sql(url: str, kind: str, scope: str) -> Register:
    try:
        from reef.stores.two_phase.sql import SqlRegister

        return SqlRegister(url, scope)
    except ImportError as error:
        raise _missing_package_error(kind, error.name or "SQLAlchemy", "sql") from error


def _open_dynamodb(table: str, query: dict[str, str], scope: str) -> Register:
    try:
        from reef.stores.two_phase.dynamodb import DynamoRegister
    except ImportError as error:
        raise _missing_package_error("dynamodb", error.name or "boto3", "s3") from error
    return DynamoRegister.of(table, query, scope)


def _missing_package_error(kind: str, package: str, extra: str) -> InvalidInputError:
    return _bad(
        f"a register of {kind}:// needs the package {package}",
        f"Install it with: pip install 'reef[{extra}]'",
    )


def _bad(message: str, hint: str = "") -> InvalidInputError:
    return InvalidInputError(
        message, kind=ErrorKind.INVALID_OPTION, hint=hint or f"Registers are {', '.join(REGISTERS)}"
    )
