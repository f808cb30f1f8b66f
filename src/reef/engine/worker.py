"""What a writer knows of the work in the background: how to hold it, and how to end it.

The work itself is jobs, a layer above the engine; `reef.open` brings both together. A writer
owns its worker, and a worker knows its writer only weakly: one that nobody has any more must not
be kept alive by the thread that tidies up behind it.
"""

from typing import Any, Protocol

from reef.config import BackgroundSettings
from reef.errors import InvalidInputError, Kind

__all__ = ["Worker", "background_settings"]


class Worker(Protocol):
    """Folds, compacts and sweeps behind a writer."""

    def step(self) -> Any:
        """Do one bounded piece of work, the most urgent one; None if nothing is due."""

    def pause(self) -> None:
        """Send no request more until `resume`."""

    def resume(self) -> None:
        """Go on."""

    def stop(self) -> None:
        """End the thread; what it is in the middle of is given up at its next request."""


def background_settings(given: bool | BackgroundSettings) -> BackgroundSettings:
    """Return what was asked for; the defaults for a plain yes or no."""
    if isinstance(given, bool):
        return BackgroundSettings()
    if not isinstance(given, BackgroundSettings):
        raise InvalidInputError(
            f"background={given!r} is neither a bool nor BackgroundSettings",
            kind=Kind.INVALID_OPTION,
        )
    given.check()
    return given
