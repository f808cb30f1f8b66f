"""Policies on the request hook: retries (`Retry`, `ReadBack`) and rates (`Throttle`, `Paced`).

**Retries.** Reads, plain puts, copies and deletes have the same effect when sent twice, so `Retry`
sends them again, a bounded number of times. A conditional write does not: `create` after a lost
response finds its own object. So `create`, `replace` and `upload` bypass `Retry`, and `ReadBack`
resolves them by reading the object back.

A store may respond "exists" although the object is our own, from an attempt whose response was lost
(H1); it may respond "conflict" although nothing was written (H2, H6); or not respond. The body
decides: commit objects carry a write id, so equal bytes mean that the object is ours.

    create    created                      done
              exists    equal bytes        created: an earlier attempt landed
                        other bytes        exists; the result carries the winner's bytes
                        no object          send again
              unknown                      send again, the same bytes

              Different bytes that could be ours, damaged in transit, are read a second time:
              taking them for another writer's would write twice, or report a loss that is none.

    replace   likewise; but once a response was lost, other bytes prove nothing: ours may
              have landed and been replaced since. Then the outcome stays unknown.

After an unknown outcome the write is sent again before it is read back, on purpose: the first
attempt may still be in flight, and a directory reports "exists" only for objects that are durable.

This assumes that no process deletes or overwrites the name meanwhile. Reef collects slots only
long after their use; a result with `doubt` set is one whose writer must prove that (H13). It also
assumes that "changed" is never the response to a request that took effect: a proxy that sends a
conditional write twice would break that, and must not be placed in front of a bucket.

**Rates.** Services limit requests by prefix, reads and writes apart (S3: some 5,500 and 3,500 a
second), and some by object (GCS: about one write a second); above that they respond 503 SlowDown or
429. Random retries only keep the service busy refusing. So the first such response makes `Throttle`
open a lane for the folder of its key, and requests in a lane are sent at a rate:

    rate
     |          refused                    .'     grows slowly near the rate that was refused
     |    .'|       __..---''''''''---..'`        last, fast away from it (a cubic curve): most
     |   /  |   .-'                               of the time is spent just below the limit
     |  /   | .'
     | /    |/  cut to 80 %
     +------------------------------------ time

At first the limit is unknown, and the rate doubles until it is refused. A refusal counts once:
requests that were sent before the cut carry no information about the rate after it. A minute
without a refusal closes the lane. Without lanes a request costs the check of an empty dict. Waits
are bounded: a request whose turn is further away than `wait_max_s` fails as throttled and is not
sent. Other processes have lanes of their own; an unpickled copy starts without any.

`Paced` limits the requests and bytes per second of background jobs, so that they leave capacity for
serving. Every request takes its share of a budget that is refilled at a steady rate, and waits
until the budget covers it. A burst of one second is free; after that the rate holds for any number
of threads. While the pace is paused every request waits: a job stops where it is, and resumes from
there. Once it is ended, every request raises `PaceEnded` before it is sent, which interrupts the
job as a crash would. Pickling yields the store inside: a rate belongs to one process.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

from reef import paths
from reef.errors import ErrorKind, InvalidInputError, NotFoundError, ReefError, UnavailableError
from reef.runtime import ConditionVariable, Runtime, leaf_lock
from reef.stores.base import ObjectInfo, Outcome, Store, Tagged, WriteResult, short_read
from reef.stores.wrappers.base import (
    CONDITIONAL,
    CREATE,
    GET_RANGE,
    READS,
    CountedParts,
    Hooked,
    Operation,
    Send,
    StoreRequest,
    Wrapper,
)

# --- retries ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Bounds of a retry loop; the first one that is reached ends it."""

    attempts_max: int = 8
    deadline_s: float = 30.0
    first_delay_s: float = 0.05
    delay_max_s: float = 5.0


class Backoff:
    """Counts attempts and waits between them: doubling delays with full jitter."""

    def __init__(
        self, runtime: Runtime, policy: RetryPolicy, started_s: float | None = None
    ) -> None:
        """`started_s` is when the first attempt began by `boottime_s`, if that was earlier."""
        self._runtime = runtime
        self._policy = policy
        spent_s = 0.0 if started_s is None else runtime.boottime_s() - started_s
        self._deadline = runtime.deadline(policy.deadline_s - spent_s)
        self.attempts = 0

    def wait(self) -> bool:
        """Wait before the next attempt; False if the bounds allow none."""
        self.attempts += 1
        if self.attempts >= self._policy.attempts_max:
            return False
        ceiling = self._policy.first_delay_s * 2 ** (self.attempts - 1)
        delay_s = self._runtime.uniform(0.0, min(ceiling, self._policy.delay_max_s))
        if delay_s >= self._deadline.remaining_s():
            return False
        self._runtime.sleep(delay_s)
        return True


class Retry(Hooked):
    """Retries `UnavailableError` only; other errors are final."""

    passes_ranges = True

    def __init__(self, inner: Store, policy: RetryPolicy | None = None) -> None:
        super().__init__(inner)
        self.policy = policy or RetryPolicy()

    def handles(self, operation: Operation) -> bool:
        return operation.is_idempotent

    def around(self, request: StoreRequest, send: Send) -> Any:
        started_s = self.runtime.boottime_s()
        backoff: Backoff | None = None
        while True:
            try:
                response = send(request)
                if request.operation is GET_RANGE:
                    _check_length(request, response)
                return response
            except UnavailableError as error:
                if error.kind is ErrorKind.DISK_FULL:  # an attempt a second later fails as well
                    raise
                backoff = backoff or Backoff(self.runtime, self.policy, started_s)
                if not backoff.wait():
                    error.context["attempts"] = backoff.attempts
                    raise

    def around_list(self, request: StoreRequest, send: Send) -> Iterator[ObjectInfo]:
        """Resume after the last key that was received; each key resets the backoff."""
        last_key, progress_s = request.start_after, self.runtime.boottime_s()
        backoff: Backoff | None = None
        while True:
            try:
                for info in send(request.after(last_key) if backoff else request):
                    last_key, progress_s, backoff = info.key, self.runtime.boottime_s(), None
                    yield info
                return
            except UnavailableError:
                backoff = backoff or Backoff(self.runtime, self.policy, progress_s)
                if not backoff.wait():
                    raise


def _check_length(request: StoreRequest, body: bytes) -> None:
    expected = request.end - request.start
    if len(body) != expected:
        raise short_read(request.key, len(body), expected)


# --- conditional writes -----------------------------------------------------------


class ReadBack(Hooked):
    """Resolves most unknown outcomes, within the policy's bounds."""

    passes_ranges = True

    def __init__(self, inner: Store, policy: RetryPolicy | None = None) -> None:
        super().__init__(inner)
        self.policy = policy or RetryPolicy()

    def handles(self, operation: Operation) -> bool:
        return not operation.is_idempotent

    def around(self, request: StoreRequest, send: Send) -> Any:
        """Send until the outcome is definite. `doubt`: an earlier attempt may have landed.

        Nothing is raised once there is doubt, not even a denied access: the credentials may have
        expired between an attempt that landed and the one that reads it back.
        """
        if request.operation not in CONDITIONAL:
            return self._upload(request, send)
        started_s = self.runtime.boottime_s()
        backoff: Backoff | None = None
        doubt = False
        while True:
            try:
                result: WriteResult = send(request)
            except ReefError as error:
                cause: Exception | None = error  # this attempt wrote nothing, for certain
                if not isinstance(error, UnavailableError):
                    break
            else:
                if result.landed:
                    return result
                resolved, cause, doubt = self._resolve(request, result, doubt)
                if resolved is not None:
                    return replace(resolved, doubt=doubt)
            backoff = backoff or Backoff(self.runtime, self.policy, started_s)
            if not backoff.wait():
                break
        if not doubt and isinstance(cause, ReefError):
            raise cause
        return WriteResult(Outcome.UNKNOWN, cause=cause, doubt=doubt)

    def _resolve(
        self, request: StoreRequest, result: WriteResult, doubt: bool
    ) -> tuple[WriteResult | None, Exception | None, bool]:
        """Return the outcome if it is definite, why not otherwise, and whether there is doubt."""
        if result.outcome is Outcome.UNKNOWN:
            return None, result.cause, True
        try:
            return self._read_back(request, doubt), result.cause, doubt
        except ReefError as error:  # the object that is there may be our own
            return None, error, True

    def _read_back(self, request: StoreRequest, doubt: bool) -> WriteResult | None:
        """Return the outcome by the object that is there; None if the write is to be sent again."""
        if request.operation is CREATE:
            return self._read_created(request)
        return self._read_replaced(request, doubt)

    def _read_created(self, request: StoreRequest) -> WriteResult | None:
        try:
            found = self._read_twice(request.key, request.body)
        except NotFoundError:
            return None
        if found.body == request.body:
            return WriteResult(Outcome.CREATED, found.tag)
        return WriteResult(Outcome.EXISTS, winner=found.body)

    def _read_replaced(self, request: StoreRequest, doubt: bool) -> WriteResult | None:
        found: Tagged | None = None
        with suppress(NotFoundError):
            found = self.inner.get_tagged(request.key)
        if found is not None and found.body == request.body:
            return WriteResult(Outcome.REPLACED, found.tag)
        if found is not None and found.tag == request.tag:
            return None  # reported as changed, yet it has not
        outcome = Outcome.UNKNOWN if doubt else Outcome.CHANGED
        return WriteResult(outcome, winner=found.body if found else None)

    def _read_twice(self, key: str, body: bytes) -> Tagged:
        """Return the object; read again if it could be ours, truncated or damaged (H8)."""
        found = self.inner.get_tagged(key)
        is_ours = found.body == body
        may_be = len(found.body) == len(body) or body.startswith(found.body)
        return self.inner.get_tagged(key) if may_be and not is_ours else found

    def _upload(self, request: StoreRequest, send: Send) -> int:
        """A lost response to the last request hides a finished upload (H3): check for it."""
        counted = CountedParts(request.parts)
        try:
            size: int = send(request.with_parts(counted))
        except UnavailableError as error:
            # Only a lost response is recovered from: an object that is visible but not
            # durable is an error.
            if error.kind is ErrorKind.NOT_DURABLE or not counted.ended:
                raise
            if self._size(request.key) != counted.bytes:
                raise
            return counted.bytes
        return size

    def _size(self, key: str) -> int | None:
        try:
            return self.inner.head(key).size
        except NotFoundError:
            return None


class Proved(Wrapper):
    """Limits conditional writes to those that the probe has proved (`reef.stores.probe`).

    No If-Match where it was found not to hold; no larger `create` before `prove` has proved one.
    """

    def __init__(
        self,
        inner: Store,
        *,
        if_match: bool,
        bytes_proved: int,
        prove: Callable[[Store, int], int],
    ) -> None:
        super().__init__(inner)
        self._bytes_proved, self._prove = bytes_proved, prove
        if not if_match:
            self.capabilities = replace(inner.capabilities, if_match=False)

    def get_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        return self.inner.get_ranges(key, ranges)  # a disk cache inside caches each by itself

    def forget(self, key: str, ranges: Iterable[tuple[int, int]]) -> None:
        self.inner.forget(key, ranges)

    def create(self, key: str, body: bytes) -> WriteResult:
        if len(body) > self._bytes_proved:
            self._bytes_proved = self._prove(self.inner, len(body))
        return self.inner.create(key, body)

    def replace(self, key: str, body: bytes, tag: str) -> WriteResult:
        if self.capabilities.if_match:
            return self.inner.replace(key, body, tag)
        raise InvalidInputError(
            f"{self.url} does not honour If-Match, as its probe has found",
            kind=ErrorKind.UNSUPPORTED_BY_STORE,
            object=key,
        )


# --- rates ------------------------------------------------------------------------


# --- throttling by the service ----------------------------------------------------


START_PER_S = 10.0
DOUBLING_S = 0.5
CUT = 0.8
STEEPNESS = 0.4
"""Steepness of the cubic curve: one more request a second after 1.4 s, 50 more after 5 s."""
RATE_MIN_PER_S = 0.2
BURST_S = 0.05
"""Unused turns are kept this long: threads do not arrive at exact intervals."""
MEASURED_S = 1.0
CUT_GAP_S = 0.5
FORGET_S = 60.0
WAIT_MAX_S = 10.0


class _Lane:
    """The rate of one kind of request to one folder."""

    def __init__(self, now_s: float) -> None:
        self._lock = leaf_lock()
        self._began_s = self._cut_s = now_s
        self._peak: float | None = None
        """The rate that was refused last; None until a rate was measured."""
        self._free_s = now_s
        self._window_s, self._in_window, self._seen_per_s = now_s, 0, 0.0

    def take(self, now_s: float, wait_max_s: float) -> float | None:
        """Return how long to wait for a turn; None if that is too long, and none is taken."""
        with self._lock:
            start_s = max(self._free_s, now_s - BURST_S)
            wait_s = max(0.0, start_s - now_s)
            if wait_s > wait_max_s:
                return None
            self._free_s = start_s + 1.0 / self._rate(now_s)
            self._measure(now_s + wait_s)
            return wait_s

    def refused(self, sent_s: float, now_s: float) -> bool:
        """Cut the rate, unless the request was sent at a rate that was cut since."""
        with self._lock:
            if sent_s < self._cut_s + (CUT_GAP_S if self._peak is not None else 0.0):
                return False
            used = max(self._seen_per_s, self._in_window / MEASURED_S)
            self._peak = max(min(self._rate(now_s), used), RATE_MIN_PER_S)
            self._cut_s = now_s
            self._free_s = max(self._free_s, now_s + 1.0 / self._rate(now_s))
            return True

    def rate(self, now_s: float) -> float:
        with self._lock:
            return self._rate(now_s)

    def is_over(self, now_s: float) -> bool:
        return now_s - self._cut_s > FORGET_S

    def _rate(self, now_s: float) -> float:
        if self._peak is None:
            doublings = min((now_s - self._began_s) / DOUBLING_S, 60.0)
            return START_PER_S * math.exp2(doublings)
        back_s: float = math.cbrt(self._peak * (1.0 - CUT) / STEEPNESS)
        rate = STEEPNESS * (now_s - self._cut_s - back_s) ** 3 + self._peak
        return max(rate, RATE_MIN_PER_S)

    def _measure(self, now_s: float) -> None:
        """Count the requests that are sent: a rate that is not used grows untested."""
        if now_s - self._window_s >= MEASURED_S:
            self._seen_per_s = self._in_window / (now_s - self._window_s)
            self._window_s, self._in_window = now_s, 0
        self._in_window += 1


class Throttle(Hooked):
    """Limits the rate of throttled prefixes; inside the retries of `reef.stores.open`."""

    passes_ranges = True

    def __init__(self, inner: Store, *, wait_max_s: float = WAIT_MAX_S) -> None:
        super().__init__(inner)
        self.wait_max_s = wait_max_s
        self._lock = leaf_lock()
        self._lanes: dict[tuple[str, str], _Lane] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, (self.inner, self.wait_max_s)

    def rates(self) -> dict[tuple[str, str], float]:
        """Return requests per second by kind (read, write) and folder, where they are limited."""
        now_s = self.runtime.monotonic_s()
        return {name: lane.rate(now_s) for name, lane in list(self._lanes.items())}

    @property
    def is_limited(self) -> bool:
        """Whether some requests wait for their turn."""
        return bool(self._lanes)

    # --- requests -----------------------------------------------------------------
    def handles(self, operation: Operation) -> bool:
        """Reading the clock of a bucket writes one object, the most contended of all."""
        if operation is Operation.NOW:
            return bool(self.capabilities.now_requests)
        if operation is Operation.ABORT_STALE:
            return bool(self.capabilities.abort_stale_requests)
        return True

    def around(self, request: StoreRequest, send: Send) -> Any:
        sent_s = self._wait(*_lane_of(request)) if self._lanes else -math.inf
        try:
            response = send(request)
        except UnavailableError as error:
            self._check(error, request, sent_s)
            raise
        if type(response) is WriteResult and response.cause is not None:
            self._check(response.cause, request, sent_s)
        return response

    def around_list(self, request: StoreRequest, send: Send) -> Iterator[ObjectInfo]:
        """The first page waits for its turn; a refusal of any page counts."""
        infos = self.around(request, send)
        while True:
            sent_s = self._sent_s()
            try:
                info = next(infos, None)
            except UnavailableError as error:
                self._check(error, request, sent_s)
                raise
            if info is None:
                return
            yield info

    # --- lanes --------------------------------------------------------------------
    def _wait(self, kind: str, key: str) -> float:
        """Wait for a turn, if the request has a lane; return when it is sent."""
        name = (kind, _folder(key))
        lane = self._lanes.get(name)
        if lane is None:
            return self._sent_s()
        now_s = self.runtime.monotonic_s()
        if lane.is_over(now_s):
            with self._lock:
                self._lanes.pop(name, None)
            return self._sent_s()
        wait_s = lane.take(now_s, self.wait_max_s)
        if wait_s is None:
            raise UnavailableError(
                f"{self.url} throttles {kind}s below {name[1] or '/'}: it takes about "
                f"{lane.rate(now_s):.1f} a second, and more are waiting than fit into "
                f"{self.wait_max_s:g} s; this one was not sent",
                kind=ErrorKind.THROTTLED,
                hint="Send less at once, or spread the load over namespaces",
                object=key,
            )
        if wait_s > 0.0:
            self.runtime.sleep(wait_s)
        return self._sent_s()

    def _sent_s(self) -> float:
        return self.runtime.monotonic_s() if self._lanes else -math.inf

    def _check(self, error: Exception, request: StoreRequest, sent_s: float) -> None:
        """Cut the rate if the service has throttled a request."""
        if isinstance(error, UnavailableError) and error.kind is ErrorKind.THROTTLED:
            self._note_refusal(*_lane_of(request), sent_s)

    def _note_refusal(self, kind: str, key: str, sent_s: float) -> None:
        now_s = self.runtime.monotonic_s()
        name = (kind, _folder(key))
        with self._lock:
            lane = self._lanes.get(name)
            if lane is None:
                self._lanes[name] = _Lane(now_s)
                return
        lane.refused(sent_s, now_s)


def _lane_of(request: StoreRequest) -> tuple[str, str]:
    """Return the kind of a request, and the key whose folder it counts for."""
    if request.operation in (Operation.NOW, Operation.ABORT_STALE):
        return "write", paths.clock()
    return "read" if request.operation in READS else "write", request.key


def _folder(key: str) -> str:
    return key.rpartition("/")[0]


def _reopen(inner: Store, wait_max_s: float) -> Throttle:
    return Throttle(inner, wait_max_s=wait_max_s)


# --- a budget for background jobs -------------------------------------------------


SOON_S = 1e-6
"""Not worth waiting for; and clocks do not always move by less."""
POLL_S = 1.0
"""How often a paused request checks whether it may resume, should a wake-up be missed."""


DELETES_PER_REQUEST = 1000
"""Deletes that count as one request. Every commit is deleted some day, so a sweep that was held to
fewer deletes than commits would fall behind for ever (H75)."""


class PaceEnded(Exception):
    """The pace was ended. Not an error of the store, so that it is never retried."""


class Pace:
    """A budget of requests and bytes; 0 means no limit."""

    def __init__(self, runtime: Runtime, requests_per_s: float, bytes_per_s: float) -> None:
        self._runtime = runtime
        self._requests = _RateLimit(requests_per_s)
        self._bytes = _RateLimit(bytes_per_s)
        self._turn: ConditionVariable = runtime.condition()
        self._paused = False
        self._ended = False
        self._lifted = 0

    def take(self, size: int = 0, requests: int = 1) -> None:
        """Return when the budget has room for a request of so many bytes."""
        with self._turn:
            self._hold()
            if self._lifted:
                return
            now_s = self._runtime.monotonic_s()
            wait_s = max(self._requests.reserve(requests, now_s), self._bytes.reserve(size, now_s))
            while (left_s := now_s + wait_s - self._runtime.monotonic_s()) > SOON_S:
                self._turn.wait(left_s)
                self._hold()

    def _hold(self) -> None:
        """Wait while paused; raise PaceEnded once ended."""
        while self._paused and not self._ended:
            self._turn.wait(POLL_S)
        if self._ended:
            raise PaceEnded

    def pause(self) -> None:
        """Make every request wait."""
        with self._turn:
            self._paused = True

    def resume(self) -> None:
        """Let waiting requests continue."""
        with self._turn:
            self._paused = False
            self._turn.notify_all()

    @contextmanager
    def lifted(self) -> Iterator[None]:
        """Let requests inside pass without a limit: another job waits for them."""
        with self._turn:
            self._lifted += 1
        try:
            yield
        finally:
            with self._turn:
                self._lifted -= 1

    def end(self) -> None:
        """Raise PaceEnded in every request from now on, waiting ones included."""
        with self._turn:
            self._ended = True
            self._turn.notify_all()

    def end_soon(self) -> None:
        """The same without a lock: for a finalizer, which may run while the lock is held."""
        self._ended = True

    @property
    def is_paused(self) -> bool:
        return self._paused


class _RateLimit:
    """A rate limit: each unit occupies its share of a second."""

    def __init__(self, per_s: float) -> None:
        self._per_s = per_s
        self._free_s = -math.inf
        """When all reserved units are used up."""

    def reserve(self, amount: float, now_s: float) -> float:
        """Return how long to wait for this amount; at most one second accumulates."""
        if self._per_s <= 0 or amount <= 0:
            return 0.0
        start_s = max(self._free_s, now_s - 1.0)
        self._free_s = start_s + amount / self._per_s
        return max(0.0, self._free_s - now_s)


class Paced(Hooked):
    """Takes from a `Pace` before each request."""

    def __init__(self, inner: Store, pace: Pace) -> None:
        super().__init__(inner)
        self.pace = pace

    def handles(self, operation: Operation) -> bool:
        return operation not in (Operation.NOW, Operation.ABORT_STALE)

    def around(self, request: StoreRequest, send: Send) -> Any:
        match request.operation:
            case Operation.GET:
                self.pace.take()
                found = send(request)
                self.pace.take(len(found.body), requests=0)
                return found
            case Operation.GET_RANGE:
                self.pace.take(request.end - request.start)
            case Operation.UPLOAD:
                self.pace.take()
                request = request.with_parts(self._pace_parts(request.parts))
            case Operation.COMPOSE:
                self.pace.take(requests=len(request.pieces))
            case Operation.DELETE:
                self.pace.take(requests=-(-len(request.keys) // DELETES_PER_REQUEST))
            case _:
                self.pace.take(len(request.body))
        return send(request)

    def around_list(self, request: StoreRequest, send: Send) -> Iterator[ObjectInfo]:
        self.pace.take()
        for position, info in enumerate(send(request)):
            if position and position % self.capabilities.list_page == 0:
                self.pace.take()
            yield info

    def __reduce__(self) -> tuple[Any, ...]:
        return _inner, (self.inner,)

    def _pace_parts(self, parts: Iterable[bytes]) -> Iterator[bytes]:
        for part in parts:
            self.pace.take(len(part), requests=0)
            yield part


def _inner(store: Store) -> Store:
    return store
