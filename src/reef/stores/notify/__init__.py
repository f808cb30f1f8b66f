"""News of a bucket, so that readers need not wait for their next look.

A notifier hears of new objects, from the kernel, from a queue, or by a request of the service,
and rings the bells of those who asked for them. That is all: an event is a hint to look, never
the truth. Lost, late, doubled or forged, it costs a look or the wait for the next one, which
comes anyway; what a reader shows is what it has read from the bucket.

    DirectoryNotifier   a directory on this machine (inotify)
    QueueNotifier       events of S3 through SQS
    PushNotifier        events that a service sends over HTTP, as Ceph does

    with QueueNotifier(queue_url, "s3://bucket/prefix", region="eu-west-1") as news:
        reader = db.reader("events", notify=news)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from reef.stores.notify.base import Bell, Notifier

if TYPE_CHECKING:
    from reef.stores.notify.directory import DirectoryNotifier
    from reef.stores.notify.http_listener import ListenerLimits
    from reef.stores.notify.push import PushNotifier
    from reef.stores.notify.queue import QueueNotifier

__all__ = [
    "Bell",
    "DirectoryNotifier",
    "ListenerLimits",
    "Notifier",
    "PushNotifier",
    "QueueNotifier",
]

HOMES = {
    "DirectoryNotifier": "reef.stores.notify.directory",
    "ListenerLimits": "reef.stores.notify.http_listener",
    "PushNotifier": "reef.stores.notify.push",
    "QueueNotifier": "reef.stores.notify.queue",
}


def __getattr__(name: str) -> Any:
    """Load a kind of notifier when it is first asked for: most processes use none."""
    if name not in HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(HOMES[name]), name)
