"""The token of a request to Google that obstore does not send, by google-auth (the extra `gcs`).

It is made from the same credentials that the store was opened with, in the order in which obstore
looks for them: a token, a service account, a file, the application's defaults.
"""

import importlib.util
import json
from typing import Any

from reef.errors import InvalidInputError, Kind, UnavailableError
from reef.stores.gcs_options import GcsOptions

__all__ = ["can_make_tokens", "token_of"]

SCOPES = ("https://www.googleapis.com/auth/devstorage.read_write",)


def can_make_tokens(options: GcsOptions) -> bool:
    """Whether there is a token, or what makes one is installed."""
    if options.bearer_token or options.skip_signature:
        return True
    return importlib.util.find_spec("google") is not None and _has_google_auth()


def token_of(options: GcsOptions) -> str | None:
    """Return a token that is valid now; None where requests are not to be signed."""
    if options.skip_signature:
        return None
    if options.bearer_token:
        return options.bearer_token
    from google.auth.exceptions import DefaultCredentialsError, GoogleAuthError
    from google.auth.transport.requests import Request

    try:
        credentials = _credentials(options)
        credentials.refresh(Request())
    except (DefaultCredentialsError, OSError, ValueError) as error:
        raise InvalidInputError(
            f"no credentials for Google: {error}",
            kind=Kind.ACCESS_DENIED,
            hint="Set service_account_path, or GOOGLE_APPLICATION_CREDENTIALS",
        ) from error
    except GoogleAuthError as error:
        raise UnavailableError(f"Google gave no token: {error}") from error
    token: str = credentials.token
    return token


def _credentials(options: GcsOptions) -> Any:
    auth: Any = importlib.import_module("google.auth")  # in part without types
    accounts: Any = importlib.import_module("google.oauth2.service_account")
    if options.service_account_key:
        told = json.loads(options.service_account_key)
        return accounts.Credentials.from_service_account_info(told, scopes=SCOPES)
    path = options.service_account_path or options.application_credentials
    if path:
        return auth.load_credentials_from_file(path, scopes=SCOPES)[0]
    return auth.default(scopes=SCOPES)[0]


def _has_google_auth() -> bool:
    return importlib.util.find_spec("google.auth") is not None
