"""Buckets of Google Cloud Storage.

Its own ways: a condition is not about the ETag but about the generation, a number that never
repeats, so that is the tag here; generation 0 stands for "no object". Listings tell no
generation, so what they show has no tag. The service takes about one write a second of one
object, and its 429 may come before or after the write took effect (H6): to a conditional write
that is an unknown outcome, as with every other answer that proves nothing. Whole objects are
joined by the service (`gcs_compose`).
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from reef import paths
from reef.runtime import REAL, Runtime
from reef.stores import gcs_compose
from reef.stores.base import Capabilities, Part
from reef.stores.gcs_options import GcsOptions
from reef.stores.gcs_token import can_make_tokens
from reef.stores.remote import RemoteStore

__all__ = ["GcsOptions", "GcsStore"]

LIST_PAGE = 1000


class GcsStore(RemoteStore):
    """A bucket, or what lies below a prefix of one."""

    client_class: ClassVar[str] = "GCSStore"

    def __init__(
        self, bucket: str, prefix: str, options: GcsOptions, *, runtime: Runtime = REAL
    ) -> None:
        self.options = options
        capabilities = Capabilities(
            clock_resolution_s=1.0,
            list_page=LIST_PAGE,
            part_bytes=options.part_bytes,
            compose=options.composite and can_make_tokens(options),
            now_requests=("put", "head"),
            abort_stale_requests=("put", "head", "list"),
        )
        super().__init__(bucket, prefix, options, capabilities, runtime)
        if options.storage_class:
            self._attributes = {"Storage-Class": options.storage_class}

    def _tag(self, meta: Any) -> str | None:
        """The generation, where it was told; listings do not tell it."""
        tag: str | None = meta["version"]
        return tag

    def _condition(self, tag: str) -> Any:
        return {"version": tag}

    def compose(self, key: str, parts: Sequence[Part]) -> int:
        """Join whole objects by the service; where there are none, read and upload."""
        if self._joins(parts):
            size = gcs_compose.compose(self, key, parts)
            if size is not None:
                return size
        return super().compose(key, parts)

    def compose_cost(self, parts: Sequence[Part]) -> Mapping[str, tuple[int, int]]:
        return gcs_compose.cost(parts) if self._joins(parts) else super().compose_cost(parts)

    def _joins(self, parts: Sequence[Part]) -> bool:
        return self.capabilities.compose and gcs_compose.may_gain(parts)

    def abort_stale(self, older_than_s: float) -> int:
        """Remove parts of compositions that never ended.

        Multipart uploads are ended by a lifecycle rule of the bucket, which see the docs for.
        """
        before_s = self.now() - older_than_s
        stale = [i.key for i in self.list(paths.compose_parts()) if i.last_modified_s <= before_s]
        self.delete_many(stale)
        return len(stale)
