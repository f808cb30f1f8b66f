"""Bells, and who rings them.

A reader takes a bell before its first look, and clears it before every look that follows: what
rings after that is for the next one. So no event falls between two looks, in whatever order the
threads run.

A notifier that cannot hear at the moment says so (`is_listening`), and its readers go back to
looking at intervals; when it hears again it rings every bell, since nobody knows what it missed.
"""

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, NoReturn, Self

from reef.errors import InvalidInputError, Kind
from reef.runtime import REAL, Runtime, Task, leaf_lock

__all__ = ["Bell", "Notifier", "check_notifier", "matching", "pause", "split_url"]


class Bell:
    """Something may have changed below some prefixes, since it was cleared last.

    It has one owner, who clears it, and rings as long as it is held: nobody closes it.
    """

    def __init__(self, notifier: "Notifier", prefixes: tuple[str, ...], runtime: Runtime) -> None:
        self._notifier = notifier
        self._runtime = runtime
        self._turn = runtime.condition()
        self._rung = False
        self.prefixes = prefixes

    @property
    def is_rung(self) -> bool:
        return self._rung

    @property
    def is_listening(self) -> bool:
        """Whether it would ring; if not, its owner must look by itself."""
        return self._notifier.is_listening

    def ring(self) -> None:
        with self._turn:
            self._rung = True
            self._turn.notify_all()

    def clear(self) -> None:
        """Begin to look: what rings from here on is for the next look."""
        self._rung = False

    def wait(self, timeout_s: float) -> bool:
        """Wait until it rings; False if `timeout_s` passed first. It stays rung until cleared."""
        deadline = self._runtime.deadline(timeout_s)
        with self._turn:
            while not self._rung and not deadline.passed():
                self._turn.wait(deadline.remaining_s())
            return self._rung


class Notifier(ABC):
    """Hears of new objects, and rings the bells that are for them. Safe for threads.

    It listens from the first bell on, until it is closed; one serves all readers of a process.
    """

    def __init__(self, runtime: Runtime = REAL) -> None:
        self.runtime = runtime
        self.heard = 0
        """Events that came, those for nobody included."""
        self._home = runtime.process_id()
        self._lock = leaf_lock()
        self._bells: weakref.WeakSet[Bell] = weakref.WeakSet()
        self._listener: Task | None = None
        self._closed = False
        self._ended = False

    def __reduce__(self) -> NoReturn:
        raise InvalidInputError(
            f"a {type(self).__name__} cannot be pickled",
            kind=Kind.NOT_PICKLABLE,
            hint="Open one in each process; a reader that is sent elsewhere looks at intervals",
        )

    def bell(self, *prefixes: str) -> Bell:
        """Return a bell that rings for new objects below these prefixes, from now on."""
        bell = Bell(self, prefixes, self.runtime)
        with self._lock:
            if self._closed:
                return bell  # it never rings, and says so
            self._bells.add(bell)
        self._start()
        self._added(prefixes)
        return bell

    def _start(self) -> None:
        with self._lock:
            if self._listener is None and not self._closed:
                self._listener = self.runtime.spawn(self._run, name="notify")

    @property
    def is_listening(self) -> bool:
        """Whether news would be heard now, in this process."""
        at_home = self._home == self.runtime.process_id()
        return at_home and not self._closed and not self._ended and self._hears()

    def notify(self, keys: Iterable[str]) -> None:
        """Ring for objects that may be new."""
        bells = self._all()
        for key in keys:
            self.heard += 1
            for bell in bells:
                if not bell.is_rung and key.startswith(bell.prefixes):
                    bell.ring()

    def notify_all(self) -> None:
        """Ring for everything: some news was missed, or cannot be read."""
        for bell in self._all():
            bell.ring()

    def _all(self) -> list[Bell]:
        with self._lock:
            return list(self._bells)

    def close(self) -> None:
        """Stop listening; bells that are left ring once, so that nobody waits for them.

        In a forked child there is nothing to stop: the listener is the parent's, and goes on.
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
            self._ended = True  # whatever the reason: readers look by themselves from here on
            self.notify_all()

    # --- of each kind -------------------------------------------------------------
    @abstractmethod
    def _listen(self) -> None:
        """Hear news until it is closed; runs in a thread of its own."""

    @abstractmethod
    def _stop(self) -> None:
        """Make `_listen` end soon."""

    def _added(self, prefixes: tuple[str, ...]) -> None:  # noqa: B027 - most hear of everything
        """See to it that news of these prefixes is heard when this returns."""

    def _hears(self) -> bool:
        return True


def pause(runtime: Runtime, bell: Bell | None, poll_s: float, calm_s: float) -> None:
    """Wait before the next look: for the bell and `calm_s` at most, or `poll_s` without one."""
    if bell is not None and bell.is_listening:
        bell.wait(calm_s)
    else:
        runtime.sleep(poll_s)


def matching(bucket: str, prefix: str) -> Callable[[str, str], str | None]:
    """Return what turns an event's bucket and name into a key of the store, if it is one."""
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
            kind=Kind.INVALID_URL,
            hint="Such as s3://bucket/prefix, as the database was opened with",
        )
    return bucket, prefix.strip("/")


def check_notifier(notify: Any, *, follows: bool) -> None:
    """Refuse what cannot ring, and a notifier for a reader whose moment does not change."""
    if notify is not None and not isinstance(notify, Notifier):
        raise InvalidInputError(
            f"notify={notify!r:.80} is not a notifier",
            kind=Kind.INVALID_OPTION,
            hint="reef.stores.notify has some, such as DirectoryNotifier",
        )
    if notify is not None and not follows:
        raise InvalidInputError(
            "notify= is for a reader that follows, and one moment does not change",
            kind=Kind.INVALID_OPTION,
        )
