"""Files to import, read through a store in streams: Parquet, Arrow files and Arrow streams.

A file is known by its digest, so that a second run of an import knows what the first one has
applied, whatever the file is called by then. Batches are cut by a count of rows alone: the same
file gives the same batches each time.
"""

import hashlib
import io
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from reef.errors import UNDECODABLE, CorruptionError, InvalidInputError, Kind, NotFoundError
from reef.jobs.export import SEAL, ExportSeal, open_files
from reef.stores import Store

__all__ = ["Found", "Source", "SourceFile", "find_files"]

PARQUET = (".parquet", ".pq")
ARROW = (".arrow", ".ipc", ".feather", ".arrows")
PART_BYTES = 8 << 20
MAGIC = b"ARROW1"

Source = str | os.PathLike[str] | Store


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file of rows."""

    store: Store
    key: str
    size: int

    def __str__(self) -> str:
        return f"{self.store.url.rstrip('/')}/{self.key}"

    def digest(self) -> str:
        """Return what tells this file from any other one."""
        summed = hashlib.blake2b(digest_size=16)
        for start in range(0, self.size, PART_BYTES):
            end = min(start + PART_BYTES, self.size)
            summed.update(self.store.get_range(self.key, start, end))
        return summed.hexdigest()

    def open(self) -> "_Rows":
        """Return its rows; InvalidInputError names the file if it is none."""
        try:
            return _ParquetRows(self) if self.key.endswith(PARQUET) else _arrow_rows(self)
        except (pa.ArrowException, OSError, ValueError) as error:
            raise self.bad(error) from error

    def bad(self, error: Exception) -> InvalidInputError:
        return InvalidInputError(
            f"file {self} cannot be read: {error}", kind=Kind.INVALID_INPUT, object=self.key
        )


class _Rows(ABC):
    """The rows of an open file."""

    schema: pa.Schema
    count: int | None
    """How many; None where only reading tells."""

    def __init__(self, source: SourceFile) -> None:
        self._source = source

    def batches(self, rows: int) -> Iterator[pa.Table]:
        """Yield tables of just so many rows; the last one may have fewer."""
        waiting: list[pa.RecordBatch] = []
        count = 0
        for batch in self._checked(rows):
            start = 0
            while start < len(batch):
                waiting.append(batch.slice(start, rows - count))
                start += len(waiting[-1])
                count += len(waiting[-1])
                if count == rows:
                    yield pa.Table.from_batches(waiting)
                    waiting, count = [], 0
        if waiting:
            yield pa.Table.from_batches(waiting)

    def _checked(self, rows: int) -> Iterator[pa.RecordBatch]:
        try:
            yield from self._read(rows)
        except (pa.ArrowException, OSError) as error:
            raise self._source.bad(error) from error

    @abstractmethod
    def _read(self, rows: int) -> Iterator[pa.RecordBatch]:
        """Yield batches, of about so many rows where the format can choose."""


class _ParquetRows(_Rows):
    def __init__(self, source: SourceFile) -> None:
        super().__init__(source)
        self._file = pq.ParquetFile(pa.PythonFile(_StoreFile(source), mode="r"))
        self.schema, self.count = self._file.schema_arrow, self._file.metadata.num_rows

    def _read(self, rows: int) -> Iterator[pa.RecordBatch]:
        yield from self._file.iter_batches(batch_size=rows, use_threads=False)


class _ArrowRows(_Rows):
    def __init__(self, source: SourceFile, reader: Any) -> None:
        super().__init__(source)
        self._reader = reader
        self.schema, self.count = reader.schema, None

    def _read(self, rows: int) -> Iterator[pa.RecordBatch]:
        if isinstance(self._reader, pa.RecordBatchStreamReader):
            yield from self._reader
        else:
            for place in range(self._reader.num_record_batches):
                yield self._reader.get_batch(place)


def _arrow_rows(source: SourceFile) -> _ArrowRows:
    file = pa.PythonFile(_StoreFile(source), mode="r")
    if source.store.get_range(source.key, 0, min(source.size, len(MAGIC))) == MAGIC:
        return _ArrowRows(source, pa.ipc.open_file(file))
    return _ArrowRows(source, pa.ipc.open_stream(file))


class _StoreFile(io.RawIOBase):
    """An object as a file that can be read at any place."""

    def __init__(self, source: SourceFile) -> None:
        super().__init__()
        self._source, self._at = source, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._source.size}[whence]
        self._at = base + offset
        return self._at

    def read(self, size: int = -1) -> bytes:
        left = self._source.size - self._at
        count = left if size < 0 else min(size, left)
        if count <= 0:
            return b""
        start, self._at = self._at, self._at + count
        return self._source.store.get_range(self._source.key, start, self._at)


# --- finding ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Found:
    """Files, in order, and what the export says that they are of."""

    files: tuple[SourceFile, ...]
    seal: ExportSeal | None = None


def _split(source: str) -> tuple[str, str, str]:
    """Take a URL's options off: the name of a file stands before them."""
    return source.partition("?") if "://" in source else (source, "", "")


def find_files(source: Source | Sequence[Source]) -> Found:
    """Return the files of a directory or bucket, or those that are named."""
    if isinstance(source, list | tuple):
        parts = [find_files(one) for one in source]
        seal = next((part.seal for part in parts if part.seal is not None), None)
        return Found(tuple(file for part in parts for file in part.files), seal)
    if not isinstance(source, str | os.PathLike | Store):
        raise InvalidInputError(
            f"source={source!r} is not a file, a directory or a URL", kind=Kind.INVALID_OPTION
        )
    if not isinstance(source, Store):
        path, mark, query = _split(os.fspath(source))
        if path.endswith(PARQUET + ARROW):
            folder, slash, name = path.rpartition("/")
            store = open_files((folder or slash or ".") + mark + query)
            return Found((SourceFile(store, name, store.head(name).size),))
        if os.path.isfile(path):
            raise InvalidInputError(
                f"{path} is not a file of Parquet or Arrow, by its name",
                kind=Kind.INVALID_OPTION,
                hint=f"Names end in one of {', '.join(PARQUET + ARROW)}",
            )
    store = open_files(source)
    found = [
        SourceFile(store, info.key, info.size)
        for info in store.list()
        if info.key.endswith(PARQUET + ARROW)
    ]
    seal = _read_seal(store)
    if not found and seal is None:
        raise NotFoundError(
            f"there is no file of Parquet or Arrow in {store.url}",
            hint=f"Names end in one of {', '.join(PARQUET + ARROW)}",
        )
    return Found(tuple(found) if seal is None else _as_sealed(store, seal, found), seal)


def _as_sealed(
    store: Store, seal: ExportSeal, found: Sequence[SourceFile]
) -> tuple[SourceFile, ...]:
    """Return the files that an export names; all must be there, whole."""
    sizes = {file.key: file.size for file in found}
    for file in seal.files:
        if sizes.get(file.name) != file.bytes:
            raise CorruptionError(
                f"{SEAL} of {store.url} names {file.name} with {file.bytes} bytes, "
                f"found {sizes.get(file.name, 'none')}",
                object=file.name,
            )
    return tuple(SourceFile(store, file.name, file.bytes) for file in seal.files)


def _read_seal(store: Store) -> ExportSeal | None:
    """Return what an export says of itself; None if this is none."""
    try:
        return msgspec.json.decode(store.get(SEAL), type=ExportSeal)
    except NotFoundError:
        return None
    except UNDECODABLE as error:
        raise CorruptionError(f"{SEAL} of {store.url} cannot be read: {error}") from error
