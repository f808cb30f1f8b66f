"""Search indexes as segment writers need them: with their centroids loaded."""

from collections.abc import Sequence

from reef.errors import CorruptionError, NotFoundError
from reef.formats.centroids import CentroidSet, decode_centroids
from reef.formats.filter_index import BuildableFilter
from reef.formats.index_block import BuildableIndex, IndexKind, IndexSpec
from reef.formats.text_index import BuildableText
from reef.formats.vector_index import BuildableVector
from reef.paths import Namespace
from reef.stores import Store


def load_indexes(
    store: Store, names: Namespace, specs: Sequence[IndexSpec]
) -> tuple[BuildableIndex, ...]:
    """Return the indexes that segments of a namespace get.

    A centroid set that is lost or damaged must not stop folds: without it segments get no vector
    index, and are searched row by row.
    """
    return tuple(_buildable(store, names, spec) for spec in specs)


def _buildable(store: Store, names: Namespace, spec: IndexSpec) -> BuildableIndex:
    if spec.kind is IndexKind.FILTER:
        return BuildableFilter(spec)
    if spec.kind is IndexKind.TEXT:
        return BuildableText(spec)
    return BuildableVector(spec, _centroids(store, names, spec))


def _centroids(store: Store, names: Namespace, spec: IndexSpec) -> CentroidSet | None:
    if not spec.centroids:
        return None
    key = names.centroids(spec.centroids, spec.home)
    try:
        return decode_centroids(store.get(key), key)
    except (NotFoundError, CorruptionError):
        return None
