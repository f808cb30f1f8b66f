"""News of a bucket: readers wake at once, and lose nothing when events do."""

import gc
import http.client
import json
import os
import pickle
import shutil
import threading
import time
from contextlib import suppress
from itertools import count

import pytest

import reef
from reef import stores
from reef.errors import ClosedError, ErrorKind, InvalidInputError
from reef.runtime import REAL
from reef.stores.memory import MemoryStore
from reef.stores.notify import (
    DirectoryNotifier,
    Notifier,
    PushNotifier,
    QueueNotifier,
    Subscription,
)
from reef.stores.notify.base import parse_event
from reef.stores.wrappers import Wrapper
from reef.telemetry import RequestMeter
from reef.testing import Simulation
from tests.support.child_process import in_child

WAKE_S = 60.0
"""Far below the minutes that the readers of these tests would take without news."""
SLOW = {"refresh_interval_ms": 600_000.0}


class ByHand(Notifier):
    """Receives the events that a test sends."""

    def _listen(self):
        with self._turn:
            while not self._closed:
                self._turn.wait(1.0)

    def __init__(self, runtime=REAL):
        super().__init__(runtime)
        self._turn = runtime.condition()

    def _stop(self):
        with self._turn:
            self._turn.notify_all()


def written(db, name="users"):
    """Write one row, and return the receipt's LSN."""
    with db.writer(name, background=False) as writer:
        return writer.put("k", b"v").lsn


def woken_s(reader, lsn, write):
    """Return how long after `write` began a reader that waited for it was awake."""
    awake = []
    thread = threading.Thread(
        target=lambda: (reader.wait_for(lsn, 250), awake.append(time.monotonic()))
    )
    thread.start()
    time.sleep(0.05)
    began_s = time.monotonic()
    write()
    thread.join()
    assert reader.last_lsn >= lsn
    return awake[0] - began_s


# --- subscriptions -------------------------------------------------------------------------------
def test_a_bell_rings_for_its_prefixes_only():
    """And stays rung until its owner clears it."""
    with ByHand() as news:
        subscription = news.subscribe("a/wal/", "a/manifest/")
        news.notify(["a/segments/1", "b/wal/1", "a/wal"])
        assert not subscription.wait(0.0)
        news.notify(["a/manifest/7"])
        assert subscription.wait(0.0)
        assert subscription.is_signaled
        subscription.clear()
        assert not subscription.is_signaled
        assert news.events_received == 4


def test_a_ring_before_the_wait_is_not_lost():
    """An event between a poll and the wait ends the wait at once."""
    with ByHand() as news:
        subscription = news.subscribe("")
        subscription.clear()
        news.notify(["x"])
        began_s = time.monotonic()
        assert subscription.wait(2 * WAKE_S)
        assert time.monotonic() - began_s < WAKE_S


def test_a_bell_without_references_is_gone():
    """Readers need not close anything; a notifier does not grow with those it has seen."""
    with ByHand() as news:
        kept = news.subscribe("a")
        for _ in range(100):
            news.subscribe("b")
        gc.collect()
        assert list(news._subscriptions) == [kept]


def test_a_closed_notifier_wakes_who_waits_and_says_that_it_is_deaf():
    """Waiting for it would be in vain: readers poll from then on."""
    news = ByHand()
    subscription = news.subscribe("a")
    assert subscription.is_listening
    news.close()
    assert subscription.wait(0.0)
    assert not subscription.is_listening
    assert not news.subscribe("a").is_listening
    news.close()


def test_a_listener_that_dies_is_no_longer_relied_on():
    """Whatever ended it: subscriptions ring once, and are not waited for again."""

    class Dies(ByHand):
        def _listen(self):
            """End at once."""

    with Dies() as news:
        subscription = news.subscribe("a")
        assert subscription.wait(WAKE_S)
        assert not subscription.is_listening


def test_a_notifier_stays_in_its_process():
    """It cannot be pickled, and a reader that is pickled polls at intervals."""
    with ByHand() as news, pytest.raises(InvalidInputError) as caught:
        pickle.dumps(news)
    assert caught.value.kind is ErrorKind.NOT_PICKLABLE


# --- what events say ---------------------------------------------------------------------
RECORD = {"s3": {"bucket": {"name": "b"}, "object": {"key": "p/wal/1", "size": 3}}}


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"Records": [RECORD, RECORD]}, [("b", "p/wal/1"), ("b", "p/wal/1")]),
        (
            {"Type": "Notification", "Message": json.dumps({"Records": [RECORD]})},
            [("b", "p/wal/1")],
        ),
        ({"detail": {"bucket": {"name": "b"}, "object": {"key": "x"}}}, [("b", "x")]),
        ({"Service": "Amazon S3", "Event": "s3:TestEvent", "Bucket": "b"}, []),
        ({"Records": []}, []),
        ({"something": "else"}, None),
        ({"Records": [{"s3": {}}]}, None),
        ([1, 2], None),
        ("text", None),
    ],
)
def test_events_are_read_in_every_form(body, expected):
    """S3, SNS envelope, EventBridge; an unreadable message is distinguished from an empty one."""
    assert parse_event(json.dumps(body)) == expected
    assert parse_event(json.dumps(body).encode()) == expected


def test_encoded_names_are_given_both_ways():
    """Some services encode them and some do not; an event too many costs nothing."""
    body = {"Records": [{"s3": {"bucket": {"name": "b"}, "object": {"key": "a+b%3D1/wal"}}}]}
    assert parse_event(json.dumps(body)) == [("b", "a+b%3D1/wal"), ("b", "a b=1/wal")]
    assert parse_event(b"\xff not JSON") is None


# --- a directory -------------------------------------------------------------------------
def test_a_directory_wakes_its_readers(tmp_path):
    """wait_for returns when the commit is there, and the next read shows it: no interval passes."""
    db = reef.open(str(tmp_path))
    written(db)
    with (
        DirectoryNotifier(str(tmp_path)) as news,
        db.reader("users", notify=news, **SLOW) as reader,
        db.writer("users", background=False) as writer,
    ):
        reader.refresh()
        wanted = reader.last_lsn + 1
        assert woken_s(reader, wanted, lambda: writer.put("u", b"1")) < WAKE_S
        writer.put("u", b"2")
        assert reader._subscription.wait(WAKE_S)
        assert reader.get("u") == b"2"


def test_without_news_a_reader_goes_by_its_interval(tmp_path):
    """The control: the same read, without a notifier, shows the rows of a minute ago."""
    db = reef.open(str(tmp_path))
    written(db)
    with db.reader("users", **SLOW) as r, db.writer("users", background=False) as writer:
        writer.put("k", b"new")
        assert r.get("k") == b"v"


def test_a_waiting_reader_sends_no_requests_of_its_own(tmp_path):
    """Where news comes by itself, waiting is quiet: one poll, then one for each event."""
    meter = RequestMeter()
    db = reef.open(str(tmp_path), meter=meter)
    lsn = written(db)
    with DirectoryNotifier(str(tmp_path)) as news, db.reader("users", notify=news, **SLOW) as r:
        r.refresh()
        meter.reset()
        assert not r.wait_for(lsn + 1000, timeout_s=0.6)
        quiet = sum(meter.requests().values())
    assert quiet <= 4, "at the beginning and at the end"
    with db.reader("users", **SLOW) as r:
        r.refresh()
        meter.reset()
        waiting = threading.Thread(target=lambda: r.wait_for(lsn + 1, timeout_s=2 * WAKE_S))
        waiting.start()
        _until(lambda: sum(meter.requests().values()) > 2 * quiet)
        written(db)
        waiting.join()


def test_a_change_stream_follows_at_once(tmp_path):
    """changes(follow=True) waits for the subscription, too."""
    meter = RequestMeter()
    db = reef.open(str(tmp_path), meter=meter)
    lsn = written(db)
    seen = []
    with DirectoryNotifier(str(tmp_path)) as news, db.reader("users", notify=news, **SLOW) as r:
        stream = r.changes(after_lsn=lsn, follow=True, timeout_s=250)
        waits, wait = threading.Event(), stream._subscription.wait
        stream._subscription.wait = lambda timeout_s: waits.set() or wait(timeout_s)
        thread = threading.Thread(target=lambda: seen.append((next(stream), time.monotonic())))
        thread.start()
        assert waits.wait(WAKE_S)
        meter.reset()
        time.sleep(0.6)
        assert meter.requests() == {}, "it waits without a request"
        with db.writer("users", background=False) as writer:
            began_s = time.monotonic()
            writer.put("u", b"1")
        thread.join()
    ((change, seen_s),) = seen
    assert change.key == b"u"
    assert seen_s - began_s < WAKE_S


def test_folders_that_are_made_later_are_watched(tmp_path):
    """Nothing is there yet: each folder is waited for in the nearest one above it."""
    with DirectoryNotifier(str(tmp_path / "not" / "yet")) as news:
        subscription = news.subscribe("namespaces/a/wal/")
        (tmp_path / "not" / "yet" / "namespaces").mkdir(parents=True)
        assert subscription.wait(WAKE_S)
        store = stores.open(str(tmp_path / "not" / "yet"))
        for number in range(3):
            subscription.clear()
            store.create(f"namespaces/a/wal/{number}", b"x")
            assert subscription.wait(WAKE_S), number
        _until(lambda: any(key.endswith("a/wal") for key in list(news._folders.values())))


def test_a_folder_that_is_replaced_is_watched_again(tmp_path):
    """Restoring a directory does not require a restart of the readers."""
    store = stores.open(str(tmp_path))
    store.put("a/wal/1", b"")
    with DirectoryNotifier(str(tmp_path)) as news:
        subscription = news.subscribe("a/wal/")
        os.rename(tmp_path / "a", tmp_path / "old")
        assert subscription.wait(WAKE_S)
        time.sleep(0.1)
        subscription.clear()
        store.create("a/wal/2", b"")
        assert subscription.wait(WAKE_S)


def test_folders_that_come_and_go_leave_nothing(tmp_path):
    """A listener that lives for months does not grow with the events it has seen."""
    with DirectoryNotifier(str(tmp_path)) as news:
        subscription = news.subscribe("a/wal/")
        before = len(news._folders)
        for number in range(5):
            subscription.clear()
            (tmp_path / "a" / "wal").mkdir(parents=True)
            assert subscription.wait(WAKE_S), number
            _until(lambda: len(news._folders) == before + 2)
            shutil.rmtree(tmp_path / "a")
            _until(lambda: len(news._folders) == before)


def test_only_finished_objects_raise_events(tmp_path):
    """Temporary files are elsewhere: an event means that a whole object has its name."""
    store = stores.open(str(tmp_path))
    store.put("wal/0", b"")
    with DirectoryNotifier(str(tmp_path)) as news:
        subscription = news.subscribe("wal/")
        for number in range(20):
            subscription.clear()
            store.create(f"wal/{number + 1}", b"x" * 10_000)
            assert subscription.wait(WAKE_S)
        assert news.events_received == 20


def test_threads_and_files_are_given_back(tmp_path):
    """A closed notifier leaves no thread and no descriptor."""
    gc.collect()  # notifiers of earlier tests
    before = _watching()
    for _ in range(5):
        news = DirectoryNotifier(str(tmp_path))
        news.subscribe("a")
        news.close()
        assert news._listener.join(WAKE_S)
        DirectoryNotifier(str(tmp_path)).close()
    assert set(_watching()) <= set(before)


def _watching():
    """Return the descriptors of the kinds that a notifier uses are open in this process."""
    links = []
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the listing's own, or one that another thread has closed
            links.append(f"{number} {os.readlink(f'/proc/self/fd/{number}')}")
    return sorted(link for link in links if "inotify" in link or "eventfd" in link)


def test_a_reader_after_a_fork_polls(tmp_path):
    """H51: the subscription rings in the parent; the child reopens and polls at its interval."""
    db = reef.open(str(tmp_path))
    written(db)
    with DirectoryNotifier(str(tmp_path)) as news, db.reader("users", notify=news) as r:
        pid = os.fork()
        if pid == 0:
            ok = r.get("k") == b"v" and r._subscription is None and not news.is_listening
            os._exit(0 if ok else 1)
        assert os.waitpid(pid, 0)[1] == 0


@pytest.mark.parametrize("kind", ["directory", "push"])
def test_a_child_that_closes_leaves_the_parents_listener_alone(tmp_path, kind):
    """H51: a fork inside of a `with` leaves it twice; the child's end has no effect."""
    opened = {
        "directory": lambda: DirectoryNotifier(str(tmp_path)),
        "push": lambda: PushNotifier("s3://bucket/root"),
    }
    with opened[kind]() as news:
        subscription = news.subscribe("wal/")
        assert in_child(lambda: news.close() or news.is_listening) == (0, "False")
        before_s = _cpu_s("notify")
        time.sleep(0.5)
        assert _cpu_s("notify") - before_s < 0.05, "its listener runs in circles"
        assert subscription.is_listening
        assert not subscription.is_signaled
        if kind == "directory":
            stores.open(str(tmp_path)).put("wal/1", b"")
        else:
            assert _post(news.endpoint, _event("bucket", "root/wal/1")) == 200
        assert subscription.wait(WAKE_S)


def _cpu_s(name):
    """Return the CPU time of the threads of a name: others of this process do not count."""
    idents = [thread.ident for thread in threading.enumerate() if thread.name == name]
    assert idents
    return sum(time.clock_gettime(time.pthread_getcpuclockid(ident)) for ident in idents)


def test_a_directory_is_named_as_its_store_is(tmp_path, monkeypatch):
    """A path from the home directory, or the store's own URL; any other path is refused."""
    monkeypatch.setenv("HOME", str(tmp_path))
    store = stores.open("~/with space")
    for number, name in enumerate(["~/with space", store.url, tmp_path / "with space"]):
        with DirectoryNotifier(name) as news:
            subscription = news.subscribe("wal/")
            store.put(f"wal/{number}", b"")
            assert subscription.wait(WAKE_S), name
    with pytest.raises(InvalidInputError, match="is not a directory"):
        DirectoryNotifier("s3://bucket/prefix")


# --- push --------------------------------------------------------------------------------
def _post(endpoint, body, method="POST", path=None):
    host, _, rest = endpoint.removeprefix("http://").partition("/")
    connection = http.client.HTTPConnection(host, timeout=WAKE_S)
    try:
        connection.request(method, f"/{rest}" if path is None else path, body)
        with connection.getresponse() as response:
            return response.status
    finally:
        connection.close()


def _event(bucket, key):
    """Give the body that Ceph's documentation shows."""
    record = {
        "eventVersion": "2.1",
        "eventSource": "ceph:s3",
        "eventName": "ObjectCreated:Put",
        "s3": {
            "s3SchemaVersion": "1.0",
            "configurationId": "reef",
            "bucket": {"name": bucket, "id": "b"},
            "object": {"key": key, "size": "1024", "eTag": "e", "versionId": "", "sequencer": "F"},
        },
        "eventId": "",
    }
    return json.dumps({"Records": [record]}).encode()


def test_a_pushed_event_rings():
    """Bucket and prefix are the store's own; events of others wake no reader."""
    with PushNotifier("s3://bucket/root") as news:
        subscription = news.subscribe("namespaces/a/wal/")
        assert _post(news.endpoint, _event("bucket", "root/namespaces/a/segments/1")) == 200
        assert _post(news.endpoint, _event("other", "root/namespaces/a/wal/1")) == 200
        assert _post(news.endpoint, _event("bucket", "namespaces/a/wal/1")) == 200
        assert not subscription.wait(0.2)
        assert _post(news.endpoint, _event("bucket", "root/namespaces/a/wal/1")) == 200
        assert subscription.wait(WAKE_S)


def test_pushes_by_strangers():
    """Without the secret path nothing rings; what cannot be read rings for all; size is bounded."""
    with PushNotifier("s3://bucket/root") as news:
        subscription = news.subscribe("x/")
        assert _post(news.endpoint, b"{}", path="/guess") == 404
        assert _post(news.endpoint, b"", method="GET") == 501
        assert not subscription.wait(0.2)
        assert _post(news.endpoint, b"not an event") == 200
        assert subscription.wait(WAKE_S)
        for size in ((1 << 20) + 1, 8 << 20):  # more than socket buffers hold
            assert _post(news.endpoint, b"x" * size) == 413
            assert _post(news.endpoint, b"x" * size, path="/guess") == 404
            assert _post(news.endpoint, b"x" * size, method="PUT") == 501
            assert _post(news.endpoint, iter([b"x" * size])) == 413, "of an unknown length"
    news._listener.join(WAKE_S)
    with pytest.raises(ConnectionError):
        _post(news.endpoint, b"{}")


def test_a_port_in_use_raises():
    """At once, with the address."""
    with PushNotifier("s3://bucket/root") as news:
        port = int(news.endpoint.split(":")[2].split("/")[0])
        with pytest.raises(InvalidInputError, match=f"127.0.0.1:{port}"):
            PushNotifier("s3://bucket/root", port=port)


@pytest.mark.parametrize("url", ["./data", "file:///data", "memory://x", "s3://", 7])
def test_events_of_a_bucket_need_its_url(url):
    """A directory has no bucket events."""
    with pytest.raises(InvalidInputError) as caught:
        PushNotifier(url)
    assert caught.value.kind is ErrorKind.INVALID_URL


# --- lost, late, doubled -----------------------------------------------------------------
class Unreliable(Notifier):
    """Passes the events of a store on as chance wants it: lost, late, doubled, out of order."""

    def __init__(self, runtime, seed_share=0.5):
        super().__init__(runtime)
        self.lost = self.late = self.doubled = 0
        self._turn = runtime.condition()
        self._share = seed_share

    def deliver(self, key):
        chance = self.runtime.uniform(0.0, 1.0)
        if chance < 0.4 * self._share:
            self.lost += 1
        elif chance < self._share:
            self.late += 1
            delay_s = self.runtime.uniform(0.0, 30.0)
            self.runtime.spawn(
                lambda: (self.runtime.sleep(delay_s), self.notify([key])), name="late"
            )
        else:
            self.notify([key])
            if chance > 1.0 - 0.2 * self._share:
                self.doubled += 1
                self.notify([key])

    def _listen(self):
        with self._turn:
            while not self._closed:
                self._turn.wait(60.0)

    def _stop(self):
        with self._turn:
            self._turn.notify_all()


class Notifying(Wrapper):
    """A store that notifies a notifier of each object created through it."""

    def __init__(self, inner, news):
        super().__init__(inner)
        self.news = news

    def create(self, key, body):
        result = self.inner.create(key, body)
        if result.landed:
            self.news.deliver(key)
        return result


class Distant(Wrapper):
    """A store whose responses, "not found" included, take 20 ms on their way back."""

    def get_tagged(self, key):
        try:
            return self.inner.get_tagged(key)
        finally:
            self.runtime.sleep(0.02)

    def create(self, key, body):
        result = self.inner.create(key, body)
        self.runtime.sleep(0.02)
        return result


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("share", [0.0, 0.6, 1.0])
def test_nothing_is_lost_when_events_are_lost_late_or_doubled(seed, share):
    """On virtual time: every commit is seen, no later than polling would show it.

    With a share of 1.0 no event comes in time, and two in five do not come at all.
    """
    sim = Simulation(seed, switch_at=frozenset())
    node = sim.process("node")
    runtime = node.runtime
    news = Unreliable(runtime, share)
    bucket = Distant(MemoryStore(runtime=runtime))
    db = reef.Database(bucket)
    delays, rows = [], {}

    def write():
        with reef.Database(Notifying(bucket, news)).writer("users", background=False) as writer:
            runtime.sleep(1.0)
            for number in range(40):
                runtime.sleep(runtime.uniform(0.0, 0.1 if number % 2 else 3.0))
                rows[b"%04d" % number] = b"v%d" % number
                receipt = writer.put(b"%04d" % number, b"v%d" % number)
                landed[receipt.lsn] = runtime.monotonic_s()

    def read():
        while "users" not in db.namespaces():
            runtime.sleep(0.1)
        with db.reader("users", notify=news, refresh_interval_ms=2000.0) as reader:
            known = reader.last_lsn
            while len(delays) < 40:
                if reader.wait_for(known + 1, timeout_s=30.0):
                    new = range(known + 1, reader.last_lsn + 1)
                    now_s, known = runtime.monotonic_s(), reader.last_lsn
                    delays.extend(now_s - landed.get(lsn, now_s) for lsn in new)
            seen.update(dict(reader.scan()))
        news.close()

    landed, seen = {}, {}
    node.spawn(write, name="writer")
    node.spawn(read, name="reader")
    sim.run()
    sim.close()
    assert seen == rows
    assert max(delays) <= 2.5, "the interval is the bound, whatever becomes of the events"
    if share == 0.0:
        assert max(delays) < 0.5, "a poll that was under way, and the next one"
    else:
        assert min(news.lost, news.late) > 0


def test_reads_between_events_are_as_fresh_as_the_last_one(tmp_path):
    """A read polls when a subscription has rung since; between events it costs no request."""
    meter = RequestMeter()
    db = reef.open(str(tmp_path), meter=meter)
    written(db)
    with ByHand() as news, db.reader("users", notify=news, **SLOW) as r:
        r.get("k")
        meter.reset()
        for _ in range(50):
            assert r.get("k") == b"v"
        assert meter.requests() == {}
        with db.writer("users", background=False) as writer:
            lsn = writer.put("k", b"new").lsn
        assert r.get("k") == b"v", "no event was sent"
        for _ in range(3):  # doubled
            news.notify([f"namespaces/users/wal/{lsn:020}.wal"])
        assert r.get("k") == b"new"


def test_a_deaf_notifier_leaves_the_reader_as_it_was(tmp_path):
    """It polls as often as one without: events are no condition for anything."""
    db = reef.open(str(tmp_path))
    written(db)
    news = ByHand()
    with db.reader("users", notify=news, **SLOW) as r, db.writer("users", background=False) as w:
        r.refresh()
        news.close()
        assert woken_s(r, r.last_lsn + 1, lambda: w.put("k", b"2")) < WAKE_S


# --- queues ------------------------------------------------------------------------------
_queues = count()


@pytest.mark.parametrize("name", ["ministack", pytest.param("moto", marks=pytest.mark.slow)])
def test_events_of_s3_through_a_queue_wake_readers(servers, name):
    """A real bucket with a notification, a real queue: readers wake long before their interval."""
    server = servers.use(name)
    bucket = server.make_bucket(f"notify-{os.getpid()}-{next(_queues)}")
    with server.client("sqs") as sqs, server.client() as s3:
        queue = sqs.create_queue(QueueName=f"q-{bucket}")["QueueUrl"]
        asked = sqs.get_queue_attributes(QueueUrl=queue, AttributeNames=["QueueArn"])
        wanted = {"QueueArn": asked["Attributes"]["QueueArn"], "Events": ["s3:ObjectCreated:*"]}
        s3.put_bucket_notification_configuration(
            Bucket=bucket, NotificationConfiguration={"QueueConfigurations": [wanted]}
        )
    url, options = f"s3://{bucket}/root", server.options()
    db = reef.open(url, **options)
    written(db)
    with QueueNotifier(queue, url, wait_s=1, **options) as news:
        with (
            db.reader("users", notify=news, **SLOW) as reader,
            db.writer("users", background=False) as writer,
        ):
            reader.refresh()
            for number in range(3):
                took_s = woken_s(
                    reader, reader.last_lsn + 1, lambda n=number: writer.put(f"u{n}", b"1")
                )
                assert took_s < WAKE_S, "on a loaded machine; alone it is milliseconds"
        assert news.events_received >= 3
    assert news._listener.join(WAKE_S)


def test_a_queue_that_cannot_be_read_is_reported_and_not_relied_on(ministack):
    """The failure says why; readers poll meanwhile; then every subscription rings."""
    with ministack.client("sqs") as sqs:
        queue = sqs.create_queue(QueueName=f"gone-{os.getpid()}")["QueueUrl"]
        sqs.delete_queue(QueueUrl=queue)
        with QueueNotifier(queue, "s3://b/p", wait_s=1, **ministack.options()) as news:
            subscription = news.subscribe("x")
            _until(lambda: news.failure is not None)
            assert not subscription.is_listening
            sqs.create_queue(QueueName=f"gone-{os.getpid()}")
            assert subscription.wait(WAKE_S), "it may have missed something"
            assert subscription.is_listening
    assert news._listener.join(WAKE_S)


def _until(check, timeout_s=WAKE_S):
    end_s = time.monotonic() + timeout_s
    while not check():
        assert time.monotonic() < end_s
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"wait_s": 0, "region": "here"}, "wait_s=0"),
        ({"wait_s": 21, "region": "here"}, "wait_s=21"),
        ({}, "region"),
        ({"region": "here", "access_key_id": "half"}, "credentials"),
    ],
)
def test_a_queue_that_cannot_be_reached_raises_at_once(tmp_path, monkeypatch, options, message):
    """Without a wait it would be asked all the time; what boto misses is named."""
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    with pytest.raises(InvalidInputError, match=message) as caught:
        QueueNotifier("https://queue", "s3://b/p", **options)
    assert caught.value.kind is ErrorKind.INVALID_OPTION


def test_messages_are_deleted_once_read(ministack):
    """An event is of no use later; the queue does not grow."""
    with ministack.client("sqs") as sqs:
        queue = sqs.create_queue(QueueName=f"read-{os.getpid()}")["QueueUrl"]
        with QueueNotifier(queue, "s3://b/p", wait_s=1, **ministack.options()) as news:
            subscription = news.subscribe("wal/")
            sqs.send_message(QueueUrl=queue, MessageBody=_event("b", "p/wal/1").decode())
            assert subscription.wait(WAKE_S)
        assert news._listener.join(WAKE_S)
        names = ["ApproximateNumberOfMessages", "ApproximateNumberOfMessagesNotVisible"]
        left = sqs.get_queue_attributes(QueueUrl=queue, AttributeNames=names)["Attributes"]
    assert {int(number) for number in left.values()} == {0}


def test_bells_are_part_of_the_face():
    """The parts of a custom notifier."""
    assert issubclass(DirectoryNotifier, Notifier)
    assert Subscription.__doc__


def test_closing_a_reader_wakes_who_waits_in_it(tmp_path):
    """Another thread's wait_for ends with ClosedError at once, not after the interval."""
    db = reef.open(str(tmp_path))
    written(db)
    ended = []
    with ByHand() as news:
        reader = db.reader("users", notify=news, **SLOW)

        def wait():
            with pytest.raises(ClosedError):
                reader.wait_for(10_000, timeout_s=250)
            ended.append(True)

        thread = threading.Thread(target=wait)
        thread.start()
        time.sleep(0.2)
        reader.close()
        thread.join(WAKE_S)
    assert ended == [True]
