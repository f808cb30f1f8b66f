"""Notifiers, subscriptions, and the parsing of events.

A reader subscribes before its first poll, and clears the subscription before every poll that
follows: an event that arrives later is for the next poll. So no event is lost between two polls, in
whatever order the threads run.

A notifier that receives no events for a while reports it (`is_listening`), and its readers poll at
intervals; when it receives events again it signals every subscription, since it may have missed
some.

An event names objects of a bucket. S3's own form is a JSON object with `Records`; Ceph's is the
same. It may come in an envelope of SNS, whose `Message` is that JSON as text, or in EventBridge's
form, with one `detail`. Names are URL-encoded in some and not in others, so both readings are
returned: one of them is right, and one event too many costs only a poll.
"""

import json
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, NoReturn, Self
from urllib.parse import unquote_plus

from reef.errors import ErrorKind, InvalidInputError
from reef.runtime import REAL, Runtime, Task, leaf_lock


class Subscription:
    """Signals that objects below some prefixes may have changed since it was cleared.

    It has one owner, which clears it. It needs no close: the notifier refers to it weakly.
    """

    def __init__(self, notifier: "Notifier", prefixes: tuple[str, ...], runtime: Runtime) -> None:
        self._notifier = notifier
        self._runtime = runtime
        self._turn = runtime.condition()
        self._signaled = False
        self.prefixes = prefixes

    @property
    def is_signaled(self) -> bool:
        return self._signaled

    @property
    def is_listening(self) -> bool:
        """Whether events would be received; if not, the owner must poll at intervals."""
        return self._notifier.is_listening

    def signal(self) -> None:
        with self._turn:
            self._signaled = True
            self._turn.notify_all()

    def clear(self) -> None:
        """Reset the signal before a poll: later events are for the next poll."""
        self._signaled = False

    def wait(self, timeout_s: float) -> bool:
        """Wait for a signal; False if `timeout_s` passed first. It stays signaled until cleared."""
        deadline = self._runtime.deadline(timeout_s)
        with self._turn:
            while not self._signaled and not deadline.passed():
                self._turn.wait(deadline.remaining_s())
            return self._signaled


class Notifier(ABC):
    """Receives events, and signals the subscriptions to their prefixes. Safe for threads.

    It listens from the first subscription on until it is closed. One notifier serves all readers
    of a process.
    """

    def __init__(self, runtime: Runtime = REAL) -> None:
        self.runtime = runtime
        self.events_received = 0
        """Number of events, including those without a subscription."""
        self._home = runtime.process_id()
        self._lock = leaf_lock()
        self._subscriptions: weakref.WeakSet[Subscription] = weakref.WeakSet()
        self._listener: Task | None = None
        self._closed = False
        self._ended = False

    def __reduce__(self) -> NoReturn:
        raise InvalidInputError(
            f"a {type(self).__name__} cannot be pickled",
            kind=ErrorKind.NOT_PICKLABLE,
            hint="Open one in each process; an unpickled reader polls at intervals",
        )

    def subscribe(self, *prefixes: str) -> Subscription:
        """Return a subscription to new objects below these prefixes, from now on."""
        subscription = Subscription(self, prefixes, self.runtime)
        with self._lock:
            if self._closed:
                return subscription  # never signaled, and not listening
            self._subscriptions.add(subscription)
        self._start()
        self._on_subscribe(prefixes)
        return subscription

    def _start(self) -> None:
        with self._lock:
            if self._listener is None and not self._closed:
                self._listener = self.runtime.spawn(self._run, name="notify")

    @property
    def is_listening(self) -> bool:
        """Whether events are received now, in this process."""
        at_home = self._home == self.runtime.process_id()
        return at_home and not self._closed and not self._ended and self._is_receiving()

    def notify(self, keys: Iterable[str]) -> None:
        """Signal the subscriptions to these keys."""
        subscriptions = self._all()
        for key in keys:
            self.events_received += 1
            for subscription in subscriptions:
                if not subscription.is_signaled and key.startswith(subscription.prefixes):
                    subscription.signal()

    def notify_all(self) -> None:
        """Signal every subscription: events were missed, or cannot be parsed."""
        for subscription in self._all():
            subscription.signal()

    def _all(self) -> list[Subscription]:
        with self._lock:
            return list(self._subscriptions)

    def close(self) -> None:
        """Stop listening, and signal every subscription once, so that no reader keeps waiting.

        In a forked child this does nothing: the listener is the parent's, and continues.
        """
        with self._lock:
            was_open, self._closed = not self._closed, True
        if was_open and self._home == self.runtime.process_id():
            self._stop()
            self.notify_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _run(self) -> None:
        try:
            self._listen()
        finally:
            self._ended = True  # for any reason: readers poll at intervals from here on
            self.notify_all()

    # --- implemented by each kind -------------------------------------------------
    @abstractmethod
    def _listen(self) -> None:
        """Receive events until it is closed; runs in a thread of its own."""

    @abstractmethod
    def _stop(self) -> None:
        """Make `_listen` return soon."""

    def _on_subscribe(self, prefixes: tuple[str, ...]) -> None:  # noqa: B027 - most receive all
        """Receive events of these prefixes from the return of this method on."""

    def _is_receiving(self) -> bool:
        return True


def pause(
    runtime: Runtime, subscription: Subscription | None, poll_s: float, calm_s: float
) -> None:
    """Wait before the next poll: for a signal, `calm_s` at most; or `poll_s` without a notifier."""
    if subscription is not None and subscription.is_listening:
        subscription.wait(calm_s)
    else:
        runtime.sleep(poll_s)


def key_matcher(bucket: str, prefix: str) -> Callable[[str, str], str | None]:
    """Return a function from an event's bucket and name to the key in this store, or None."""
    below = f"{prefix}/" if prefix else ""

    def key_of(named: str, name: str) -> str | None:
        is_ours = named == bucket and name.startswith(below)
        return name.removeprefix(below) if is_ours else None

    return key_of


def split_url(url: Any) -> tuple[str, str]:
    """Return bucket and prefix of a store's URL."""
    scheme, mark, rest = url.partition("://") if isinstance(url, str) else ("", "", "")
    bucket, _, prefix = rest.split("?", 1)[0].partition("/")
    if not mark or scheme in ("file", "memory") or not bucket:
        raise InvalidInputError(
            f"{str(url).split('?', 1)[0]!r} is not the URL of a bucket",
            kind=ErrorKind.INVALID_URL,
            hint="Such as s3://bucket/prefix, as the database was opened with",
        )
    return bucket, prefix.strip("/")


def check_notifier(notify: Any, *, follows: bool) -> None:
    """Raise unless it is a notifier for a reader that follows the head."""
    if notify is not None and not isinstance(notify, Notifier):
        raise InvalidInputError(
            f"notify={notify!r:.80} is not a notifier",
            kind=ErrorKind.INVALID_OPTION,
            hint="reef.stores.notify has some, such as DirectoryNotifier",
        )
    if notify is not None and not follows:
        raise InvalidInputError(
            "notify= is for a reader that follows the head, and this one is pinned",
            kind=ErrorKind.INVALID_OPTION,
        )


# --- events -----------------------------------------------------------------------


DEPTH_MAX = 3


def parse_event(body: str | bytes) -> list[tuple[str, str]] | None:
    """Return (bucket, name) of each object in an event; None if it cannot be parsed.

    >>> parse_event('{"Records": [{"s3": {"bucket": {"name": "b"}, "object": {"key": "a%2Fb"}}}]}')
    [('b', 'a%2Fb'), ('b', 'a/b')]
    """
    try:
        return _objects(json.loads(body), DEPTH_MAX)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def _objects(event: Any, depth: int) -> list[tuple[str, str]]:
    if "Records" in event:
        return [pair for record in event["Records"] for pair in _bucket_and_key(record["s3"])]
    if "detail" in event:
        return _bucket_and_key(event["detail"])
    if event.get("Event") == "s3:TestEvent":
        return []
    if "Message" in event and depth:
        return _objects(json.loads(event["Message"]), depth - 1)
    raise ValueError("unknown form of event")


def _bucket_and_key(place: Any) -> list[tuple[str, str]]:
    bucket, name = str(place["bucket"]["name"]), str(place["object"]["key"])
    decoded = unquote_plus(name)
    return [(bucket, name)] if decoded == name else [(bucket, name), (bucket, decoded)]
