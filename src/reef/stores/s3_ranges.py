"""Ranges of objects from servers that send them with the wrong status.

A range is answered 206. rclone's S3 server sends the right bytes, says which they are, and answers
200, which obstore takes for a server that has ignored the range. boto3 does not look at the status,
so it reads them; where the answer does not say which bytes it has, nobody can tell.

Unlike for other tasks, the boto3 client is kept: making one takes longer than the read. A forked
child makes its own, since the sockets of the old one are its parent's (H51).
"""

import re
from contextlib import closing
from typing import TYPE_CHECKING, Any

from reef.errors import UnavailableError
from reef.runtime import REAL, leaf_lock
from reef.stores.base import check_range, past_the_end, short_read
from reef.stores.remote_native import abandoned
from reef.stores.s3_client import s3_client, translated

if TYPE_CHECKING:
    from reef.stores.s3_store import S3Store

__all__ = ["RangeReader"]

CONTENT_RANGE = re.compile(r"bytes (\d+)-\d+/(\d+)")


class RangeReader:
    """Reads ranges of a bucket's objects, with one client for each process."""

    def __init__(self, store: "S3Store") -> None:
        self._store = store
        self._setup = leaf_lock()
        self._client: tuple[Any, int] = None, -1
        """And the process that it belongs to."""

    def read(self, key: str, start: int, end: int) -> bytes:
        """Return the bytes of [start, end), as `Store.get_range` does."""
        check_range(key, start, end)
        store, client = self._store, self._connect()
        with translated(store.url, key):
            answer = client.get_object(
                Bucket=store.bucket, Key=store.name_of(key), Range=f"bytes={start}-{end - 1}"
            )
            with closing(answer["Body"]) as stream:
                told = CONTENT_RANGE.fullmatch(answer.get("ContentRange", ""))
                body: bytes = stream.read(end - start) if told else b""
        if told is None or int(told[1]) != start:
            raise UnavailableError(
                f"{store.url} answers a request for a range of {key} with something else",
                hint="Something in between, or a server without ranged GETs, which Reef needs",
                object=key,
            )
        if end > int(told[2]):
            raise past_the_end(key, end, int(told[2]))
        if len(body) != end - start:
            raise short_read(key, len(body), end - start)
        return body

    def _connect(self) -> Any:
        process_id = REAL.process_id()
        client, of_process = self._client
        if of_process != process_id:
            with self._setup:
                client, of_process = self._client  # another thread may have been quicker
                if of_process != process_id:
                    if client is not None:
                        abandoned.append(client)
                    client = s3_client(self._store.options)
                    self._client = client, process_id
        return client
