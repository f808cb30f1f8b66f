"""Beginning anew: a state in the place of a history that can no longer be read.

For what can be made again from elsewhere, as the registry of a bucket can. Nothing is repaired,
and nothing is deleted here:

1. Read the head, damaged or not; only then ask for the new state, so that it is not older.
2. Write it as a checkpoint, of a number behind those of all objects there are, and of the head.
3. Swap the head for one that has nothing but this checkpoint. Lost: from step 1.
4. Swap the plan, damaged or not, for an empty one that gives up all states before it.

The head is swapped like any other, so that whoever read the old one loses; its sessions find that
their base is not in the new history. A late write from before has a lower number and fits nowhere.
What is left of the old history lies below the new checkpoint, and is collected in its time.
"""

from collections.abc import Callable, Mapping

from reef.catalog.checkpoint_format import CheckpointMeta, pair_hash
from reef.catalog.head import Head, decode_head
from reef.catalog.parts import Parts
from reef.catalog.register import Swap, Version
from reef.errors import ConflictError, CorruptionError
from reef.stores.wrappers.retry import Backoff

__all__ = ["begin_anew"]


def begin_anew(parts: Parts, make: Callable[[], Mapping[bytes, bytes]]) -> None:
    """Replace everything; ConflictError if others change the head again and again."""
    backoff = Backoff(parts.runtime, parts.backoff)
    while True:
        version = parts.heads.version()
        head = _first_head(parts, make(), _number_behind(parts, version))
        parts.runtime.reach("catalog begun anew")
        if parts.heads.replace(version, head) is Swap.LANDED or _is_there(parts, head):
            break
        if not backoff.wait():
            raise ConflictError(
                f"the head of the catalog was changed by others {backoff.attempts} times in a row",
                hint="Try again when less is going on",
                attempts=backoff.attempts,
            )
    parts.plans.give_up(head.last_segment_seq)


def _first_head(parts: Parts, state: Mapping[bytes, bytes], seq: int) -> Head:
    """Step 2. A head has had at most one checkpoint for each segment, so that none has had more
    revisions than twice their number.
    """
    pairs, write_id = sorted(state.items()), parts.runtime.ulid()
    meta = CheckpointMeta(
        id=f"{seq:020}-{parts.runtime.ulid()}",
        txn_id=seq,
        last_segment_seq_at_ckpt=seq,
        write_id=write_id,
        created_at_ms=int(parts.runtime.wall_s() * 1000),
        key_count=len(pairs),
        byte_size=sum(len(key) + len(value) for key, value in pairs),
        set_hash=str(pair_hash(pairs)),
    )
    return Head(
        revision=2 * seq,
        last_segment_seq=seq,
        last_txn_id=seq,
        write_id=write_id,
        recent=(write_id,),
        checkpoint=parts.checkpoints.write(meta, pairs),
        nonce=parts.heads.nonce(),
    )


def _number_behind(parts: Parts, version: Version) -> int:
    head = _decoded(version)
    return max(parts.newest_number(), head.last_segment_seq if head else 0) + 1


def _is_there(parts: Parts, wanted: Head) -> bool:
    """Whether a swap without an answer has landed; others may have committed on top."""
    head = _decoded(parts.heads.version())
    return head is not None and wanted.write_id in head.recent


def _decoded(version: Version) -> Head | None:
    try:
        return None if version.body is None else decode_head(version.body, version.name)
    except CorruptionError:
        return None
