"""One node of a Raft cluster whose journal is a local log; controlled by lines on stdin."""

import json
import sys

from pysyncobj import SyncObj, SyncObjConf
from pysyncobj.batteries import ReplDict

from reef.locallog.raft import journal_at


def main():
    """Respond to each line with a line."""
    directory, dump, address, *others = sys.argv[1:]
    conf = SyncObjConf(
        journalFile=journal_at(directory, segment_bytes=4096),
        fullDumpFile=dump or None,
        logCompactionMinEntries=20,
        logCompactionMinTime=3,
        raftMinTimeout=0.8,
        raftMaxTimeout=2.0,
        connectionRetryTime=0.3,
    )
    kept = ReplDict()
    SyncObj(address, others, conf, consumers=[kept])
    for line in sys.stdin:
        word, *rest = json.loads(line)
        if word == "put":
            print(json.dumps(_put(kept, *rest)), flush=True)
        else:
            print(json.dumps(dict(kept.items())), flush=True)


def _put(kept, key, value):
    try:
        kept.set(key, value, sync=True, timeout=3.0)
    except Exception as error:
        return type(error).__name__
    return True


if __name__ == "__main__":
    main()
