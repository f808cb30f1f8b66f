"""Errors as a user of Spark should see them: what is wrong, not where Reef noticed it.

Spark shows the whole traceback of whatever its Python processes raise, causes first, and the
message at its very end. For an error of Reef's, which says what the caller has to do, the frames
inside of Reef are noise; they stay only where the fault is Reef's own, or the bucket's.
"""

from collections.abc import Callable, Iterator
from functools import wraps
from typing import ParamSpec, TypeVar

from reef.errors import CorruptionError, InternalError, ReefError

__all__ = ["each_plainly", "plainly"]

Given = ParamSpec("Given")
Found = TypeVar("Found")
OURS = (CorruptionError, InternalError)


def plainly(method: Callable[Given, Found]) -> Callable[Given, Found]:
    """Let the errors of what Spark calls end here: without causes, and the frames below."""

    @wraps(method)
    def told(*args: Given.args, **kwargs: Given.kwargs) -> Found:
        try:
            return method(*args, **kwargs)
        except OURS:
            raise
        except ReefError as error:
            raise error.with_traceback(None) from None

    return told


def each_plainly(items: Iterator[Found]) -> Iterator[Found]:
    """Yield the same; an error on the way is told in the same way."""
    try:
        yield from items
    except OURS:
        raise
    except ReefError as error:
        raise error.with_traceback(None) from None
