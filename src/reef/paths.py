"""Every object name, built and parsed here and nowhere else.

    store/…                                   what the bucket remembers of itself
    catalog/…                                 the registry of the bucket (`CatalogNames`)
    namespaces/<name>/
      manifest/<generation, 20 digits>.manifest.json
      wal/<lsn, 20 digits>.wal
      segments/<ulid>.seg
      leases/<ulid>.json
      quarantine/…
      successors/<incarnation, 20 digits>.json     only where the name was dropped and re-created
      incarnations/<incarnation, 20 digits>/       the same folders again, for each re-creation

Numbers have 20 digits, enough for 64 bits, so that names sort as numbers do.
"""

import re
from dataclasses import dataclass

from reef.errors import InvalidInputError

__all__ = [
    "CatalogNames",
    "Namespace",
    "ProbeNames",
    "cas_verdict",
    "clock",
    "compose_parts",
    "probe_object",
]

NAMESPACE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
NUMBERED = re.compile(r"(\d{20})\.(?:wal|manifest\.json|json)")


def cas_verdict() -> str:
    """Return the name of the record of how this bucket does compare-and-swap."""
    return "store/cas.json"


def probe_object(probe_id: str, name: str) -> str:
    """Return a name that only one run of the probe uses; deleted when it ends."""
    return f"store/probe/{probe_id}/{name}"


@dataclass(frozen=True, slots=True)
class ProbeNames:
    """Names of one run of the probe, in the folders where the engine writes conditionally.

    A store may decide by folder or by suffix whether it honours a condition. No namespace and no
    catalog has these names: the name of a namespace does not begin with '_'.
    """

    probe_id: str

    @property
    def namespace(self) -> str:
        return f"namespaces/_probe-{self.probe_id}"

    def manifest(self, generation: int) -> str:
        return f"{self.namespace}/manifest/{generation:020}.manifest.json"

    def wal_object(self, lsn: int) -> str:
        return f"{self.namespace}/wal/{lsn:020}.wal"

    @property
    def lease(self) -> str:
        return f"{self.namespace}/leases/{self.probe_id}.json"

    @property
    def catalog_head(self) -> str:
        return f"catalog/_probe-{self.probe_id}/HEAD.json"


def clock() -> str:
    """Return the name of the object whose date tells the store's time."""
    return "store/clock"


def compose_parts() -> str:
    """Return the folder of objects that are joined into another one, and then removed."""
    return "store/parts/"


@dataclass(frozen=True, slots=True)
class Namespace:
    """The names of the objects of one incarnation of a namespace.

    A name that is dropped and created again gets a prefix of its own, so that no object of one
    incarnation can be read in another (H65).
    """

    name: str
    incarnation: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not NAMESPACE_NAME.fullmatch(self.name):
            raise InvalidInputError(
                f"{self.name!r} is not the name of a namespace",
                hint="Up to 128 letters, digits, '.', '_' and '-', the first a letter or a digit",
            )

    @property
    def base(self) -> str:
        """The folder of the name, with all its incarnations."""
        return f"namespaces/{self.name}"

    @property
    def root(self) -> str:
        """The folder of this incarnation; the first one has no folder of its own."""
        if self.incarnation == 1:
            return self.base
        return f"{self.base}/incarnations/{self.incarnation:020}"

    @property
    def successors(self) -> str:
        return f"{self.base}/successors/"

    def successor(self, incarnation: int) -> str:
        """Return the name of the record that announces a re-creation."""
        return f"{self.successors}{incarnation:020}.json"

    def at(self, incarnation: int) -> "Namespace":
        return Namespace(self.name, incarnation)

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
        return slot_name(self.wal, lsn)

    def segment(self, segment_id: str) -> str:
        return f"{self.segments}{segment_id}.seg"

    def lease(self, lease_id: str) -> str:
        return f"{self.leases}{lease_id}.json"

    def quarantined(self, key: str) -> str:
        return f"{self.root}/quarantine/{key.removeprefix(self.root + '/').replace('/', '-')}"


@dataclass(frozen=True, slots=True)
class CatalogNames:
    """The names of one catalog's objects; `root` is empty, or ends with a slash."""

    root: str = ""

    @property
    def head(self) -> str:
        return f"{self.root}HEAD.json"

    @property
    def heads(self) -> str:
        """Where the head's versions lie, in a store without If-Match."""
        return f"{self.root}heads/"

    @property
    def segments(self) -> str:
        return f"{self.root}segments/"

    @property
    def checkpoints(self) -> str:
        return f"{self.root}checkpoints/"

    @property
    def leases(self) -> str:
        return f"{self.root}leases/"

    @property
    def plan(self) -> str:
        return f"{self.root}gc/GARBAGE"

    @property
    def plans(self) -> str:
        """Where the plan's versions lie, in a store without If-Match."""
        return f"{self.root}gc/plans/"

    def segment(self, seq: int, write_id: str) -> str:
        return f"{self.segments}seg-{seq:020}-{write_id}"

    def segments_after(self, seq: int) -> str:
        """Return what sorts behind all segments of this number, and before those of the next."""
        return f"{self.segments}seg-{seq:020}~"

    def checkpoint(self, checkpoint_id: str) -> str:
        return f"{self.checkpoints}ckpt-{checkpoint_id}"

    def lease(self, lease_id: str) -> str:
        return f"{self.leases}{lease_id}.json"


def slot_name(folder: str, lsn: int) -> str:
    """Return the name of a slot in the folder of a log."""
    return f"{folder}{lsn:020}.wal"


CATALOG_OBJECT = re.compile(r"(?:seg|ckpt)-(\d{20})-([0-9A-Z]{26})")


def catalog_object(key: str) -> tuple[int, str] | None:
    """Return the number and the write id that a segment's or checkpoint's key names."""
    match = CATALOG_OBJECT.fullmatch(key.rsplit("/", 1)[-1])
    return (int(match[1]), match[2]) if match else None


def number_of(key: str) -> int | None:
    """Return the LSN or generation that a key names; None if it names none."""
    match = NUMBERED.fullmatch(key.rsplit("/", 1)[-1])
    return int(match[1]) if match else None
