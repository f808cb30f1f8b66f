"""From a URL to a store that can be used.

./data, /var/data, file:///var/data    a directory
memory://, memory://name               this process's memory
s3://bucket/prefix?region=eu-west-1    a bucket; the query holds options too
az://container/prefix, gs://bucket/…   the same at Azure and Google
…?cas=sqlite:///reef.db                any of them, written with two-phase compare-and-swap
"""

import os
import re
from collections.abc import Iterable
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from reef.errors import InvalidInputError, Kind
from reef.runtime import REAL, Runtime
from reef.stores.base import Store, check_key
from reef.stores.local import LocalStore
from reef.stores.memory import open_memory
from reef.stores.two_phase import TwoPhase, open_register
from reef.stores.wrappers import (
    PROFILES,
    DiskCache,
    Faults,
    Latency,
    Meter,
    ReadBack,
    Retry,
    RetryPolicy,
    Rule,
    Throttle,
)
from reef.stores.wrappers.disk_cache import DISK_CACHE_BYTES
from reef.stores.wrappers.throttle import WAIT_MAX_S
from reef.telemetry import Metrics, RequestMeter

__all__ = ["open"]

BUCKETS = ("s3", "az", "gs")
FOR_ALL = (
    "cas",
    "disk_cache",
    "disk_cache_bytes",
    "faults",
    "latency",
    "meter",
    "metrics",
    "retry",
)
"""Options that every store takes."""
SCHEMES = ("a directory", "file://", "memory://", *(f"{scheme}://" for scheme in BUCKETS))


def open(
    url: str | os.PathLike[str],
    *,
    runtime: Runtime = REAL,
    retry: RetryPolicy | None = None,
    latency: str | None = None,
    faults: Iterable[Rule] | None = None,
    cas: str | None = None,
    meter: RequestMeter | None = None,
    metrics: Metrics | None = None,
    disk_cache: str | os.PathLike[str] | None = None,
    disk_cache_bytes: int | None = None,
    **options: Any,
) -> Store:
    """Open the store at `url`; a path is always that of a directory.

    `options` are the backend's own (`S3Options`, `AzureOptions`, `GcsOptions`); `latency` names
    a profile that delays every request; `faults` makes them fail by rule; `disk_cache` names a
    local directory that keeps what was read of segments; `cas` is the URL of a register, for
    stores without conditional writes (`reef.stores.two_phase`).
    """
    url, cas = _without_cas(_text(url), cas)
    store = _backend(url, runtime, options)
    if latency is not None:
        store = Latency(store, _profile(latency))
    if faults is not None:
        store = Faults(store, faults)
    store = Throttle(Meter(store, meter, metrics), wait_max_s=_patience_s(retry))
    store = Retry(store, retry)
    if cas is not None:
        store = TwoPhase(store, open_register(cas, store.url), retry)
    store = ReadBack(store, retry)
    return _cached(store, disk_cache, disk_cache_bytes, metrics)


def _text(url: str | os.PathLike[str]) -> str:
    """Return a URL or a path as text; `_split` says what is neither."""
    if not isinstance(url, os.PathLike):
        return url
    path = os.fspath(url)
    if isinstance(path, str) and re.match(r"[a-z]\w+:/", path):
        raise InvalidInputError(
            f"{path!r} is a path, which has lost a slash of the URL that it was made of",
            kind=Kind.INVALID_URL,
            hint="Give the URL as text",
        )
    return path


def _without_cas(url: str, cas: str | None) -> tuple[str, str | None]:
    """Take the register out of a URL's query; it may stand behind a plain path, too.

    It is a URL itself, so a plus in it is a plus: in a password, or in postgresql+psycopg://.
    """
    base, _, query = url.partition("?") if isinstance(url, str) else ("", "", "")
    words = query.split("&")
    given = [word.removeprefix("cas=") for word in words if word.startswith("cas=")]
    if not given:
        return url, cas
    if cas is not None or len(given) > 1:
        raise InvalidInputError("option 'cas' is given twice", kind=Kind.INVALID_OPTION)
    rest = "&".join(word for word in words if not word.startswith("cas="))
    return f"{base}?{rest}" if rest else base, unquote(given[0])


def _backend(url: str, runtime: Runtime, options: dict[str, Any]) -> Store:
    scheme, rest, query = _split(url)
    options = _joined(url, query, options)
    if scheme in BUCKETS:
        return _open_bucket(scheme, url, rest, options, runtime)
    if scheme == "memory":
        return open_memory(url, rest, runtime=runtime, page=_page(_only(scheme, options, "page")))
    if scheme == "file":
        _only(scheme, options)
        return _open_directory(url, rest, runtime)
    raise InvalidInputError(
        f"{_bare(url)!r} has the unknown scheme {scheme!r}",
        kind=Kind.INVALID_URL,
        hint=f"Reef opens {', '.join(SCHEMES)}",
    )


def _split(url: str) -> tuple[str, str, str]:
    """Return scheme, the rest, and the query. A path without a scheme is a directory."""
    if not isinstance(url, str) or not url:
        raise InvalidInputError(
            f"a store's URL is a non-empty text, or a path, got {url!r:.80}",
            kind=Kind.INVALID_URL,
            hint=f"Reef opens {', '.join(SCHEMES)}",
        )
    if "\0" in url:
        raise InvalidInputError(f"{_bare(url)!r} has a NUL character", kind=Kind.INVALID_URL)
    if "://" not in url:
        return "file", os.path.expanduser(url), ""
    try:
        parts = urlsplit(url, allow_fragments=False)
    except ValueError as error:  # of brackets that hold no address
        raise InvalidInputError(
            f"{_bare(url)!r} is not a URL: {error}", kind=Kind.INVALID_URL
        ) from None
    if parts.scheme == "file":
        if parts.netloc not in ("", "localhost"):
            raise InvalidInputError(
                f"{_bare(url)!r} names the host {parts.netloc!r}",
                kind=Kind.INVALID_URL,
                hint="A directory's URL has three slashes: file:///var/data",
            )
        return "file", unquote(parts.path), parts.query
    return parts.scheme, parts.netloc + parts.path, parts.query


def _joined(url: str, query: str, options: dict[str, Any]) -> dict[str, Any]:
    words = parse_qsl(query, keep_blank_values=True)
    names = [*(name for name, _ in words), *options]
    for name in names:
        if names.count(name) > 1:
            raise InvalidInputError(
                f"option {name!r} is given twice, in {_bare(url)!r} or as an argument",
                kind=Kind.INVALID_OPTION,
            )
    return {**dict(words), **options}


def _only(scheme: str, options: dict[str, Any], *known: str) -> dict[str, Any]:
    own = f": {', '.join(known)}" if known else " none of its own"
    for name in options:
        if name not in known:
            raise InvalidInputError(
                f"{scheme}:// has no option {name!r}",
                kind=Kind.INVALID_OPTION,
                hint=f"It takes{own}; all stores take {', '.join(FOR_ALL)}",
            )
    return options


def _bare(url: str) -> str:
    """Return a URL without its query, which may hold secrets, for messages."""
    return url.split("?", 1)[0]


def _page(options: dict[str, Any]) -> int:
    return _positive("page", options.get("page", 1000))


def _positive(name: str, value: object) -> int:
    """Return a number that may have come as text."""
    text = str(value)
    if not (text.isascii() and text.isdigit() and int(text) >= 1):
        raise InvalidInputError(
            f"option {name}={text!r} is not a positive number", kind=Kind.INVALID_OPTION
        )
    return int(text)


def _cached(store: Store, path: Any, bytes_max: Any, metrics: Metrics | None) -> Store:
    if path is None:
        if bytes_max is not None:
            raise InvalidInputError(
                "option 'disk_cache_bytes' is given without 'disk_cache'",
                kind=Kind.INVALID_OPTION,
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
        raise _bad_cache(path, "lies inside of the store, and would be taken for objects")
    return absolute


def _bad_cache(path: object, why: str) -> InvalidInputError:
    return InvalidInputError(f"option disk_cache={path!r} {why}", kind=Kind.INVALID_OPTION)


def _open_directory(url: str, path: str, runtime: Runtime) -> Store:
    try:
        return LocalStore(path, runtime=runtime)
    except NotADirectoryError as error:
        raise InvalidInputError(
            f"{_bare(url)} is a file, not a directory",
            kind=Kind.INVALID_URL,
            hint="Name a directory; it is made if it does not exist",
        ) from error
    except OSError as error:
        raise InvalidInputError(
            f"{_bare(url)[:200]} cannot be opened: {error.strerror}", kind=Kind.INVALID_URL
        ) from error


def _open_bucket(
    scheme: str, url: str, rest: str, options: dict[str, Any], runtime: Runtime
) -> Store:
    bucket, _, prefix = rest.partition("/")
    prefix = prefix.strip("/")
    if "@" in bucket:
        raise InvalidInputError(
            f"the bucket of {scheme}://…@{bucket.rsplit('@', 1)[1]} has credentials in front",
            kind=Kind.INVALID_URL,
            hint="Give them as options or in the environment",
        )
    if not bucket:
        raise InvalidInputError(
            f"{_bare(url)!r} names no bucket",
            kind=Kind.INVALID_URL,
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
        from reef.stores.azure_store import AzureOptions, AzureStore

        return AzureStore(bucket, prefix, AzureOptions.from_words(options), runtime=runtime)
    if scheme == "gs":
        from reef.stores.gcs_store import GcsOptions, GcsStore

        return GcsStore(bucket, prefix, GcsOptions.from_words(options), runtime=runtime)
    from reef.stores.s3_store import S3Options, S3Store

    return S3Store(bucket, prefix, S3Options.from_words(options), runtime=runtime)


def _patience_s(retry: RetryPolicy | None) -> float:
    """Return how long a throttled request may wait for its turn: within the deadline of all."""
    return min(WAIT_MAX_S, (retry or RetryPolicy()).deadline_s)


def _profile(name: str) -> Any:
    if name not in PROFILES:
        raise InvalidInputError(
            f"there is no latency profile {name!r}",
            kind=Kind.INVALID_OPTION,
            hint=f"There are: {', '.join(PROFILES)}",
        )
    return PROFILES[name]
