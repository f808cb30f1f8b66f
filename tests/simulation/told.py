"""What clients were told, checked against the truth.

- A write that was acknowledged stands at its LSN and counts, once, and so every later open
  shows it, in order. A write that was reported as failed never counts. What `resolve` says of
  an unknown one is so. An idempotency key counts once at most.
- Whoever shows LSN L, a reader or a writer that has just opened, shows exactly the state of the
  log at L: a prefix.
- At most one writer is unfenced: behind the fences of a finished open no older epoch is
  acknowledged, and no two opens have the same epoch.
"""

from collections import defaultdict
from dataclasses import dataclass, field

from reef.engine.log_rules import Verdict
from reef.errors import OutcomeUnknownError, ReefError
from reef.types import Receipt


@dataclass(frozen=True)
class Open:
    """A writer that has opened."""

    who: str
    epoch: int
    first_fence: int
    last_fence: int


@dataclass
class Fate:
    """What became of a write, as far as its clients know. Several may try the same keyed one."""

    acknowledged: bool = False
    open: int = 0
    """Tries that are on their way, or whose outcome is unknown."""

    @property
    def failed(self):
        return not self.acknowledged and self.open == 0


@dataclass
class Told:
    """The clients' side of one history."""

    in_order: bool = True
    """Whether acknowledgements come in LSN order: not in independent mode."""
    fates: defaultdict[bytes, Fate] = field(default_factory=lambda: defaultdict(Fate))
    receipts: list[tuple[bytes | None, Receipt]] = field(default_factory=list)
    resolved: list[tuple[bytes, str]] = field(default_factory=list)
    seen: list[tuple[str, int, dict[bytes, bytes]]] = field(default_factory=list)
    opens: list[Open] = field(default_factory=list)
    ingests: list[int] = field(default_factory=list)
    acknowledged_lsn: int = 0

    # --- noting -------------------------------------------------------------------
    def put(self, writer, key, value, **options):
        """Write, and note the answer; return the receipt, or raise what was raised."""
        self.sent(value)
        try:
            receipt = writer.put(key, value, **options)
        except OutcomeUnknownError:
            raise
        except ReefError:
            self.refuse(value)
            raise
        return self.acknowledge(value, receipt)

    def delete(self, writer, key):
        self.acknowledge(None, writer.delete(key))

    def sent(self, value):
        """Note that a write is on its way: its process may die before it hears anything."""
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

    def answered(self, value, future):
        """Note the answer to a write that was not waited for."""
        try:
            self.acknowledge(value, future.result())
        except OutcomeUnknownError as error:
            return error
        except ReefError:
            self.refuse(value)
        return None

    def opened(self, who, writer):
        """Note what a writer found when it had opened."""
        committer = writer._committer
        last = committer.tail.next_lsn - 1
        fences = len(committer.opened.fence_ids)
        self.opens.append(Open(who, committer.opened.epoch, last - fences + 1, last))
        self.seen.append((f"{who}, which has just opened,", last, dict(writer.scan())))

    # --- checking -----------------------------------------------------------------
    def check(self, judged):
        """Compare all of it with the log."""
        self._check_receipts(judged)
        self._check_fates(judged)
        self._check_seen(judged)
        self._check_opens()
        for key, lsns in judged.keys.items():
            assert len(lsns) == 1, f"key {key} counts at LSNs {lsns}"
        for lsn in self.ingests:
            assert judged.verdicts.get(lsn) is Verdict.APPLIES, f"the ingest at LSN {lsn} is lost"

    def _check_receipts(self, judged):
        for value, receipt in self.receipts:
            header = judged.headers.get(receipt.lsn)
            assert header is not None, f"{value}: LSN {receipt.lsn} was acknowledged and is missing"
            assert header.write_id == receipt.write_id, (
                f"{value}: LSN {receipt.lsn} was acknowledged and holds another object"
            )
            verdict = judged.verdicts[receipt.lsn]
            assert verdict is Verdict.APPLIES, f"{value} was acknowledged and is {verdict}"

    def _check_fates(self, judged):
        for value, fate in self.fates.items():
            lsns = judged.applied.get(value, [])
            assert len(lsns) <= 1, f"{value} applies at {lsns}"
            if fate.failed:
                assert not lsns, f"{value} was reported as failed and counts at LSN {lsns}"
            if fate.acknowledged:
                assert lsns, f"{value} was acknowledged and counts nowhere"
        for value, answer in self.resolved:
            counts = bool(judged.applied.get(value))
            assert answer == "unknown" or counts == (answer == "committed"), (
                f"{value} was resolved as {answer}, and {'counts' if counts else 'does not'}"
            )

    def _check_seen(self, judged):
        for who, lsn, rows in self.seen:
            assert lsn <= judged.last_lsn, f"{who} saw LSN {lsn} of {judged.last_lsn}"
            assert rows == judged.states[lsn], (
                f"{who} showed {rows} at LSN {lsn}, the log says {judged.states[lsn]}"
            )

    def _check_opens(self):
        epochs = [opened.epoch for opened in self.opens]
        assert len(set(epochs)) == len(epochs), f"epochs were taken twice: {epochs}"
        for opened in self.opens:
            for value, receipt in self.receipts:
                if receipt.epoch < opened.epoch:
                    assert receipt.lsn < opened.first_fence, (
                        f"{value} of epoch {receipt.epoch} was acknowledged at LSN {receipt.lsn}, "
                        f"behind the fences of epoch {opened.epoch} at {opened.first_fence}"
                    )
