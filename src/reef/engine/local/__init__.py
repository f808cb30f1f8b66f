"""A local log in front of the bucket: a write is acknowledged after one sync of one disk.

    caller ──▶ front ──▶ local log ──▶ overlay, receipt        what a put waits for
                  │
                  └──▶ uploader ──▶ committer ──▶ bucket        in the background, in order

`entries` says what a batch looks like in the local log, `identity` whose log it is, `front` keeps
the books of what is on this disk only, `uploader` brings it to the bucket, `opening` takes up what
a crash has left, `writer` is the face. Every upload carries the log's id and the last index in it
(`reef.manifest.streams`), so that nothing is applied twice, whatever died and whenever.
"""
