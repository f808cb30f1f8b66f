"""The engine between a client and the bucket: commit, fence, recover, read."""
