"""Edits of the search indexes of a namespace.

The manifest names the indexes that segments get from then on. Segments say themselves which ones
they have, so neither adding nor dropping one touches a segment: a search uses the index of a
segment if it serves the manifest's, and reads its rows otherwise.
"""

from collections.abc import Iterable

import msgspec

from reef.errors import ConflictError, NotFoundError
from reef.formats.index_block import IndexSpec
from reef.formats.manifest import Manifest
from reef.formats.segment import Footer
from reef.manifest.invariants import refuse_condemned_keys
from reef.paths import centroids_name


def add_index(manifest: Manifest, spec: IndexSpec) -> Manifest | None:
    """Add an index; None if it is there already, ConflictError if it has other options."""
    for known in manifest.indexes:
        if (known.kind, known.column) == (spec.kind, spec.column):
            if known.options == spec.options:
                return None
            raise ConflictError(
                f"the column has a {spec.kind} index with other options: {known.options}",
                hint="Drop it first with alter(drop_index=…)",
            )
    return msgspec.structs.replace(manifest, indexes=(*manifest.indexes, spec))


def drop_indexes(manifest: Manifest, column: int, name: str) -> Manifest:
    """Drop all indexes of a column; NotFoundError if it has none."""
    left = tuple(spec for spec in manifest.indexes if spec.column != column)
    if len(left) == len(manifest.indexes):
        raise NotFoundError(f"column {name} has no index", column=name)
    return msgspec.structs.replace(manifest, indexes=left)


def set_centroids(manifest: Manifest, spec: IndexSpec, centroids: str) -> Manifest | None:
    """Name the centroids of a vector index; None if it was dropped, or another process was first.

    From this publish on the object is a root; refused if a sweep has condemned it meanwhile.
    """
    if spec not in manifest.indexes:
        return None
    refuse_condemned_keys(manifest, [f"segments/{centroids_name(centroids)}"])
    trained = msgspec.structs.replace(spec, centroids=centroids, home=None)
    indexes = tuple(trained if known == spec else known for known in manifest.indexes)
    return msgspec.structs.replace(manifest, indexes=indexes)


def without_centroids(indexes: Iterable[IndexSpec]) -> tuple[IndexSpec, ...]:
    """Return indexes to be trained again: a backup has no centroids."""
    return tuple(msgspec.structs.replace(spec, centroids="", home=None) for spec in indexes)


def index_specs(footers: Iterable[Footer]) -> tuple[IndexSpec, ...]:
    """Return the indexes that the newest segment names, built or not: for a rebuild."""
    newest = max(footers, key=lambda footer: footer.created_at_ms, default=None)
    return () if newest is None else tuple(place.spec for place in newest.indexes)
