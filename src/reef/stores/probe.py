"""Proves by racing that a store's conditional writes are exclusive (H4).

Some services accept `If-None-Match` and ignore it: two writers would both be reported as winners.
Reef does not trust a store before it has probed it:

1. create twice at one name: the second must lose, and the first one's bytes stay;
2. several writers race for one name, some rounds: exactly one wins each;
3. the same in every folder where the engine writes conditionally, and with bodies as large as
   common WAL objects: some services and proxies honour a condition by path or by size (H73);
4. one more create at each of these names, after all the races: it must lose;
5. the same for If-Match, with a stale tag and with a race. A store that fails here is
   used without If-Match;
6. listings come in the order of the keys' bytes, and start after any key: some services
   sort folders before names, and their start-after would skip objects.

Two properties are proved later, when no caller has to wait for it: that an object keeps its name
when it is old (by the first opening AGED_S after the probe), and that larger bodies than
BYTES_PROVED are treated alike (before the first such body is written). With a register none of this
depends on the store, and only the steps in the probe's own folder are run. ADR 0022 has the cost in
requests.

A missing response proves nothing, in either direction: such a store is unavailable, and no verdict
is stored. The verdict is stored in the bucket, with the compare-and-swap that its writers use. A
verdict of a narrower probe is upgraded by probing again. A writer with another compare-and-swap is
refused: native and two-phase writers would not see each other's locks.
"""

import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import msgspec

from reef import paths
from reef.errors import (
    UNDECODABLE,
    CorruptionError,
    ErrorKind,
    InvalidInputError,
    NotFoundError,
    ReefError,
    UnavailableError,
    UnsupportedFormatError,
)
from reef.runtime import Runtime
from reef.stores.base import Outcome, Store, WriteResult
from reef.stores.two_phase import find_two_phase
from reef.stores.wrappers import Proved

FORMAT = 1
SCOPE = 2
"""The extent of this probe. 1: one folder and bodies of 26 bytes."""
RACERS = 4
ROUNDS = 3
ROUNDS_MAX = 15
BYTES_PROVED = 5 << 20
"""Larger than a group of batches is by default, and than the size from which some services treat an
object in another way."""
PLACE_RACERS = 2
MANIFEST_BYTES = 256 << 10
CATALOG_BYTES = 64 << 10
AGED_S = 60.0
TWO_PHASE_HINT = (
    "Such a store needs two-phase compare-and-swap: open it with cas=<register URL>, "
    "cas=sqlite:///reef.db for one"
)


class CasVerdict(msgspec.Struct, frozen=True):
    """The stored result of the probe of a bucket."""

    format: int
    cas: str
    """The kind of compare-and-swap: "native", or the name of a register."""
    if_match: bool
    proved_at_s: float
    scope: int = 1
    """Extent of the probe (`SCOPE`); verdicts of older releases do not say it."""
    bytes_proved: int = 0
    """Largest body for which create-only was seen to hold."""
    is_aged: bool = False
    """Whether create-only was seen to hold at the name of an object that was AGED_S old."""
    refused: str = ""
    """Why the store is not written to any more, if it failed after it had passed."""


@dataclass(frozen=True, slots=True)
class _Place:
    """The key and the body size of a round of racing creates."""

    key: str
    bytes: int = 0
    """Size of the bodies; 0: a nonce alone."""
    racers: int = PLACE_RACERS


@dataclass(frozen=True, slots=True)
class _Racer:
    result: WriteResult
    body: bytes


def agree_on_cas(store: Store, cas: str | None = None) -> CasVerdict:
    """Return the bucket's verdict; the first call ever probes the bucket and stores it.

    Called on every open for writing: one GET when there is a verdict. `cas` is the store's own by
    default.
    """
    cas = store.cas if cas is None else cas
    known = remembered(store)
    if known is None:
        known = _store_verdict(store, probe(store, cas))
    _check_same_cas(store, known, cas)
    return _upgrade_verdict(store, known)


def _upgrade_verdict(store: Store, known: CasVerdict) -> CasVerdict:
    """Return the verdict with the proofs that are due now. With a register there are none."""
    if known.refused:
        raise _not_exclusive(store, known.refused)
    if known.cas != "native":
        return known
    if known.scope < SCOPE:
        known = probe(store, known.cas)
    elif known.is_aged or abs(store.runtime.wall_s() - known.proved_at_s) < AGED_S:
        return known
    else:
        known = _prove_aged(store, known)
    return _amend(store, known)


def _amend(store: Store, proved: CasVerdict) -> CasVerdict:
    """Store a verdict with more proofs, and those that other processes have stored meanwhile.

    A refusal counts, whichever process has seen the reason: it is never written over.
    """
    latest = remembered(store)
    if latest is not None:
        proved = msgspec.structs.replace(
            proved,
            bytes_proved=max(proved.bytes_proved, latest.bytes_proved),
            is_aged=proved.is_aged or latest.is_aged,
            refused=proved.refused or latest.refused,
        )
    store.put(paths.cas_verdict(), msgspec.json.encode(proved))
    if proved.refused:
        raise _not_exclusive(store, proved.refused)
    return proved


def _prove_aged(store: Store, known: CasVerdict) -> CasVerdict:
    """Try to create the verdict's own object again: it is the oldest one that is known."""
    other = msgspec.structs.replace(known, scope=0)
    result = store.create(paths.cas_verdict(), msgspec.json.encode(other))
    if result.outcome is Outcome.UNKNOWN:
        raise _silent(store)
    if result.landed:
        return msgspec.structs.replace(known, refused="a create over an old object took effect")
    return msgspec.structs.replace(known, is_aged=True)


def prove_size(store: Store, size: int) -> CasVerdict:
    """Prove create-only for bodies of up to `size` bytes, once per bucket and doubling."""
    known = remembered(store)
    if known is not None and known.refused:
        raise _not_exclusive(store, known.refused)
    if known is not None and known.bytes_proved >= size:
        return known
    size = 1 << (size - 1).bit_length()
    run = _Probe(store)
    try:
        run.check_second_create(run.names.wal_object(1), size)
    finally:
        run.clean_up()
    if known is None:  # an operator has deleted it: the next opening probes again
        known = CasVerdict(FORMAT, store.cas, store.capabilities.if_match, 0.0, scope=0)
        return msgspec.structs.replace(known, bytes_proved=size)
    return _amend(store, msgspec.structs.replace(known, bytes_proved=size))


def check_cas(store: Store) -> None:
    """Raise if the bucket is written with another compare-and-swap; does not probe it."""
    known = remembered(store)
    if known is not None:
        _check_same_cas(store, known, store.cas)


def agrees_without_register(store: Store, known: CasVerdict) -> bool:
    """Whether a reader may also write, as far as that is known without a query to a register.

    Raises if it was opened with a register, and the bucket is written without one.
    """
    if find_two_phase(store) is None:
        return known.cas == store.cas and known.scope >= SCOPE and not known.refused
    if known.cas == "native":
        _check_same_cas(store, known, "a register")
    return False


def _check_same_cas(store: Store, known: CasVerdict, cas: str) -> None:
    if known.cas != cas:
        raise InvalidInputError(
            f"{store.url} is written with compare-and-swap by {known.cas!r}, "
            f"this process with {cas!r}",
            kind=ErrorKind.OTHER_CAS,
            hint="All writers of a bucket must use one compare-and-swap, and the same register",
        )


def as_proved(store: Store, verdict: CasVerdict) -> Store:
    """Return the store, limited to the writes that were proved; a register proves all sizes."""
    is_native = verdict.cas == "native"
    if not is_native and verdict.if_match:
        return store
    bytes_proved = verdict.bytes_proved if is_native else sys.maxsize
    return Proved(store, if_match=verdict.if_match, bytes_proved=bytes_proved, prove=_prove_bytes)


def _prove_bytes(store: Store, size: int) -> int:
    return prove_size(store, size).bytes_proved


def remembered(store: Store) -> CasVerdict | None:
    """Return the stored verdict, if any."""
    try:
        body = store.get(paths.cas_verdict())
    except NotFoundError:
        return None
    return _decode(body)


def probe(store: Store, cas: str | None = None) -> CasVerdict:
    """Race for exclusion now; leaves no object behind. Raises if create-only does not hold."""
    cas = store.cas if cas is None else cas
    run = _Probe(store)
    is_native = cas == "native"
    try:
        run.check_create(run.engine_places() if is_native else ())
        run.check_listing()
        keys = [run.names.lease, run.names.catalog_head] if is_native else []
        if_match = store.capabilities.if_match and run.if_match_holds(keys)
        bytes_proved = BYTES_PROVED if is_native else 0
        return CasVerdict(FORMAT, cas, if_match, store.now(), SCOPE, bytes_proved)
    finally:
        run.clean_up()


class _Probe:
    def __init__(self, store: Store) -> None:
        self.store = store
        self.id = store.runtime.ulid()
        self.names = paths.ProbeNames(self.id)
        self.used: list[str] = []
        self._winners: dict[str, bytes] = {}
        """The bodies that won, by key."""

    def clean_up(self) -> None:
        with suppress(ReefError):  # left-over objects are never read
            self.store.delete_many(self.used)

    def engine_places(self) -> list[_Place]:
        """Return one place for each folder and size that the engine writes conditionally."""
        return [
            _Place(self.names.wal_object(1)),
            _Place(self.names.wal_object(2), BYTES_PROVED),
            _Place(self.names.manifest(1), MANIFEST_BYTES),
            _Place(self.names.lease),
            _Place(self.names.catalog_head, CATALOG_BYTES),
        ]

    def check_create(self, places: Iterable[_Place]) -> None:
        self.check_second_create(paths.probe_object(self.id, "twice"))
        numbered = (paths.probe_object(self.id, f"create-{n}") for n in range(ROUNDS_MAX))
        self._check_races((_Place(key, racers=RACERS) for key in numbered), ROUNDS)
        for place in places:
            again = (self._again(place, number) for number in range(ROUNDS_MAX))
            self._check_races(again, 1)
        for key in list(self._winners):
            self._check_late_create(key)

    def _again(self, place: _Place, number: int) -> _Place:
        """Return the place, or another one like it where that was left undecided."""
        key = place.key if not number else f"{place.key}.{number}"
        return _Place(key, place.bytes, place.racers)

    def _check_races(self, places: Iterable[_Place], rounds: int) -> None:
        if not self._decided_well(map(self._create_round, places), rounds):
            raise self._not_exclusive("racing creates had no winner, or more than one")

    def _create_round(self, place: _Place) -> bool | None:
        self.used.append(place.key)
        bodies = [self._body(place.bytes) for _ in range(place.racers)]
        racers = self._race(bodies, lambda body: self.store.create(place.key, body))
        return self._one_winner(place.key, racers)

    def _decided_well(self, rounds: Iterable[bool | None], needed: int) -> bool:
        """Whether one racer won each round; undecided rounds are run again."""
        decided = 0
        for one_won in rounds:
            if one_won is False:
                return False
            decided += one_won is True
            if decided == needed:
                return True
        raise self._silent()

    def check_second_create(self, key: str, size: int = 0) -> None:
        self.used.append(key)
        body = self._body(size)
        first = self._checked_response(self.store.create(key, body))
        if first.outcome is not Outcome.CREATED:
            raise self._not_exclusive(f"the response to a first create was {first.outcome.value!r}")
        self._winners[key] = body
        self._check_late_create(key)

    def _check_late_create(self, key: str) -> None:
        """Create again where an object exists: it must lose, and the first one's bytes stay."""
        body = self._winners[key]
        # Of another size: with the same one, the read-back of a lost create reads twice.
        result = self._checked_response(self.store.create(key, self._body(len(body) + 1)))
        if result.outcome is not Outcome.EXISTS or not self._holds(key, body):
            raise self._not_exclusive(
                f"a second create of the same name took effect ({len(body)} bytes at {key})"
            )

    def _one_winner(self, key: str, racers: list[_Racer]) -> bool | None:
        """True: one won, and the object has its bytes. None: too few responses to decide."""
        winners = [racer for racer in racers if racer.result.landed]
        unknown = any(racer.result.outcome is Outcome.UNKNOWN for racer in racers)
        if len(winners) > 1:
            return False
        if not winners:
            return None if unknown else False
        self._winners[key] = winners[0].body
        return self._holds(key, winners[0].body)

    def _holds(self, key: str, body: bytes) -> bool:
        """Whether the object has these bytes; read twice, since a read may be truncated (H8)."""
        for _ in range(2):
            with suppress(NotFoundError):
                if self.store.get(key) == body:
                    return True
        return False

    def _checked_response(self, result: WriteResult) -> WriteResult:
        """Raise if there was no response; a refusal without a reason is a response."""
        silent = result.doubt or result.cause is not None
        if result.outcome is Outcome.UNKNOWN and silent:
            raise self._silent()
        return result

    def _silent(self) -> UnavailableError:
        return _silent(self.store)

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
                    kind=ErrorKind.UNSUPPORTED_BY_STORE,
                    hint="Open it with the option listing='unsorted'",
                )

    def if_match_holds(self, keys: Iterable[str]) -> bool:
        """Whether a stale tag and all but one of several racers lose, in each folder."""
        own = self._key("if-match")
        return self._if_match_holds_at(own, ROUNDS, RACERS) and all(
            self._if_match_holds_at(key, 1, PLACE_RACERS) for key in keys
        )

    def _if_match_holds_at(self, key: str, rounds: int, racers: int) -> bool:
        self.store.put(key, self._nonce())
        stale = self.store.get_tagged(key).tag
        if stale is None or not self._replaces(key, stale):
            return False
        if self._replaces(key, stale):
            return False
        return self._decided_well(
            (self._replace_round(key, racers) for _ in range(ROUNDS_MAX)), rounds
        )

    def _replaces(self, key: str, tag: str) -> bool:
        return self._checked_response(self.store.replace(key, self._nonce(), tag)).landed

    def _replace_round(self, key: str, racers: int) -> bool | None:
        tag = self.store.get_tagged(key).tag or ""
        bodies = [self._nonce() for _ in range(racers)]
        return self._one_winner(
            key, self._race(bodies, lambda body: self.store.replace(key, body, tag))
        )

    def _race(self, bodies: Sequence[bytes], write: Callable[[bytes], WriteResult]) -> list[_Racer]:
        results = self._runtime.map(write, bodies)
        return [_Racer(result, body) for result, body in zip(results, bodies, strict=True)]

    @property
    def _runtime(self) -> Runtime:
        return self.store.runtime

    def _key(self, name: str) -> str:
        self.used.append(paths.probe_object(self.id, name))
        return self.used[-1]

    def _nonce(self) -> bytes:
        return self._runtime.ulid().encode()

    def _body(self, size: int) -> bytes:
        """Return a body of a size that no other racer has; a nonce alone if that is longer."""
        nonce = self._nonce()
        return nonce.ljust(size, b"\0") if size else nonce

    def _not_exclusive(self, seen: str) -> InvalidInputError:
        return _not_exclusive(self.store, seen)


def _not_exclusive(store: Store, seen: str) -> InvalidInputError:
    return InvalidInputError(
        f"{store.url} does not honour create-only writes: {seen}",
        kind=ErrorKind.NOT_EXCLUSIVE,
        hint=TWO_PHASE_HINT,
    )


def _silent(store: Store) -> UnavailableError:
    return UnavailableError(
        f"{store.url} did not respond while its conditional writes were probed",
        hint="Try again; no verdict was stored",
    )


def _store_verdict(store: Store, verdict: CasVerdict) -> CasVerdict:
    """Store the verdict; if another process stored one first, return that."""
    result = store.create(paths.cas_verdict(), msgspec.json.encode(verdict))
    if result.landed:
        return verdict
    known = remembered(store)
    if known is None:
        raise UnavailableError(
            f"the verdict on the conditional writes of {store.url} could not be stored",
            hint="Try again",
        )
    return known


def _decode(body: bytes) -> CasVerdict:
    key = paths.cas_verdict()
    try:
        verdict = msgspec.json.decode(body, type=CasVerdict)
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
