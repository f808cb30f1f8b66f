"""What became of a write: looked up in the log, by the same rules that everyone reads it by.

committed   the object stands in its slot and counts, or its key is in the window
rejected    the slot holds something else, or the object is void, or another object has
            committed its key
unknown     the slot is still open, or was collected: it may land, or may have counted
"""

from dataclasses import dataclass
from typing import Literal

from reef.engine.log import Log
from reef.engine.log_rules import LogReader, Verdict, contiguous
from reef.errors import InvalidInputError, OutcomeUnknownError
from reef.formats.manifest import Manifest
from reef.formats.wal_object import WalHeader
from reef.manifest.dedup import DedupWindow
from reef.manifest.head import HeadFinder
from reef.types import Receipt

__all__ = ["Outcomes"]

Answer = Literal["committed", "rejected", "unknown"]
LOOKS_MAX = 10
"""How often the log is read again, where that took longer than half a grace period."""


@dataclass(frozen=True, slots=True)
class Outcomes:
    """Resolves receipts and idempotency keys of one namespace."""

    log: Log
    heads: HeadFinder

    def resolve(self, what: OutcomeUnknownError | Receipt | str) -> Answer:
        """Return what became of a write."""
        if isinstance(what, OutcomeUnknownError):
            what = what.receipt
        if not isinstance(what, Receipt | str):
            raise InvalidInputError(
                f"resolve() takes an error, a receipt or an idempotency key, "
                f"got {type(what).__name__}"
            )
        for _ in range(LOOKS_MAX):
            self.heads.forget()
            head = self.heads.find()
            answer = self._resolve(what, head.manifest)
            if head.fresh():  # else a slot may have been collected and filled again (H67)
                return answer
        return "unknown"

    def _resolve(self, what: Receipt | str, manifest: Manifest) -> Answer:
        key = what if isinstance(what, str) else what.idempotency_key
        window = DedupWindow.of(manifest)
        entry = window.get(key) if key is not None else None
        if entry is not None:
            if isinstance(what, str) or entry.write_id == what.write_id:
                return "committed"
            # A key counts once while it is in the window: this object never did, nor ever will.
            if window.reaches_back_to(what.lsn or 0):
                return "rejected"
        found = self._verdicts(manifest)
        if isinstance(what, str):
            return "committed" if what in found.keys else "unknown"
        return self._of_receipt(what, manifest, found)

    def _of_receipt(self, receipt: Receipt, manifest: Manifest, found: "_Found") -> Answer:
        lsn = receipt.lsn or 0
        if lsn < manifest.wal_floor:
            return "unknown"
        if lsn not in found.verdicts:
            return "unknown"
        write_id, verdict = found.verdicts[lsn]
        if write_id != receipt.write_id:
            return "rejected"
        return "committed" if verdict is Verdict.APPLIES else "rejected"

    def _verdicts(self, manifest: Manifest) -> "_Found":
        rules = LogReader(manifest)
        listed = [slot.lsn for slot in self.log.filled(manifest.wal_floor)]
        found = _Found({}, set())
        lsns = contiguous([*listed, *manifest.skipped_lsns], manifest.wal_floor)
        for lsn in lsns:
            if lsn in manifest.skipped_lsns:
                rules.skip()
                continue
            read = self.log.read(lsn)
            if read is None:
                break
            verdict = rules.judge(read.header).verdict
            found.verdicts[lsn] = (read.header.write_id, verdict)
            if verdict is Verdict.APPLIES:
                found.keys.update(_keys_of(read.header))
        return found


def _keys_of(header: WalHeader) -> set[str]:
    """Return the idempotency keys that an object commits: its batches', or its ingest's."""
    keys = [batch.key for batch in header.batches]
    if header.job is not None:
        keys.append(header.job.key)
    return {key for key in keys if key is not None}


@dataclass(frozen=True, slots=True)
class _Found:
    verdicts: dict[int, tuple[str, Verdict]]
    keys: set[str]
