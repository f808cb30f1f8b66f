"""Small values that many layers share."""

from dataclasses import dataclass

from reef.errors import ErrorKind, InvalidInputError


@dataclass(frozen=True, slots=True)
class Receipt:
    """The result of a commit: the position of a batch in the log."""

    namespace: str
    lsn: int | None
    """None while the outcome is unknown."""
    index: int
    """The batch's place in its group."""
    epoch: int
    write_id: str
    ops: int
    replayed: bool = False
    """Whether the idempotency key was committed before, and nothing was written now."""
    idempotency_key: str | None = None

    def wait(self, timeout_s: float | None = None) -> int:
        """Return the LSN when the batch is in the bucket: here, at once.

        With `durability="local"` it may take until the upload, at most `timeout_s`.
        """
        if self.lsn is None:
            raise InvalidInputError(
                f"it is unknown whether this batch was committed to {self.namespace}",
                hint="Resolve it with a writer: writer.resolve(receipt)",
            )
        return self.lsn


@dataclass(frozen=True, slots=True)
class KeyRange:
    """[start, end); no end means to the last key."""

    start: bytes = b""
    end: bytes | None = None

    @classmethod
    def of(
        cls,
        start: bytes | str | None,
        end: bytes | str | None,
        prefix: bytes | str | None = None,
    ) -> "KeyRange":
        """Return the range of a scan's arguments; text is UTF-8."""
        first, last, begins = (_bound(bound) for bound in (start, end, prefix))
        bounds = cls(first or b"", last)
        return bounds.both(cls.of_prefix(begins)) if begins else bounds

    @classmethod
    def of_prefix(cls, prefix: bytes) -> "KeyRange":
        """Return the range of all keys that begin with `prefix`."""
        bare = prefix.rstrip(b"\xff")
        end = bare[:-1] + bytes([bare[-1] + 1]) if bare else None
        return cls(prefix, end)

    def both(self, other: "KeyRange") -> "KeyRange":
        """Return the intersection of both ranges."""
        ends = [end for end in (self.end, other.end) if end is not None]
        return KeyRange(max(self.start, other.start), min(ends, default=None))

    def has(self, key: bytes) -> bool:
        return key >= self.start and (self.end is None or key < self.end)

    def overlaps(self, other: "KeyRange") -> bool:
        """Whether some key may be in both."""
        both = self.both(other)
        return both.end is None or both.start < both.end

    def touches(self, low: bytes, high: bytes) -> bool:
        """Whether some key from `low` to `high`, both included, may be in the range."""
        return high >= self.start and (self.end is None or low < self.end)


def _bound(bound: bytes | str | None) -> bytes | None:
    if isinstance(bound, str):
        try:
            return bound.encode()
        except UnicodeEncodeError as error:
            raise InvalidInputError(
                f"the bound of a range is not text: {error}", kind=ErrorKind.INVALID_KEY
            ) from error
    if bound is not None and not isinstance(bound, bytes):
        raise InvalidInputError(
            f"the bound of a range is bytes or text, got {type(bound).__name__}",
            kind=ErrorKind.INVALID_KEY,
        )
    return bound
