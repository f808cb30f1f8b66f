"""Bugs in two-phase creation to find: each takes one protection away, as a change might."""

from dataclasses import replace

from reef.errors import UnavailableError
from reef.stores import Outcome, WriteResult
from reef.stores.two_phase import finishing, store
from reef.stores.two_phase.finishing import Content, Finish, Finisher
from reef.stores.two_phase.store import TwoPhase, _Claim


def recovery_deletes_records_without_objects(patch):
    """A record whose destination is missing is deleted."""

    def finish(self, record):
        self.prepare()
        if self.content(record) is Content.RIGHT:
            self.seal(record)
        else:
            self._register.delete([record])
        return Finish.FINISHED

    patch.setattr(Finisher, "finish", finish)


def the_loser_does_not_help(patch):
    """Return "exists" as soon as there is a record."""

    def help_none(self, record, holder, doubt):
        return WriteResult(Outcome.EXISTS)

    patch.setattr(TwoPhase, "_help", help_none)


def acknowledged_at_the_insert(patch):
    """The insert is acknowledged as soon as it is durable; the copy is left to recovery."""
    patch.setattr(TwoPhase, "_complete", lambda *_: WriteResult(Outcome.CREATED))


def sources_go_by_age_alone(patch):
    """An old source that no record names is taken for garbage, though its insert may come."""
    original = store._is_useless

    def is_useless(source, record, *, below):
        return record is None or original(source, record, below=below)

    patch.setattr(store, "_is_useless", is_useless)


def sources_survive_their_names(patch):
    """A name is freed while a helper can still copy to it."""

    def delete_many(self, keys):
        records = self.register.read(keys)
        self.inner.delete_many(keys)
        self.register.delete(records)

    patch.setattr(TwoPhase, "delete_many", delete_many)


def names_are_never_freed(patch):
    """A committed record means that there is an object."""
    patch.setattr(TwoPhase, "_free_if_deleted", lambda self, holder: False)


def silence_means_lost(patch):
    """Treat an insert without a response as refused."""
    original = TwoPhase._claim

    def claim(self, record):
        try:
            self.register.insert(record)
        except UnavailableError:
            self.inner.delete(record.source)
            return _Claim(replace(record, source="another's", committed=True))
        return original(self, record)

    patch.setattr(TwoPhase, "_claim", claim)


def silence_means_won(patch):
    """Treat an insert without a response as done."""
    original = TwoPhase._claim

    def claim(self, record):
        try:
            self.register.insert(record)
        except UnavailableError:
            return _Claim(record)
        return original(self, record)

    patch.setattr(TwoPhase, "_claim", claim)


def the_destination_is_not_checked_again(patch):
    """The object of another that the register does not know is copied over."""
    original = Finisher.content

    def content(self, record):
        found = original(self, record)
        return Content.MISSING if found is Content.OTHER else found

    patch.setattr(Finisher, "content", content)


def the_record_is_not_checked_again(patch):
    """Treat a record that was inserted once as still there."""
    patch.setattr(finishing, "_is_open", lambda record, holder: True)
