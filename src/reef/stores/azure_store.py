"""Containers of Azure Blob Storage.

Its own ways: a listing has pages of 5,000 and always starts at the folder's first name, so what
comes before `start_after` is skipped here; suffix ranges do not exist, and none are asked for;
uncommitted blocks of an upload that never ended are dropped by the service after a week, so
there is nothing to end; objects are composed of blocks (`azure_compose`). A condition that does
not hold is 409 (BlobAlreadyExists) for a create and 412 for a replace.
"""

from collections.abc import Mapping, Sequence
from typing import ClassVar

from reef.runtime import REAL, Runtime
from reef.stores import azure_compose
from reef.stores.azure_options import AzureOptions
from reef.stores.base import Capabilities, Part
from reef.stores.compose_plan import Step
from reef.stores.remote import RemoteStore

__all__ = ["AzureOptions", "AzureStore"]

LIST_PAGE = 5000


class AzureStore(RemoteStore):
    """A container, or what lies below a prefix of one."""

    client_class: ClassVar[str] = "AzureStore"
    skips_in_listings: ClassVar[bool] = False

    def __init__(
        self, bucket: str, prefix: str, options: AzureOptions, *, runtime: Runtime = REAL
    ) -> None:
        self.options = options
        capabilities = Capabilities(
            clock_resolution_s=1.0,
            list_page=LIST_PAGE,
            part_bytes=options.part_bytes,
            compose=options.block_copy and options.can_sign,
            now_requests=("put", "head"),
        )
        super().__init__(bucket, prefix, options, capabilities, runtime)
        self._copies_blocks = capabilities.compose

    def compose(self, key: str, parts: Sequence[Part]) -> int:
        """Let the service copy blocks; where it cannot, read and upload."""
        steps = self._steps(parts)
        if steps:
            try:
                return azure_compose.compose(self, key, steps)
            except azure_compose.CannotCopy:
                self._copies_blocks = False  # nothing is visible yet; and it will not learn
        return super().compose(key, parts)

    def compose_cost(self, parts: Sequence[Part]) -> Mapping[str, tuple[int, int]]:
        steps = self._steps(parts)
        return azure_compose.cost(steps) if steps else super().compose_cost(parts)

    def _steps(self, parts: Sequence[Part]) -> list[Step]:
        if not self._copies_blocks:
            return []
        return azure_compose.steps_of(parts, self.options.part_bytes)

    def abort_stale(self, older_than_s: float) -> int:
        """Uncommitted blocks go by themselves after a week."""
        return 0
