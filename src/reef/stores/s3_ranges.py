"""Ranges of objects from servers that send them with the wrong status.

A range is answered 206. rclone's S3 server sends the right bytes, says which they are, and answers
200, which obstore takes for a server that has ignored the range. boto3 does not look at the status,
so it reads them; where the answer does not say which bytes it has, nobody can tell.
"""

import re
from contextlib import closing
from typing import TYPE_CHECKING

from reef.errors import Kind, UnavailableError
from reef.stores.base import past_the_end
from reef.stores.s3_client import s3_client, translated

if TYPE_CHECKING:
    from reef.stores.s3_store import S3Store

__all__ = ["read_range"]

CONTENT_RANGE = re.compile(r"bytes (\d+)-\d+/(\d+)")


def read_range(store: "S3Store", key: str, start: int, end: int) -> bytes:
    """Return the bytes of [start, end), as `Store.get_range` does."""
    client = s3_client(store.options)
    try:
        with translated(store.url, key):
            answer = client.get_object(
                Bucket=store.bucket, Key=store.name_of(key), Range=f"bytes={start}-{end - 1}"
            )
            with closing(answer["Body"]) as stream:
                told = CONTENT_RANGE.fullmatch(answer.get("ContentRange", ""))
                body: bytes = stream.read(end - start) if told else b""
    finally:
        client.close()
    if told is None or int(told[1]) != start:
        raise UnavailableError(
            f"{store.url} answers a request for a range of {key} with something else",
            hint="Something in between, or a server without ranged GETs, which Reef needs",
            object=key,
        )
    if end > int(told[2]):
        raise past_the_end(key, end, int(told[2]))
    if len(body) != end - start:
        raise UnavailableError(
            f"object {key}: {len(body)} of {end - start} bytes came",
            kind=Kind.SHORT_READ,
            object=key,
        )
    return body
