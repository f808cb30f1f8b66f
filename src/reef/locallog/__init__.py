"""A crash-safe local log, byte-compatible with the Go library `hashicorp/raft-wal`.

`LocalLog` is all of it for users: numbered entries that survive a power failure once they are
acknowledged, in a directory that either library opens. `docs/guide/local-log.md` shows how;
`docs/format/local-log.md` states the bytes.
"""

from reef.locallog.encoding import (
    CUSTOM_CODEC_MIN,
    BinaryCodec,
    EntryCodec,
    EntryTime,
    EntryType,
    LogEntry,
)
from reef.locallog.log import LocalLog
from reef.locallog.recovery import LogRecoveryReport

__all__ = [
    "CUSTOM_CODEC_MIN",
    "BinaryCodec",
    "EntryCodec",
    "EntryTime",
    "EntryType",
    "LocalLog",
    "LogEntry",
    "LogRecoveryReport",
]
