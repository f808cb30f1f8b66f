"""Buckets of AWS S3, and of everything that speaks its protocol.

Its own ways: the tag is the ETag, which old Ceph wants back without quotes; a thousand objects
are deleted with one request; what an upload left behind is ended through boto3, and objects are
composed by copying parts (`s3_compose`); some servers answer ranges with 200 (`s3_ranges`).
"""

import importlib.util
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from reef.errors import UnavailableError
from reef.runtime import REAL, Runtime
from reef.stores import s3_compose
from reef.stores.base import Capabilities, Part
from reef.stores.remote import RemoteStore
from reef.stores.s3_options import S3Options
from reef.stores.s3_ranges import RangeReader
from reef.stores.s3_uploads import abort_stale_uploads

__all__ = ["S3Options", "S3Store"]

LIST_PAGE = 1000
DELETE_PAGE = 1000


class S3Store(RemoteStore):
    """A bucket of AWS S3, or of anything that speaks its protocol."""

    client_class: ClassVar[str] = "S3Store"

    def __init__(
        self, bucket: str, prefix: str, options: S3Options, *, runtime: Runtime = REAL
    ) -> None:
        self.options = options
        has_boto = importlib.util.find_spec("boto3") is not None
        capabilities = Capabilities(
            if_match=options.if_match != "none",
            clock_resolution_s=1.0,
            list_page=LIST_PAGE,
            delete_page=DELETE_PAGE if options.bulk_delete else 1,
            part_bytes=options.part_bytes,
            compose=has_boto and options.part_copy,
            abort_stale=has_boto,
            now_requests=("put", "head"),
            abort_stale_requests=("put", "head", "list"),
        )
        super().__init__(bucket, prefix, options, capabilities, runtime)
        self._has_boto, self._says_206 = has_boto, True
        self._ranges = RangeReader(self)
        if options.storage_class:
            self._attributes = {"Storage-Class": options.storage_class}

    def get_range(self, key: str, start: int, end: int) -> bytes:
        """Some servers send ranges with the wrong status: from the first one on, boto3 reads."""
        if self._says_206:
            try:
                return super().get_range(key, start, end)
            except UnavailableError as error:
                if not self._has_boto or "not_partial" not in error.context:
                    raise
        body = self._ranges.read(key, start, end)
        self._says_206 = False
        return body

    def _condition(self, tag: str) -> Any:
        return {"e_tag": tag.strip('"') if self.options.if_match == "bare" else tag}

    def _deletes_in_bulk(self) -> bool:
        return self.options.bulk_delete

    def compose(self, key: str, parts: Sequence[Part]) -> int:
        """Copy what is large enough to be a part; where nothing is, read and upload."""
        steps = s3_compose.steps_of(parts, self.options) if self.capabilities.compose else []
        return s3_compose.compose(self, key, steps) if steps else super().compose(key, parts)

    def compose_cost(self, parts: Sequence[Part]) -> Mapping[str, tuple[int, int]]:
        steps = s3_compose.steps_of(parts, self.options)
        return s3_compose.cost(steps) if steps else super().compose_cost(parts)

    def abort_stale(self, older_than_s: float) -> int:
        before_s = self.now() - older_than_s
        return abort_stale_uploads(self.url, self.bucket, self.prefix, self.options, before_s)
