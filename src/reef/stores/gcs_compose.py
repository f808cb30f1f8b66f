"""Composes an object in Google Cloud Storage out of others (the XML API's `?compose`).

The service joins whole objects, up to 32 at a time, and nothing smaller: it has no way to copy a
range. So a part that is all of an object is joined as it is, named with its generation; whatever
lies between such parts is read and uploaded as an object of its own, joined, and removed. Where
no part is a whole object of some size there is nothing to gain, and everything is read and
uploaded as elsewhere: a join of segments is of that kind, since each leaves its tail behind. So it
is where the service refuses: all objects of a join must be of one storage class.

The result is made only where there is no object (generation 0); after a lost answer, one of the
right size under a name that nobody else uses is this one.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import quote
from xml.sax.saxutils import escape

from reef import paths
from reef.errors import InvalidInputError, Kind, NotFoundError, ReefError
from reef.stores.base import ObjectInfo, Part, check_range, past_the_end
from reef.stores.compose_plan import read_requests, reading
from reef.stores.gcs_token import token_of
from reef.stores.remote_http import Sender
from reef.stores.remote_options import MIB

if TYPE_CHECKING:
    from reef.stores.gcs_store import GcsStore

__all__ = ["compose", "cost", "may_gain"]

SOURCES_MAX = 32
WHOLE_BYTES_MIN = 1 * MIB
"""Reading a smaller object costs less than the requests that joining it takes."""
ENDPOINT = "https://storage.googleapis.com"


@dataclass(frozen=True, slots=True)
class _Whole:
    """All of an object, as it is now."""

    key: str
    generation: str | None
    size: int


_Piece = _Whole | list[Part]


def may_gain(parts: Sequence[Part]) -> bool:
    """Whether some part could be a whole object that is worth joining."""
    return any(_may_be_whole(part) for part in parts)


def cost(parts: Sequence[Part]) -> Mapping[str, tuple[int, int]]:
    """Return requests and bytes by kind, if every part that may be whole is."""
    pieces = list(_grouped([None if _may_be_whole(part) else part for part in parts]))
    runs = [piece for piece in pieces if piece is not None]
    reads = [read_requests(run) for run in runs]
    sizes = [sum(len(part) for part in run if isinstance(part, bytes)) for run in runs]
    joins = _joins(len(pieces))
    return {
        "head": (len({part[0] for part in parts if _may_be_whole(part)}), 0),
        "get": (sum(count for count, _ in reads), sum(size for _, size in reads)),
        "put": (len(runs) + joins, sum(sizes) + sum(size for _, size in reads)),
        "delete": (len(runs) + joins - 1, 0),
    }


def compose(store: "GcsStore", key: str, parts: Sequence[Part]) -> int | None:
    """Write the object, and return its size; None if no part is a whole object, or one that the
    service does not join.
    """
    pieces = _looked_up(store, parts)
    if not any(isinstance(piece, _Whole) for piece in pieces):
        return None
    composition = _Composition(store)
    try:
        return composition.run(key, pieces)
    except InvalidInputError as error:
        if error.kind is not Kind.REFUSED_BY_STORE:
            raise
        return None  # sources of several storage classes, for one: nothing was made
    finally:
        composition.clean_up()


def _looked_up(store: "GcsStore", parts: Sequence[Part]) -> list[_Piece]:
    infos: dict[str, ObjectInfo] = {}
    found: list[_Whole | Part] = [_look_up(store, part, infos) for part in parts]
    runs = _grouped([None if isinstance(one, _Whole) else one for one in found])
    wholes = iter([one for one in found if isinstance(one, _Whole)])
    return [next(wholes) if run is None else run for run in runs]


def _look_up(store: "GcsStore", part: Part, infos: dict[str, ObjectInfo]) -> _Whole | Part:
    if isinstance(part, bytes) or not _may_be_whole(part):
        return part
    source, _, end = part
    info = infos.get(source) or store.head(source)
    infos[source] = info
    if end > info.size:
        raise past_the_end(source, end, info.size)
    return _Whole(source, info.tag, info.size) if end == info.size else part


class _Composition:
    """One object on its way, and the objects that were made for it."""

    def __init__(self, store: "GcsStore") -> None:
        self._store = store
        self._sender = Sender(store.url, store.options, store.runtime)
        self._temporary: list[str] = []

    def run(self, key: str, pieces: Sequence[_Piece]) -> int:
        wholes = [piece if isinstance(piece, _Whole) else self._uploaded(piece) for piece in pieces]
        while len(wholes) > SOURCES_MAX:
            batches = [wholes[at : at + SOURCES_MAX] for at in range(0, len(wholes), SOURCES_MAX)]
            wholes = [self._joined(batch) for batch in batches]
        return self._join(key, wholes)

    def clean_up(self) -> None:
        with suppress(ReefError):  # a sweep of stale parts finds what is left
            self._store.delete_many(self._temporary)

    def _uploaded(self, run: Sequence[Part]) -> _Whole:
        name = self._new_name()
        return _Whole(name, None, self._store.upload(name, reading(self._store, run)))

    def _joined(self, batch: Sequence[_Whole]) -> _Whole:
        if len(batch) == 1:
            return batch[0]
        name = self._new_name()
        return _Whole(name, None, self._join(name, batch))

    def _new_name(self) -> str:
        self._temporary.append(f"{paths.compose_parts()}{self._store.runtime.ulid()}")
        return self._temporary[-1]

    def _join(self, key: str, wholes: Sequence[_Whole]) -> int:
        size = sum(whole.size for whole in wholes)
        components = "".join(self._component(whole) for whole in wholes)
        headers = {"x-goog-if-generation-match": "0"}
        if self._store.options.storage_class:  # that of the sources, or it is refused
            headers["x-goog-storage-class"] = self._store.options.storage_class
        if token := token_of(self._store.options):
            headers["Authorization"] = f"Bearer {token}"
        try:
            body = f"<ComposeRequest>{components}</ComposeRequest>".encode()
            self._sender.send("PUT", self._url(key), key, body, headers)
        except ReefError:
            if self._landed_size(key) == size:
                return size
            self._check_sources(wholes)
            raise
        return size

    def _check_sources(self, wholes: Sequence[_Whole]) -> None:
        """The service says that something is missing, not what: name the source that is."""
        for whole in wholes:
            now = self._store.head(whole.key)
            if whole.generation is not None and now.tag != whole.generation:
                raise NotFoundError(
                    f"object {whole.key} of {self._store.url} was replaced while it was joined",
                    object=whole.key,
                )

    def _component(self, whole: _Whole) -> str:
        name = escape(self._store.name_of(whole.key))
        generation = f"<Generation>{whole.generation}</Generation>" if whole.generation else ""
        return f"<Component><Name>{name}</Name>{generation}</Component>"

    def _url(self, key: str) -> str:
        endpoint = (self._store.options.endpoint or ENDPOINT).rstrip("/")
        name = quote(self._store.name_of(key), safe="")
        return f"{endpoint}/{self._store.bucket}/{name}?compose"

    def _landed_size(self, key: str) -> int | None:
        try:
            return self._store.head(key).size
        except NotFoundError:
            return None


def _may_be_whole(part: Part) -> bool:
    if isinstance(part, bytes):
        return False
    check_range(*part)
    return part[1] == 0 and part[2] >= WHOLE_BYTES_MIN


def _grouped(parts: Sequence[Part | None]) -> Iterator[list[Part] | None]:
    """Yield None for each whole object, and what lies between two as one run."""
    run: list[Part] = []
    for part in parts:
        if part is not None:
            run += [part] if part else []
            continue
        if run:
            yield run
        yield None
        run = []
    if run:
        yield run


def _joins(sources: int) -> int:
    """Return how many requests join so many objects into one."""
    requests = 0
    while sources > SOURCES_MAX:
        full, rest = divmod(sources, SOURCES_MAX)
        requests += full + (rest > 1)
        sources = full + (rest > 0)
    return requests + 1
