"""Making the object of a record appear, whoever inserted the record (H23).

    the destination has the right bytes      set committed, delete the source
    else, the source is there                copy it, and look again
    else, read the record again
          gone, committed, or another's      somebody has finished it
          the destination has the right bytes by now   set committed
          otherwise                          stuck: an alarm, and the record stays

The insert was the durable point. So a record is never deleted here, whatever is missing. All of
it may be done by any number of helpers at once, and by the first writer too: a copy writes the
same bytes, and none can be made once the source is gone.
"""

from enum import StrEnum

from reef.errors import CorruptionError, NotFoundError
from reef.stores.base import Store
from reef.stores.two_phase.record import Record, checksum_of
from reef.stores.two_phase.register import Register

__all__ = ["Finish", "Finisher", "stuck_error"]

COPIES_MAX = 3
"""How often a copy is tried whose bytes come out wrong."""


class Finish(StrEnum):
    """What became of a record that was found unfinished."""

    FINISHED = "finished"
    DONE = "done"
    """Somebody else was quicker."""
    STUCK = "stuck"
    """Its bytes are nowhere: the name stays taken, and somebody must look into it."""


class Finisher:
    """Finishes records of one bucket."""

    def __init__(self, store: Store, register: Register) -> None:
        self._store = store
        self._register = register

    def finish(self, record: Record) -> Finish:
        """Bring a record to its end; UnavailableError if store or register do not answer."""
        for _ in range(COPIES_MAX):
            if self.is_right(record):
                break
            try:
                self._store.copy(record.source, record.destination)
            except NotFoundError:
                if self.is_done(record):
                    return Finish.DONE
                if self.is_right(record):
                    break
                return Finish.STUCK
        else:
            if not self.is_right(record):
                return Finish.DONE if self.is_done(record) else Finish.STUCK
        self.seal(record)
        return Finish.FINISHED

    def seal(self, record: Record) -> None:
        """Set committed; only then is the source of no use to anybody."""
        self._register.commit(record)
        self._store.delete(record.source)

    def is_done(self, record: Record) -> bool:
        """Whether a record was finished, as the register says now.

        Records go only after their objects, so one that is gone was finished, too.
        """
        now = self._register.read_one(record.destination)
        return now is None or now.source != record.source or now.committed

    def is_right(self, record: Record) -> bool:
        """Whether the bytes at the destination are the record's."""
        try:
            return checksum_of(self._store.get(record.destination)) == record.checksum
        except NotFoundError:
            return False


def stuck_error(record: Record) -> CorruptionError:
    """Return the alarm for a record whose bytes are nowhere."""
    return CorruptionError(
        f"the register has object {record.destination}, with checksum {record.checksum}; neither "
        f"it nor its source {record.source} has those bytes",
        hint="They were removed by hand, or by something that is not Reef; the record is kept",
        object=record.destination,
        offset=0,
    )
