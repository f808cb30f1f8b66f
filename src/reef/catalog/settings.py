"""Settings of a catalog: how long things are kept, and how values become bytes."""

from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from reef.errors import UNDECODABLE, CorruptionError, InvalidInputError

__all__ = ["BYTES", "JSON", "Codec", "Retention"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """What collection leaves alone, beside what the head and living leases need.

    Segments are kept from the oldest kept checkpoint on, so that every snapshot taken since then
    can be read again with `session_at`.
    """

    checkpoints_last: int = 2
    """So many of the newest checkpoints stay."""
    checkpoints_min_age_s: float = 900.0
    """Younger ones stay, whatever their number."""
    grace_s: float = 60.0
    """Between the plan and the deletion: for readers without a lease."""
    lease_ttl_s: float = 60.0
    """How long a session lives without a heartbeat."""

    def __post_init__(self) -> None:
        if self.checkpoints_last < 1 or self.lease_ttl_s <= 0:
            raise InvalidInputError(
                "a catalog keeps at least one checkpoint, and a lease lasts more than 0 s"
            )
        if self.grace_s < 0 or self.checkpoints_min_age_s < 0:
            raise InvalidInputError("grace and minimum age of a catalog are not negative")


class Codec(Protocol):
    """How values become bytes, and come back."""

    def encode(self, value: Any) -> bytes: ...
    def decode(self, data: bytes) -> Any: ...


class _Bytes:
    """Values are bytes already."""

    def encode(self, value: Any) -> bytes:
        if not isinstance(value, bytes):
            raise InvalidInputError(
                f"a value is bytes, got {type(value).__name__}",
                hint="Open the catalog with codec=reef.catalog.JSON for other values",
            )
        return value

    def decode(self, data: bytes) -> Any:
        return data

    def __reduce__(self) -> str:
        return "BYTES"


class _Json:
    """Values are what JSON can say."""

    def encode(self, value: Any) -> bytes:
        try:
            return msgspec.json.encode(value)
        except (TypeError, ValueError) as error:
            raise InvalidInputError(f"the value is not JSON: {error}") from error

    def decode(self, data: bytes) -> Any:
        try:
            return msgspec.json.decode(data)
        except UNDECODABLE as error:
            raise CorruptionError(
                f"a value is not JSON: {error}", hint="It was written with another codec"
            ) from error

    def __reduce__(self) -> str:
        return "JSON"


BYTES: Codec = _Bytes()
JSON: Codec = _Json()
