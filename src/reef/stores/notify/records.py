"""What an event says: which objects of which bucket.

S3's own form is a JSON object with `Records`; Ceph's is the same. It may come in an envelope of
SNS, whose `Message` is that JSON as text, or as EventBridge's form, with one `detail`. Names are
URL-encoded in some and not in others, so both readings are given: one of them is right, and an
event too many costs nothing.
"""

import json
from typing import Any
from urllib.parse import unquote_plus

__all__ = ["objects_of"]

DEPTH_MAX = 3


def objects_of(body: str | bytes) -> list[tuple[str, str]] | None:
    """Return (bucket, name) of each object told of; None if it cannot be read.

    >>> objects_of('{"Records": [{"s3": {"bucket": {"name": "b"}, "object": {"key": "a%2Fb"}}}]}')
    [('b', 'a%2Fb'), ('b', 'a/b')]
    """
    try:
        return _objects(json.loads(body), DEPTH_MAX)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def _objects(told: Any, depth: int) -> list[tuple[str, str]]:
    if "Records" in told:
        return [pair for record in told["Records"] for pair in _named(record["s3"])]
    if "detail" in told:
        return _named(told["detail"])
    if told.get("Event") == "s3:TestEvent":
        return []
    if "Message" in told and depth:
        return _objects(json.loads(told["Message"]), depth - 1)
    raise ValueError("no event that is known")


def _named(place: Any) -> list[tuple[str, str]]:
    bucket, name = str(place["bucket"]["name"]), str(place["object"]["key"])
    decoded = unquote_plus(name)
    return [(bucket, name)] if decoded == name else [(bucket, name), (bucket, decoded)]
