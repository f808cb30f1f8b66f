"""Proves by racing that a store's conditional writes really exclude (H4).

Some services accept `If-None-Match` and ignore it: two writers would both be told that
they won. Reef does not believe a store before it has tried:

1. create twice at one name: the second must lose, and the first one's bytes stay;
2. several writers race for one name, some rounds: exactly one wins each;
3. the same for If-Match, with a stale tag and with a race. A store that fails here is
   used without If-Match;
4. listings come in the order of the keys' bytes, and start after any key: some services
   sort folders before names, and their start-after would skip objects.

Silence proves nothing, in either direction: a store that does not answer is unavailable, not
guilty, and no verdict is kept of it. The verdict is kept in the bucket, with the way of
compare-and-swap that its writers use. A writer that comes with another way is refused: native
and two-phase writers would not see each other's locks.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

import msgspec

from reef import paths
from reef.errors import (
    UNDECODABLE,
    CorruptionError,
    InvalidInputError,
    Kind,
    NotFoundError,
    ReefError,
    UnavailableError,
    UnsupportedFormatError,
)
from reef.runtime import Runtime
from reef.stores.base import Outcome, Store, WriteResult
from reef.stores.two_phase import find_two_phase
from reef.stores.wrappers import Wrapper

__all__ = [
    "Verdict",
    "agree_on_cas",
    "agrees_unasked",
    "as_proved",
    "check_cas",
    "probe",
    "remembered",
]

FORMAT = 1
RACERS = 4
ROUNDS = 5
ROUNDS_MAX = 15
TWO_PHASE_HINT = (
    "Such a store needs two-phase compare-and-swap: open it with cas=<register URL>, "
    "cas=sqlite:///reef.db for one"
)


class Verdict(msgspec.Struct, frozen=True):
    """What the bucket remembers of its conditional writes."""

    format: int
    cas: str
    """The way of compare-and-swap: "native", or the name of a register."""
    if_match: bool
    proved_at_s: float


@dataclass(frozen=True, slots=True)
class _Racer:
    result: WriteResult
    body: bytes


def agree_on_cas(store: Store, cas: str | None = None) -> Verdict:
    """Return the bucket's verdict, proving and remembering it on the first call ever.

    Called on every open for writing: one GET when the bucket knows. `cas` is the store's own
    way, unless told otherwise.
    """
    cas = store.cas if cas is None else cas
    known = remembered(store)
    if known is None:
        known = _remember(store, probe(store, cas))
    _check_way(store, known, cas)
    return known


def check_cas(store: Store) -> None:
    """Raise if the bucket is written in another way; what is not known yet is not proved here."""
    known = remembered(store)
    if known is not None:
        _check_way(store, known, store.cas)


def agrees_unasked(store: Store, known: Verdict) -> bool:
    """Whether who reads may write too, as far as that is known without asking a register.

    Raises if it came with a register to a bucket that is written without one.
    """
    if find_two_phase(store) is None:
        return known.cas == store.cas
    if known.cas == "native":
        _check_way(store, known, "a register")
    return False


def _check_way(store: Store, known: Verdict, cas: str) -> None:
    if known.cas != cas:
        raise InvalidInputError(
            f"{store.url} is written with compare-and-swap by {known.cas!r}, "
            f"this writer came with {cas!r}",
            kind=Kind.OTHER_CAS,
            hint="All writers of a bucket must use the same way, and the same register",
        )


def as_proved(store: Store, verdict: Verdict) -> Store:
    """Return the store with what the verdict denies taken away."""
    return store if verdict.if_match else _WithoutIfMatch(store)


class _WithoutIfMatch(Wrapper):
    """A store whose If-Match was found not to hold: nobody may use it."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.capabilities = replace(inner.capabilities, if_match=False)

    def replace(self, key: str, body: bytes, tag: str) -> WriteResult:
        raise InvalidInputError(
            f"the If-Match of {self.url} was found not to hold",
            kind=Kind.UNSUPPORTED_BY_STORE,
            object=key,
        )


def remembered(store: Store) -> Verdict | None:
    """Return what the bucket knows, if it knows anything."""
    try:
        body = store.get(paths.cas_verdict())
    except NotFoundError:
        return None
    return _decode(body)


def probe(store: Store, cas: str | None = None) -> Verdict:
    """Race for exclusion now; leaves no object behind. Raises if create-only does not hold."""
    cas = store.cas if cas is None else cas
    run = _Probe(store)
    try:
        run.check_create()
        run.check_listing()
        if_match = store.capabilities.if_match and run.if_match_holds()
        return Verdict(format=FORMAT, cas=cas, if_match=if_match, proved_at_s=store.now())
    finally:
        with suppress(ReefError):  # what is left over is small, and never read
            store.delete_many(run.used)


class _Probe:
    def __init__(self, store: Store) -> None:
        self.store = store
        self.id = store.runtime.ulid()
        self.used: list[str] = []

    def check_create(self) -> None:
        self._check_second_create()
        rounds = (self._create_round(number) for number in range(ROUNDS_MAX))
        if not self._decided_well(rounds):
            raise self._not_exclusive("racing creates had no winner, or more than one")

    def _create_round(self, number: int) -> bool | None:
        key = self._key(f"create-{number}")
        racers = self._race(lambda body: self.store.create(key, body))
        return self._one_winner(key, racers)

    def _decided_well(self, rounds: Iterator[bool | None]) -> bool:
        """Whether one racer won each round; rounds without a clear answer are run again."""
        decided = 0
        for one_won in rounds:
            if one_won is False:
                return False
            decided += one_won is True
            if decided == ROUNDS:
                return True
        raise self._silent()

    def _check_second_create(self) -> None:
        key = self._key("twice")
        first = self._answered(self.store.create(key, b"first"))
        second = self._answered(self.store.create(key, b"second"))
        if first.outcome is not Outcome.CREATED:
            raise self._not_exclusive(f"a first create was answered {first.outcome.value!r}")
        if second.outcome is not Outcome.EXISTS or not self._holds(key, b"first"):
            raise self._not_exclusive("a second create of the same name took effect")

    def _one_winner(self, key: str, racers: list[_Racer]) -> bool | None:
        """True: one won, and its bytes are there. None: too few answers to tell."""
        winners = [racer for racer in racers if racer.result.landed]
        unknown = any(racer.result.outcome is Outcome.UNKNOWN for racer in racers)
        if len(winners) > 1:
            return False
        if not winners:
            return None if unknown else False
        return self._holds(key, winners[0].body)

    def _holds(self, key: str, body: bytes) -> bool:
        """Whether these bytes are there; looked at twice, as a read may be cut short (H8)."""
        for _ in range(2):
            with suppress(NotFoundError):
                if self.store.get(key) == body:
                    return True
        return False

    def _answered(self, result: WriteResult) -> WriteResult:
        """A store that refuses for ever though nothing is in the way has answered, too."""
        silent = result.doubt or result.cause is not None
        if result.outcome is Outcome.UNKNOWN and silent:
            raise self._silent()
        return result

    def _silent(self) -> UnavailableError:
        return UnavailableError(
            f"{self.store.url} did not answer while its conditional writes were probed",
            hint="Try again; nothing was concluded",
        )

    def check_listing(self) -> None:
        """The characters '-', '.', '/' and '0' follow each other: folders must not jump ahead."""
        keys = [self._key(f"list/a{rest}") for rest in ("-", "./x", ".x", "/x", "0", "b")]
        for key in keys:
            self.store.put(key, b"")
        for first in range(len(keys)):
            folder = paths.probe_object(self.id, "list/")
            start_after = keys[first - 1] if first else ""
            listed = [info.key for info in self.store.list(folder, start_after)]
            if listed != keys[first:]:
                raise InvalidInputError(
                    f"{self.store.url} does not list keys in the order of their bytes",
                    kind=Kind.UNSUPPORTED_BY_STORE,
                    hint="Open it with the option listing='unsorted'",
                )

    def if_match_holds(self) -> bool:
        key = self._key("if-match")
        self.store.put(key, self._nonce())
        stale = self.store.get_tagged(key).tag
        if stale is None or not self._replaces(key, stale):
            return False
        if self._replaces(key, stale):
            return False
        return self._decided_well(self._replace_round(key) for _ in range(ROUNDS_MAX))

    def _replaces(self, key: str, tag: str) -> bool:
        return self._answered(self.store.replace(key, self._nonce(), tag)).landed

    def _replace_round(self, key: str) -> bool | None:
        tag = self.store.get_tagged(key).tag or ""
        return self._one_winner(key, self._race(lambda body: self.store.replace(key, body, tag)))

    def _race(self, write: Callable[[bytes], WriteResult]) -> list[_Racer]:
        bodies = [self._nonce() for _ in range(RACERS)]
        results = self._runtime.gather([lambda body=body: write(body) for body in bodies])  # type: ignore[misc]
        return [_Racer(result, body) for result, body in zip(results, bodies, strict=True)]

    @property
    def _runtime(self) -> Runtime:
        return self.store.runtime

    def _key(self, name: str) -> str:
        self.used.append(paths.probe_object(self.id, name))
        return self.used[-1]

    def _nonce(self) -> bytes:
        return self._runtime.ulid().encode()

    def _not_exclusive(self, seen: str) -> InvalidInputError:
        return InvalidInputError(
            f"{self.store.url} does not honour create-only writes: {seen}",
            kind=Kind.NOT_EXCLUSIVE,
            hint=TWO_PHASE_HINT,
        )


def _remember(store: Store, verdict: Verdict) -> Verdict:
    """Keep the verdict; if another process kept one first, its counts."""
    result = store.create(paths.cas_verdict(), msgspec.json.encode(verdict))
    if result.landed:
        return verdict
    known = remembered(store)
    if known is None:
        raise UnavailableError(
            f"{store.url} could not keep the verdict on its conditional writes",
            hint="Try again",
        )
    return known


def _decode(body: bytes) -> Verdict:
    key = paths.cas_verdict()
    try:
        verdict = msgspec.json.decode(body, type=Verdict)
    except UNDECODABLE as error:
        raise CorruptionError(f"object {key} is not a verdict: {error}", object=key) from error
    if verdict.format > FORMAT:
        raise UnsupportedFormatError(
            f"object {key} is a verdict of format {verdict.format}, "
            f"this release reads up to {FORMAT}",
            hint="Upgrade Reef",
            object=key,
        )
    return verdict
