"""Commit, fence, recover, read: what happens between a client and the bucket."""
