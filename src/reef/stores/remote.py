"""Buckets over the network, through obstore.

`RemoteStore` is what S3, Azure and GCS have in common; each has a module of its own for what
it does in its own way: how tags are told and sent back, what a listing costs, how objects are
composed.

The client's own retries are off: a retried conditional write that finds its own object
would report a loss (H1). Retrying is the business of the wrappers. Only `upload` has a
client that sends again: it alone cannot be repeated from outside, since its source is
read once, and what it writes has a name of its own.

A forked child cannot use its parent's clients (H51): they belong to the process and to the copy
of the native library that they were made with (`remote_native`).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar

from reef import paths
from reef.errors import InvalidInputError, Kind, NotFoundError, ReefError, UnavailableError
from reef.runtime import REAL, Runtime, leaf_lock
from reef.stores.base import (
    Capabilities,
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
from reef.stores.compose_plan import read_requests
from reef.stores.listing import Listing, start_of
from reef.stores.remote_errors import is_conflict, never_sent, translate
from reef.stores.remote_native import NATIVE, Native, abandoned
from reef.stores.remote_options import RemoteOptions
from reef.stores.s3_uploads import Source

__all__ = ["RemoteStore"]

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


class RemoteStore(Store):
    """A bucket of a service that obstore has a client for."""

    client_class: ClassVar[str]
    """obstore's name for the client."""
    skips_in_listings: ClassVar[bool] = True
    """Whether the service starts a listing where it is told to."""

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
        self._connect()  # wrong options are told here, not at the first call

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, (type(self), self.bucket, self.prefix, self._remote, self.runtime)

    # --- each service's own way ---------------------------------------------------
    def _tag(self, meta: Any) -> str | None:
        """Return the tag that `replace` takes, out of what the client tells of an object."""
        tag: str | None = meta["e_tag"]
        return tag

    def _condition(self, tag: str) -> Any:
        """Return the client's word for "only if the object still has this tag"."""
        return {"e_tag": tag}

    def _deletes_in_bulk(self) -> bool:
        return self.capabilities.delete_page > 1

    # --- read ---------------------------------------------------------------------
    def get_tagged(self, key: str) -> Tagged:
        with self._asking(key) as clients:
            result = clients.native.get(clients.once, check_key(key))
            meta, body = result.meta, bytes(result.bytes())
        if len(body) != meta["size"]:
            raise short_read(key, len(body), meta["size"])
        return Tagged(body, self._info(meta).tag)

    def get_range(self, key: str, start: int, end: int) -> bytes:
        check_range(key, start, end)
        with self._asking(key) as clients:
            options = {"range": (start, end)}
            result = clients.native.get(clients.once, check_key(key), options=options)
            size, body = result.meta["size"], bytes(result.bytes())
        if end > size:
            raise past_the_end(key, end, size)
        if len(body) != end - start:
            raise short_read(key, len(body), end - start)
        return body

    def head(self, key: str) -> ObjectInfo:
        with self._asking(key) as clients:
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
        with self._asking(folder) as clients:
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
                f"object {meta['path']}: what answered is no object store, it sent no ETag",
                object=meta["path"],
            )
        written_s = meta["last_modified"].timestamp()
        return ObjectInfo(meta["path"], meta["size"], self._tag(meta), written_s)

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
        condition = self._condition(tag)
        return self._conditional(key, body, condition, Outcome.REPLACED, Outcome.CHANGED)

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
        return self._tag(result)

    def upload(self, key: str, parts: Iterable[bytes]) -> int:
        """One PUT if it all fits a part, else a multipart upload of equal parts."""
        source = Source(parts, self._remote.part_bytes, self.runtime)
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
            chunk_size=self._remote.part_bytes,
            max_concurrency=self._remote.upload_concurrency,
        )

    def name_of(self, key: str) -> str:
        """Return an object's whole name in its bucket."""
        return f"{self.prefix}/{check_key(key)}" if self.prefix else check_key(key)

    def signed_url(self, method: str, key: str, valid_s: float) -> str:
        """Return a URL with which anybody may do this one thing for a while."""
        with self._asking(key) as clients:
            valid = timedelta(seconds=valid_s)
            return str(clients.native.sign(clients.once, method, check_key(key), valid))

    def compose_cost(self, parts: Sequence[Part]) -> Mapping[str, tuple[int, int]]:
        """Of reading everything and uploading it, as a store does that composes nothing."""
        reads, read_bytes = read_requests(parts)
        size = read_bytes + sum(len(part) for part in parts if isinstance(part, bytes))
        count = -(-size // self._remote.part_bytes)
        return {"get": (reads, read_bytes), "put": (1 if count <= 1 else 2 + count, size)}

    def copy(self, source: str, target: str) -> None:
        with self._asking(source) as clients:
            clients.native.copy(clients.once, check_key(source), check_key(target))

    def delete_many(self, keys: Sequence[str]) -> None:
        checked = [check_key(key) for key in keys]
        page = self.capabilities.delete_page
        delete = self._delete_page if self._deletes_in_bulk() else self._delete_singly
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
        """The date of an object written this moment; buckets have no other clock."""
        self.put(paths.clock(), self.runtime.ulid().encode())
        return self.head(paths.clock()).last_modified_s

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
        native = NATIVE.for_process(REAL.process_id())
        clients = self._clients
        if clients is None or clients.process_id != native.process_id:
            with self._setup:
                clients = self._clients  # another thread may have been quicker
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
        return _Clients(
            self._new_client(native.client(self.client_class), {"max_retries": 0}),
            self._new_client(native.client(self.client_class), again),
            native.module,
            native.process_id,
        )

    def _new_client(self, client_class: Any, retry_config: dict[str, Any]) -> Any:
        try:
            return client_class(
                self.bucket,
                prefix=self.prefix or None,
                client_options=self._remote.client_config(),
                retry_config=retry_config,
                **self._remote.store_config(),
            )
        except Exception as error:
            raise InvalidInputError(
                f"{self.url} cannot be opened: {error}", kind=Kind.INVALID_OPTION
            ) from error


def _reopen(kind: Any, bucket: str, prefix: str, options: Any, runtime: Runtime) -> RemoteStore:
    store: RemoteStore = kind(bucket, prefix, options, runtime=runtime)
    return store
