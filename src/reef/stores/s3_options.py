"""The options of `s3://` stores: AWS, and everything that speaks its protocol.

Whatever is not given comes from the usual `AWS_…` environment variables. The operations
page lists working sets for AWS, MinIO, R2, Tigris, Ceph and SeaweedFS.
"""

from dataclasses import dataclass, field, fields
from datetime import timedelta
from typing import Any, Literal

from reef.errors import InvalidInputError, Kind

__all__ = ["S3Options"]

MIB = 1 << 20
TIMEOUT_S_MAX = 86_400


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Options:
    """Where the bucket is and how to speak to it."""

    endpoint: str | None = None
    region: str | None = None
    access_key_id: str | None = None
    secret_access_key: str | None = field(default=None, repr=False)
    session_token: str | None = field(default=None, repr=False)
    skip_signature: bool = False
    """For public buckets: no credentials are looked for."""
    allow_http: bool = False
    allow_invalid_certificates: bool = False
    virtual_hosted_style: bool = False
    s3_express: bool = False
    """A directory bucket; its listings are unsorted."""
    listing: Literal["sorted", "unsorted"] = "sorted"
    """"unsorted": whole folders are listed and sorted here, since the service keeps
    another order (S3 Express, SeaweedFS) and its start-after would skip keys."""
    if_match: Literal["quoted", "bare", "none"] = "quoted"
    """How `replace` sends a tag. Ceph up to 16 wants it without quotes."""
    bulk_delete: bool = True
    server_side_encryption: str | None = None
    sse_kms_key_id: str | None = None
    storage_class: str | None = None
    proxy_url: str | None = None
    timeout_s: float = 30.0
    connect_timeout_s: float = 5.0
    part_bytes: int = 8 * MIB
    """Size of a part of an upload; S3 allows 10,000 parts of 5 MiB to 5 GiB."""
    upload_concurrency: int = 4

    @classmethod
    def from_words(cls, words: dict[str, Any]) -> "S3Options":
        """Make options from keyword arguments or a URL's query; both may be text."""
        known = {option.name: option for option in fields(cls)}
        for name in words:
            if name not in known:
                raise InvalidInputError(
                    f"s3:// has no option {name!r}",
                    kind=Kind.INVALID_OPTION,
                    hint=f"It takes: {', '.join(sorted(known))}",
                )
        options = cls(**{name: _coerce(known[name].default, name, words[name]) for name in words})
        options.check()
        return options

    def check(self) -> None:
        if self.if_match not in ("quoted", "bare", "none"):
            raise _bad_option("if_match", self.if_match, "quoted, bare or none")
        if self.listing not in ("sorted", "unsorted"):
            raise _bad_option("listing", self.listing, "sorted or unsorted")
        if self.part_bytes < 5 * MIB:
            raise _bad_option("part_bytes", self.part_bytes, "at least 5 MiB")
        for name in ("timeout_s", "connect_timeout_s"):
            seconds = getattr(self, name)
            if not 0 < seconds <= TIMEOUT_S_MAX:  # NaN is refused, too
                raise _bad_option(name, seconds, f"a number of seconds up to {TIMEOUT_S_MAX}")
        if self.upload_concurrency < 1:
            raise _bad_option("upload_concurrency", self.upload_concurrency, "at least 1")
        if self.endpoint is not None and not self.endpoint.startswith(("http://", "https://")):
            raise _bad_option("endpoint", self.endpoint, "a URL with http:// or https://")

    @property
    def sorts_listings(self) -> bool:
        return self.listing == "sorted" and not self.s3_express

    def store_config(self) -> dict[str, Any]:
        """Return the configuration of the client, leaving out what the environment decides."""
        config: dict[str, Any] = {
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
        return {name: value for name, value in config.items() if value is not None}

    def client_config(self) -> dict[str, Any]:
        config: dict[str, Any] = {
            "timeout": timedelta(seconds=self.timeout_s),
            "connect_timeout": timedelta(seconds=self.connect_timeout_s),
            "allow_http": self.allow_http or (self.endpoint or "").startswith("http://") or None,
            "allow_invalid_certificates": self.allow_invalid_certificates or None,
            "proxy_url": self.proxy_url,
            # A cache between here and the bucket must not answer for it (H9).
            "default_headers": {"Cache-Control": "no-cache"},
        }
        return {name: value for name, value in config.items() if value is not None}


def _coerce(default: object, name: str, value: Any) -> Any:
    """A URL's query has only text; read it as the type of the option's default."""
    try:
        if isinstance(default, bool) and isinstance(value, str):
            return {"true": True, "false": False}[value.lower()]
        if isinstance(default, int | float) and isinstance(value, str):
            return type(default)(value)
    except (KeyError, ValueError):
        raise _bad_option(name, value, f"a {type(default).__name__}") from None
    if default is None and value is not None and not isinstance(value, str):
        raise _bad_option(name, value, "text")
    return value


def _bad_option(name: str, value: object, expected: str) -> InvalidInputError:
    return InvalidInputError(f"option {name}={value!r} is not {expected}", kind=Kind.INVALID_OPTION)
