"""Composes an object in S3 by copying parts: bytes of large ranges never pass through here.

1. begin a multipart upload;
2. copy the large ranges and send the rest, a few parts at a time (`compose_plan`);
3. look how large each part has become: a service that ignores a copy's range, or cuts it at the
   object's end without a word, would make another object than was asked for;
4. complete it. Its name is used by nobody else, so no condition is needed; and if the answer is
   lost, an object of the right size under that name is this one (H3).

Whatever fails before the end ends the upload, so that nothing is left that is billed.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from reef.errors import InvalidInputError, Kind, NotFoundError, ReefError, UnavailableError
from reef.stores.base import Part, past_the_end
from reef.stores.compose_plan import Copied, Sent, Step, plan, read_requests, reading
from reef.stores.remote_options import MIB
from reef.stores.s3_client import s3_client, translated
from reef.stores.s3_options import S3Options

if TYPE_CHECKING:
    from reef.stores.s3_store import S3Store

__all__ = ["compose", "cost", "steps_of"]

PART_BYTES_MIN = 5 * MIB
COPY_BYTES_MAX = 512 * MIB
"""The service allows 5 GiB; several smaller copies run side by side."""
PARTS_MAX = 10_000
LIST_PARTS_PAGE = 1000
ATTEMPTS_MAX = 5


def steps_of(parts: Sequence[Part], options: S3Options) -> list[Step]:
    """Return the parts of the upload; none if nothing is large enough to be copied."""
    steps = plan(
        parts,
        part_bytes_min=PART_BYTES_MIN,
        part_bytes=options.part_bytes,
        copy_bytes_max=COPY_BYTES_MAX,
    )
    copies = any(isinstance(step, Copied) for step in steps)
    return steps if copies and len(steps) <= PARTS_MAX else []


def cost(steps: Sequence[Step]) -> Mapping[str, tuple[int, int]]:
    """Return requests and bytes by kind, if all goes well: begin and complete are PUTs."""
    sent = [step for step in steps if isinstance(step, Sent)]
    gets = [read_requests(step.pieces) for step in sent]
    return {
        "get": (sum(requests for requests, _ in gets), sum(size for _, size in gets)),
        "put": (2 + len(sent), sum(step.size for step in sent)),
        "copy": (len(steps) - len(sent), 0),
        "list": (-(-len(steps) // LIST_PARTS_PAGE), 0),
    }


def compose(store: "S3Store", key: str, steps: Sequence[Step]) -> int:
    """Write the object; return its size."""
    client = s3_client(store.options, attempts_max=ATTEMPTS_MAX)
    try:
        return _Composition(store, client, key, steps).run()
    finally:
        client.close()


class _Composition:
    """One upload on its way."""

    def __init__(self, store: "S3Store", client: Any, key: str, steps: Sequence[Step]) -> None:
        self._store, self._client, self._key, self._steps = store, client, key, steps
        self._size = sum(step.size for step in steps)
        self._target = {"Bucket": store.bucket, "Key": store.name_of(key)}

    def run(self) -> int:
        with translated(self._store.url, self._key):
            begun = self._client.create_multipart_upload(**self._target, **self._settings())
        self._target["UploadId"] = begun["UploadId"]
        try:
            tags = self._write_parts()
            self._check_parts()
        except BaseException:
            with suppress(Exception):  # a sweep ends what is left
                self._client.abort_multipart_upload(**self._target)
            raise
        self._complete(tags)
        return self._size

    def _settings(self) -> dict[str, str]:
        options = self._store.options
        settings = {
            "ServerSideEncryption": options.server_side_encryption,
            "SSEKMSKeyId": options.sse_kms_key_id,
            "StorageClass": options.storage_class,
        }
        return {name: value for name, value in settings.items() if value is not None}

    def _write_parts(self) -> list[str]:
        """All that were begun are waited for: a part that lands after the abort would stay."""
        tags: list[str] = []
        at_once = self._store.options.upload_concurrency
        for first in range(0, len(self._steps), at_once):
            numbered = list(enumerate(self._steps[first : first + at_once], first + 1))
            outcomes = self._store.runtime.gather(
                [lambda one=one: _caught(lambda: self._write_part(*one)) for one in numbered]  # type: ignore[misc]
            )
            for outcome in outcomes:
                if isinstance(outcome, Exception):
                    raise outcome
                tags.append(outcome)
        return tags

    def _write_part(self, number: int, step: Step) -> str:
        tag: str
        if isinstance(step, Sent):
            body = b"".join(reading(self._store, step.pieces))
            with translated(self._store.url, self._key):
                sent = self._client.upload_part(**self._target, PartNumber=number, Body=body)
                tag = sent["ETag"]
            return tag
        try:
            with translated(self._store.url, step.source):
                copied = self._client.upload_part_copy(
                    **self._target,
                    PartNumber=number,
                    CopySource={
                        "Bucket": self._store.bucket,
                        "Key": self._store.name_of(step.source),
                    },
                    CopySourceRange=f"bytes={step.start}-{step.end - 1}",
                )
                tag = copied["CopyPartResult"]["ETag"]
        except InvalidInputError:
            self._check_source(step)  # services name a range past the end in many ways
            raise
        return tag

    def _check_source(self, step: Copied) -> None:
        size = self._store.head(step.source).size
        if step.end > size:
            raise past_the_end(step.source, step.end, size)

    def _check_parts(self) -> None:
        with translated(self._store.url, self._key):
            pages = self._client.get_paginator("list_parts").paginate(**self._target)
            found = {part["PartNumber"]: part["Size"] for page in pages for part in page["Parts"]}
        for number, step in enumerate(self._steps, 1):
            if found.get(number) == step.size:
                continue
            if isinstance(step, Copied):
                self._check_source(step)
            raise InvalidInputError(
                f"part {number} of {self._key} should have {step.size} bytes, "
                f"{self._store.url} made it {found.get(number)}",
                kind=Kind.UNSUPPORTED_BY_STORE,
                hint="Open it with the option part_copy=false",
                object=self._key,
            )

    def _complete(self, tags: Sequence[str]) -> None:
        parts = [{"PartNumber": number, "ETag": tag} for number, tag in enumerate(tags, 1)]
        try:
            with translated(self._store.url, self._key):
                self._client.complete_multipart_upload(
                    **self._target, MultipartUpload={"Parts": parts}
                )
        except UnavailableError:
            if self._landed_size() != self._size:
                raise

    def _landed_size(self) -> int | None:
        try:
            return self._store.head(self._key).size
        except NotFoundError:
            return None


def _caught(call: Callable[[], str]) -> str | Exception:
    try:
        return call()
    except ReefError as error:
        return error
