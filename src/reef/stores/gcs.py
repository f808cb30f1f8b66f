"""Buckets of Google Cloud Storage.

Differences from other services: a condition names not the ETag but the generation, a number that
never repeats, so that is the tag here; generation 0 means "no object". Listings carry no
generation, so their objects have no tag. The service accepts about one write a second of one
object, and its 429 may come before or after the write took effect (H6): for a conditional write
that is an unknown outcome, as with every other response that proves nothing.

Objects are composed by the XML API's `?compose`. The service joins whole objects, up to 32 at a
time, and cannot copy a range. So a part that is all of an object is joined as it is, named with its
generation; the parts between are read and uploaded as an object of their own, joined, and removed.
Where no part is a whole object of some size there is nothing to gain, and everything is read and
uploaded: joining segments is of that kind, since each leaves its tail behind. The same where the
service refuses, for instance because the objects differ in storage class. The result is created
only where there is no object (generation 0); after a lost response, an object of the right size
under a name that no other process uses is this one.

Requests that obstore does not send are signed by google-auth (the extra `gcs`), with the
credentials of the store in obstore's order: a token, a service account, a file, the application's
defaults.
"""

import importlib.util
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, ClassVar
from urllib.parse import quote
from xml.sax.saxutils import escape

from reef import paths
from reef.config import bad_option
from reef.errors import ErrorKind, InvalidInputError, NotFoundError, ReefError, UnavailableError
from reef.runtime import REAL, Runtime
from reef.stores.base import Capabilities, ObjectInfo, Part, check_range, past_the_end
from reef.stores.remote import RemoteStore
from reef.stores.remote_http import (
    MIB,
    HttpSender,
    RemoteOptions,
    read_requests,
    reading,
)

# --- options ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class GcsOptions(RemoteOptions):
    """Credentials; there is only one service, unless `endpoint` names another."""

    scheme: ClassVar[str] = "gs"

    service_account_path: str | None = None
    service_account_key: str | None = field(default=None, repr=False)
    application_credentials: str | None = None
    """A file of credentials, as GOOGLE_APPLICATION_CREDENTIALS names one."""
    bearer_token: str | None = field(default=None, repr=False)
    skip_signature: bool = False
    """For public buckets: send requests without credentials."""
    composite: bool = True
    """Whether whole objects are put together by the service."""
    storage_class: str | None = None

    def check(self) -> None:
        RemoteOptions.check(self)
        given = [self.service_account_path, self.service_account_key, self.application_credentials]
        if sum(one is not None for one in given) > 1:
            raise bad_option(
                "service_account_path", self.service_account_path, "the only credentials given"
            )

    def _named(self) -> dict[str, Any]:
        return {
            "base_url": self.endpoint,
            "service_account": self.service_account_path,
            "service_account_key": self.service_account_key,
            "application_credentials": self.application_credentials,
            "bearer_token": self.bearer_token,
            "skip_signature": self.skip_signature or None,
        }


# --- tokens -------------------------------------------------------------------------


SCOPES = ("https://www.googleapis.com/auth/devstorage.read_write",)


def can_make_tokens(options: GcsOptions) -> bool:
    """Whether there is a token, or google-auth to make one."""
    if options.bearer_token or options.skip_signature:
        return True
    return importlib.util.find_spec("google") is not None and _has_google_auth()


def token_of(options: GcsOptions) -> str | None:
    """Return a valid token; None if requests are not signed."""
    if options.skip_signature:
        return None
    if options.bearer_token:
        return options.bearer_token
    from google.auth.exceptions import DefaultCredentialsError, GoogleAuthError
    from google.auth.transport.requests import Request

    try:
        credentials = _credentials(options)
        credentials.refresh(Request())
    except (DefaultCredentialsError, OSError, ValueError) as error:
        raise InvalidInputError(
            f"no credentials for Google: {error}",
            kind=ErrorKind.ACCESS_DENIED,
            hint="Set service_account_path, or GOOGLE_APPLICATION_CREDENTIALS",
        ) from error
    except GoogleAuthError as error:
        raise UnavailableError(f"Google gave no token: {error}") from error
    token: str = credentials.token
    return token


def _credentials(options: GcsOptions) -> Any:
    auth: Any = importlib.import_module("google.auth")  # in part without types
    accounts: Any = importlib.import_module("google.oauth2.service_account")
    if options.service_account_key:
        account = json.loads(options.service_account_key)
        return accounts.Credentials.from_service_account_info(account, scopes=SCOPES)
    path = options.service_account_path or options.application_credentials
    if path:
        return auth.load_credentials_from_file(path, scopes=SCOPES)[0]
    return auth.default(scopes=SCOPES)[0]


def _has_google_auth() -> bool:
    return importlib.util.find_spec("google.auth") is not None


# --- the store ----------------------------------------------------------------------


LIST_PAGE = 1000


class GcsStore(RemoteStore):
    """A bucket, or the objects below a prefix of one."""

    client_class: ClassVar[str] = "GCSStore"

    def __init__(
        self, bucket: str, prefix: str, options: GcsOptions, *, runtime: Runtime = REAL
    ) -> None:
        self.options = options
        capabilities = Capabilities(
            clock_resolution_s=1.0,
            list_page=LIST_PAGE,
            part_bytes=options.part_bytes,
            compose=options.composite and can_make_tokens(options),
            now_requests=("put", "head"),
            abort_stale_requests=("put", "head", "list"),
        )
        super().__init__(bucket, prefix, options, capabilities, runtime)
        if options.storage_class:
            self._attributes = {"Storage-Class": options.storage_class}

    def _tag(self, meta: Any) -> str | None:
        """The generation; None in listings, which omit it."""
        tag: str | None = meta["version"]
        return tag

    def _condition(self, tag: str) -> Any:
        return {"version": tag}

    def compose(self, key: str, parts: Sequence[Part]) -> int:
        """Join whole objects by the service; where there are none, read and upload."""
        if self._joins(parts):
            size = _compose_wholes(self, key, parts)
            if size is not None:
                return size
        return super().compose(key, parts)

    def compose_cost(self, parts: Sequence[Part]) -> Mapping[str, tuple[int, int]]:
        return _cost(parts) if self._joins(parts) else super().compose_cost(parts)

    def _joins(self, parts: Sequence[Part]) -> bool:
        return self.capabilities.compose and _may_gain(parts)

    def abort_stale(self, older_than_s: float) -> int:
        """Remove parts of compositions that never ended.

        Multipart uploads are ended by a lifecycle rule of the bucket, which see the docs for.
        """
        before_s = self.now() - older_than_s
        stale = [i.key for i in self.list(paths.compose_parts()) if i.last_modified_s <= before_s]
        self.delete_many(stale)
        return len(stale)


# --- composing objects --------------------------------------------------------------


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


def _may_gain(parts: Sequence[Part]) -> bool:
    """Whether some part could be a whole object that is worth joining."""
    return any(_may_be_whole(part) for part in parts)


def _cost(parts: Sequence[Part]) -> Mapping[str, tuple[int, int]]:
    """Return requests and bytes by kind, if every part that may be whole is."""
    pieces = list(_group_parts([None if _may_be_whole(part) else part for part in parts]))
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


def _compose_wholes(store: GcsStore, key: str, parts: Sequence[Part]) -> int | None:
    """Write the object, and return its size; None if no part is a whole object, or one that the
    service does not join.
    """
    pieces = _find_wholes(store, parts)
    if not any(isinstance(piece, _Whole) for piece in pieces):
        return None
    composition = _JoinComposition(store)
    try:
        return composition.run(key, pieces)
    except InvalidInputError as error:
        if error.kind is not ErrorKind.REFUSED_BY_STORE:
            raise
        return None  # sources of several storage classes, for one: nothing was made
    finally:
        composition.clean_up()


def _find_wholes(store: GcsStore, parts: Sequence[Part]) -> list[_Piece]:
    infos: dict[str, ObjectInfo] = {}
    found: list[_Whole | Part] = [_find_whole(store, part, infos) for part in parts]
    runs = _group_parts([None if isinstance(one, _Whole) else one for one in found])
    wholes = iter([one for one in found if isinstance(one, _Whole)])
    return [next(wholes) if run is None else run for run in runs]


def _find_whole(store: GcsStore, part: Part, infos: dict[str, ObjectInfo]) -> _Whole | Part:
    if isinstance(part, bytes) or not _may_be_whole(part):
        return part
    source, _, end = part
    info = infos.get(source) or store.head(source)
    infos[source] = info
    if end > info.size:
        raise past_the_end(source, end, info.size)
    return _Whole(source, info.tag, info.size) if end == info.size else part


class _JoinComposition:
    """One object in progress, and the temporary objects made for it."""

    def __init__(self, store: GcsStore) -> None:
        self._store = store
        self._sender = HttpSender(store.url, store.options, store.runtime)
        self._temporary: list[str] = []

    def run(self, key: str, pieces: Sequence[_Piece]) -> int:
        wholes = [
            piece if isinstance(piece, _Whole) else self._upload_part(piece) for piece in pieces
        ]
        while len(wholes) > SOURCES_MAX:
            batches = [wholes[at : at + SOURCES_MAX] for at in range(0, len(wholes), SOURCES_MAX)]
            wholes = [self._compose_batch(batch) for batch in batches]
        return self._join(key, wholes)

    def clean_up(self) -> None:
        with suppress(ReefError):  # `abort_stale` removes the rest
            self._store.delete_many(self._temporary)

    def _upload_part(self, run: Sequence[Part]) -> _Whole:
        name = self._new_name()
        return _Whole(name, None, self._store.upload(name, reading(self._store, run)))

    def _compose_batch(self, batch: Sequence[_Whole]) -> _Whole:
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
        """The service does not name the missing source: find it, for the error."""
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


def _group_parts(parts: Sequence[Part | None]) -> Iterator[list[Part] | None]:
    """Yield None for each whole object, and the parts between two as one run."""
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
