"""The options that every bucket over the network takes, and how options are read from text.

A URL's query has only text, keyword arguments have types: both are read as the type of the
option's default. What is not given comes from the provider's usual environment variables.
"""

from dataclasses import Field, dataclass, fields
from datetime import timedelta
from typing import Any, ClassVar, Literal, Self

from reef.errors import InvalidInputError, Kind

__all__ = ["MIB", "RemoteOptions", "bad_option"]

MIB = 1 << 20
TIMEOUT_S_MAX = 86_400
EXPECTED = {bool: "true or false", int: "a whole number", float: "a number"}
"""What the types of options are called where people write them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteOptions:
    """How to speak to a service; where it is and who asks is said by each one's own options."""

    scheme: ClassVar[str] = ""

    endpoint: str | None = None
    allow_http: bool = False
    allow_invalid_certificates: bool = False
    listing: Literal["sorted", "unsorted"] = "sorted"
    """"unsorted": whole folders are listed and sorted here, since the service keeps
    another order (S3 Express, SeaweedFS) and its start-after would skip keys."""
    proxy_url: str | None = None
    timeout_s: float = 30.0
    connect_timeout_s: float = 5.0
    part_bytes: int = 8 * MIB
    """Size of a part of an upload; S3 allows 10,000 parts of 5 MiB to 5 GiB."""
    upload_concurrency: int = 4

    @classmethod
    def from_words(cls, words: dict[str, Any]) -> Self:
        """Make options from keyword arguments or a URL's query; both may be text."""
        known: dict[str, Field[Any]] = {option.name: option for option in fields(cls)}
        for name in words:
            if name not in known:
                raise InvalidInputError(
                    f"{cls.scheme}:// has no option {name!r}",
                    kind=Kind.INVALID_OPTION,
                    hint=f"It takes: {', '.join(sorted(known))}",
                )
        options = cls(**{name: _coerce(known[name].default, name, words[name]) for name in words})
        options.check()
        return options

    def check(self) -> None:
        if self.listing not in ("sorted", "unsorted"):
            raise bad_option("listing", self.listing, "sorted or unsorted")
        if self.part_bytes < 5 * MIB:
            raise bad_option("part_bytes", self.part_bytes, "at least 5 MiB")
        for name in ("timeout_s", "connect_timeout_s"):
            seconds = getattr(self, name)
            if not 0 < seconds <= TIMEOUT_S_MAX:  # NaN is refused, too
                raise bad_option(name, seconds, f"a number of seconds up to {TIMEOUT_S_MAX}")
        if self.upload_concurrency < 1:
            raise bad_option("upload_concurrency", self.upload_concurrency, "at least 1")
        if self.endpoint is not None and not self.endpoint.startswith(("http://", "https://")):
            raise bad_option("endpoint", self.endpoint, "a URL with http:// or https://")

    @property
    def sorts_listings(self) -> bool:
        return self.listing == "sorted"

    def store_config(self) -> dict[str, Any]:
        """Return the configuration of the client, leaving out what the environment decides."""
        return {name: value for name, value in self._named().items() if value is not None}

    def _named(self) -> dict[str, Any]:
        """Return each setting by the client's name for it; None leaves it to the environment."""
        return {"endpoint": self.endpoint}

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
        raise bad_option(name, value, EXPECTED[type(default)]) from None
    if default is None and value is not None and not isinstance(value, str):
        raise bad_option(name, value, "text")
    return value


def bad_option(name: str, value: object, expected: str) -> InvalidInputError:
    """Return the error for an option that cannot be meant."""
    return InvalidInputError(f"option {name}={value!r} is not {expected}", kind=Kind.INVALID_OPTION)
