"""What an `OSError` of the directory store means to its caller.

Reading and writing differ in one word: "no such file" is an answer to a read, and to a
write a sign that the ground was moved from under it.
"""

import errno

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


class read_errors:  # noqa: N801 - used like a function; a generator would cost each call more
    """Turn the errors of a read into Reef's own."""

    __slots__ = ("_key", "_url")

    def __init__(self, url: str, key: str) -> None:
        self._url, self._key = url, key

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, OSError):
            raise self._told(error) from error

    def _told(self, error: OSError) -> ReefError:
        if _number(error) in ABSENT:
            return NotFoundError(f"no object {self._key} in {self._url}", object=self._key)
        return _translate(error, self._url, self._key)


class write_errors(read_errors):  # noqa: N801 - as above
    """Turn the errors of a write into Reef's own."""

    __slots__ = ()

    def _told(self, error: OSError) -> ReefError:
        if _number(error) in CLASH:
            return InvalidInputError(
                f"key {self._key} clashes with another object or directory in {self._url}",
                kind=Kind.INVALID_KEY,
                hint="A directory cannot hold both an object and others below its name",
                object=self._key,
            )
        return _translate(error, self._url, self._key)


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
