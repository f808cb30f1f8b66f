"""The options of `s3://` stores: AWS, and everything that speaks its protocol.

Whatever is not given comes from the usual `AWS_…` environment variables. The operations
page lists working sets for AWS, MinIO, R2, Tigris, Ceph and SeaweedFS.
"""

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from reef.stores.remote_options import RemoteOptions, bad_option

__all__ = ["S3Options"]


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Options(RemoteOptions):
    """Where the bucket is and how to speak to it."""

    scheme: ClassVar[str] = "s3"

    region: str | None = None
    access_key_id: str | None = None
    secret_access_key: str | None = field(default=None, repr=False)
    session_token: str | None = field(default=None, repr=False)
    skip_signature: bool = False
    """For public buckets: no credentials are looked for."""
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
