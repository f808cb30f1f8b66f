"""Observations of clients, checked against the log oracle: the invariants of all scenarios.

- A write that was acknowledged is at its LSN and counts, once, and so every later open shows
  it, in order. A write that was reported as failed, as fenced or as a conflict never counts.
  `resolve` is right about an unknown one. An idempotency key counts once at most.
- A bulk load counts with all its rows if it was acknowledged, and with none if it was refused.
- A process that shows LSN L, a reader or a writer that has just opened, shows exactly the state
  of the log at L: a prefix.
- A change stream yields every object that counts up to its position, once, in order. Where the
  log was collected it ends with an error.
- At most one writer is unfenced: behind the fences of a finished open no older epoch is
  acknowledged, and no two opens have the same epoch.

Each holds within one life of the name: nothing of one life shows in another.
"""

from collections import defaultdict
from dataclasses import dataclass, field

from reef.engine.log.log import Verdict
from reef.errors import OutcomeUnknownError, ReefError
from reef.types import Receipt


@dataclass(frozen=True)
class Open:
    """A writer that has opened."""

    who: str
    epoch: int
    first_fence: int
    last_fence: int
    fence_id: str
    """The write id of its last fence, which identifies the life."""


@dataclass
class Fate:
    """The outcome of a write, as far as its clients know. Several may try the same keyed one."""

    acknowledged: bool = False
    open: int = 0
    """Tries in flight, or with an unknown outcome."""

    @property
    def failed(self):
        return not self.acknowledged and self.open == 0


@dataclass
class Stream:
    """A change stream: where it began, how far it came, the rows that it has yielded."""

    who: str
    after: int
    position: int
    rows: list[tuple[int, bytes, bytes | None]] = field(default_factory=list)


@dataclass
class ClientLog:
    """All that the clients of one history have observed."""

    in_order: bool = True
    """Whether acknowledgements come in LSN order: not in independent mode."""
    fates: defaultdict[bytes, Fate] = field(default_factory=lambda: defaultdict(Fate))
    receipts: list[tuple[bytes | None, Receipt]] = field(default_factory=list)
    resolved: list[tuple[bytes, str]] = field(default_factory=list)
    seen: list[tuple[str, int, dict[bytes, bytes]]] = field(default_factory=list)
    opens: list[Open] = field(default_factory=list)
    ingests: list[int] = field(default_factory=list)
    streams: list[Stream] = field(default_factory=list)
    acknowledged_lsn: int = 0
    committed_batches: set[int] = field(default_factory=set)
    """Numbers of the batches of a stream that were acknowledged, by whichever driver."""
    keyed: set[bytes] = field(default_factory=set)
    """Values that are sent until they are acknowledged, if need be in several lives."""

    # --- recording ----------------------------------------------------------------
    def put(self, writer, key, value, **options):
        """Write, and record the outcome; return the receipt, or raise the error of the write."""
        if "idempotency_key" in options:
            self.keyed.add(value)
        with self.trying([value]):
            receipt = writer.put(key, value, **options)
        return self.acknowledge(value, receipt)

    def increment(self, writer, key, value):
        """Read and write one key in a transaction; note the outcome."""
        with self.trying([value]), writer.transaction() as tx:
            tx.get(key)
            tx.put(key, value)
        return self.acknowledge(value, tx.receipt)

    def delete(self, writer, key):
        self.acknowledge(None, writer.delete(key))

    def trying(self, values):
        """Record the outcome that some writes share, in a `with` statement."""
        return _Trying(self, values)

    def sent(self, value):
        """Record a write in flight: its process may crash before it gets a response."""
        self.fates[value].open += 1

    def refuse(self, value):
        """Note that this try has failed, for certain."""
        self.fates[value].open -= 1

    def acknowledge(self, value, receipt):
        if value is not None:
            self.fates[value].acknowledged = True
        self.receipts.append((value, receipt))
        self.acknowledged_lsn = max(self.acknowledged_lsn, receipt.lsn)
        return receipt

    def loaded(self, rows, lsn):
        """Note that a bulk load was acknowledged."""
        for value in rows.values():
            self.fates[value].acknowledged = True
        self.ingests.append(lsn)

    def record_outcome(self, value, future):
        """Record the outcome of a write that was sent without waiting."""
        try:
            self.acknowledge(value, future.result())
        except OutcomeUnknownError as error:
            return error
        except ReefError:
            self.refuse(value)
        return None

    def opened(self, who, writer):
        """Record the epoch, fences and rows of a writer that has opened."""
        committer = writer._committer
        last = committer.tail.next_lsn - 1
        fences = committer.opened.fence_ids
        self.opens.append(
            Open(who, committer.opened.epoch, last - len(fences) + 1, last, fences[-1])
        )
        self.seen.append((f"{who}, which has just opened,", last, dict(writer.scan())))

    # --- checking -----------------------------------------------------------------
    def check(self, evaluated):
        """Compare all of it with the log of a name that has one life."""
        self.check_lives([evaluated])
        for lsn in self.ingests:
            verdict = evaluated.verdicts.get(lsn)
            assert verdict is Verdict.APPLIES, f"the ingest at LSN {lsn} is lost"
        lost = self.committed_batches - evaluated.batches
        assert not lost, f"batches {lost} of a stream were acknowledged and count nowhere"

    def check_lives(self, lives):
        """Compare all of it with the logs of all lives."""
        self._check_receipts(lives)
        self._check_fates(lives)
        self._check_seen(lives)
        self._check_streams(lives)
        for life in lives:
            self._check_opens(life)
            self._check_batches(life)
            for key, lsns in life.keys.items():
                assert len(lsns) == 1, f"key {key} counts at LSNs {lsns}"

    def _check_receipts(self, lives):
        for value, receipt in self.receipts:
            life = _life_of(lives, receipt.write_id)
            assert life is not None, f"{value}: LSN {receipt.lsn} was acknowledged and is missing"
            lsn = life.lsn_of(receipt.write_id)
            assert lsn == receipt.lsn, (
                f"{value}: LSN {receipt.lsn} was acknowledged and holds another object"
            )
            verdict = life.verdicts[lsn]
            assert verdict is Verdict.APPLIES, f"{value} was acknowledged and is {verdict}"

    def _check_fates(self, lives):
        for value, fate in self.fates.items():
            places = _places(lives, value)
            for life in lives if value in self.keyed else ():
                assert len(_places([life], value)) <= 1, f"{value} applies at {places}"
            assert len(places) <= 1 or value in self.keyed, f"{value} applies at {places}"
            if fate.failed:
                assert not places, f"{value} was reported as failed and counts at LSN {places}"
            if fate.acknowledged:
                assert places, f"{value} was acknowledged and counts nowhere"
        for value, outcome in self.resolved:
            counts = bool(_places(lives, value))
            assert outcome == "unknown" or counts == (outcome == "committed"), (
                f"{value} was resolved as {outcome}, and {'counts' if counts else 'does not'}"
            )

    def _check_seen(self, lives):
        for who, lsn, rows in self.seen:
            states = [life.states[lsn] for life in lives if lsn in life.states]
            assert states, f"{who} saw LSN {lsn}, which is in no log"
            assert rows in states, (
                f"{who} showed {rows} at LSN {lsn}, the log says {' or '.join(map(str, states))}"
            )

    def _check_streams(self, lives):
        for stream in self.streams:
            expected = [_changes(life, stream) for life in lives]
            assert stream.rows in expected, (
                f"{stream.who} followed the changes of ({stream.after}, {stream.position}] and "
                f"got {stream.rows}, the log says {' or '.join(map(str, expected))}"
            )

    def _check_batches(self, life):
        """Every batch of a stream counts once; with one life, all that were acknowledged do."""
        numbers = [
            number
            for lsn, header in life.headers.items()
            if life.verdicts[lsn] is Verdict.APPLIES and not header.kind.of_writer
            for number in header.marks.values()
        ]
        assert len(set(numbers)) == len(numbers), f"batches of a stream count twice: {numbers}"
        life.batches.update(numbers)

    def _check_opens(self, life):
        opens = [one for one in self.opens if life.lsn_of(one.fence_id) is not None]
        receipts = [one for one in self.receipts if life.lsn_of(one[1].write_id) is not None]
        epochs = [opened.epoch for opened in opens]
        assert len(set(epochs)) == len(epochs), f"epochs were taken twice: {epochs}"
        for opened in opens:
            for value, receipt in receipts:
                if receipt.epoch < opened.epoch:
                    assert receipt.lsn < opened.first_fence, (
                        f"{value} of epoch {receipt.epoch} was acknowledged at LSN {receipt.lsn}, "
                        f"behind the fences of epoch {opened.epoch} at {opened.first_fence}"
                    )


class _Trying:
    """Some writes in flight. An error other than an unknown outcome rejects them all."""

    def __init__(self, clients, values):
        self._clients, self._values = clients, values

    def __enter__(self):
        for value in self._values:
            self._clients.sent(value)

    def __exit__(self, kind, error, trace):
        if isinstance(error, ReefError) and not isinstance(error, OutcomeUnknownError):
            for value in self._values:
                self._clients.refuse(value)


def _life_of(lives, write_id):
    return next((life for life in lives if life.lsn_of(write_id) is not None), None)


def _places(lives, value):
    return [lsn for life in lives for lsn in life.applied.get(value, [])]


def _changes(life, stream):
    """Return the rows that a stream over these LSNs has to yield."""
    rows = []
    for lsn in range(stream.after + 1, stream.position + 1):
        state = life.states.get(lsn, {})
        rows += [(lsn, key, state.get(key)) for key in sorted(life.changed.get(lsn, ()))]
    return rows
