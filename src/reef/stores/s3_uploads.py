"""Unfinished multipart uploads: found and ended through boto3 (the extra `s3`).

They are invisible in listings and billed like objects. A lifecycle rule on the bucket
does the same work without a client; the operations page shows it.
"""

from typing import Any

from reef.errors import InvalidInputError, Kind
from reef.stores.s3_options import S3Options

__all__ = ["abort_stale_uploads"]


def abort_stale_uploads(
    bucket: str, prefix: str, options: S3Options, now_s: float, older_than_s: float
) -> int:
    """End the uploads below `prefix` that began more than `older_than_s` ago."""
    client = _client(options)
    try:
        aborted = 0
        pages = client.get_paginator("list_multipart_uploads")
        for page in pages.paginate(Bucket=bucket, Prefix=f"{prefix}/" if prefix else ""):
            for upload in page.get("Uploads", []):
                if upload["Initiated"].timestamp() <= now_s - older_than_s:
                    client.abort_multipart_upload(
                        Bucket=bucket, Key=upload["Key"], UploadId=upload["UploadId"]
                    )
                    aborted += 1
        return aborted
    finally:
        client.close()


def _client(options: S3Options) -> Any:
    try:
        import boto3
        from botocore.config import Config
    except ImportError as error:
        raise InvalidInputError(
            "ending stale uploads needs boto3",
            kind=Kind.UNSUPPORTED_BY_STORE,
            hint="pip install 'reef[s3]', or give the bucket a lifecycle rule",
        ) from error
    style = "virtual" if options.virtual_hosted_style else "path"
    return boto3.client(
        "s3",
        endpoint_url=options.endpoint,
        region_name=options.region,
        aws_access_key_id=options.access_key_id,
        aws_secret_access_key=options.secret_access_key,
        aws_session_token=options.session_token,
        config=Config(
            connect_timeout=options.connect_timeout_s,
            read_timeout=options.timeout_s,
            s3={"addressing_style": style},
            proxies={"http": options.proxy_url, "https": options.proxy_url}
            if options.proxy_url
            else None,
        ),
    )
