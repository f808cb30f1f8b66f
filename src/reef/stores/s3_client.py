"""The boto3 client, for what obstore does not offer: uploads that never ended, part copies, queues.

It is made for a task and closed after it: a client that was open across a fork would share its
sockets with the parent. Only ranges keep theirs (`s3_ranges`). Its errors become Reef's own, so
that what is passing is tried again. The region may come from `AWS_REGION`, as for obstore: boto3
knows only `AWS_DEFAULT_REGION`.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from reef.errors import InvalidInputError, Kind, UnavailableError
from reef.runtime import leaf_lock
from reef.stores.remote_errors import Answer, explain
from reef.stores.s3_options import S3Options

__all__ = ["s3_client", "translated"]

CONNECTIONS_MAX = 64
"""Kept open by a client; it warns of each beyond, and two full gathers ask for as many."""

_making = leaf_lock()
"""Clients are made one after the other: what they share in boto3 is not made for threads."""


@contextmanager
def translated(url: str, key: str = "") -> Iterator[None]:
    """Turn boto's errors into Reef's own, so that what is passing is tried again."""
    from botocore.exceptions import (
        BotoCoreError,
        ClientError,
        NoCredentialsError,
        PartialCredentialsError,
    )

    try:
        yield
    except ClientError as error:
        answer = _answer(error)
        known = explain(answer, url, key)
        kind = Kind.THROTTLED if answer.status in (429, 503) else Kind.UNAVAILABLE
        raise known or UnavailableError(f"{url}: {answer.words}", kind=kind) from error
    except (NoCredentialsError, PartialCredentialsError) as error:
        raise explain(Answer(403, words=str(error)), url, key) or error from error
    except BotoCoreError as error:  # all of these are about the way there and back
        raise UnavailableError(
            f"{url} cannot be reached: {error}",
            hint="Check the endpoint, the network and the proxy",
        ) from error


def _answer(error: Any) -> Answer:
    response = error.response
    return Answer(
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
            kind=Kind.UNSUPPORTED_BY_STORE,
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
            return boto3.client(
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
            f"there can be no client for {service}: {error}", kind=Kind.INVALID_OPTION
        ) from error
