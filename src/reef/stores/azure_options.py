"""The options of `az://` stores: containers of Azure Blob Storage.

Whatever is not given comes from the usual `AZURE_STORAGE_…` environment variables, from the
workload's or the machine's managed identity, or from the Azure command line.
"""

from dataclasses import dataclass, field
from typing import Any, ClassVar

from reef.stores.remote_options import RemoteOptions

__all__ = ["AzureOptions"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AzureOptions(RemoteOptions):
    """Which account the container belongs to, and who asks."""

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
    """For public containers: no credentials are looked for."""
    block_copy: bool = True
    """Whether objects are composed of blocks that the service copies."""

    @property
    def can_sign(self) -> bool:
        """Whether URLs can be signed with what is given; the environment may hold something."""
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
