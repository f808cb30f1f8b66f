"""Whose local log this is: written beside its entries, before the first of them.

A log has an id of its own, which is the name of its stream, and belongs to one namespace of one
bucket. The bucket's address is kept for people only: buckets move. What proves that the two belong
together is that the namespace knows the stream.

Copies of a log have its id. What they do not share is the life, a name for each opening: it is
noted here before the role is taken with it, and so no copy that was opened since has it.
"""

import msgspec

from reef.errors import UNDECODABLE, InvalidInputError
from reef.locallog import LocalLog
from reef.runtime import Runtime

__all__ = ["UPLOADED", "LogIdentity", "own_log", "read_identity", "stream_of"]

IDENTITY = b"reef.front"
UPLOADED = b"reef.uploaded"
"""Up to which index all is known to be in the bucket; it may be more."""
LIVES_MAX = 16
"""How many openings are remembered that may have taken the role."""


def stream_of(log_id: str) -> str:
    """Return the name of a log's stream in its bucket."""
    return f"local/{log_id}"


class LogIdentity(msgspec.Struct, frozen=True):
    """What a local log says of itself."""

    id: str
    namespace: str
    url: str
    is_known: bool = False
    """Whether its stream was made known to its namespace: before that it takes no batch."""
    lives: tuple[str, ...] = ()
    """The openings that may have taken the writer role last: one took it, or several that died."""
    base: int = 0
    """Entries up to here were uploaded under another id: the log has forked there."""

    @property
    def stream(self) -> str:
        return stream_of(self.id)

    def noted(self, log: LocalLog) -> int:
        """Return up to which index the log knows of its uploads; it may be more."""
        return max(log.get_uint64(UPLOADED), self.base)

    def born(self, life: str, held: str = "") -> "LogIdentity":
        """Return it with one more life. The one that the bucket names stays, however many died
        since: one of those may still take the role, by a request that arrives late."""
        others = [other for other in self.lives if other != held][1 - LIVES_MAX :]
        kept = [held] if held in self.lives else []
        return msgspec.structs.replace(self, lives=(*kept, *others, life))

    def write(self, log: LocalLog) -> None:
        """Note it in the log, durably."""
        if read_identity(log.get(IDENTITY), log.path) != self:
            log.set(IDENTITY, msgspec.json.encode(self))


def read_identity(stored: bytes | None, path: str) -> LogIdentity | None:
    """Return what a log says of itself; None if it says nothing."""
    if stored is None:
        return None
    try:
        return msgspec.json.decode(stored, type=LogIdentity)
    except UNDECODABLE as error:
        raise InvalidInputError(f"{path} says of itself what cannot be read: {error}") from error


def own_log(log: LocalLog, namespace: str, url: str, runtime: Runtime) -> LogIdentity:
    """Return whose log this is, which is made ours if it is new; refuses another's."""
    found = read_identity(log.get(IDENTITY), log.path)
    if found is None:
        if log.last_index:
            raise InvalidInputError(
                f"{log.path} holds {log.last_index - log.first_index + 1} entries that no "
                f"writer of Reef has put there",
                hint="Choose another directory",
            )
        found = LogIdentity(runtime.ulid(), namespace, url)
    if found.namespace != namespace:
        raise InvalidInputError(
            f"{log.path} is the local log of namespace {found.namespace} in {found.url}, "
            f"not of {namespace}",
            hint="Every namespace has a local log of its own: choose another directory",
            namespace=found.namespace,
        )
    return found
