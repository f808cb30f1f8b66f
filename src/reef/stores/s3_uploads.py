"""Uploads: the source of one on its way in, and the leftovers of those that never ended.

Unfinished multipart uploads are invisible in listings and billed like objects. They are
found and ended through boto3 (the extra `s3`); a lifecycle rule on the bucket does the
same work without a client, and the operations page shows it.
"""

from collections.abc import Iterable, Iterator
from contextvars import copy_context
from itertools import chain
from typing import Any

from reef.runtime import Pool, Runtime
from reef.stores.s3_client import s3_client, translated
from reef.stores.s3_options import S3Options

__all__ = ["Source", "abort_stale_uploads"]


class Source:
    """What an upload reads from: cut into equal parts, counted, its own errors kept apart.

    The client asks for pieces on a thread of its own, from which no other request can be sent; and
    whoever makes the pieces may need to read from the store. So they are made on a helper.
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


def abort_stale_uploads(
    url: str, bucket: str, prefix: str, options: S3Options, before_s: float
) -> int:
    """End the uploads below `prefix` that began before a time by the store's clock."""
    client = s3_client(options)
    try:
        with translated(url):
            return _abort(client, bucket, f"{prefix}/" if prefix else "", before_s)
    finally:
        client.close()


def _abort(client: Any, bucket: str, prefix: str, before_s: float) -> int:
    aborted = 0
    pages = client.get_paginator("list_multipart_uploads")
    try:
        for page in pages.paginate(Bucket=bucket, Prefix=prefix):
            for upload in page.get("Uploads", []):
                if upload["Initiated"].timestamp() <= before_s:
                    aborted += _abort_one(client, bucket, upload)
    except client.exceptions.NoSuchUpload:
        return aborted  # rclone says so where there is none
    return aborted


def _abort_one(client: Any, bucket: str, upload: Any) -> bool:
    try:
        client.abort_multipart_upload(Bucket=bucket, Key=upload["Key"], UploadId=upload["UploadId"])
    except client.exceptions.NoSuchUpload:
        return False  # it ended by itself, or by another's hand
    return True
