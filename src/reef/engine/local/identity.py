"""Whose local log this is: written beside its entries, before the first of them.

A log has an id of its own, which is the name of its stream, and belongs to one namespace of one
bucket. The bucket's address is kept for people only: buckets move. What proves that the two belong
together is that the namespace knows the stream.
"""

import msgspec

from reef.errors import UNDECODABLE, InvalidInputError
from reef.locallog import LocalLog
from reef.runtime import Runtime

__all__ = ["UPLOADED", "LogIdentity", "mark_known", "own_log", "read_identity"]

IDENTITY = b"reef.front"
UPLOADED = b"reef.uploaded"
"""Up to which index all is known to be in the bucket; it may be more."""


class LogIdentity(msgspec.Struct, frozen=True):
    """What a local log says of itself."""

    id: str
    namespace: str
    url: str
    is_known: bool = False
    """Whether its stream was made known to its namespace: before that it takes no batch."""

    @property
    def stream(self) -> str:
        return f"local/{self.id}"


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
        log.set(IDENTITY, msgspec.json.encode(found))
    if found.namespace != namespace:
        raise InvalidInputError(
            f"{log.path} is the local log of namespace {found.namespace} in {found.url}, "
            f"not of {namespace}",
            hint="Every namespace has a local log of its own: choose another directory",
            namespace=found.namespace,
        )
    return found


def mark_known(log: LocalLog, identity: LogIdentity, url: str) -> LogIdentity:
    """Note that the namespace knows the stream now, and where the bucket was last found."""
    known = msgspec.structs.replace(identity, is_known=True, url=url)
    if known != identity:
        log.set(IDENTITY, msgspec.json.encode(known))
    return known
