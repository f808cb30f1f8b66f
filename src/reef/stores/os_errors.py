"""What an `OSError` of the directory store means to its caller.

Reading and writing differ in one word: "no such file" is an answer to a read, and to a
write a sign that the ground was moved from under it.
"""

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from reef.errors import InvalidInputError, Kind, NotFoundError, ReefError, UnavailableError

__all__ = ["Doubt", "read_errors", "write_errors"]

DENIED = {errno.EACCES, errno.EPERM, errno.EROFS}
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
ABSENT = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR}
CLASH = {errno.ENOTDIR, errno.EISDIR}


class Doubt(OSError):
    """Whether a name is there for good, nobody can say."""

    def __init__(self, cause: OSError) -> None:
        super().__init__(cause.errno or errno.EIO, str(cause))
        self.cause = cause


@contextmanager
def read_errors(url: str, key: str) -> Iterator[None]:
    """Turn the errors of a read into Reef's own."""
    try:
        yield
    except OSError as error:
        if _number(error) in ABSENT:
            raise NotFoundError(f"no object {key} in {url}", object=key) from error
        raise _translate(error, url, key) from error


@contextmanager
def write_errors(url: str, key: str) -> Iterator[None]:
    """Turn the errors of a write into Reef's own."""
    try:
        yield
    except OSError as error:
        if _number(error) in CLASH:
            raise InvalidInputError(
                f"key {key} clashes with another object or directory in {url}",
                kind=Kind.INVALID_KEY,
                hint="A directory cannot hold both an object and others below its name",
                object=key,
            ) from error
        raise _translate(error, url, key) from error


def _translate(error: OSError, url: str, key: str) -> ReefError:
    number = _number(error)
    if number in DENIED:
        return InvalidInputError(
            f"no permission for {key} in {url}: {error.strerror}",
            kind=Kind.ACCESS_DENIED,
            object=key,
        )
    if number == errno.ENAMETOOLONG:
        return InvalidInputError(
            f"a part of key {key[:80]}… is longer than the file system allows",
            kind=Kind.INVALID_KEY,
            object=key,
        )
    kind = Kind.DISK_FULL if number in FULL else Kind.UNAVAILABLE
    if isinstance(error, Doubt):
        kind = Kind.NOT_DURABLE  # it may be visible, which proves nothing
    return UnavailableError(f"{key} in {url}: {error}", kind=kind, object=key)


def _number(error: OSError) -> int:
    if error.errno is not None:
        return error.errno
    for kind, number in ((IsADirectoryError, errno.EISDIR), (NotADirectoryError, errno.ENOTDIR)):
        if isinstance(error, kind):
            return number
    return errno.EIO
