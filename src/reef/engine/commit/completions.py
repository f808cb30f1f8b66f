"""Completions: how a caller learns the outcome of a batch, in the bucket or on a local disk.

    pending ──complete()──▶ decided ──deliver()──▶ future set, callbacks run
              under the lock           outside of the lock

A batch is decided once, under its writer's lock: by a `Receipt` (durable, or replayed where its
idempotency key was committed before) or by an error (rejected, or unknown). There are two kinds of
caller:

- One that waits does the writer's work itself (it sends, or syncs the disk) until `result` is set.
  It has no future, and there is nothing to deliver.
- One that does not wait has a future. Results are queued in the order in which they are decided,
  and each is delivered by a worker, by `flush`, or by the end of the writer. The first error that
  went to such a caller is raised by the next `flush` as well.

A future runs its owner's callbacks on the thread that sets it. They may call the writer again,
wait, block, or end their thread, so five rules hold (H26):

- A thread claims one result under the lock, and sets it outside. If it is interrupted in between,
  the result goes back to the head of the queue.
- Callers that wait run no callbacks. `flush` does, but none within another callback.
- A batch that is written in a callback is urgent: the callback may wait for its future. Urgent
  results come first, and any worker may deliver them.
- Workers keep the writer alive, so that one that its program has dropped is not collected with a
  queue (H78).
- A worker that runs a callback is replaced, so that its callback may wait for other batches. At
  most `CALLBACK_WORKERS_MAX` workers run callbacks at a time, so that blocked callbacks do not cost
  a thread each; other workers deliver urgent results only.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from reef.errors import InternalError, ReefError
from reef.runtime import ConditionVariable, Future, Runtime
from reef.types import Receipt

CALLBACK_WORKERS_MAX = 16
"""Workers of one writer that run callbacks at a time."""


@dataclass(eq=False, slots=True, kw_only=True)
class Completion:
    """The outcome of one batch: pending until `result` is set."""

    future: "Future[Receipt] | None" = None
    """For a caller that does not wait; None again once it is set, since a backlog may be long."""
    in_callback: bool = False
    """Whether it was submitted from a callback, which may be waiting for it."""
    result: Receipt | ReefError | None = None
    followers: "tuple[Completion, ...]" = ()
    """Repeats of its idempotency key: they get the same result."""

    def complete_at_once(self, receipt: Receipt) -> None:
        """Complete a future before its caller has it, while it cannot have callbacks."""
        self.result = receipt
        if self.future is not None:
            self.future.set_result(receipt)

    def outcome(self) -> Receipt:
        """Return the receipt, or raise the error; once decided."""
        if isinstance(self.result, Receipt):
            return self.result
        raise self.result or InternalError("a batch has no outcome yet")


def new_future(runtime: Runtime) -> "Future[Receipt]":
    """Return the future of a submitted batch, which may be in flight: no cancelling (H26)."""
    future = runtime.future()
    future.set_running_or_notify_cancel()
    return future


class Work(Protocol):
    """The work of a writer besides deliveries; called under its lock."""

    def has_work(self) -> bool: ...
    def next_work(self) -> Callable[[], None] | None:
        """Claim the next piece of work, to be run outside of the lock."""


class Completions:
    """Delivers the outcomes of one writer, and runs its background workers.

    Workers exist only while there is work for callers that do not wait.
    """

    def __init__(
        self,
        runtime: Runtime,
        changed: ConditionVariable,
        work: Work,
        *,
        name: str,
        workers_max: int = 1,
        linger_s: float = 0.0,
    ) -> None:
        self._runtime = runtime
        self._changed = changed
        """The writer's lock; notified when something was decided."""
        self._work = work
        self._name = name
        self._workers_max = workers_max
        """Workers at a time, not counting those that run callbacks."""
        self._linger_s = linger_s
        """How long an idle worker waits for more."""
        self._urgent: OrderedDict[Completion, None] = OrderedDict()
        self._ready: OrderedDict[Completion, None] = OrderedDict()
        self._claimed: dict[object, Completion] = {}
        """By claimant, at most one each: its future is set next, before any callback runs."""
        self._rejection: ReefError | None = None
        self._workers: set[object] = set()
        self._worker_count = 0
        self._owner: object | None = None
        """The writer, while there are workers."""
        self._callback_threads: set[object] = set()
        """Threads that run callbacks, workers or not."""

    def __len__(self) -> int:
        """Return the number of results that are decided and not claimed for delivery."""
        return len(self._urgent) + len(self._ready)

    # --- deciding; under the lock -------------------------------------------------
    def complete(self, completion: Completion, result: Receipt | ReefError) -> None:
        """Decide a batch; a batch that is decided keeps its first result."""
        if completion.result is not None:
            return
        if completion.future is not None:
            queue = self._urgent if completion.in_callback else self._ready
            queue[completion] = None
            if isinstance(result, ReefError):
                self._rejection = self._rejection or result
        for follower in completion.followers:
            self.complete(follower, result)
        completion.result = result  # last: an interrupt before that leaves it to be decided

    def undelivered(self) -> list[Completion]:
        """Return the batches that are decided and whose futures are not set yet."""
        return [*self._claimed.values(), *self._urgent, *self._ready]

    def take_rejection(self) -> ReefError | None:
        """Return the first error since the last call that went to a caller that did not wait."""
        rejection, self._rejection = self._rejection, None
        return rejection

    # --- delivering; takes the lock -----------------------------------------------
    @property
    def in_callback(self) -> bool:
        """Whether this thread runs a callback."""
        return self._runtime.thread_id() in self._callback_threads

    def deliver(self, completion: Completion) -> None:
        """Return when the future of a decided batch is set, by this thread or by another."""
        future = completion.future
        while future is not None and not future.done():
            if not self._run_callbacks(1, completion):
                with self._changed:
                    is_claimed = completion in self._claimed.values()
                if is_claimed:
                    future.exception()

    def deliver_all(self) -> None:
        """Set the futures that this thread may set now, not those that are decided meanwhile."""
        with self._changed:
            count = self.deliverable()
        self._run_callbacks(count)

    def deliver_rest(self) -> None:
        """Deliver until the queue is empty; within a callback, leave that to the workers."""
        try:
            while len(self) and not self.in_callback:
                self.deliver_all()
        finally:
            self.deliver_in_background()

    def deliver_in_background(self) -> None:
        """Make sure that a worker delivers the results that are decided."""
        if self._urgent or self._ready:
            self.ensure_worker()

    def deliverable(self) -> int:
        """Return the number of futures that this thread may set now; under the lock."""
        return len(self._urgent) if self._is_urgent_only() else len(self)

    def _run_callbacks(self, count: int, only: Completion | None = None) -> int:
        """Set up to `count` futures, or that of `only`; return how many."""
        claimant, me = object(), self._runtime.thread_id()
        is_outermost = me not in self._callback_threads
        delivered = 0
        try:
            self._callback_threads.add(me)
            while delivered < count and (completion := self._claim(claimant, only)) is not None:
                _set_future(completion)
                delivered += 1
            return delivered
        finally:
            if is_outermost:
                self._callback_threads.discard(me)
            with self._changed:
                self._release(claimant)
                self._changed.notify_all()

    def _claim(self, claimant: object, only: Completion | None) -> Completion | None:
        """Claim the next result, or that of `only`."""
        with self._changed:
            self._release(claimant)
            is_urgent_only = only is None and self._is_urgent_only()
            for queue in (self._urgent,) if is_urgent_only else (self._urgent, self._ready):
                completion = next(iter(queue), None) if only is None else only
                if completion is not None and completion in queue:
                    self._claimed[claimant] = completion  # first: an interrupt must not lose it
                    del queue[completion]
                    return completion
        return None

    def _release(self, claimant: object) -> None:
        """Drop a claim, and its future; if that was not set, another thread will."""
        completion = self._claimed.get(claimant)
        if completion is not None and completion.future is not None:
            if completion.future.done():
                completion.future = None
            else:
                self._urgent[completion] = None
                self._urgent.move_to_end(completion, last=False)
        self._claimed.pop(claimant, None)

    # --- workers ------------------------------------------------------------------
    def ensure_worker(self, owner: object | None = None) -> None:
        """Make sure that a worker continues if no caller waits; workers keep `owner` alive."""
        with self._changed:
            if owner is not None and (self._worker_count or self._has_task()):
                self._owner = owner
            if self._worker_count - self._busy() >= self._workers_max or not self._has_task():
                self._changed.notify_all()
                return
            self._worker_count += 1
        try:
            self._runtime.spawn(self._run_worker, name=self._name)
        except BaseException:
            with self._changed:
                owner = self._leave(None)
            raise

    def _run_worker(self) -> None:
        me = self._runtime.thread_id()
        try:
            while (task := self._await_task(me)) is not None:
                task()
        except BaseException as error:
            with self._changed:
                owner = self._leave(me)
            self.ensure_worker(owner)  # a callback has ended this thread, by sys.exit() perhaps
            if not isinstance(error, Exception):  # otherwise the writer has ended with it
                raise

    def _await_task(self, me: object) -> Callable[[], None] | None:
        """Return a delivery or a piece of work; None if there was none for a while."""
        with self._changed:
            self._workers.add(me)
            while True:
                if self.deliverable():
                    return self.deliver_all
                task = self._work.next_work()
                if task is not None:
                    return task
                if not self._linger_s or (
                    not self._changed.wait(self._linger_s) and not self._has_task()
                ):
                    owner = self._leave(me)  # noqa: F841  # freed after the lock is
                    return None

    def _leave(self, me: object) -> object | None:
        """Note the end of a worker; the last one returns the owner, which may be freed now."""
        self._workers.discard(me)
        self._worker_count -= 1
        owner = None if self._worker_count else self._owner
        if not self._worker_count:
            self._owner = None
        return owner

    def _has_task(self) -> bool:
        """Whether there is something to do for one more worker."""
        if self._urgent or (self._ready and self._busy() < CALLBACK_WORKERS_MAX):
            return True
        return self._work.has_work()

    def _is_urgent_only(self) -> bool:
        """Whether this thread is a worker, and enough others run callbacks."""
        if self._busy() < CALLBACK_WORKERS_MAX:
            return False
        me = self._runtime.thread_id()
        return me in self._workers and me not in self._callback_threads

    def _busy(self) -> int:
        """Return the number of workers that run callbacks."""
        return len(self._workers & self._callback_threads)


def _set_future(completion: Completion) -> None:
    """Set a future, which runs its callbacks."""
    future, result = completion.future, completion.result
    if future is not None:
        if isinstance(result, ReefError):
            future.set_exception(result)
        else:
            future.set_result(result)  # type: ignore[arg-type]  # only decided ones are queued
