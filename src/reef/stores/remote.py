"""Buckets over the network, through obstore.

`RemoteStore` is the common part of S3, Azure and GCS; each has a module for its own tags, listing
costs and composition.

The client's own retries are off: a retried conditional write that finds its own object would report
a loss (H1). Retrying is left to the policies. Only `upload` has a client that sends again: it
cannot be repeated from outside, since its source is read once, and its name is used once.

obstore runs on a native thread pool that a forked child does not inherit: every call there would
hang (H51). A child that notices a new process id loads a private copy of the native library, which
has a pool of its own (docs/adr/0003). Clients belong to the process, and to the copy of the library
that they were made with. This is the only module that imports obstore.
"""

import importlib.machinery
import importlib.util
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import copy_context
from dataclasses import dataclass
from datetime import timedelta
from itertools import chain
from typing import Any, ClassVar

import obstore
import obstore.store

from reef import paths
from reef.errors import ErrorKind, InvalidInputError, NotFoundError, ReefError, UnavailableError
from reef.runtime import REAL, Pool, Runtime, leaf_lock
from reef.stores.base import (
    Capabilities,
    Listing,
    ObjectInfo,
    Outcome,
    Part,
    Store,
    Tagged,
    WriteResult,
    check_key,
    check_prefix,
    check_range,
    past_the_end,
    short_read,
)
from reef.stores.remote_http import RemoteOptions, is_conflict, never_sent, read_requests, translate

# --- the native library -------------------------------------------------------------


abandoned: list[Any] = []
"""Clients from before a fork: never used again, and never freed, since freeing would hang."""


class Native:
    """The native library, in a copy whose threads belong to this process."""

    def __init__(self) -> None:
        self._lock = leaf_lock()
        self.module: Any = obstore
        self._classes: Any = obstore.store
        self.process_id = -1

    def client(self, name: str) -> Any:
        return getattr(self._classes, name)

    def for_process(self, process_id: int) -> "Native":
        """Return the library in a copy that this process can use."""
        if self.process_id != process_id:
            with self._lock:
                if self.process_id not in (-1, process_id):
                    self.module = _load_private_copy()
                    self._classes = self.module._store
                self.process_id = process_id
        return self


def _load_private_copy() -> Any:
    """Load a copy of the file: the loader identifies a library by its path."""
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


NATIVE = Native()


# --- uploads --------------------------------------------------------------------------


class _UploadSource:
    """The parts of an upload: regrouped into equal pieces, counted, their own errors kept apart.

    The client pulls pieces on a thread of its own, from which no other request can be sent; and
    the iterator behind them may need to read from the store. So it runs on a helper thread.
    """

    def __init__(self, parts: Iterable[bytes], part_bytes: int, runtime: Runtime) -> None:
        self._runtime = runtime
        self._context = copy_context()  # the helper's requests count for the caller's operation
        self._pieces = _regroup(parts, part_bytes)
        self._error: BaseException | None = None
        self._first = next(self._pieces)
        self._second = next(self._pieces, None)
        self.fits_one_part = self._second is None
        self.bytes = 0

    def whole(self) -> bytes:
        self.bytes = len(self._first)
        return self._first

    def pieces(self) -> Iterator[bytes]:
        helper = self._runtime.pool(1, name="upload")
        try:
            for piece in chain([self._first, self._second or b""], self._made_by(helper)):
                self.bytes += len(piece)
                yield piece
        except Exception as error:
            self._error = error
            raise
        finally:
            helper.close()

    def _made_by(self, helper: Pool) -> Iterator[bytes]:
        while True:
            made = helper.submit(lambda: self._context.run(next, self._pieces, None)).result()
            if made is None:
                return
            yield made

    def raise_own_error(self) -> None:
        if self._error is not None:
            raise self._error


def _regroup(parts: Iterable[bytes], size: int) -> Iterator[bytes]:
    """Yield pieces of exactly `size` bytes, but for the last; at least one."""
    pending = bytearray()
    for part in parts:
        pending += part
        while len(pending) > size:
            yield bytes(pending[:size])
            del pending[:size]
    yield bytes(pending)


# --- where a listing starts ---------------------------------------------------------


HIGHEST = "\U0010ffff"
LOWEST_IN_KEYS = " "


def start_of(prefix: str, start_after: str) -> str | None:
    """Return the largest offset that skips no key of the listing, or None.

    >>> start_of("wal/01", "")[:-1], start_of("wal/01", "wal/015"), start_of("wal/", "")
    ('wal/00', 'wal/015', None)
    """
    offsets = [_below(prefix)]
    if _is_key(start_after):
        offsets.append(start_after)
    return max(offsets) or None


def _below(prefix: str) -> str:
    """Return a text that sorts below all keys with this prefix, and above the others'.

    The client sends it as a path: it must not begin with a slash or hold two in a row,
    and control characters do not survive the XML of the response.
    """
    if not prefix or prefix.endswith("/"):
        return ""  # a folder is where the client begins anyway
    head, last = prefix[:-1], prefix[-1]
    if last == LOWEST_IN_KEYS:
        return head.rstrip("/")
    before = chr(ord(last) - 1)
    if before == "/" and (not head or head.endswith("/")):
        before = "."
    return head + before + HIGHEST


def _is_key(text: str) -> bool:
    try:
        check_key(text)
    except InvalidInputError:
        return False
    return True


# --- the store ----------------------------------------------------------------------


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
    """Retries failed requests; for uploads."""
    native: Any
    process_id: int


class RemoteStore(Store):
    """A bucket of a service that obstore has a client for."""

    client_class: ClassVar[str]
    """obstore's name for the client."""
    skips_in_listings: ClassVar[bool] = True
    """Whether the service starts a listing at a given key."""

    def __init__(
        self,
        bucket: str,
        prefix: str,
        options: RemoteOptions,
        capabilities: Capabilities,
        runtime: Runtime,
    ) -> None:
        self.bucket, self.prefix = bucket, prefix
        self.url = f"{options.scheme}://{bucket}/{prefix}".rstrip("/")
        self.runtime = runtime
        self.capabilities = capabilities
        self._remote = options
        self._attributes: dict[str, str] = {}
        self._clients: _Clients | None = None
        self._setup = leaf_lock()
        self._connect()  # invalid options raise here, not at the first request

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, (type(self), self.bucket, self.prefix, self._remote, self.runtime)

    # --- overridden by services -----------------------------------------------------
    def _tag(self, meta: Any) -> str | None:
        """Return the tag that `replace` takes, from the client's metadata of an object."""
        tag: str | None = meta["e_tag"]
        return tag

    def _condition(self, tag: str) -> Any:
        """Return the client's form of the condition that the object still has this tag."""
        return {"e_tag": tag}

    def _deletes_in_bulk(self) -> bool:
        return self.capabilities.delete_page > 1

    # --- read ---------------------------------------------------------------------
    def get_tagged(self, key: str) -> Tagged:
        with self._clients_for(key) as clients:
            result = clients.native.get(clients.once, check_key(key))
            meta, body = result.meta, bytes(result.bytes())
        if len(body) != meta["size"]:
            raise short_read(key, len(body), meta["size"])
        return Tagged(body, self._info(meta).tag)

    def get_range(self, key: str, start: int, end: int) -> bytes:
        check_range(key, start, end)
        with self._clients_for(key) as clients:
            options = {"range": (start, end)}
            result = clients.native.get(clients.once, check_key(key), options=options)
            size, body = result.meta["size"], bytes(result.bytes())
        if end > size:
            raise past_the_end(key, end, size)
        if len(body) != end - start:
            raise short_read(key, len(body), end - start)
        return body

    def head(self, key: str) -> ObjectInfo:
        with self._clients_for(key) as clients:
            return self._info(clients.native.head(clients.once, check_key(key)))

    def list(self, prefix: str = "", start_after: str = "") -> Listing:
        check_prefix(prefix)
        folder = prefix[: prefix.rfind("/") + 1]
        are_sorted = self._remote.sorts_listings
        skips = are_sorted and self.skips_in_listings
        offset = start_of(prefix, start_after) if skips else None
        return Listing(
            lambda: self._list_pages(folder, offset), prefix, start_after, are_sorted=are_sorted
        )

    def _list_pages(self, folder: str, offset: str | None) -> Iterator[Sequence[ObjectInfo]]:
        with self._clients_for(folder) as clients:
            pages = clients.native.list(
                clients.once,
                folder.rstrip("/") or None,
                offset=offset,
                chunk_size=self.capabilities.list_page,
            )
            for page in pages:
                yield [self._info(meta) for meta in page]

    def _info(self, meta: Any) -> ObjectInfo:
        """A 204, or a portal's login page, comes without a tag; an object never does."""
        if meta["e_tag"] is None:
            raise UnavailableError(
                f"object {meta['path']}: the response has no ETag, so it is not an object store's",
                object=meta["path"],
            )
        written_s = meta["last_modified"].timestamp()
        return ObjectInfo(meta["path"], meta["size"], self._tag(meta), written_s)

    # --- write --------------------------------------------------------------------
    def put(self, key: str, body: bytes) -> str | None:
        with self._clients_for(key) as clients:
            return self._put(clients.once, clients.native, key, body, "overwrite")

    def create(self, key: str, body: bytes) -> WriteResult:
        return self._conditional(key, body, "create", Outcome.CREATED, Outcome.EXISTS)

    def replace(self, key: str, body: bytes, tag: str) -> WriteResult:
        if not self.capabilities.if_match:
            raise InvalidInputError(
                f"{self.url} was opened without If-Match",
                kind=ErrorKind.UNSUPPORTED_BY_STORE,
                object=key,
            )
        condition = self._condition(tag)
        return self._conditional(key, body, condition, Outcome.REPLACED, Outcome.CHANGED)

    def _conditional(
        self, key: str, body: bytes, mode: Any, landed: Outcome, lost: Outcome
    ) -> WriteResult:
        """Raise if nothing was written; a write that may have landed has an unknown outcome."""
        clients = self._connect()
        try:
            return WriteResult(landed, self._put(clients.once, clients.native, key, body, mode))
        except ReefError:
            raise
        except Exception as error:
            translated = translate(error, self.url, key)
            if translated.kind is ErrorKind.BUCKET_MISSING:
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
            use_multipart=False,  # the condition is checked by one request (H3)
        )
        return self._tag(result)

    def upload(self, key: str, parts: Iterable[bytes]) -> int:
        """One PUT if it all fits a part, else a multipart upload of equal parts."""
        source = _UploadSource(parts, self._remote.part_bytes, self.runtime)
        try:
            with self._clients_for(key) as clients:
                self._upload(clients, key, source)
        except ReefError:
            source.raise_own_error()  # the client reports it as an error of the store
            raise
        return source.bytes

    def _upload(self, clients: _Clients, key: str, source: _UploadSource) -> None:
        if source.fits_one_part:
            self._put(clients.again, clients.native, key, source.whole(), "overwrite")
            return
        clients.native.put(
            clients.again,
            check_key(key),
            source.pieces(),
            attributes=self._attributes,
            use_multipart=True,
            chunk_size=self._remote.part_bytes,
            max_concurrency=self._remote.upload_concurrency,
        )

    def name_of(self, key: str) -> str:
        """Return an object's whole name in its bucket."""
        return f"{self.prefix}/{check_key(key)}" if self.prefix else check_key(key)

    def signed_url(self, method: str, key: str, valid_s: float) -> str:
        """Return a presigned URL for one method of one object."""
        with self._clients_for(key) as clients:
            valid = timedelta(seconds=valid_s)
            return str(clients.native.sign(clients.once, method, check_key(key), valid))

    def compose_cost(self, parts: Sequence[Part]) -> Mapping[str, tuple[int, int]]:
        """The cost of reading all parts and uploading them."""
        reads, read_bytes = read_requests(parts)
        size = read_bytes + sum(len(part) for part in parts if isinstance(part, bytes))
        count = -(-size // self._remote.part_bytes)
        return {"get": (reads, read_bytes), "put": (1 if count <= 1 else 2 + count, size)}

    def copy(self, source: str, target: str) -> None:
        with self._clients_for(source) as clients:
            clients.native.copy(clients.once, check_key(source), check_key(target))

    def delete_many(self, keys: Sequence[str]) -> None:
        checked = [check_key(key) for key in keys]
        page = self.capabilities.delete_page
        delete = self._delete_page if self._deletes_in_bulk() else self._delete_singly
        pages = [checked[at : at + page] for at in range(0, len(checked), page)]
        self.runtime.map(delete, pages)

    def _delete_page(self, keys: Sequence[str]) -> None:
        """The client reports one error only: "not found" may hide others."""
        try:
            with self._clients_for(keys[0]) as clients:
                clients.native.delete(clients.once, list(keys))
        except NotFoundError:
            self._delete_singly(keys)

    def _delete_singly(self, keys: Sequence[str]) -> None:
        for key in keys:
            with suppress(NotFoundError), self._clients_for(key) as clients:
                clients.native.delete(clients.once, key)

    # --- housekeeping -------------------------------------------------------------
    def now(self) -> float:
        """The date of an object that is written now; buckets have no other clock."""
        self.put(paths.clock(), self.runtime.ulid().encode())
        return self.head(paths.clock()).last_modified_s

    # --- the client ---------------------------------------------------------------
    @contextmanager
    def _clients_for(self, key: str) -> Iterator[_Clients]:
        """Yield the clients; translate their errors."""
        clients = self._connect()
        try:
            yield clients
        except ReefError:
            raise
        except Exception as error:
            raise translate(error, self.url, key) from error

    def _connect(self) -> _Clients:
        native = NATIVE.for_process(REAL.process_id())
        clients = self._clients
        if clients is None or clients.process_id != native.process_id:
            with self._setup:
                clients = self._clients  # another thread may have made them
                if clients is None or clients.process_id != native.process_id:
                    if clients is not None:
                        abandoned.append(clients)
                    clients = self._clients = self._new_clients(native)
        return clients

    def _new_clients(self, native: Native) -> _Clients:
        again = {
            "max_retries": UPLOAD_RETRIES_MAX,
            "retry_timeout": timedelta(seconds=self._remote.timeout_s),
            "backoff": UPLOAD_BACKOFF,
        }
        extra = self._credentials()
        return _Clients(
            self._new_client(native.client(self.client_class), {"max_retries": 0}, extra),
            self._new_client(native.client(self.client_class), again, extra),
            native.module,
            native.process_id,
        )

    def _credentials(self) -> dict[str, Any]:
        """Return arguments of the client for credentials that are not among the options."""
        return {}

    def _new_client(
        self, client_class: Any, retry_config: dict[str, Any], extra: dict[str, Any]
    ) -> Any:
        try:
            return client_class(
                self.bucket,
                prefix=self.prefix or None,
                client_options=self._remote.client_config(),
                retry_config=retry_config,
                **self._remote.store_config(),
                **extra,
            )
        except Exception as error:
            raise InvalidInputError(
                f"{self.url} cannot be opened: {error}", kind=ErrorKind.INVALID_OPTION
            ) from error


def _reopen(kind: Any, bucket: str, prefix: str, options: Any, runtime: Runtime) -> RemoteStore:
    store: RemoteStore = kind(bucket, prefix, options, runtime=runtime)
    return store
