"""The disk cache: never wrong, never in the way, never larger than allowed."""

import errno
import fcntl
import os
import pickle
import signal
import socket
import stat
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

import reef
from reef import stores
from reef.errors import InvalidInputError, NotFoundError
from reef.files import OS
from reef.jobs import fold
from reef.runtime import REAL
from reef.stores import DiskCache, Meter
from reef.stores.local import LocalStore
from reef.stores.memory import MemoryStore
from reef.stores.wrappers.base import Wrapper
from reef.stores.wrappers.disk_cache import FAILURES_MAX, PAUSE_S, QUEUED_BYTES_MAX, is_segment
from reef.telemetry import Metrics, RequestMeter
from reef.testing import Recorder
from tests.support.child_process import in_child
from tests.support.faulty_files import FaultyFiles, FixedStat

KIB = 1024
KEY = "namespaces/users/segments/01J00000000000000000000000.seg"
BODY = bytes(number % 251 for number in range(1 << 20))
UNPRIVILEGED_UID = 65534


class Cached:
    """A cache on a directory, over a store that counts, with what there is to see of both."""

    def __init__(self, path, bucket=None, bytes_max=8 << 20, **options):
        self.path = Path(path)
        self.bucket = bucket or MemoryStore()
        if bucket is None:
            self.bucket.put(KEY, BODY)
        self.recorder = Recorder(self.bucket)
        self.meter = RequestMeter()
        self.metrics = Metrics()
        self.store = DiskCache(
            Meter(self.recorder, self.meter), str(path), bytes_max, metrics=self.metrics, **options
        )

    def read(self, start, end):
        """Read a range, see that it is right, and return how many requests it took."""
        before = self.meter.requests().get("get", 0)
        assert self.store.get_range(KEY, start, end) == BODY[start:end]
        return self.meter.requests().get("get", 0) - before

    def count(self, name):
        return self.metrics.to_dict()[f"disk_cache.{name}"]["value"]

    @property
    def files(self):
        return sorted(self.path.glob("*/*.range"))

    @contextmanager
    def locked(self):
        """Hold the writers' lock, as another process would."""
        with open(self.path / "usage", "r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


@pytest.fixture
def cached(tmp_path):
    """Return a cache of 8 MiB over a bucket with one segment."""
    return Cached(tmp_path / "cache")


def on_disk(path):
    """Return the bytes of all files below a path, in whole blocks."""
    total = 0
    for folder, _, names in os.walk(path):
        for name in names:
            try:
                size = os.stat(os.path.join(folder, name)).st_size
            except FileNotFoundError:
                continue
            if name != "usage":
                total += -(-size // 4096) * 4096
    return total


# --- hits and misses ----------------------------------------------------------------


def test_a_range_is_fetched_once(cached):
    """The second read is a hit: same bytes, no request."""
    assert cached.read(100, 5_000) == 1
    assert cached.read(100, 5_000) == 0
    assert cached.read(100, 5_001) == 1
    assert (cached.count("hits"), cached.count("misses")) == (1, 2)
    assert cached.count("bytes") == on_disk(cached.path) == 4 * 4096


def test_only_missing_ranges_are_fetched_in_one_call(cached):
    """Of several ranges, hits come from disk; the rest shares requests as ever."""
    near = [(0, 10), (10, 20), (20, 30), (500_000, 500_010)]
    cached.store.get_ranges(KEY, [near[1], near[3]])
    cached.meter.reset()
    cached.recorder.calls.clear()
    asked = [near[3], near[2], near[1], near[0], near[2]]
    assert cached.store.get_ranges(KEY, asked) == [BODY[slice(*span)] for span in asked]
    assert cached.meter.requests() == {"get": 1}  # (0, 10) and (20, 30) are close together
    assert cached.store.get_ranges(KEY, asked) == [BODY[slice(*span)] for span in asked]
    assert cached.meter.requests() == {"get": 1}
    assert cached.store.get_ranges(KEY, []) == []


def test_a_restart_finds_everything(cached):
    """Another cache on the same directory, here or in another process, begins warm."""
    cached.read(0, 1000)
    assert Cached(cached.path, cached.bucket).read(0, 1000) == 0
    assert in_child(lambda: Cached(cached.path, cached.bucket).read(0, 1000)) == (0, "0")


def test_a_copy_shares_the_directory(tmp_path):
    """Pickling sends the place and the bound, not the entries."""
    bucket = LocalStore(str(tmp_path / "bucket"))
    bucket.put(KEY, BODY)
    first = DiskCache(bucket, str(tmp_path / "cache"), 1 << 20)
    first.get_range(KEY, 0, 1000)
    copy = pickle.loads(pickle.dumps(first))
    bucket.delete(KEY)
    assert copy.get_range(KEY, 0, 1000) == BODY[:1000]
    assert copy._directory.bytes_max == 1 << 20


def test_a_relative_path_is_where_it_was(tmp_path, monkeypatch):
    """Changing the working directory does not move the cache."""
    monkeypatch.chdir(tmp_path)
    cached = Cached("cache")
    monkeypatch.chdir("/")
    cached.read(0, 10)
    assert (tmp_path / "cache" / "usage").exists()


def test_buckets_do_not_mix(tmp_path):
    """The same key and range of another URL is another entry."""
    left, right = MemoryStore("memory://left"), MemoryStore("memory://right")
    left.put(KEY, b"left")
    right.put(KEY, b"rite")
    for _ in range(2):
        for bucket, body in ((left, b"left"), (right, b"rite")):
            assert DiskCache(bucket, str(tmp_path)).get_range(KEY, 0, 4) == body
    assert len(list(tmp_path.glob("*/*.range"))) == 2


def test_the_directory_is_for_its_owner(cached):
    """Cached bytes are not readable by other users of the machine."""
    cached.read(0, 10)
    assert stat.S_IMODE(cached.path.stat().st_mode) == 0o700


def test_a_bad_range_is_refused_as_ever(cached):
    """Empty, negative, and past the end: the same errors, and nothing is kept."""
    cached.read(0, 10)
    for span in ((5, 5), (-1, 4), (0, len(BODY) + 1), (0, 1 << 80)):
        with pytest.raises(InvalidInputError):
            cached.store.get_range(KEY, *span)
        with pytest.raises(InvalidInputError):
            cached.store.get_ranges(KEY, [(0, 10), span])
    assert len(cached.files) == 1


def test_a_database_reads_its_segments_from_disk(tmp_path):
    """A new process with a warm disk reads a folded row without any request."""
    cache = str(tmp_path / "cache")
    db = reef.open(str(tmp_path / "data"), disk_cache=cache)
    with db.writer("users") as users:
        for number in range(100):
            users.put(f"u{number}", b"x" * 1000)
        fold(db, "users")
    for expected in (2, 0):
        meter = RequestMeter()
        db = reef.open(str(tmp_path / "data"), disk_cache=cache, meter=meter)
        with db.reader("users") as reader:
            meter.reset()
            assert reader.get("u7") == b"x" * 1000
        assert meter.requests().get("get", 0) == expected


# --- objects that are never cached (H9) -----------------------------------------------


@pytest.mark.parametrize(
    "key",
    [
        "namespaces/users/wal/00000000000000000001.wal",
        "namespaces/users/manifest/00000000000000000001.manifest.json",
        "namespaces/users/leases/01J00000000000000000000000.json",
        "namespaces/users/quarantine/segments-01J.seg",
        "namespaces/segments/wal/1.seg",
        "namespaces/users/segments/notes.txt",
        "namespaces/users/segments/deeper/x.seg",
        "store/cas.json",
        "x.seg",
    ],
)
def test_H9_control_objects_are_never_served_from_disk(cached, key):
    """H9: mutable objects come from the bucket, in whole and in part."""
    assert not is_segment(key)
    for body in (b"older", b"newer"):
        cached.bucket.put(key, body)
        assert cached.store.get_range(key, 0, 5) == body
        assert cached.store.get_ranges(key, [(0, 2), (3, 5)]) == [body[:2], body[3:]]
        assert cached.store.get(key) == body
    assert not cached.path.exists()


def test_H9_not_found_is_never_kept(cached):
    """H9: a segment that was missing before is found now."""
    key = KEY.replace("01J", "02K")
    for read in (
        lambda: cached.store.get_range(key, 0, 5),
        lambda: cached.store.get_ranges(key, [(0, 5)])[0],
    ):
        with pytest.raises(NotFoundError):
            read()
    cached.bucket.put(key, b"there")
    assert cached.store.get_range(key, 0, 5) == b"there"


def test_whole_objects_and_listings_are_not_kept(cached):
    """A sweep or a check of a segment asks the bucket."""
    cached.read(0, 10)
    cached.store.delete(KEY)
    with pytest.raises(NotFoundError):
        cached.store.get(KEY)
    with pytest.raises(NotFoundError):
        cached.store.head(KEY)
    assert list(cached.store.list()) == []


def test_H8_a_short_response_is_not_cached(tmp_path):
    """H8: what came in part would be wrong for ever."""

    class Short(Wrapper):
        def get_range(self, key, start, end):
            return self.inner.get_range(key, start, end)[:-1]

    bucket = MemoryStore()
    bucket.put(KEY, BODY)
    DiskCache(Short(bucket), str(tmp_path)).get_range(KEY, 0, 100)
    assert list(tmp_path.iterdir()) == []
    assert DiskCache(bucket, str(tmp_path)).get_range(KEY, 0, 100) == BODY[:100]


# --- damage -----------------------------------------------------------------------------


def entry_of(cached, start, end):
    """Keep a range and return its file."""
    before = cached.files
    cached.read(start, end)
    return next(file for file in cached.files if file not in before)


def assert_dropped(cached, span, file, good):
    """The damage is counted, the bucket read, and the entry rewritten."""
    damaged = cached.count("damaged")
    assert cached.read(*span) == 1
    assert cached.count("damaged") == damaged + 1
    assert file.read_bytes() == good
    assert cached.read(*span) == 0


def test_every_flipped_byte_is_seen(cached):
    """Header, identity, checksum or payload: there is no byte that may change."""
    file = entry_of(cached, 0, 40)
    good = file.read_bytes()
    for place in range(len(good)):
        for flip in (0x01, 0x80):
            file.write_bytes(good[:place] + bytes([good[place] ^ flip]) + good[place + 1 :])
            assert_dropped(cached, (0, 40), file, good)


def test_every_truncation_is_seen(cached):
    """A torn file, an empty one, one that is too long, one of zeros."""
    file = entry_of(cached, 0, 40)
    good = file.read_bytes()
    for bad in [*(good[:size] for size in range(len(good))), good + b"\0", bytes(len(good))]:
        file.write_bytes(bad)
        assert_dropped(cached, (0, 40), file, good)


@pytest.mark.parametrize("other", [(40, 80), (0, 41), (1, 41)])
def test_a_file_under_the_wrong_name_is_seen(cached, other):
    """A valid entry of another range is not used."""
    file = entry_of(cached, 0, 40)
    good = file.read_bytes()
    os.replace(entry_of(cached, *other), file)
    assert_dropped(cached, (0, 40), file, good)


def test_bytes_that_decode_badly_can_be_forgotten(cached):
    """A checksum cannot know that the bytes were wrong when they came."""
    cached.bucket.put(KEY, BODY[::-1])
    cached.store.get_ranges(KEY, [(0, 10), (10, 20)])
    cached.bucket.put(KEY, BODY)
    cached.store.forget(KEY, [(0, 10), (10, 20), (70, 80), (0, 1 << 80)])
    assert cached.read(0, 10) == 1


# --- disks that fail ----------------------------------------------------------------------


class Failing(FaultyFiles):
    """Files that fail in the calls that are named, with the error that is given."""

    def __init__(self, *calls, error=errno.ENOSPC, after=0):
        super().__init__(before=self._fail, before_query=self._fail)
        self.failing = set(calls)
        self.error = error
        self.left = after

    def _fail(self, call, name):
        if call in self.failing:
            self.left -= 1
            if self.left < 0:
                raise OSError(self.error, os.strerror(self.error))


CALLS = ["create", "open", "append", "write", "read", "set_mtime", "stat of file", "stat"]
CALLS += ["rename", "unlink", "make_directory"]


@pytest.mark.parametrize("call", CALLS)
def test_no_error_of_the_disk_reaches_a_reader(tmp_path, call):
    """Whichever call fails, warm or cold, the bytes come, and the error is counted."""
    cached = Cached(tmp_path / "cache")
    cached.read(0, 10)
    broken = Cached(cached.path, cached.bucket, files=Failing(call, error=errno.EIO))
    for _ in range(3):
        for start in range(0, 300, 10):
            broken.read(start, start + 10)
    assert broken.count("errors") > 0
    assert Cached(cached.path, cached.bucket).read(0, 10) == 0


@pytest.mark.parametrize("after", [0, 1])
def test_a_full_disk_leaves_nothing_behind(tmp_path, after):
    """ENOSPC at the first byte or in the middle: no file, and no usage that was not used."""
    cached = Cached(tmp_path / "cache")
    cached.read(0, 10)
    usage = (cached.path / "usage").read_bytes()
    full = Cached(cached.path, cached.bucket, files=Failing("append", after=after))
    full.read(10, 5000)
    assert full.count("errors") == 1
    assert [file.name for file in cached.path.iterdir() if file.is_file()] == ["usage"]
    assert len(cached.files) == 1
    assert (cached.path / "usage").read_bytes() == usage


def test_after_repeated_failures_writing_rests(tmp_path):
    """Three in a row, then silence for a minute, then one more try; a success ends it."""

    class Clock(type(REAL)):
        boot_s = 0.0

        def boottime_s(self):
            return self.boot_s

    clock = Clock()
    bucket = MemoryStore(runtime=clock)
    bucket.put(KEY, BODY)
    files = Failing("create")
    cached = Cached(tmp_path / "cache", bucket, files=files)
    for start in range(10):
        cached.read(start, 100)
    assert cached.count("errors") == FAILURES_MAX
    assert cached.count("skipped") == 10 - FAILURES_MAX
    clock.boot_s += PAUSE_S
    cached.read(20, 100)
    cached.read(21, 100)
    assert cached.count("errors") == FAILURES_MAX + 1
    clock.boot_s += PAUSE_S
    files.failing.clear()
    for start in range(30, 33):
        assert [cached.read(start, 100) for _ in range(2)] == [1, 0]
    assert cached.count("errors") == FAILURES_MAX + 1


def test_failures_between_successes_do_not_add_up(tmp_path):
    """Only failures in a row make writing rest."""
    files = Failing("create")
    cached = Cached(tmp_path / "cache", files=files)
    for start in range(4 * FAILURES_MAX):
        files.failing = {"create"} if start % 2 else set()
        cached.read(start, 100)
    assert cached.count("errors") == 2 * FAILURES_MAX
    assert cached.count("skipped") == 0


def test_a_hit_that_cannot_be_marked_is_a_hit(cached):
    """Another user's file: its place in the order of use is all that is lost."""
    os.utime(entry_of(cached, 0, 10), (1000, 1000))
    other = Cached(cached.path, cached.bucket, files=Failing("set_mtime", error=errno.EPERM))
    assert other.read(0, 10) == 0


def test_a_read_only_directory_still_serves(tmp_path_factory):
    """Hits are hits, damage is read past, and the rest comes from the bucket."""

    def read(path, bucket):
        if os.geteuid() == 0:
            os.setresuid(UNPRIVILEGED_UID, UNPRIVILEGED_UID, UNPRIVILEGED_UID)
        cached = Cached(path, bucket)
        costs = [cached.read(0, 10), cached.read(10, 20), cached.read(20, 30), cached.read(20, 30)]
        return costs, cached.count("damaged"), cached.count("errors") > 0

    path = tmp_path_factory.mktemp("read-only")
    base = Path(tempfile.gettempdir())
    for folder in (path, *(above for above in path.parents if base in above.parents)):
        folder.chmod(0o755)  # pytest's own are closed to others
    cached = Cached(path)
    cached.read(0, 10)
    entry_of(cached, 10, 20).write_bytes(b"damage")
    for file in (*path.glob("**/*"), path):
        file.chmod(0o555)
    try:
        assert in_child(lambda: read(path, cached.bucket)) == (0, "([0, 1, 1, 1], 1, True)")
    finally:
        for file in (path, *path.glob("**/*")):
            file.chmod(0o755)


def test_a_directory_deleted_underneath_is_made_again(cached):
    """Someone cleans up: the next reads ask the bucket, and are kept."""
    import shutil

    cached.read(0, 10)
    shutil.rmtree(cached.path)
    assert [cached.read(0, 10), cached.read(0, 10)] == [1, 0]
    assert cached.count("errors") == 0


@pytest.mark.parametrize("below", ["", "deeper"])
def test_a_path_that_cannot_be_a_directory(tmp_path, below):
    """A file in its place: everything is read through."""
    (tmp_path / "file").write_text("mine")
    cached = Cached(tmp_path / "file" / below)
    assert [cached.read(0, 10), cached.read(0, 10)] == [1, 1]
    assert cached.count("errors") > 0
    assert (tmp_path / "file").read_text() == "mine"


# --- the bound ------------------------------------------------------------------------------


def test_the_bound_holds_after_every_write(tmp_path):
    """Ranges of many sizes, far more than fit: never more on disk than allowed."""
    cached = Cached(tmp_path / "cache", bytes_max=256 * KIB)
    fullest = 0
    for number in range(150):
        start = number * 3000
        cached.read(start, start + 1 + number * 7919 % 27_000)
        used = on_disk(cached.path)
        assert cached.count("bytes") == used <= 256 * KIB
        fullest = max(fullest, used)
    assert fullest > 220 * KIB
    assert cached.count("evicted") > 50
    assert cached.count("skipped") == 0


def test_the_least_recently_used_entry_is_evicted_first(tmp_path):
    """Reading an entry again saves it; writing it long ago does not condemn it."""
    cached = Cached(tmp_path / "cache", bytes_max=160 * KIB)
    spans = [(number, number + 15 * KIB) for number in range(10)]  # 16 KiB each on disk
    for age, span in enumerate(spans):
        os.utime(entry_of(cached, *span), (1000 + age, 1000 + age))
    assert cached.read(*spans[0]) == 0
    cached.read(20 * KIB, 35 * KIB)
    assert cached.count("evicted") == 1
    kept = [cached.read(*span) == 0 for span in (spans[0], *spans[2:])]
    assert all(kept)
    assert cached.read(*spans[1]) == 1


def test_a_read_marks_an_entry_once_a_second_at_most(cached):
    """A hot entry does not cost a change of its inode at every read."""
    file = entry_of(cached, 0, 10)
    written_ns = file.stat().st_mtime_ns
    cached.read(0, 10)
    assert file.stat().st_mtime_ns == written_ns
    os.utime(file, ns=(written_ns, written_ns - 1_500_000_000))
    cached.read(0, 10)
    assert file.stat().st_mtime_ns >= written_ns


def test_a_range_too_large_is_not_kept(tmp_path):
    """More than an eighth of everything would push out too much."""
    cached = Cached(tmp_path / "cache", bytes_max=256 * KIB)
    assert [cached.read(0, 40 * KIB) for _ in range(2)] == [1, 1]
    assert cached.count("skipped") == 2
    assert not cached.path.exists()


def test_a_call_larger_than_the_cache_keeps_what_fits(tmp_path):
    """One read of everything does not count the directory over and over."""
    cached = Cached(tmp_path / "cache", bytes_max=256 * KIB)
    spans = [(start, start + 16 * KIB) for start in range(0, len(BODY), 16 * KIB)]
    for _ in range(2):
        assert cached.store.get_ranges(KEY, spans) == [BODY[slice(*span)] for span in spans]
        assert 200 * KIB < on_disk(cached.path) <= 256 * KIB
        assert cached.count("evicted") <= 2
    assert cached.count("skipped") > 0


def test_foreign_files_are_left_alone(tmp_path):
    """Eviction removes only files with an entry's name."""
    for name in ("notes.txt", "ab/notes.txt", "ab/" + "0" * 38, "mine/" + "0" * 30 + ".range"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"mine" * 50_000)
    cached = Cached(tmp_path, bytes_max=160 * KIB)
    for start in range(30):
        cached.read(start, start + 15 * KIB)
    assert cached.count("evicted") > 0
    assert len([file for file in tmp_path.glob("**/*") if file.stat().st_size == 200_000]) == 4


@pytest.mark.parametrize("content", [b"", b"garbage", b"another-boot 00000000000000000000\n"])
def test_a_usage_that_cannot_be_trusted_is_recounted(tmp_path, content):
    """After a restart of the machine the number may be older than the entries."""
    cached = Cached(tmp_path / "cache", bytes_max=160 * KIB)
    for start in range(9):
        cached.read(start, start + 15 * KIB)
    (cached.path / "usage").write_bytes(content)
    for start in range(9, 20):
        cached.read(start, start + 15 * KIB)
        assert on_disk(cached.path) <= 160 * KIB
    assert cached.count("bytes") == on_disk(cached.path)


def test_a_count_that_finds_room_removes_nothing(tmp_path):
    """Damaged entries were dropped, or the usage was too high: then there is room already."""
    cached = Cached(tmp_path / "cache", bytes_max=160 * KIB)
    for start in range(9):
        cached.read(start, start + 15 * KIB)
    cached.read(50, 60)
    (cached.path / "usage").write_bytes(b"")
    cached.read(60, 70)
    assert on_disk(cached.path) == 152 * KIB
    assert cached.count("evicted") == 0


def test_a_smaller_bound_holds_from_the_first_write(tmp_path):
    """Opening an old directory with less room makes the room."""
    large = Cached(tmp_path / "cache", bytes_max=1 << 20)
    for start in range(50):
        large.read(start, start + 15 * KIB)
    small = Cached(large.path, large.bucket, bytes_max=160 * KIB)
    small.read(100, 200)
    assert on_disk(large.path) <= 160 * KIB


# --- several at once ----------------------------------------------------------------------


def hammer(path, seed, bytes_max, seconds):
    """Read ranges for a while, checking each; return hits, evictions, damage and errors.

    On a stalled machine it takes longer until there were some of each.
    """
    cached = Cached(path, bytes_max=bytes_max)
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s or cached.count("hits") <= 10 or not cached.count("evicted"):
        seed = seed * 48271 % 2147483647
        start = seed % 60 * 4096
        cached.store.get_ranges(KEY, [(start, start + 9000), (start + 9000, start + 9100)])
        cached.read(start, start + 9000)
    return [cached.count(name) for name in ("hits", "evicted", "damaged", "errors")]


def test_processes_share_a_directory_and_its_bound(tmp_path):
    """Three write, read and evict at once: right bytes, no damage, never beyond the bound."""
    bytes_max, path = 256 * KIB, tmp_path / "cache"
    watching = Cached(path, bytes_max=bytes_max)
    watching.read(0, 10)
    children = []
    for seed in (1, 2, 3):
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            signal.alarm(120)
            outcome = repr(hammer(path, seed, bytes_max, 2.0))
            os.write(writing, outcome.encode())
            os._exit(0)
        os.close(writing)
        children.append((child, reading))
    end_s, fullest = time.monotonic() + 2.0, 0
    while (now_s := time.monotonic()) < end_s or (fullest <= 128 * KIB and now_s < end_s + 60):
        with watching.locked():  # a count during writes would mix states
            fullest = max(fullest, on_disk(path))
        time.sleep(0.01)
    for child, reading in children:
        with os.fdopen(reading) as stream:
            hits, evicted, damaged, errors = eval(stream.read())
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert hits > 10
        assert evicted > 0
        assert (damaged, errors) == (0, 0)
    assert 128 * KIB < fullest <= bytes_max


def test_threads_share_a_cache(tmp_path):
    """Every read is right, whichever thread writes the entry."""
    cached = Cached(tmp_path / "cache", bytes_max=256 * KIB)
    spans = [(start * 4096 % 700_000, start * 4096 % 700_000 + 9000) for start in range(400)]
    reads = REAL.gather([lambda span=span: cached.store.get_range(KEY, *span) for span in spans])
    assert reads == [BODY[slice(*span)] for span in spans]
    assert (cached.count("damaged"), cached.count("errors")) == (0, 0)
    assert on_disk(cached.path) <= 256 * KIB


def test_a_busy_lock_delays_no_read(cached):
    """While another writes, ranges wait in memory; the next write takes them along."""
    cached.read(0, 10)
    with cached.locked():
        start_s = time.monotonic()
        assert [cached.read(10, 20), cached.read(20, 30)] == [1, 1]
        assert time.monotonic() - start_s < 10.0
        assert len(cached.files) == 1
    cached.read(30, 40)
    assert len(cached.files) == 4
    assert cached.count("skipped") == 0


def test_two_that_miss_at_once_count_once(cached):
    """Another process wrote the same range in the meantime: it is there, and counted."""
    other = Cached(cached.path, cached.bucket)
    other.read(50, 60)
    with cached.locked():
        cached.read(0, 10)
    other.read(0, 10)
    cached.read(10, 20)
    assert len(cached.files) == 3
    assert cached.count("bytes") == on_disk(cached.path)


def test_waiting_ranges_are_bounded(cached):
    """A lock that is never released costs a few MiB, not everything that is read."""
    cached.read(0, 10)
    size = 512 * KIB
    with cached.locked():
        for start in range(QUEUED_BYTES_MAX // size + 5):
            cached.read(start, start + size)
    assert cached.count("skipped") == 5
    cached.read(50, 60)
    assert cached.count("bytes") == on_disk(cached.path)


def test_an_entry_may_be_removed_while_it_is_read(cached):
    """Eviction under an open file: its reader gets all of it."""
    file = entry_of(cached, 0, 1000)

    def remove(call, name):
        if call == "stat of file" and name == file.name:
            file.unlink()

    removing = FaultyFiles(before_query=remove)
    assert Cached(cached.path, cached.bucket, files=removing).read(0, 1000) == 0
    assert cached.files == []


@pytest.mark.parametrize("call", ["create", "append", "set_mtime", "rename", "unlink"])
def test_a_death_at_any_call_leaves_nothing_broken(tmp_path, call):
    """The next process writes on; the usage is too high at worst, and never too low."""

    def die(found, name):
        if found == call:
            os._exit(42)

    cached = Cached(tmp_path / "cache", bytes_max=160 * KIB)
    for start in range(9):
        cached.read(start, start + 15 * KIB)
    files = FaultyFiles(before=die, before_query=die)
    dying = Cached(cached.path, cached.bucket, bytes_max=160 * KIB, files=files)
    assert in_child(lambda: [dying.read(start, start + 15 * KIB) for start in range(50, 60)]) == (
        42,
        "",
    )
    assert int((cached.path / "usage").read_bytes().split()[1]) >= on_disk(cached.path)
    for start in range(100, 120):
        assert [cached.read(start, start + 15 * KIB) for _ in range(2)] == [1, 0]
        assert on_disk(cached.path) <= 160 * KIB
    assert not (cached.path / "unfinished").exists()


# --- fork (H51) -------------------------------------------------------------------------------


def test_H51_a_forked_child_uses_the_cache(cached):
    """H51: nothing is held open, so a child reads and writes as its parent does."""
    cached.read(0, 10)
    result = in_child(lambda: [cached.read(0, 10), cached.read(10, 20), cached.read(10, 20)])
    assert result == (0, "[0, 1, 0]")
    assert cached.read(10, 20) == 0


def test_H51_a_child_does_not_keep_the_lock_of_a_dead_parent(cached):
    """H51: a fork while another thread writes, and the parent dies: others can still write."""
    cached.read(0, 10)

    reading, writing = os.pipe()
    parent = os.fork()
    if parent == 0:
        held = cached.store._directory._lock()
        assert held.__enter__() is not None
        orphan = os.fork()
        if orphan == 0:
            os.write(writing, str(os.getpid()).encode())  # its first steps are done
            signal.alarm(120)
            signal.pause()
        os._exit(0)
    os.close(writing)
    os.waitpid(parent, 0)
    orphan = int(os.read(reading, 20))
    os.close(reading)
    try:
        cached.read(10, 20)
        assert len(cached.files) == 2
    finally:
        os.kill(orphan, signal.SIGKILL)


def test_the_cache_is_outermost():
    """A hit is not counted, delayed or retried: it never reaches those wrappers."""
    opened = stores.open("memory://", disk_cache="unused")
    assert isinstance(opened, DiskCache)
    assert isinstance(opened.inner, stores.ReadBack)


# --- files that are not regular ----------------------------------------------------------
def make_fifo(path):
    """Make a FIFO that no process writes to."""
    os.mkfifo(path)


def make_device(path):
    """Make a link to a device that can be read without end."""
    os.symlink("/dev/zero", path)


def make_socket(path):
    """Make a socket that no process listens on."""
    before = os.getcwd()
    os.chdir(path.parent)  # a socket's path is short
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(before)


NOT_REGULAR = {
    "fifo": make_fifo,
    "device": make_device,
    "socket": make_socket,
    "directory": os.mkdir,
    "dangling link": lambda path: os.symlink("/nowhere/at/all", path),
}


@contextmanager
def within(seconds):
    """Fail if the block takes longer: a read that hangs would never return."""

    def expired(*_):
        raise AssertionError("it hangs")

    before = signal.signal(signal.SIGALRM, expired)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("kind", NOT_REGULAR)
def test_an_entry_that_is_not_a_regular_file_is_read_past(tmp_path, kind):
    """A FIFO in the place of an entry hung every reader: the open waited for a writer."""
    cached = Cached(tmp_path)
    cached.read(0, 100)
    (entry,) = tmp_path.glob("*/*.range")
    entry.unlink()
    NOT_REGULAR[kind](entry)
    with within(30):
        assert cached.read(0, 100) == 1
        cached.read(0, 100)
    if kind != "directory":
        assert entry.is_file(), "it was replaced"


@pytest.mark.parametrize("name", ["usage", "unfinished"])
@pytest.mark.parametrize("kind", NOT_REGULAR)
def test_the_caches_own_files_may_be_anything(tmp_path, kind, name):
    """Ranges come from the bucket, and no call waits."""
    NOT_REGULAR[kind](tmp_path / name)
    cached = Cached(tmp_path)
    with within(30):
        for _ in range(3):
            cached.read(0, 100)


def test_a_link_is_not_written_through_to_a_device(tmp_path):
    """The usage is written to a regular file only."""
    os.symlink("/dev/null", tmp_path / "usage")
    cached = Cached(tmp_path)
    cached.read(0, 100)
    assert cached.count("errors") == 1
    assert list(tmp_path.glob("*/*.range")) == []


class NothingRegular(type(OS)):
    """A file system that calls every open file a device, whatever its size."""

    def open(self, path, **options):
        file = super().open(path, **options)
        return FixedStat(file, file.stat()._replace(is_file=False))


def test_only_regular_files_are_entries(tmp_path):
    """Its size and its bytes may be right: it is dropped before it is read."""
    Cached(tmp_path).read(0, 100)
    cached = Cached(tmp_path, files=NothingRegular())
    cached.read(0, 100)
    assert (cached.count("damaged"), cached.count("hits")) == (1, 0)
