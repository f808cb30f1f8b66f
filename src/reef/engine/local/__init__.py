"""A local log before the bucket: a write is acknowledged after one sync of one disk.

    caller ──▶ buffer ──▶ local log ──▶ overlay, receipt       the path of a put
                  │
                  └──▶ uploader ──▶ committer ──▶ bucket       in the background, in order

`stream` has the format of a local log's entries, its identity, its position in the bucket, and the
errors; `buffer` keeps the batches that are on this disk only; `uploader` commits them to the
bucket; `open` recovers them after a crash; `reef.engine.handles.local_writer` is the public handle.
Every upload carries the log's id and the last index in it (`reef.manifest.dedup`), so that no entry
is applied twice, whichever process crashed, and when (protocols §11).
"""
