"""The state that a branch shares with its origin, found without the manifests of the branch.

The first manifest of a branch follows from one generation of its origin and one LSN (protocols §8).
The origin pins both under the folder of the branch for as long as the branch needs them. So a
branch whose manifests are lost is found by that pin, and begins where its first manifest did: with
the segments of the pinned generation, and the origin's log from its floor up to that LSN. Its own
segments and its own log continue from there.

If some manifest of the branch can be read, that names the origin. A pin that a rebuild or a repair
of the origin has renewed does not name a generation any more: then only the folder of the branch is
left, and the inherited LSNs are reported as lost.
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

import msgspec

from reef.engine.context import NamespaceContext
from reef.engine.stats import pins_of_branch
from reef.errors import CorruptionError, NotFoundError, UnsupportedFormatError
from reef.formats.manifest import Manifest, Origin
from reef.manifest.branching import first_manifest
from reef.manifest.head import HeadFinder
from reef.manifest.roots import UNKNOWN_GENERATION
from reef.paths import Namespace, number_of
from reef.stores import Store


@dataclass(frozen=True, slots=True)
class Inheritance:
    """The beginning of a branch."""

    names: Namespace
    """Of the branch, with the folders of its inherited log."""
    first: Manifest
    """Its first manifest, derived once more."""


def find_inheritance(context: NamespaceContext) -> Inheritance | None:
    """Return the beginning of a branch; None of another namespace, or if the origin has lost it."""
    for origin in _origins(context):
        first = _first_manifest(context.store, origin)
        if first is not None:
            inherited = tuple((part.last_lsn, part.root) for part in first.inherited)
            return Inheritance(replace(context.names, inherited=inherited), first)
    return None


def _origins(context: NamespaceContext) -> Iterator[Origin]:
    """Yield the origin as manifests of the branch state it, or else as pins of others do."""
    listed = [number_of(info.key) for info in context.store.list(context.names.manifests)]
    heads = context.fresh().heads
    for generation in sorted((number for number in listed if number), reverse=True):
        with suppress(CorruptionError, NotFoundError, UnsupportedFormatError):
            origin = heads.load(generation).origin
            if origin is not None:
                yield origin
            return
    yield from pins_of_branch(context.store, context.names.root)


def _first_manifest(store: Store, origin: Origin) -> Manifest | None:
    """Return the first manifest of a branch; None if the pinned generation cannot be read."""
    if origin.generation == UNKNOWN_GENERATION:
        return None
    heads = HeadFinder(store, Namespace.of_root(origin.root))
    try:
        head = heads.find(fallback=True, dropped=True).manifest
        source = heads.load(origin.generation)
        first = first_manifest(source, head, origin)
        # A slot that a repair of the origin has skipped since counts in the branch.
        return msgspec.structs.replace(first, skipped_lsns=source.skipped_lsns)
    except (CorruptionError, NotFoundError, UnsupportedFormatError):
        return None
