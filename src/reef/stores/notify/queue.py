"""News of a bucket through a queue: S3 sends its events to SQS, and this reads them (boto3).

Each process needs a queue of its own, fed by an SNS topic or by EventBridge where there are
several: a message goes to one receiver only. What is received is deleted, since it is of no use
later; what could not be deleted comes again, and rings once more. While the queue cannot be
reached, readers look at intervals; when it answers again, every bell rings.
"""

from typing import Any

from reef.errors import ReefError
from reef.runtime import REAL, Runtime
from reef.stores.notify.base import Notifier, matching, split_url
from reef.stores.notify.records import objects_of
from reef.stores.remote_options import bad_option
from reef.stores.s3_client import s3_client, translated
from reef.stores.s3_options import S3Options

__all__ = ["QueueNotifier"]

WAIT_S = 20
"""How long the service holds a request open until there is a message; its own maximum."""
MESSAGES_MAX = 10
PAUSE_S = (0.5, 30.0)


class QueueNotifier(Notifier):
    """Listens to a queue. `options` are those of `s3://` stores: region, endpoint, credentials."""

    def __init__(
        self,
        queue_url: str,
        store_url: str,
        *,
        wait_s: int = WAIT_S,
        runtime: Runtime = REAL,
        **options: Any,
    ) -> None:
        super().__init__(runtime)
        if not 1 <= wait_s <= WAIT_S:  # without waiting it would ask all the time
            raise bad_option("wait_s", wait_s, f"a number of seconds from 1 to {WAIT_S}")
        self._queue_url, self._wait_s = queue_url, wait_s
        self._key_of = matching(*split_url(store_url))
        self._options = S3Options.from_words({"timeout_s": wait_s + 10.0, **options})
        self._client = s3_client(self._options, "sqs")
        self._pause_s = 0.0
        self.failure: ReefError | None = None
        """Why the queue cannot be read at the moment, if it cannot."""

    def _listen(self) -> None:
        try:
            while not self._closed:
                self._step()
        finally:
            self._client.close()

    def _step(self) -> None:
        try:
            self._receive()
        except ReefError as error:
            self.failure = error
            self._pause_s = min(max(self._pause_s * 2, PAUSE_S[0]), PAUSE_S[1])
            self.runtime.sleep(self._pause_s)
            return
        if self.failure is not None:
            self.failure, self._pause_s = None, 0.0
            self.notify_all()  # what came meanwhile may have been read by nobody

    def _receive(self) -> None:
        with translated(self._queue_url):
            answer = self._client.receive_message(
                QueueUrl=self._queue_url,
                MaxNumberOfMessages=MESSAGES_MAX,
                WaitTimeSeconds=self._wait_s,
            )
        messages = answer.get("Messages", [])
        for message in messages:
            self._take(message["Body"])
        if messages:
            with translated(self._queue_url):
                self._client.delete_message_batch(
                    QueueUrl=self._queue_url,
                    Entries=[
                        {"Id": str(number), "ReceiptHandle": message["ReceiptHandle"]}
                        for number, message in enumerate(messages)
                    ],
                )

    def _take(self, body: str) -> None:
        told = objects_of(body)
        if told is None:
            self.notify_all()
            return
        keys = (self._key_of(bucket, name) for bucket, name in told)
        self.notify(key for key in keys if key is not None)

    def _hears(self) -> bool:
        return self.failure is None

    def _stop(self) -> None:
        """The request that is open ends by itself, within `wait_s`."""
        if self._listener is None:
            self._client.close()
