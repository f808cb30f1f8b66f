"""Buckets over the network, through obstore; the only module that imports it.

The client's own retries are off: a retried conditional write that finds its own object
would report a loss (H1). Retrying is the business of the wrappers.

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
from itertools import chain
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
from reef.stores.remote_errors import is_conflict, never_sent, translate
from reef.stores.s3_options import S3Options

__all__ = ["S3Store"]


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
            delete_page=1000 if options.bulk_delete else 1,
            part_bytes=options.part_bytes,
            abort_stale=importlib.util.find_spec("boto3") is not None,
        )
        self._attributes = {"Storage-Class": options.storage_class} if options.storage_class else {}
        self._client: Any = None
        self._client_process = -1
        self._setup = leaf_lock()
        self._connect()  # wrong options are told here, not at the first call

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, (self.bucket, self.prefix, self.options, self.runtime)

    # --- read ---------------------------------------------------------------------
    def get_tagged(self, key: str) -> Tagged:
        with self._asking(key) as (client, native):
            result = native.get(client, check_key(key))
            meta, body = result.meta, bytes(result.bytes())
        if len(body) != meta["size"]:
            raise _short(key, len(body), meta["size"])
        return Tagged(body, meta["e_tag"])

    def get_range(self, key: str, start: int, end: int) -> bytes:
        check_range(key, start, end)
        with self._asking(key) as (client, native):
            result = native.get(client, check_key(key), options={"range": (start, end)})
            size, body = result.meta["size"], bytes(result.bytes())
        if end > size:
            raise past_the_end(key, end, size)
        if len(body) != end - start:
            raise _short(key, len(body), end - start)
        return body

    def head(self, key: str) -> ObjectInfo:
        with self._asking(key) as (client, native):
            return _info(native.head(client, check_key(key)))

    def list(self, prefix: str = "", start_after: str = "") -> Iterator[ObjectInfo]:
        check_prefix(prefix)
        infos = self._list_folder(prefix[: prefix.rfind("/") + 1], start_after)
        if not self.options.sorts_listings:
            infos = iter(sorted(infos, key=lambda info: info.key))
        return _within(infos, prefix, start_after)

    def _list_folder(self, folder: str, start_after: str) -> Iterator[ObjectInfo]:
        offset = (start_after or None) if self.options.sorts_listings else None
        with self._asking(folder) as (client, native):
            pages = native.list(client, folder.rstrip("/") or None, offset=offset, chunk_size=1000)
            for page in pages:
                yield from map(_info, page)

    # --- write --------------------------------------------------------------------
    def put(self, key: str, body: bytes) -> str | None:
        with self._asking(key):
            return self._put(key, body, "overwrite")

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
        try:
            return WriteResult(landed, self._put(check_key(key), body, mode))
        except ReefError:
            raise
        except Exception as error:
            translated = translate(error, self.url, key)
            gone = lost is Outcome.CHANGED and isinstance(translated, NotFoundError)
            if gone or is_conflict(error):
                return WriteResult(lost)
            if isinstance(translated, UnavailableError) and not never_sent(error):
                return WriteResult(Outcome.UNKNOWN, cause=translated)
            raise translated from error

    def _put(self, key: str, body: bytes, mode: Any) -> str | None:
        client, native = self._connect()
        result = native.put(
            client,
            check_key(key),
            body,
            attributes=self._attributes,
            mode=mode,
            use_multipart=False,
        )
        tag: str | None = result["e_tag"]
        return tag

    def upload(self, key: str, parts: Iterable[bytes]) -> int:
        """One PUT if it all fits a part, else a multipart upload of equal parts."""
        source = _Source(parts, self.options.part_bytes)
        if source.fits_one_part:
            self.put(key, source.first)
            return len(source.first)
        with self._asking(key) as (client, native):
            try:
                native.put(
                    client,
                    check_key(key),
                    source.pieces(),
                    attributes=self._attributes,
                    use_multipart=True,
                    chunk_size=self.options.part_bytes,
                    max_concurrency=self.options.upload_concurrency,
                )
            except Exception:
                source.raise_own_error()
                raise
        return source.bytes

    def copy(self, source: str, target: str) -> None:
        with self._asking(source) as (client, native):
            native.copy(client, check_key(source), check_key(target))

    def delete_many(self, keys: Sequence[str]) -> None:
        checked = [check_key(key) for key in keys]
        if checked:
            with suppress(NotFoundError), self._asking(checked[0]) as (client, native):
                native.delete(client, checked)

    # --- housekeeping -------------------------------------------------------------
    def now(self) -> float:
        """The date of an object written this moment; S3 has no other clock."""
        self.put(paths.clock(), self.runtime.ulid().encode())
        return self.head(paths.clock()).last_modified_s

    def abort_stale(self, older_than_s: float) -> int:
        from reef.stores.s3_uploads import abort_stale_uploads

        return abort_stale_uploads(self.bucket, self.prefix, self.options, self.now(), older_than_s)

    # --- the client ---------------------------------------------------------------
    @contextmanager
    def _asking(self, key: str) -> Iterator[tuple[Any, Any]]:
        """Yield the client and its module; turn its errors into Reef's own."""
        connected = self._connect()
        try:
            yield connected
        except ReefError:
            raise
        except Exception as error:
            raise translate(error, self.url, key) from error

    def _connect(self) -> tuple[Any, Any]:
        native = _native.for_process(REAL.process_id())
        if self._client_process != native.process_id:
            with self._setup:
                _abandoned.append(self._client)
                self._client = self._new_client(native.store_class)
                self._client_process = native.process_id
        return self._client, native.module

    def _new_client(self, store_class: Any) -> Any:
        try:
            return store_class(
                self.bucket,
                prefix=self.prefix or None,
                client_options=self.options.client_config(),
                retry_config={"max_retries": 0},
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


def _within(infos: Iterable[ObjectInfo], prefix: str, start_after: str) -> Iterator[ObjectInfo]:
    """The client lists whole folders, and some servers ignore start-after: filter again."""
    for info in infos:
        if info.key > start_after and info.key.startswith(prefix):
            yield info
        elif info.key > prefix and not info.key.startswith(prefix):
            return


class _Source:
    """What an upload reads from: cut into equal parts, counted, its own errors kept apart."""

    def __init__(self, parts: Iterable[bytes], part_bytes: int) -> None:
        self._pieces = _regroup(parts, part_bytes)
        self._error: BaseException | None = None
        self.first = next(self._pieces)
        self._second = next(self._pieces, None)
        self.fits_one_part = self._second is None
        self.bytes = 0

    def pieces(self) -> Iterator[bytes]:
        try:
            for piece in chain([self.first, self._second or b""], self._pieces):
                self.bytes += len(piece)
                yield piece
        except Exception as error:
            self._error = error
            raise

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


def _info(meta: Any) -> ObjectInfo:
    return ObjectInfo(meta["path"], meta["size"], meta["e_tag"], meta["last_modified"].timestamp())


def _short(key: str, found: int, expected: int) -> UnavailableError:
    return UnavailableError(
        f"object {key}: {found} of {expected} bytes came",
        kind=Kind.SHORT_READ,
        object=key,
    )
