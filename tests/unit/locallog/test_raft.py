"""The journal of PySyncObj on a local log: as its own one, and in clusters that are killed."""

import json
import random
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from pysyncobj.journal import MemoryJournal, createJournal

from reef.locallog import LocalLog
from reef.locallog.raft import LocalLogJournal, journal_at
from tests.support.servers.base import HOST, free_port

ROOT = Path(__file__).parents[3]
PATIENCE_S = 120


@pytest.mark.parametrize("seed", range(5))
def test_the_same_as_pysyncobjs_own(tmp_path, seed):
    """Any calls in any order match the journal in memory, also after a reopening."""
    rng = random.Random(seed)
    ours, theirs = LocalLogJournal(LocalLog(tmp_path, 4096)), MemoryJournal()
    for _ in range(300):
        word, count = rng.randrange(20), len(theirs)
        if word < 12 or count < 2:
            index = theirs[-1][1] + 1 if count else rng.randint(1, 99)
            both(ours, theirs, "add", bytes(rng.randrange(300)), index, rng.randint(1, 9))
        elif word == 12:
            both(ours, theirs, "deleteEntriesFrom", rng.randint(0, count))
        elif word == 13:
            both(ours, theirs, "deleteEntriesTo", rng.randint(0, count))
        elif word == 14 and rng.random() < 0.2:
            both(ours, theirs, "clear")
        elif word == 15:
            both(ours, theirs, "setCurrentTerm", rng.randint(1, 99), rng.choice((None, "a:1")))
        elif word == 16:
            ours._destroy()
            ours = LocalLogJournal(LocalLog(tmp_path, 4096))
        assert len(ours) == len(theirs)
        assert ours[:] == theirs[:]
        assert ours[1:4] == theirs[1:4]
        assert ours[-3:] == theirs[-3:]
        assert ours.getCurrentTerm() == theirs.getCurrentTerm()
        assert ours.getVotedForNodeId() == theirs.getVotedForNodeId()
        for place in (0, -1) if len(theirs) else ():
            assert ours[place] == theirs[place]
    with pytest.raises(IndexError):
        ours[len(ours)]
    ours._destroy()


def both(ours, theirs, name, *args):
    """Call the same on both."""
    getattr(ours, name)(*args)
    getattr(theirs, name)(*args)


def test_the_commit_index_is_kept_once_a_second(tmp_path):
    """Not at each change; a journal without one begins where PySyncObj's own does."""
    journal = LocalLogJournal(LocalLog(tmp_path))
    assert journal.getRaftCommitIndex() == 1
    journal.setRaftCommitIndex(7)
    assert journal._log.get_uint64(b"pysyncobj.commit") == 0
    journal.onOneSecondTimer()
    journal.setRaftCommitIndex(9)
    journal._destroy()
    again = LocalLogJournal(LocalLog(tmp_path))
    assert again.getRaftCommitIndex() == 7
    again._destroy()


def test_sockets_of_others_still_work():
    """PySyncObj replaces a function of the standard library when it is imported."""
    assert socket.inet_ntop(socket.AF_INET, b"\x7f\0\0\1") == "127.0.0.1"


def test_other_paths_are_pysyncobjs(tmp_path):
    """Only a path that is marked leads to a log."""
    import pysyncobj.syncobj

    marked = journal_at(str(tmp_path / "log"))
    journal = pysyncobj.syncobj.createJournal(marked)
    assert isinstance(journal, LocalLogJournal)
    journal._destroy()
    assert isinstance(pysyncobj.syncobj.createJournal(None), MemoryJournal)
    assert isinstance(createJournal(None), MemoryJournal)


# --- clusters -----------------------------------------------------------------------


class Cluster:
    """Three nodes on 127.0.0.1, each a process with a directory."""

    def __init__(self, path, stack, *, dumps=False):
        self.path, self.dumps = path, dumps
        self.addresses = [f"{HOST}:{free_port()}" for _ in range(3)]
        self.nodes = [None] * 3
        stack.callback(self.kill, range(3))

    def start(self, numbers):
        for number in numbers:
            others = [a for n, a in enumerate(self.addresses) if n != number]
            dump = str(self.path / f"dump{number}") if self.dumps else ""
            words = [str(self.path / f"log{number}"), dump, self.addresses[number], *others]
            self.nodes[number] = subprocess.Popen(
                [sys.executable, "-m", "tests.unit.locallog.raft_node", *words],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )

    def kill(self, numbers):
        """As a power failure would, as far as a process can observe."""
        for number in numbers:
            node, self.nodes[number] = self.nodes[number], None
            if node is not None:
                node.kill()
                node.communicate()

    def ask(self, number, *words):
        node = self.nodes[number]
        node.stdin.write(json.dumps(words) + "\n")
        node.stdin.flush()
        return json.loads(node.stdout.readline())

    def put(self, number, key, value):
        """Put until the cluster says that it did."""
        until(lambda: self.ask(number, "put", key, value) is True)

    def agree(self, numbers, expected):
        """Wait until these nodes all have at least the acknowledged entries."""
        for number in numbers:
            until(lambda number=number: expected.items() <= self.ask(number, "get").items())


def until(condition):
    """Wait for something to become true."""
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, "the cluster did not come to it"
        time.sleep(0.05)


def test_a_cluster_keeps_its_state(tmp_path):
    """Three nodes, all killed with -9 and started again: acknowledged entries are there; then one
    of them is killed, misses something, comes back, and catches up."""
    with ExitStack() as stack:
        cluster = Cluster(tmp_path, stack)
        cluster.start(range(3))
        expected = {f"k{n}": n for n in range(5)}
        for key, value in expected.items():
            cluster.put(value % 3, key, value)
        cluster.kill(range(3))
        cluster.start(range(3))
        cluster.agree(range(3), expected)
        cluster.kill([0])
        cluster.put(1, "late", 9)
        cluster.start([0])
        cluster.agree(range(3), {**expected, "late": 9})
    for number in range(3):
        with LocalLog(tmp_path / f"log{number}") as log:
            assert log.last_index >= 6
            assert log.get(b"pysyncobj.vote")


@pytest.mark.slow
def test_a_cluster_under_fire(tmp_path):
    """A minute of puts and kills, with snapshots that cut the journals at their heads."""
    rng = random.Random(4)
    with ExitStack() as stack:
        cluster = Cluster(tmp_path, stack, dumps=True)
        cluster.start(range(3))
        expected = {}
        end = time.monotonic() + 60
        while time.monotonic() < end:
            for _ in range(rng.randint(5, 30)):
                key = f"k{len(expected)}"
                value = expected[key] = rng.randrange(1000)
                cluster.put(rng.randrange(3), key, value)
            victims = rng.sample(range(3), rng.choice((1, 1, 2, 3)))
            cluster.kill(victims)
            cluster.start(victims)
        cluster.put(0, "end", 1)
        cluster.agree(range(3), {"end": 1})
        states = [cluster.ask(n, "get") for n in range(3)]
        assert states[0] == states[1] == states[2]
        assert expected.items() <= states[0].items()
