"""The options of `gs://` stores: buckets of Google Cloud Storage.

Whatever is not given comes from the usual `GOOGLE_…` environment variables, from the
application default credentials, or from the machine's metadata server.
"""

from dataclasses import dataclass, field
from typing import Any, ClassVar

from reef.stores.remote_options import RemoteOptions, bad_option

__all__ = ["GcsOptions"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GcsOptions(RemoteOptions):
    """Who asks; there is only one service, unless `endpoint` names another."""

    scheme: ClassVar[str] = "gs"

    service_account_path: str | None = None
    service_account_key: str | None = field(default=None, repr=False)
    application_credentials: str | None = None
    """A file of credentials, as GOOGLE_APPLICATION_CREDENTIALS names one."""
    bearer_token: str | None = field(default=None, repr=False)
    skip_signature: bool = False
    """For public buckets: no credentials are looked for."""
    composite: bool = True
    """Whether whole objects are put together by the service."""
    storage_class: str | None = None

    def check(self) -> None:
        RemoteOptions.check(self)
        given = [self.service_account_path, self.service_account_key, self.application_credentials]
        if sum(one is not None for one in given) > 1:
            raise bad_option(
                "service_account_path", self.service_account_path, "the only credentials given"
            )

    def _named(self) -> dict[str, Any]:
        return {
            "base_url": self.endpoint,
            "service_account": self.service_account_path,
            "service_account_key": self.service_account_key,
            "application_credentials": self.application_credentials,
            "bearer_token": self.bearer_token,
            "skip_signature": self.skip_signature or None,
        }
