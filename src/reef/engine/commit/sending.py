"""Send one WAL object: PUT until the outcome is definite, and prove it where it is in doubt.

created    it is in its slot, and counts; after a long while the floor proves it (H13)
exists     another object has the slot, and this one never landed; after doubt the floor proves it
unknown    no response within the deadline, or no proof: it may count
refused    every attempt was rejected by the store: nothing was written
"""

from dataclasses import dataclass

from reef.engine.commit.flights import Flight
from reef.engine.log import Log
from reef.engine.log_rules import Proof, prove
from reef.errors import ReefError, UnavailableError
from reef.manifest.head import HeadFinder
from reef.runtime import Runtime
from reef.stores import Outcome, WriteResult

__all__ = ["Sender"]


@dataclass(frozen=True, slots=True)
class Sender:
    """Sends for one writer."""

    log: Log
    heads: HeadFinder
    deadline_s: float
    runtime: Runtime

    def send(self, flight: Flight) -> WriteResult:
        """Return the outcome of a flight; `flight.doubt` separates unknown from refused."""
        answer = self._put(flight)
        if answer.outcome is Outcome.UNKNOWN:
            return answer
        last = self.heads.last
        by_store_s = self.heads.dates.took_s(flight.sent, answer.date_s)
        # Whether no slot can have been collected since the first attempt was sent. One attempt
        # that lost at once: the slot was taken before it came.
        if answer.outcome is Outcome.CREATED:
            is_certain = last is not None and last.trusts_put(flight.sent, by_store_s)
        else:
            is_quick = last is not None and last.is_quick(flight.sent, by_store_s)
            is_certain = is_quick and not flight.doubt
        return answer if is_certain else self._prove(flight, answer)

    def _put(self, flight: Flight) -> WriteResult:
        """Send the same bytes each time. An attempt that raises has written nothing."""
        deadline = flight.batches[0].deadline or self.runtime.deadline(self.deadline_s)
        while True:
            try:
                answer = self.log.fill(flight.lsn, flight.body)
                doubt = answer.doubt or answer.outcome is Outcome.UNKNOWN
                flight.doubt = flight.doubt or doubt
            except UnavailableError as error:
                answer = WriteResult(Outcome.UNKNOWN, cause=error)
            except ReefError as error:  # a refusal does not change by asking again
                return WriteResult(Outcome.UNKNOWN, cause=error)
            if answer.outcome is not Outcome.UNKNOWN or deadline.passed():
                return answer
            self.runtime.sleep(self.runtime.uniform(0.01, 0.2))

    def _prove(self, flight: Flight, answer: WriteResult) -> WriteResult:
        """Ask the floor: the slot may have been collected and filled again meanwhile (H66)."""
        try:
            self.heads.forget()
            manifest = self.heads.find(dropped=True).manifest
        except ReefError as error:
            flight.doubt = True
            return WriteResult(Outcome.UNKNOWN, cause=error)
        match prove(manifest, flight.header, in_slot=answer.landed):
            case Proof.COUNTS:
                return WriteResult(Outcome.CREATED)
            case Proof.LOST:
                return answer
        flight.doubt = True
        floor = manifest.wal_floor
        cause = UnavailableError(f"LSN {flight.lsn} was folded, and the floor is LSN {floor} now")
        return WriteResult(Outcome.UNKNOWN, cause=cause)
