"""Containers of Azure Blob Storage.

Differences from other services: a listing has pages of 5,000 and always starts at the folder's
first name, so keys before `start_after` are skipped here; suffix ranges do not exist, and none are
requested; uncommitted blocks of an unfinished upload are dropped by the service after a week, so
there is nothing to abort. A condition that does not hold is 409 (BlobAlreadyExists) for a create
and 412 for a replace.

An object is composed of blocks that the service reads by itself (Put Block From URL):

1. put a block for each range and each piece of new bytes; the block of a range names its source by
   a URL that is signed for reading it, so that the service may read it;
2. check the sizes of the blocks: a service that does not know the request would store an empty one;
3. put the list of blocks, which creates the object. This is idempotent.

Requests go to URLs that are signed for the target, with any of the account's own credentials that
can sign. Where none can, or where the service cannot copy blocks (Azurite), nothing is visible yet,
and the ranges are read and uploaded instead.
"""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar
from urllib.parse import quote
from xml.etree import ElementTree

from reef.errors import InvalidInputError, NotFoundError, ReefError
from reef.runtime import REAL, Runtime
from reef.stores.base import Capabilities, Part, past_the_end
from reef.stores.remote import RemoteStore
from reef.stores.remote_http import (
    MIB,
    CopiedRange,
    HttpSender,
    RemoteOptions,
    Sent,
    Step,
    plan,
    reading,
)

# --- options ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class AzureOptions(RemoteOptions):
    """The account that the container belongs to, and its credentials."""

    scheme: ClassVar[str] = "az"

    account_name: str | None = None
    account_key: str | None = field(default=None, repr=False)
    sas_token: str | None = field(default=None, repr=False)
    """A shared access signature of the container: racwdl."""
    bearer_token: str | None = field(default=None, repr=False)
    tenant_id: str | None = None
    client_id: str | None = None
    client_secret: str | None = field(default=None, repr=False)
    use_azure_cli: bool = False
    skip_signature: bool = False
    """For public containers: send requests without credentials."""
    block_copy: bool = True
    """Whether objects are composed of blocks that the service copies."""

    @property
    def can_sign(self) -> bool:
        """Whether URLs may be signed; a key may come from the environment."""
        return not (self.sas_token or self.bearer_token or self.skip_signature)

    def _named(self) -> dict[str, Any]:
        return {
            "endpoint": self.endpoint,
            "account_name": self.account_name,
            "account_key": self.account_key,
            "sas_key": self.sas_token,
            "token": self.bearer_token,
            "tenant_id": self.tenant_id,
            "client_id": self.client_id,
            "client_secret": self.client_secret,
            "use_azure_cli": self.use_azure_cli or None,
            "skip_signature": self.skip_signature or None,
        }


# --- the store ----------------------------------------------------------------------


LIST_PAGE = 5000


class AzureStore(RemoteStore):
    """A container, or the objects below a prefix of one."""

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
                return _compose_blocks(self, key, steps)
            except _CannotCopy:
                self._copies_blocks = False  # nothing is visible yet; do not try again
        return super().compose(key, parts)

    def compose_cost(self, parts: Sequence[Part]) -> Mapping[str, tuple[int, int]]:
        steps = self._steps(parts)
        return _cost(steps) if steps else super().compose_cost(parts)

    def _steps(self, parts: Sequence[Part]) -> list[Step]:
        if not self._copies_blocks:
            return []
        return _steps_of(parts, self.options.part_bytes)

    def abort_stale(self, older_than_s: float) -> int:
        """The service drops uncommitted blocks after a week."""
        return 0


# --- composing objects --------------------------------------------------------------


COPY_BYTES_MAX = 256 * MIB
"""The service allows more; several smaller copies run in parallel."""
BLOCKS_MAX = 50_000
SIGNED_S = 3600.0


class _CannotCopy(Exception):
    """The service cannot copy these blocks: read and upload the ranges instead."""


def _steps_of(parts: Sequence[Part], part_bytes: int) -> list[Step]:
    """Return the blocks; none if nothing is to be copied. Blocks may have any size."""
    steps = plan(parts, part_bytes_min=1, part_bytes=part_bytes, copy_bytes_max=COPY_BYTES_MAX)
    copies = any(isinstance(step, CopiedRange) for step in steps)
    return steps if copies and len(steps) <= BLOCKS_MAX else []


def _cost(steps: Sequence[Step]) -> Mapping[str, tuple[int, int]]:
    """Return requests and bytes by kind, if all goes well."""
    sent = [step for step in steps if isinstance(step, Sent)]
    return {
        "put": (1 + len(sent), sum(step.size for step in sent)),
        "copy": (len(steps) - len(sent), 0),
        "get": (1, 0),
    }


def _compose_blocks(store: AzureStore, key: str, steps: Sequence[Step]) -> int:
    """Write the object, and return its size; _CannotCopy if that is not possible in this way."""
    composition = _BlockComposition(store, key, steps)
    composition.write_blocks()
    composition.check_blocks()
    composition.commit()
    return sum(step.size for step in steps)


class _BlockComposition:
    """One object in progress."""

    def __init__(self, store: AzureStore, key: str, steps: Sequence[Step]) -> None:
        self._store, self._key, self._steps = store, key, steps
        self._attempt = store.runtime.ulid()
        self._http = HttpSender(store.url, store.options, store.runtime)
        sources = {step.source for step in steps if isinstance(step, CopiedRange)}
        try:
            self._target = store.signed_url("PUT", key, SIGNED_S)
            self._readable = store.signed_url("GET", key, SIGNED_S)
            self._sources = {
                source: store.signed_url("GET", source, SIGNED_S) for source in sources
            }
        except ReefError as error:
            raise _CannotCopy from error

    def write_blocks(self) -> None:
        at_once = self._store.options.upload_concurrency
        for first in range(0, len(self._steps), at_once):
            numbered = enumerate(self._steps[first : first + at_once], first)
            self._store.runtime.map(lambda block: self._write_block(*block), numbered)

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
            raise _CannotCopy from error  # the source is fine: the service cannot, or may not

    def _check_source(self, step: CopiedRange) -> None:
        size = self._store.head(step.source).size
        if step.end > size:
            raise past_the_end(step.source, step.end, size)

    def check_blocks(self) -> None:
        url = f"{self._readable}&comp=blocklist&blocklisttype=uncommitted"
        listed = ElementTree.fromstring(self._http.send("GET", url, self._key))
        found = {block.findtext("Name"): block.findtext("Size") for block in listed.iter("Block")}
        for number, step in enumerate(self._steps):
            if found.get(self._block_id(number)) != str(step.size):
                if isinstance(step, CopiedRange):
                    self._check_source(step)
                raise _CannotCopy

    def commit(self) -> None:
        names = "".join(
            f"<Uncommitted>{self._block_id(number)}</Uncommitted>"
            for number in range(len(self._steps))
        )
        body = f'<?xml version="1.0" encoding="utf-8"?><BlockList>{names}</BlockList>'
        try:
            self._http.send("PUT", f"{self._target}&comp=blocklist", self._key, body.encode())
        except ReefError:
            # A response may have been lost, and blocks that are committed are not uncommitted.
            if self._landed_size() != sum(step.size for step in self._steps):
                raise

    def _block_id(self, number: int) -> str:
        """Return a block id; all ids of an object, those of uploads too, have one length."""
        return base64.b64encode(f"{self._attempt}{number:06}".encode()).decode()

    def _landed_size(self) -> int | None:
        try:
            return self._store.head(self._key).size
        except NotFoundError:
            return None
