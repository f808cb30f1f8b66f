"""Ceph's own bucket events, pushed over HTTP: a real gateway, a real listener."""

import os
import threading
import time

import reef
from reef.stores.notify import PushNotifier


def test_events_of_ceph_wake_readers(ceph):
    """A topic with a push endpoint: the event comes with the commit, the interval is long."""
    bucket = ceph.make_bucket(f"push-{os.getpid()}")
    url = f"s3://{bucket}/root"
    with PushNotifier(url) as news, ceph.client("sns") as sns, ceph.client() as s3:
        topic = sns.create_topic(Name=bucket, Attributes={"push-endpoint": news.endpoint})
        wanted = {"Id": "reef", "TopicArn": topic["TopicArn"], "Events": ["s3:ObjectCreated:*"]}
        s3.put_bucket_notification_configuration(
            Bucket=bucket, NotificationConfiguration={"TopicConfigurations": [wanted]}
        )
        try:
            _write_and_wait(reef.open(url, **ceph.options(), if_match="bare"))
            received = news.events_received
            _read_with(news, reef.open(url, **ceph.options(), if_match="bare"))
            assert news.events_received >= received + 3
        finally:
            sns.delete_topic(TopicArn=topic["TopicArn"])
    assert news._listener.join(60)


def _write_and_wait(db):
    with db.writer("users", background=False) as writer:
        writer.put("k", b"0")


def _read_with(news, db):
    with (
        db.reader("users", notify=news, refresh_interval_ms=600_000.0) as reader,
        db.writer("users", background=False) as writer,
    ):
        reader.refresh()
        for number in range(3):
            lsn, awake = reader.last_lsn + 1, []
            thread = threading.Thread(
                target=lambda lsn=lsn, awake=awake: awake.append(
                    (reader.wait_for(lsn, 250), time.monotonic())
                )
            )
            thread.start()
            time.sleep(0.1)
            began_s = time.monotonic()
            writer.put("k", b"%d" % number)
            thread.join()
            ((seen, awake_s),) = awake
            assert seen
            assert awake_s - began_s < 60, "a loaded machine; alone it is two requests"
        assert reader.get("k") == b"2"
