"""Notifications of new objects in a bucket, so that readers need not poll it.

A notifier receives events from the kernel, from a queue, or by requests of the service, and signals
the subscriptions to their prefixes. An event is only a hint to poll: lost, late, duplicated or
forged, it costs a poll, or the wait for the next one at the regular interval. Rows are always read
from the bucket.

    DirectoryNotifier   a directory on this machine (inotify)
    QueueNotifier       events of S3 through SQS
    PushNotifier        events that a service sends over HTTP, as Ceph does

    with QueueNotifier(queue_url, "s3://bucket/prefix", region="eu-west-1") as notifier:
        reader = db.reader("events", notify=notifier)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from reef.stores.notify.base import Notifier, Subscription

if TYPE_CHECKING:
    from reef.stores.notify.sources import (
        DirectoryNotifier,
        ListenerLimits,
        PushNotifier,
        QueueNotifier,
    )

__all__ = [
    "DirectoryNotifier",
    "ListenerLimits",
    "Notifier",
    "PushNotifier",
    "QueueNotifier",
    "Subscription",
]

HOMES = {
    "DirectoryNotifier": "reef.stores.notify.sources",
    "ListenerLimits": "reef.stores.notify.sources",
    "PushNotifier": "reef.stores.notify.sources",
    "QueueNotifier": "reef.stores.notify.sources",
}


def __getattr__(name: str) -> Any:
    """Import a notifier on its first use: most processes use none."""
    if name not in HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(HOMES[name]), name)
