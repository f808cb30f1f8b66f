"""Composes an object in Azure out of blocks that the service reads by itself (Put Block From URL).

1. put a block for each range and each piece of new bytes; a range's block names its source by a
   URL that is signed for reading it, so that the service may;
2. look how large the blocks have become: a service that does not know the request would take it
   for an empty block;
3. put the list of blocks: that makes the object. Said twice, it says the same.

Requests go to URLs that are signed for the target, with any of the account's own credentials that
can sign. Where none can, or where the service cannot copy blocks (Azurite), nothing is visible
yet, and the ranges are read and uploaded instead. Blocks that are never listed are dropped by the
service after a week.
"""

import base64
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING
from urllib.parse import quote
from xml.etree import ElementTree

from reef.errors import InvalidInputError, NotFoundError, ReefError
from reef.stores.base import Part, past_the_end
from reef.stores.compose_plan import Copied, Sent, Step, plan, reading
from reef.stores.remote_http import Sender
from reef.stores.remote_options import MIB

if TYPE_CHECKING:
    from reef.stores.azure_store import AzureStore

__all__ = ["CannotCopy", "compose", "cost", "steps_of"]

COPY_BYTES_MAX = 256 * MIB
"""The service allows more; several smaller copies run side by side."""
BLOCKS_MAX = 50_000
SIGNED_S = 3600.0


class CannotCopy(Exception):
    """Neither refused nor failed: this has to be done in another way."""


def steps_of(parts: Sequence[Part], part_bytes: int) -> list[Step]:
    """Return the blocks; none if nothing is to be copied. Blocks may have any size."""
    steps = plan(parts, part_bytes_min=1, part_bytes=part_bytes, copy_bytes_max=COPY_BYTES_MAX)
    copies = any(isinstance(step, Copied) for step in steps)
    return steps if copies and len(steps) <= BLOCKS_MAX else []


def cost(steps: Sequence[Step]) -> Mapping[str, tuple[int, int]]:
    """Return requests and bytes by kind, if all goes well."""
    sent = [step for step in steps if isinstance(step, Sent)]
    return {
        "put": (1 + len(sent), sum(step.size for step in sent)),
        "copy": (len(steps) - len(sent), 0),
        "get": (1, 0),
    }


def compose(store: "AzureStore", key: str, steps: Sequence[Step]) -> int:
    """Write the object, and return its size; CannotCopy if that is not possible in this way."""
    composition = _Composition(store, key, steps)
    composition.write_blocks()
    composition.check_blocks()
    composition.commit()
    return sum(step.size for step in steps)


class _Composition:
    """One object on its way."""

    def __init__(self, store: "AzureStore", key: str, steps: Sequence[Step]) -> None:
        self._store, self._key, self._steps = store, key, steps
        self._attempt = store.runtime.ulid()
        self._http = Sender(store.url, store.options, store.runtime)
        sources = {step.source for step in steps if isinstance(step, Copied)}
        try:
            self._target = store.signed_url("PUT", key, SIGNED_S)
            self._readable = store.signed_url("GET", key, SIGNED_S)
            self._sources = {
                source: store.signed_url("GET", source, SIGNED_S) for source in sources
            }
        except ReefError as error:
            raise CannotCopy from error

    def write_blocks(self) -> None:
        at_once = self._store.options.upload_concurrency
        for first in range(0, len(self._steps), at_once):
            numbered = list(enumerate(self._steps[first : first + at_once], first))
            self._store.runtime.gather(
                [lambda one=one: self._write_block(*one) for one in numbered]  # type: ignore[misc]
            )

    def _write_block(self, number: int, step: Step) -> None:
        url = f"{self._target}&comp=block&blockid={quote(self._block_id(number), safe='')}"
        if isinstance(step, Sent):
            body = b"".join(reading(self._store, step.pieces))
            self._http.send("PUT", url, self._key, body)
            return
        headers = {
            "x-ms-copy-source": self._sources[step.source],
            "x-ms-source-range": f"bytes={step.start}-{step.end - 1}",
        }
        try:
            self._http.send("PUT", url, step.source, b"", headers)
        except (InvalidInputError, NotFoundError) as error:
            self._check_source(step)
            raise CannotCopy from error  # the source is fine: the service cannot, or may not

    def _check_source(self, step: Copied) -> None:
        size = self._store.head(step.source).size
        if step.end > size:
            raise past_the_end(step.source, step.end, size)

    def check_blocks(self) -> None:
        url = f"{self._readable}&comp=blocklist&blocklisttype=uncommitted"
        told = ElementTree.fromstring(self._http.send("GET", url, self._key))
        found = {block.findtext("Name"): block.findtext("Size") for block in told.iter("Block")}
        for number, step in enumerate(self._steps):
            if found.get(self._block_id(number)) != str(step.size):
                if isinstance(step, Copied):
                    self._check_source(step)
                raise CannotCopy

    def commit(self) -> None:
        names = "".join(
            f"<Uncommitted>{self._block_id(number)}</Uncommitted>"
            for number in range(len(self._steps))
        )
        body = f'<?xml version="1.0" encoding="utf-8"?><BlockList>{names}</BlockList>'
        try:
            self._http.send("PUT", f"{self._target}&comp=blocklist", self._key, body.encode())
        except ReefError:
            # An answer may have been lost, and blocks that are committed are not uncommitted.
            if self._landed_size() != sum(step.size for step in self._steps):
                raise

    def _block_id(self, number: int) -> str:
        """All ids of an object have one length, also those of an upload that takes over: 32."""
        return base64.b64encode(f"{self._attempt}{number:06}".encode()).decode()

    def _landed_size(self) -> int | None:
        try:
            return self._store.head(self._key).size
        except NotFoundError:
            return None
