"""Buckets over the network, through obstore; the only module that imports it.

The client's own retries are off: a retried conditional write that finds its own object
would report a loss (H1). Retrying is the business of the wrappers. Only `upload` has a
client that sends again: it alone cannot be repeated from outside, since its source is
read once, and what it writes has a name of its own.

obstore runs on a native thread pool that a forked child does not inherit: every call
there would hang (H51). A child that notices a new process id loads a private copy of the
native library, which has a pool of its own. See docs/adr/0003.
"""

import importlib.machinery
import importlib.util
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import obstore
import obstore.store

from reef import paths
from reef.errors import InvalidInputError, Kind, NotFoundError, ReefError, UnavailableError
from reef.runtime import REAL, Runtime, leaf_lock
from reef.stores.base import (
    Capabilities,
    ObjectInfo,
    Outcome,
    Store,
    Tagged,
    WriteResult,
    check_key,
    check_prefix,
    check_range,
    past_the_end,
)
from reef.stores.listing import Listing, start_of
from reef.stores.remote_errors import is_conflict, never_sent, translate
from reef.stores.s3_options import S3Options
from reef.stores.s3_uploads import Source, abort_stale_uploads

__all__ = ["S3Store"]

LIST_PAGE = 1000
DELETE_PAGE = 1000
UPLOAD_RETRIES_MAX = 5
UPLOAD_BACKOFF = {
    "init_backoff": timedelta(milliseconds=50),
    "max_backoff": timedelta(seconds=2),
    "base": 2,
}


@dataclass(frozen=True, slots=True)
class _Clients:
    """Two clients of one bucket, and the library and process they belong to."""

    once: Any
    """Sends every request once."""
    again: Any
    """Sends again what failed; for uploads."""
    native: Any
    process_id: int


class S3Store(Store):
    """A bucket of AWS S3, or of anything that speaks its protocol."""

    def __init__(
        self, bucket: str, prefix: str, options: S3Options, *, runtime: Runtime = REAL
    ) -> None:
        self.bucket, self.prefix, self.options = bucket, prefix, options
        self.url = f"s3://{bucket}/{prefix}".rstrip("/")
        self.runtime = runtime
        self.capabilities = Capabilities(
            if_match=options.if_match != "none",
            clock_resolution_s=1.0,
            list_page=LIST_PAGE,
            delete_page=DELETE_PAGE if options.bulk_delete else 1,
            part_bytes=options.part_bytes,
            abort_stale=importlib.util.find_spec("boto3") is not None,
            now_requests=("put", "head"),
            abort_stale_requests=("put", "head", "list"),
        )
        self._attributes = {"Storage-Class": options.storage_class} if options.storage_class else {}
        self._clients: _Clients | None = None
        self._setup = leaf_lock()
        self._connect()  # wrong options are told here, not at the first call

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, (self.bucket, self.prefix, self.options, self.runtime)

    # --- read ---------------------------------------------------------------------
    def get_tagged(self, key: str) -> Tagged:
        with self._asking(key) as clients:
            result = clients.native.get(clients.once, check_key(key))
            meta, body = result.meta, bytes(result.bytes())
        if len(body) != meta["size"]:
            raise _short(key, len(body), meta["size"])
        return Tagged(body, _info(meta).tag)

    def get_range(self, key: str, start: int, end: int) -> bytes:
        check_range(key, start, end)
        with self._asking(key) as clients:
            options = {"range": (start, end)}
            result = clients.native.get(clients.once, check_key(key), options=options)
            size, body = result.meta["size"], bytes(result.bytes())
        if end > size:
            raise past_the_end(key, end, size)
        if len(body) != end - start:
            raise _short(key, len(body), end - start)
        return body

    def head(self, key: str) -> ObjectInfo:
        with self._asking(key) as clients:
            return _info(clients.native.head(clients.once, check_key(key)))

    def list(self, prefix: str = "", start_after: str = "") -> Listing:
        check_prefix(prefix)
        folder = prefix[: prefix.rfind("/") + 1]
        are_sorted = self.options.sorts_listings
        offset = start_of(prefix, start_after) if are_sorted else None
        return Listing(
            lambda: self._list_pages(folder, offset), prefix, start_after, are_sorted=are_sorted
        )

    def _list_pages(self, folder: str, offset: str | None) -> Iterator[Sequence[ObjectInfo]]:
        with self._asking(folder) as clients:
            pages = clients.native.list(
                clients.once, folder.rstrip("/") or None, offset=offset, chunk_size=LIST_PAGE
            )
            for page in pages:
                yield [_info(meta) for meta in page]

    # --- write --------------------------------------------------------------------
    def put(self, key: str, body: bytes) -> str | None:
        with self._asking(key) as clients:
            return self._put(clients.once, clients.native, key, body, "overwrite")

    def create(self, key: str, body: bytes) -> WriteResult:
        return self._conditional(key, body, "create", Outcome.CREATED, Outcome.EXISTS)

    def replace(self, key: str, body: bytes, tag: str) -> WriteResult:
        if not self.capabilities.if_match:
            raise InvalidInputError(
                f"{self.url} was opened without If-Match",
                kind=Kind.UNSUPPORTED_BY_STORE,
                object=key,
            )
        sent = tag.strip('"') if self.options.if_match == "bare" else tag
        return self._conditional(key, body, {"e_tag": sent}, Outcome.REPLACED, Outcome.CHANGED)

    def _conditional(
        self, key: str, body: bytes, mode: Any, landed: Outcome, lost: Outcome
    ) -> WriteResult:
        """Errors mean that nothing was written; what may have been is an unknown outcome."""
        clients = self._connect()
        try:
            return WriteResult(landed, self._put(clients.once, clients.native, key, body, mode))
        except ReefError:
            raise
        except Exception as error:
            translated = translate(error, self.url, key)
            if translated.kind is Kind.BUCKET_MISSING:
                raise translated from error
            gone = lost is Outcome.CHANGED and isinstance(translated, NotFoundError)
            if gone or is_conflict(error):
                return WriteResult(lost)
            if isinstance(translated, UnavailableError) and not never_sent(error):
                return WriteResult(Outcome.UNKNOWN, cause=translated)
            raise translated from error

    def _put(self, client: Any, native: Any, key: str, body: bytes, mode: Any) -> str | None:
        result = native.put(
            client,
            check_key(key),
            body,
            attributes=self._attributes,
            mode=mode,
            use_multipart=False,  # a condition is judged at once, and by one request (H3)
        )
        tag: str | None = result["e_tag"]
        return tag

    def upload(self, key: str, parts: Iterable[bytes]) -> int:
        """One PUT if it all fits a part, else a multipart upload of equal parts."""
        source = Source(parts, self.options.part_bytes, self.runtime)
        try:
            with self._asking(key) as clients:
                self._upload(clients, key, source)
        except ReefError:
            source.raise_own_error()  # it came back as if the store had failed
            raise
        return source.bytes

    def _upload(self, clients: _Clients, key: str, source: Source) -> None:
        if source.fits_one_part:
            self._put(clients.again, clients.native, key, source.whole(), "overwrite")
            return
        clients.native.put(
            clients.again,
            check_key(key),
            source.pieces(),
            attributes=self._attributes,
            use_multipart=True,
            chunk_size=self.options.part_bytes,
            max_concurrency=self.options.upload_concurrency,
        )

    def copy(self, source: str, target: str) -> None:
        with self._asking(source) as clients:
            clients.native.copy(clients.once, check_key(source), check_key(target))

    def delete_many(self, keys: Sequence[str]) -> None:
        checked = [check_key(key) for key in keys]
        page = self.capabilities.delete_page
        delete = self._delete_page if self.options.bulk_delete else self._delete_singly
        self.runtime.gather(
            [lambda at=at: delete(checked[at : at + page]) for at in range(0, len(checked), page)]  # type: ignore[misc]
        )

    def _delete_page(self, keys: Sequence[str]) -> None:
        """The client tells of one error only: "not there" may hide others behind it."""
        try:
            with self._asking(keys[0]) as clients:
                clients.native.delete(clients.once, list(keys))
        except NotFoundError:
            self._delete_singly(keys)

    def _delete_singly(self, keys: Sequence[str]) -> None:
        for key in keys:
            with suppress(NotFoundError), self._asking(key) as clients:
                clients.native.delete(clients.once, key)

    # --- housekeeping -------------------------------------------------------------
    def now(self) -> float:
        """The date of an object written this moment; S3 has no other clock."""
        self.put(paths.clock(), self.runtime.ulid().encode())
        return self.head(paths.clock()).last_modified_s

    def abort_stale(self, older_than_s: float) -> int:
        before_s = self.now() - older_than_s
        return abort_stale_uploads(self.url, self.bucket, self.prefix, self.options, before_s)

    # --- the client ---------------------------------------------------------------
    @contextmanager
    def _asking(self, key: str) -> Iterator[_Clients]:
        """Yield the clients; turn their errors into Reef's own."""
        clients = self._connect()
        try:
            yield clients
        except ReefError:
            raise
        except Exception as error:
            raise translate(error, self.url, key) from error

    def _connect(self) -> _Clients:
        native = _native.for_process(REAL.process_id())
        clients = self._clients
        if clients is None or clients.process_id != native.process_id:
            with self._setup:
                clients = self._clients  # another thread may have been quicker
                if clients is None or clients.process_id != native.process_id:
                    if clients is not None:
                        _abandoned.append(clients)
                    clients = self._clients = self._new_clients(native)
        return clients

    def _new_clients(self, native: "_Native") -> _Clients:
        again = {
            "max_retries": UPLOAD_RETRIES_MAX,
            "retry_timeout": timedelta(seconds=self.options.timeout_s),
            "backoff": UPLOAD_BACKOFF,
        }
        return _Clients(
            self._new_client(native.store_class, {"max_retries": 0}),
            self._new_client(native.store_class, again),
            native.module,
            native.process_id,
        )

    def _new_client(self, store_class: Any, retry_config: dict[str, Any]) -> Any:
        try:
            return store_class(
                self.bucket,
                prefix=self.prefix or None,
                client_options=self.options.client_config(),
                retry_config=retry_config,
                **self.options.store_config(),
            )
        except Exception as error:
            raise InvalidInputError(
                f"{self.url} cannot be opened: {error}", kind=Kind.INVALID_OPTION
            ) from error


_abandoned: list[Any] = []
"""Clients from before a fork: never used again, and never freed, since freeing would hang."""


class _Native:
    """The native library, in a copy whose threads belong to this process."""

    def __init__(self) -> None:
        self._lock = leaf_lock()
        self.module: Any = obstore
        self.store_class: Any = obstore.store.S3Store
        self.process_id = -1

    def for_process(self, process_id: int) -> "_Native":
        if self.process_id != process_id:
            with self._lock:
                if self.process_id not in (-1, process_id):
                    self.module = _load_private_copy()
                    self.store_class = self.module._store.S3Store
                self.process_id = process_id
        return self


def _load_private_copy() -> Any:
    """The loader knows a library by its file: a copy of the file is another library."""
    original = obstore._obstore.__file__
    folder = tempfile.mkdtemp(prefix="reef-obstore-")
    try:
        path = shutil.copy(original, os.path.join(folder, os.path.basename(original)))
        name = "reef_forked._obstore"
        loader = importlib.machinery.ExtensionFileLoader(name, path)
        spec = importlib.util.spec_from_file_location(name, path, loader=loader)
        assert spec is not None
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
        return module
    finally:
        shutil.rmtree(folder, ignore_errors=True)


_native = _Native()


def _reopen(bucket: str, prefix: str, options: S3Options, runtime: Runtime) -> S3Store:
    return S3Store(bucket, prefix, options, runtime=runtime)


def _info(meta: Any) -> ObjectInfo:
    """A 204, or a portal's login page, comes without a tag; an object never does."""
    if meta["e_tag"] is None:
        raise UnavailableError(
            f"object {meta['path']}: what answered is not an S3 service, it sent no ETag",
            object=meta["path"],
        )
    return ObjectInfo(meta["path"], meta["size"], meta["e_tag"], meta["last_modified"].timestamp())


def _short(key: str, found: int, expected: int) -> UnavailableError:
    return UnavailableError(
        f"object {key}: {found} of {expected} bytes came",
        kind=Kind.SHORT_READ,
        object=key,
    )
