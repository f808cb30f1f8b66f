"""Every object name, built and parsed here and nowhere else.

    store/…                                   records of the bucket itself
    catalog/…                                 the registry of the bucket (`CatalogNames`)
    backups/…, data/…                         a backup set, on a store of its own (`BackupNames`)
    namespaces/<name>/
      manifest/<generation, 20 digits>.manifest.json
      wal/<lsn, 20 digits>.wal
      segments/<ulid>.seg
      segments/<ulid>.ctr                      centroids of a vector index
      leases/<ulid>.json
      quarantine/…
      restored/<ulid>.manifest.json           only where a dropped name was restored from a backup
      successors/<incarnation, 20 digits>.json     only where the name was dropped and re-created
      incarnations/<incarnation, 20 digits>/       the same folders again, for each re-creation

Numbers have 20 digits, enough for 64 bits, so that names sort as numbers do.
"""

import re
from dataclasses import dataclass

from reef.errors import InvalidInputError

NAMESPACE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
ROOT = re.compile(rf"namespaces/({NAMESPACE_NAME.pattern})(?:/incarnations/(\d{{20}}))?")
NUMBERED = re.compile(r"(\d{20})\.(?:wal|manifest\.json|json)")
CENTROIDS_SUFFIX = ".ctr"
SUFFIXES = {"wal": ".wal", "manifest": ".manifest.json"}


def cas_verdict() -> str:
    """Return the name of the record of how this bucket does compare-and-swap."""
    return "store/cas.json"


def bucket_id() -> str:
    """Return the name of the record that distinguishes this bucket from all others."""
    return "store/id.json"


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
    """Return the name of the object whose date is the store's time."""
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
    home: str = ""
    """The name under which the objects are stored, if the namespace was renamed."""
    inherited: tuple[tuple[int, str], ...] = ()
    """Last LSN and root of each part of the log that a branch inherits, in ascending order."""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not NAMESPACE_NAME.fullmatch(self.name):
            raise InvalidInputError(
                f"{self.name!r} is not the name of a namespace",
                hint="Up to 128 letters, digits, '.', '_' and '-', the first a letter or a digit",
            )

    @property
    def base(self) -> str:
        """The folder of the name, with all its incarnations."""
        return f"namespaces/{self.folder}"

    @property
    def folder(self) -> str:
        """The name under which the objects are stored: that of the first incarnation."""
        return self.home or self.name

    @property
    def root(self) -> str:
        """The folder of this incarnation; the first one has no folder of its own."""
        if self.incarnation == 1:
            return self.base
        return f"{self.incarnations}{self.incarnation:020}"

    @property
    def incarnations(self) -> str:
        """The folder of all incarnations but the first."""
        return f"{self.base}/incarnations/"

    @property
    def successors(self) -> str:
        return f"{self.base}/successors/"

    def successor(self, incarnation: int) -> str:
        """Return the name of the record that announces a re-creation."""
        return f"{self.successors}{incarnation:020}.json"

    def at(self, incarnation: int) -> "Namespace":
        return Namespace(self.name, incarnation, self.home)

    @classmethod
    def of_root(cls, root: str) -> "Namespace":
        """Return the names of the incarnation whose folder is `root`."""
        match = ROOT.fullmatch(root)
        if match is None:
            raise InvalidInputError(f"{root!r} is not the folder of a namespace")
        return cls(match[1], int(match[2] or 1))

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
        home = self.home_of_slot(lsn)
        return self.slot_pattern % lsn if home is None else f"{home}/wal/{lsn:020}.wal"

    @property
    def slot_pattern(self) -> str:
        """The name of an own slot, as a pattern for the `%` operator and an LSN."""
        return f"{self.wal.replace('%', '%%')}%020d.wal"

    @property
    def first_own_lsn(self) -> int:
        """The first LSN whose slot is in the folder of this namespace."""
        return self.inherited[-1][0] + 1 if self.inherited else 1

    def home_of_slot(self, lsn: int) -> str | None:
        """Return the root of the namespace that a branch inherited a slot from; None if its own."""
        return next((root for last, root in self.inherited if lsn <= last), None)

    def log_parts(self, first: int) -> list[tuple[str, str, int | None]]:
        """Return the folders of the log from an LSN on, each with the name to list after and the
        last LSN that counts in it; None in the own folder.
        """
        parts: list[tuple[str, str, int | None]] = []
        for last, root in self.inherited:
            if first <= last:
                parts.append((f"{root}/wal/", f"{root}/wal/{first - 1:020}.wal", last))
                first = last + 1
        return [*parts, (self.wal, self.slot_pattern % (first - 1), None)]

    def segment(self, segment_id: str, home: str | None = None) -> str:
        """Return the name of a segment; `home` is the root of another namespace that has it."""
        return f"{home or self.root}/segments/{segment_id}.seg"

    def centroids(self, centroids_id: str, home: str | None = None) -> str:
        """Return the name of a centroid set. A sweep finds it in the folder of the segments."""
        return f"{home or self.root}/segments/{centroids_name(centroids_id)}"

    def lease(self, lease_id: str) -> str:
        return f"{self.leases}{lease_id}.json"

    def prepared(self, restore_id: str) -> str:
        """Return the name of a first manifest that a restore has made for a dropped name."""
        return f"{self.root}/restored/{restore_id}.manifest.json"

    @property
    def released(self) -> str:
        """The object that names the last writer that was closed cleanly."""
        return f"{self.root}/writer/released.json"

    def quarantined(self, key: str) -> str:
        return f"{self.root}/quarantine/{key.removeprefix(self.root + '/').replace('/', '-')}"


def centroids_name(centroids_id: str) -> str:
    """Return the name of a centroid set in its folder; those of segments have another ending."""
    return f"{centroids_id}{CENTROIDS_SUFFIX}"


def is_segment(key: str) -> bool:
    """Whether an object in the folder of segments is one."""
    return key.endswith(".seg")


@dataclass(frozen=True, slots=True)
class CatalogNames:
    """The names of one catalog's objects; `root` is empty, or ends with a slash."""

    root: str = ""

    @property
    def head(self) -> str:
        return f"{self.root}HEAD.json"

    @property
    def heads(self) -> str:
        """The folder of the head's versions, in a store without If-Match."""
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
        """The folder of the plan's versions, in a store without If-Match."""
        return f"{self.root}gc/plans/"

    def segment(self, seq: int, write_id: str) -> str:
        return f"{self.segments}seg-{seq:020}-{write_id}"

    def segments_after(self, seq: int) -> str:
        """Return a name behind all segments of this number, and before those of the next."""
        return f"{self.segments}seg-{seq:020}~"

    def checkpoint(self, checkpoint_id: str) -> str:
        return f"{self.checkpoints}ckpt-{checkpoint_id}"

    def lease(self, lease_id: str) -> str:
        return f"{self.leases}{lease_id}.json"


BACKUP_DATA = "data"
"""The folder of a backup set that has the segments, as if it were the root of a namespace."""
BACKUP_PIECE = re.compile(r"(\d{20})-(\d{20})\.log")


@dataclass(frozen=True, slots=True)
class BackupNames:
    """The names of the objects of a backup set.

    A set may hold backups of several buckets: segments have names of their own wherever they come
    from, logs are distinguished by the id of their bucket and the folder of their namespace.
    """

    @property
    def backups(self) -> str:
        return "backups/"

    @property
    def manifests(self) -> str:
        return f"{BACKUP_DATA}/manifests/"

    @property
    def segments(self) -> str:
        return f"{BACKUP_DATA}/segments/"

    @property
    def logs(self) -> str:
        return f"{BACKUP_DATA}/logs/"

    def backup(self, backup_id: str) -> str:
        """Return the name of a descriptor; ULIDs sort by the time at which they were made."""
        return f"{self.backups}{backup_id}.json"

    def manifest(self, backup_id: str, number: int) -> str:
        """Return the name of the manifest of a backup's namespace."""
        return f"{self.manifests}{backup_id}-{number:05}.manifest.json"

    def segment(self, segment_id: str) -> str:
        return f"{self.segments}{segment_id}.seg"

    def log(self, bucket: str, root: str) -> str:
        """Return the folder of the log of one incarnation of a namespace."""
        return f"{self.logs}{bucket}/{root}/"

    def piece(self, bucket: str, root: str, first: int, last: int) -> str:
        return f"{self.log(bucket, root)}{first:020}-{last:020}.log"


def piece_range(key: str) -> tuple[int, int] | None:
    """Return the first and the last LSN that the name of a piece of a log has."""
    match = BACKUP_PIECE.fullmatch(key.rsplit("/", 1)[-1])
    return (int(match[1]), int(match[2])) if match else None


CATALOG_OBJECT = re.compile(r"(?:seg|ckpt)-(\d{20})-([0-9A-Z]{26})")


def catalog_object(key: str) -> tuple[int, str] | None:
    """Return the number and the write id that a segment's or checkpoint's key names."""
    match = CATALOG_OBJECT.fullmatch(key.rsplit("/", 1)[-1])
    return (int(match[1]), match[2]) if match else None


def numbered_key(folder: str, number: int) -> str:
    """Return the key of a slot or a manifest, relative to the namespace."""
    return f"{folder}/{number:020}{SUFFIXES[folder]}"


def number_of(key: str) -> int | None:
    """Return the LSN or generation that a key names; None if it names none."""
    match = NUMBERED.fullmatch(key.rsplit("/", 1)[-1])
    return int(match[1]) if match else None
