"""Sending one WAL object: PUT until the answer is definite, and prove it where it was slow.

created    it stands in its slot; after a long while only the floor shows that it counts (H13)
exists     another object has the slot
unknown    no answer within the deadline, or no proof: it may count
refused    every try was turned down by the store: nothing was written, for certain
"""

from dataclasses import dataclass

from reef.engine.commit.flights import Flight
from reef.engine.log import Log
from reef.errors import ReefError, UnavailableError
from reef.formats.manifest import Manifest
from reef.formats.wal_object import WalHeader
from reef.manifest.head import HeadFinder
from reef.manifest.streams import StreamHistory
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
        """Return what became of a flight; `flight.doubt` tells unknown from refused."""
        answer = self._put(flight)
        last = self.heads.last
        by_store_s = self.heads.dates.took_s(flight.sent, answer.date_s)
        if answer.landed and (last is None or not last.trusts_put(flight.sent, by_store_s)):
            return self._prove(flight)
        return answer

    def _put(self, flight: Flight) -> WriteResult:
        """The same bytes each time. A try that raises has written nothing; others may have."""
        deadline = flight.batches[0].deadline or self.runtime.deadline(self.deadline_s)
        while True:
            try:
                answer = self.log.fill(flight.lsn, flight.body)
                flight.doubt = flight.doubt or answer.outcome is Outcome.UNKNOWN
            except UnavailableError as error:
                answer = WriteResult(Outcome.UNKNOWN, cause=error)
            except ReefError as error:  # a refusal does not change by asking again
                return WriteResult(Outcome.UNKNOWN, cause=error)
            if answer.outcome is not Outcome.UNKNOWN or deadline.passed():
                return answer
            self.runtime.sleep(self.runtime.uniform(0.01, 0.2))

    def _prove(self, flight: Flight) -> WriteResult:
        """A slow PUT may have landed in a collected slot: only the floor tells (H13)."""
        flight.doubt = True
        try:
            self.heads.forget()
            manifest = self.heads.find().manifest
        except ReefError as error:
            return WriteResult(Outcome.UNKNOWN, cause=error)
        counted = {entry.write_id for entry in manifest.dedup}
        marked = _is_marked(manifest, flight.header)
        if flight.lsn >= manifest.wal_floor or flight.header.write_id in counted or marked:
            return WriteResult(Outcome.CREATED)
        return WriteResult(Outcome.UNKNOWN)


def _is_marked(manifest: Manifest, header: WalHeader) -> bool:
    """Whether a stream's mark proves that an object was folded: with its entries, and not with
    those of a copy of the same local log, which has the same numbers (H71)."""
    ends = {stream: points[-1] for stream, points in header.lineages.items()}
    return any(StreamHistory.of(manifest, s).has_point(point) for s, point in ends.items())
