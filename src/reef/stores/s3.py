"""Buckets of AWS S3, and of every service that speaks its protocol.

Options that are not given come from the usual `AWS_…` environment variables. Without keys in
either, boto3 finds the credentials: in a profile of `~/.aws`, by single sign-on, from the container
or from the instance. It refreshes them, and each request uses the current ones. Without boto3,
obstore asks the container and the instance. The operations page lists working sets for AWS, MinIO,
R2, Tigris, Ceph and SeaweedFS.

Differences from other services: the tag is the ETag, which old Ceph expects without quotes; one
request deletes a thousand objects; objects are composed by copying parts.

boto3 (the extra `s3`) sends the requests that obstore does not offer: it aborts unfinished uploads,
copies parts and reads queues. A client is made for one task and closed after it: a client that is
open across a fork would share its sockets with the parent. Its errors become Reef's own, so that
transient ones are retried. The region may come from `AWS_REGION`, as for obstore: boto3 reads only
`AWS_DEFAULT_REGION`.

Unfinished multipart uploads are invisible in listings and billed like objects. `abort_stale` aborts
them; a lifecycle rule of the bucket does the same without a client.

A range has the status 206. rclone's S3 server sends the right bytes, names them in Content-Range,
and sends 200, which obstore takes for a server that has ignored the range. boto3 ignores the
status, so it reads them; without a Content-Range the response cannot be used.

An object is composed by copying parts, without downloading large ranges:

1. begin a multipart upload;
2. copy the large ranges and send the rest, a few parts at a time (`reef.stores.remote_http`);
3. check the size of each part: a service that ignores the range of a copy, or silently truncates it
   at the object's end, would make a different object;
4. complete it. No other process uses its name, so no condition is needed; and if the response is
   lost, an object of the right size under that name is this one (H3).

A failure before the end aborts the upload, so that no parts are left and billed.
"""

import importlib.util
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, ClassVar, Literal

from reef.config import bad_option
from reef.errors import ErrorKind, InvalidInputError, NotFoundError, ReefError, UnavailableError
from reef.runtime import REAL, Runtime, leaf_lock
from reef.stores.base import Capabilities, Part, check_range, past_the_end, short_read
from reef.stores.remote import RemoteStore, abandoned
from reef.stores.remote_http import (
    MIB,
    CopiedRange,
    RemoteOptions,
    Response,
    Sent,
    Step,
    final_error,
    plan,
    read_requests,
    reading,
)

# --- options ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Options(RemoteOptions):
    """Where the bucket is and how to speak to it."""

    scheme: ClassVar[str] = "s3"

    region: str | None = None
    profile: str | None = None
    """A profile of `~/.aws`, as AWS_PROFILE names one; needs boto3."""
    access_key_id: str | None = None
    secret_access_key: str | None = field(default=None, repr=False)
    session_token: str | None = field(default=None, repr=False)
    skip_signature: bool = False
    """For public buckets: send requests without credentials."""
    virtual_hosted_style: bool = False
    s3_express: bool = False
    """A directory bucket; its listings are unsorted."""
    if_match: Literal["quoted", "bare", "none"] = "quoted"
    """How `replace` sends a tag. Ceph up to 16 wants it without quotes."""
    bulk_delete: bool = True
    part_copy: bool = True
    """Whether objects are composed of parts that the service copies; R2 wants all parts equal."""
    server_side_encryption: str | None = None
    sse_kms_key_id: str | None = None
    storage_class: str | None = None

    def check(self) -> None:
        RemoteOptions.check(self)
        if self.if_match not in ("quoted", "bare", "none"):
            raise bad_option("if_match", self.if_match, "quoted, bare or none")
        if self.profile is not None and self.access_key_id is not None:
            raise bad_option("profile", self.profile, "the only credentials given")

    @property
    def needs_boto_credentials(self) -> bool:
        """Whether a profile is named, or neither options nor environment have keys."""
        if self.skip_signature or self.access_key_id is not None:
            return False
        return self.profile is not None or "AWS_ACCESS_KEY_ID" not in os.environ

    def client_config(self) -> dict[str, Any]:
        config = RemoteOptions.client_config(self)
        if self.endpoint is None and os.environ.get("AWS_ENDPOINT_URL", "").startswith("http://"):
            config["allow_http"] = True
        return config

    @property
    def sorts_listings(self) -> bool:
        return self.listing == "sorted" and not self.s3_express

    def _named(self) -> dict[str, Any]:
        return {
            "endpoint": self.endpoint,
            "region": self.region,
            "access_key_id": self.access_key_id,
            "secret_access_key": self.secret_access_key,
            "session_token": self.session_token,
            "server_side_encryption": self.server_side_encryption,
            "sse_kms_key_id": self.sse_kms_key_id,
            "skip_signature": self.skip_signature or None,
            "s3_express": self.s3_express or None,
            "virtual_hosted_style_request": self.virtual_hosted_style or None,
            "disable_bulk_delete": None if self.bulk_delete else True,
        }


# --- the client ---------------------------------------------------------------------


CONNECTIONS_MAX = 64
"""Kept open by a client; it warns of each above, and two full `Runtime.map` calls use as many."""

_making = leaf_lock()
"""Clients are made one after the other: boto3 shares state that is not thread-safe."""


@contextmanager
def translated(url: str, key: str = "") -> Iterator[None]:
    """Translate errors of boto3, so that transient ones are retried."""
    from botocore.exceptions import (
        BotoCoreError,
        ClientError,
        NoCredentialsError,
        PartialCredentialsError,
    )

    try:
        yield
    except ClientError as error:
        response = _response(error)
        known = final_error(response, url, key)
        kind = ErrorKind.THROTTLED if response.status in (429, 503) else ErrorKind.UNAVAILABLE
        raise known or UnavailableError(f"{url}: {response.message}", kind=kind) from error
    except (NoCredentialsError, PartialCredentialsError) as error:
        raise _no_credentials(url, f": {error}") from error
    except BotoCoreError as error:  # all of these are errors of the connection
        raise UnavailableError(
            f"{url} cannot be reached: {error}",
            hint="Check the endpoint, the network and the proxy",
        ) from error


def _response(error: Any) -> Response:
    response = error.response
    return Response(
        response.get("ResponseMetadata", {}).get("HTTPStatusCode"),
        response.get("Error", {}).get("Code"),
        str(error)[:300],
    )


def s3_client(options: S3Options, service: str = "s3", *, attempts_max: int = 1) -> Any:
    """Return a client that sends each request up to `attempts_max` times."""
    try:
        import boto3
        from botocore import UNSIGNED
        from botocore.config import Config
        from botocore.exceptions import BotoCoreError
    except ImportError as error:
        raise InvalidInputError(
            "ending stale uploads, and listening to a queue, need boto3",
            kind=ErrorKind.UNSUPPORTED_BY_STORE,
            hint="pip install 'reef[s3]'; a lifecycle rule of the bucket ends uploads, too",
        ) from error
    style = "virtual" if options.virtual_hosted_style else "path"
    proxies = {"http": options.proxy_url, "https": options.proxy_url} if options.proxy_url else None
    config = Config(
        connect_timeout=options.connect_timeout_s,
        read_timeout=options.timeout_s,
        retries={"mode": "standard", "total_max_attempts": attempts_max},
        signature_version=UNSIGNED if options.skip_signature else None,
        s3={"addressing_style": style},
        proxies=proxies,
        max_pool_connections=CONNECTIONS_MAX,
        # Some servers store the checksum trailers of newer clients as if they were data.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
    )
    try:
        with _making:
            session: Any = boto3  # the default session, which keeps descriptions of services
            if options.needs_boto_credentials:  # it also keeps the profile of its first use
                session = boto3.Session(profile_name=options.profile)
            return session.client(
                service,
                endpoint_url=options.endpoint,
                region_name=options.region or os.environ.get("AWS_REGION"),
                aws_access_key_id=options.access_key_id,
                aws_secret_access_key=options.secret_access_key,
                aws_session_token=options.session_token,
                verify=False if options.allow_invalid_certificates else None,
                config=config,
            )
    except (BotoCoreError, ValueError) as error:  # a region or half of the credentials is missing
        raise InvalidInputError(
            f"cannot make a client for {service}: {error}", kind=ErrorKind.INVALID_OPTION
        ) from error


CREDENTIALS_TTL_S = 300.0
"""How long a client uses credentials; boto3 refreshes those that expire ten minutes before."""


class _BotoCredentials:
    """The credentials that boto3 finds, as obstore calls for them.

    They are searched for before the first request, which may ask the network, and not when a store
    is opened.
    """

    def __init__(self, url: str, options: S3Options) -> None:
        import boto3

        self._url = url
        self._found: Any = None
        with _making, _reported(url):
            self._session = boto3.Session(profile_name=options.profile)
        region = options.region or os.environ.get("AWS_REGION") or self._session.region_name
        self.config = {"region": region} if region else {}
        """Obstore adds it to the options of the client."""

    def load(self) -> None:
        """Find the credentials, once; InvalidInputError if there are none, or have expired."""
        if self._found is not None:
            return
        with _making, _reported(self._url):
            found = self._session.get_credentials()
            if found is None:
                raise _no_credentials(
                    self._url, " in options, environment, ~/.aws, container or instance"
                )
            found.get_frozen_credentials()
        self._found = found

    def __call__(self) -> dict[str, Any]:
        self.load()
        frozen = self._found.get_frozen_credentials()
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            "expires_at": datetime.fromtimestamp(REAL.wall_s() + CREDENTIALS_TTL_S, UTC),
        }


@contextmanager
def _reported(url: str) -> Iterator[None]:
    """Translate errors of boto3's search: an unknown profile, a login that has expired."""
    from botocore.exceptions import BotoCoreError

    try:
        yield
    except BotoCoreError as error:
        raise _no_credentials(url, f": {error}") from error


def _no_credentials(url: str, reason: str) -> InvalidInputError:
    return InvalidInputError(
        f"{url}: no credentials were found{reason}",
        kind=ErrorKind.ACCESS_DENIED,
        hint="Set AWS_PROFILE or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or pass profile= or "
        "access_key_id= and secret_access_key=; skip_signature=true is for public buckets",
    )


# --- the store ----------------------------------------------------------------------


LIST_PAGE = 1000
DELETE_PAGE = 1000


class S3Store(RemoteStore):
    """A bucket of AWS S3, or of anything that speaks its protocol."""

    client_class: ClassVar[str] = "S3Store"

    def __init__(
        self, bucket: str, prefix: str, options: S3Options, *, runtime: Runtime = REAL
    ) -> None:
        self.options = options
        self._has_boto = has_boto = importlib.util.find_spec("boto3") is not None
        self._provider: _BotoCredentials | None = None
        self._is_open = False
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
        self._is_open = self._says_206 = True
        self._ranges = _RangeReader(self)
        if options.storage_class:
            self._attributes = {"Storage-Class": options.storage_class}

    def get_range(self, key: str, start: int, end: int) -> bytes:
        """Read with boto3 after the first range that came with the wrong status."""
        if self._says_206:
            try:
                return super().get_range(key, start, end)
            except UnavailableError as error:
                if not self._has_boto or "not_partial" not in error.context:
                    raise
        body = self._ranges.read(key, start, end)
        self._says_206 = False
        return body

    def _connect(self) -> Any:
        clients = super()._connect()
        if self._provider is not None and self._is_open:
            self._provider.load()
        return clients

    def _credentials(self) -> dict[str, Any]:
        if not self.options.needs_boto_credentials:
            return {}
        if not self._has_boto:
            if self.options.profile is None and "AWS_PROFILE" not in os.environ:
                return {}
            raise _no_credentials(self.url, ": a profile needs boto3, pip install 'reef[s3]'")
        self._provider = _BotoCredentials(self.url, self.options)
        return {"credential_provider": self._provider}

    def _condition(self, tag: str) -> Any:
        return {"e_tag": tag.strip('"') if self.options.if_match == "bare" else tag}

    def _deletes_in_bulk(self) -> bool:
        return self.options.bulk_delete

    def compose(self, key: str, parts: Sequence[Part]) -> int:
        """Copy ranges that are large enough to be a part; without any, read and upload."""
        steps = steps_of(parts, self.options) if self.capabilities.compose else []
        return _compose_parts(self, key, steps) if steps else super().compose(key, parts)

    def compose_cost(self, parts: Sequence[Part]) -> Mapping[str, tuple[int, int]]:
        steps = steps_of(parts, self.options)
        return _cost(steps) if steps else super().compose_cost(parts)

    def abort_stale(self, older_than_s: float) -> int:
        before_s = self.now() - older_than_s
        return _abort_stale_uploads(self.url, self.bucket, self.prefix, self.options, before_s)


# --- ranges -------------------------------------------------------------------------


CONTENT_RANGE = re.compile(r"bytes (\d+)-\d+/(\d+)")


class _RangeReader:
    """Reads ranges of a bucket's objects, with one client for each process."""

    def __init__(self, store: S3Store) -> None:
        self._store = store
        self._setup = leaf_lock()
        self._client: tuple[Any, int] = None, -1
        """And the process that it belongs to."""

    def read(self, key: str, start: int, end: int) -> bytes:
        """Return the bytes of [start, end), as `Store.get_range` does."""
        check_range(key, start, end)
        store, client = self._store, self._connect()
        with translated(store.url, key):
            response = client.get_object(
                Bucket=store.bucket, Key=store.name_of(key), Range=f"bytes={start}-{end - 1}"
            )
            with closing(response["Body"]) as stream:
                content_range = CONTENT_RANGE.fullmatch(response.get("ContentRange", ""))
                body: bytes = stream.read(end - start) if content_range else b""
        if content_range is None or int(content_range[1]) != start:
            raise UnavailableError(
                f"{store.url} ignores the range of a request for {key}",
                hint="Check proxies in between; Reef needs a server with ranged GETs",
                object=key,
            )
        if end > int(content_range[2]):
            raise past_the_end(key, end, int(content_range[2]))
        if len(body) != end - start:
            raise short_read(key, len(body), end - start)
        return body

    def _connect(self) -> Any:
        process_id = REAL.process_id()
        client, of_process = self._client
        if of_process != process_id:
            with self._setup:
                client, of_process = self._client  # another thread may have made it
                if of_process != process_id:
                    if client is not None:
                        abandoned.append(client)
                    client = s3_client(self._store.options)
                    self._client = client, process_id
        return client


# --- unfinished uploads -------------------------------------------------------------


def _abort_stale_uploads(
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
        return aborted  # rclone raises this if there is none
    return aborted


def _abort_one(client: Any, bucket: str, upload: Any) -> bool:
    try:
        client.abort_multipart_upload(Bucket=bucket, Key=upload["Key"], UploadId=upload["UploadId"])
    except client.exceptions.NoSuchUpload:
        return False  # completed or aborted by another process
    return True


# --- composing objects ------------------------------------------------------------


PART_BYTES_MIN = 5 * MIB
COPY_BYTES_MAX = 512 * MIB
"""The service allows 5 GiB; several smaller copies run in parallel."""
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
    copies = any(isinstance(step, CopiedRange) for step in steps)
    return steps if copies and len(steps) <= PARTS_MAX else []


def _cost(steps: Sequence[Step]) -> Mapping[str, tuple[int, int]]:
    """Return requests and bytes by kind, if all goes well: begin and complete are PUTs."""
    sent = [step for step in steps if isinstance(step, Sent)]
    gets = [read_requests(step.pieces) for step in sent]
    return {
        "get": (sum(requests for requests, _ in gets), sum(size for _, size in gets)),
        "put": (2 + len(sent), sum(step.size for step in sent)),
        "copy": (len(steps) - len(sent), 0),
        "list": (-(-len(steps) // LIST_PARTS_PAGE), 0),
    }


def _compose_parts(store: S3Store, key: str, steps: Sequence[Step]) -> int:
    """Write the object; return its size."""
    client = s3_client(store.options, attempts_max=ATTEMPTS_MAX)
    try:
        return _PartComposition(store, client, key, steps).run()
    finally:
        client.close()


class _PartComposition:
    """One upload in progress."""

    def __init__(self, store: S3Store, client: Any, key: str, steps: Sequence[Step]) -> None:
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
            with suppress(Exception):  # a sweep aborts it
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
        """Wait for all parts, failed or not: one that lands after the abort would stay."""
        tags: list[str] = []
        at_once = self._store.options.upload_concurrency
        for first in range(0, len(self._steps), at_once):
            numbered = enumerate(self._steps[first : first + at_once], first + 1)
            outcomes = self._store.runtime.map(self._try_part, numbered)
            for outcome in outcomes:
                if isinstance(outcome, Exception):
                    raise outcome
                tags.append(outcome)
        return tags

    def _try_part(self, numbered: tuple[int, Step]) -> str | ReefError:
        try:
            return self._write_part(*numbered)
        except ReefError as error:
            return error

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

    def _check_source(self, step: CopiedRange) -> None:
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
            if isinstance(step, CopiedRange):
                self._check_source(step)
            raise InvalidInputError(
                f"part {number} of {self._key} should have {step.size} bytes, "
                f"{self._store.url} made it {found.get(number)}",
                kind=ErrorKind.UNSUPPORTED_BY_STORE,
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
