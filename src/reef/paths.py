"""Every object name, built and parsed here and nowhere else.

    store/…                                   what the bucket remembers of itself
    namespaces/<name>/
      manifest/<generation, 20 digits>.manifest.json
      wal/<lsn, 20 digits>.wal
      segments/<ulid>.seg
      leases/<ulid>.json
      quarantine/…

Numbers have 20 digits, enough for 64 bits, so that names sort as numbers do.
"""

import re
from dataclasses import dataclass

from reef.errors import InvalidInputError

__all__ = ["Namespace", "cas_verdict", "clock", "probe_object"]

NAMESPACE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
NUMBERED = re.compile(r"(\d{20})\.(?:wal|manifest\.json)")


def cas_verdict() -> str:
    """Return the name of the record of how this bucket does compare-and-swap."""
    return "store/cas.json"


def probe_object(probe_id: str, name: str) -> str:
    """Return a name that only one run of the probe uses; deleted when it ends."""
    return f"store/probe/{probe_id}/{name}"


def clock() -> str:
    """Return the name of the object whose date tells the store's time."""
    return "store/clock"


@dataclass(frozen=True, slots=True)
class Namespace:
    """The names of one namespace's objects."""

    name: str

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not NAMESPACE_NAME.fullmatch(self.name):
            raise InvalidInputError(
                f"{self.name!r} is not the name of a namespace",
                hint="Up to 128 letters, digits, '.', '_' and '-', the first a letter or a digit",
            )

    @property
    def root(self) -> str:
        return f"namespaces/{self.name}"

    @property
    def manifests(self) -> str:
        return f"{self.root}/manifest/"

    @property
    def wal(self) -> str:
        return f"{self.root}/wal/"

    @property
    def segments(self) -> str:
        return f"{self.root}/segments/"

    @property
    def leases(self) -> str:
        return f"{self.root}/leases/"

    def manifest(self, generation: int) -> str:
        return f"{self.manifests}{generation:020}.manifest.json"

    def wal_object(self, lsn: int) -> str:
        return f"{self.wal}{lsn:020}.wal"

    def segment(self, segment_id: str) -> str:
        return f"{self.segments}{segment_id}.seg"

    def lease(self, lease_id: str) -> str:
        return f"{self.leases}{lease_id}.json"

    def quarantined(self, key: str) -> str:
        return f"{self.root}/quarantine/{key.removeprefix(self.root + '/').replace('/', '-')}"


def number_of(key: str) -> int | None:
    """Return the LSN or generation that a key names; None if it names none."""
    match = NUMBERED.fullmatch(key.rsplit("/", 1)[-1])
    return int(match[1]) if match else None
