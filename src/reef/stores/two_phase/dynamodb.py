"""A register in a DynamoDB table, through boto3.

The table's partition key is the scope and its sort key the destination, so that a bucket's records
are read in order, by consistent queries. It is created, billed by request, if it does not exist. An
insert is a put with the condition that there is no such item; the client's own retries may make
that fail on our own item, which reading it shows.

A backup is always restored to a new table. So the incarnation's item names the table that it was
generated in, and the first process that finds another one generates a new id (H72). Conditions on
two items would need a transaction for each commit: here the incarnation is read after it instead.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields
from typing import Any

import boto3
from botocore.config import Config
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    NoCredentialsError,
    NoRegionError,
    PartialCredentialsError,
)

from reef.errors import ErrorKind, InvalidInputError, ReefError, UnavailableError
from reef.runtime import REAL
from reef.stores.two_phase.register import (
    INCARNATION,
    PAGE,
    RESERVED,
    DatabaseRegister,
    Holding,
    Record,
)

IDENTITY = {"scope": {"S": RESERVED}, "destination": {"S": "id"}}
INCARNATION_KEY = {"scope": {"S": RESERVED}, "destination": {"S": INCARNATION}}
GETS_AT_ONCE = 100
TIMEOUT_S = 30
TAKEN = "ConditionalCheckFailedException"
REFUSALS = (
    "AccessDeniedException",
    "UnrecognizedClientException",
    "InvalidSignatureException",
    "ValidationException",
)


@dataclass(frozen=True, slots=True)
class DynamoOptions:
    """Location and credentials; the usual `AWS_…` variables are the defaults."""

    region: str | None = None
    endpoint: str | None = None
    access_key_id: str | None = None
    secret_access_key: str | None = field(default=None, repr=False)
    session_token: str | None = field(default=None, repr=False)

    def client(self) -> Any:
        config = Config(
            connect_timeout=TIMEOUT_S,
            read_timeout=TIMEOUT_S,
            retries={"mode": "standard", "total_max_attempts": 3},
        )
        return boto3.Session().client(
            "dynamodb",
            region_name=self.region or os.environ.get("AWS_REGION"),  # boto3 knows another name
            endpoint_url=self.endpoint,
            aws_access_key_id=self.access_key_id,
            aws_secret_access_key=self.secret_access_key,
            aws_session_token=self.session_token,
            config=config,
        )


class DynamoRegister(DatabaseRegister):
    """Records of one bucket in a table."""

    kind = "dynamodb"

    def __init__(self, table: str, options: DynamoOptions, scope: str) -> None:
        super().__init__(table, options, scope)
        self.table, self.options = table, options
        self._client: Any = None
        self._made = False

    @classmethod
    def of(cls, table: str, words: dict[str, str], scope: str) -> "DynamoRegister":
        """Return the register of a URL's parts."""
        known = [one.name for one in fields(DynamoOptions)]
        for name in words:
            if name not in known:
                raise InvalidInputError(
                    f"a register of dynamodb:// has no option {name!r}",
                    kind=ErrorKind.INVALID_OPTION,
                    hint=f"It takes: {', '.join([*known, 'scope'])}",
                )
        if not table or "/" in table or "@" in table:
            raise InvalidInputError(
                "option 'cas' names no table",
                kind=ErrorKind.INVALID_OPTION,
                hint="Write dynamodb://table?region=eu-west-1",
            )
        return cls(table, DynamoOptions(**words), scope)

    def _identity(self) -> str:
        with self._session() as client:
            found = client.get_item(TableName=self.table, Key=IDENTITY, ConsistentRead=True)
        return str(found["Item"]["id"]["S"])

    def _make(self, client: Any) -> None:
        """Create the table and its id, unless they exist; several processes may do so at once."""
        try:
            client.describe_table(TableName=self.table)
        except client.exceptions.ResourceNotFoundException:
            keys = (("scope", "HASH"), ("destination", "RANGE"))
            # Another process may make it at the same time.
            with suppress(client.exceptions.ResourceInUseException):
                client.create_table(
                    TableName=self.table,
                    KeySchema=[{"AttributeName": name, "KeyType": kind} for name, kind in keys],
                    AttributeDefinitions=[
                        {"AttributeName": name, "AttributeType": "S"} for name, _ in keys
                    ],
                    BillingMode="PAY_PER_REQUEST",
                )
        client.get_waiter("table_exists").wait(
            TableName=self.table, WaiterConfig={"Delay": 1, "MaxAttempts": 60}
        )
        self._put(client, {**IDENTITY, "id": {"S": REAL.ulid()}})
        self._generate_id(client, "attribute_not_exists(destination) OR #drawn_in <> :drawn_in")
        self._made = True  # not before: a register without an id is made again by the next call

    def _generate_id(self, client: Any, condition: str | None) -> None:
        table_id = client.describe_table(TableName=self.table)["Table"].get("TableId", "")
        request: dict[str, Any] = {
            "TableName": self.table,
            "Key": INCARNATION_KEY,
            "UpdateExpression": "SET #id = :id, #drawn_in = :drawn_in",
            "ExpressionAttributeNames": {"#id": "id", "#drawn_in": "drawn_in"},
            "ExpressionAttributeValues": {":id": {"S": REAL.ulid()}, ":drawn_in": {"S": table_id}},
        }
        if condition is not None:
            request["ConditionExpression"] = condition
        _holds(lambda: client.update_item(**request))

    def begin_incarnation(self) -> str:
        with self._session() as client:
            self._generate_id(client, None)
        return self.incarnation()

    def incarnation(self) -> str:
        return self.holding(INCARNATION).incarnation

    def holding(self, destination: str) -> Holding:
        keys = [self._key(destination), INCARNATION_KEY]
        items = self._items({self.table: {"Keys": keys, "ConsistentRead": True}})
        found = next((_record(item) for item in items if "source" in item), None)
        shown = next((item["id"]["S"] for item in items if "source" not in item), "")
        return Holding(found, shown)

    def insert(self, record: Record) -> bool:
        item = {
            **self._key(record.destination),
            "source": {"S": record.source},
            "checksum": {"S": record.checksum},
            "committed": {"BOOL": False},
        }
        with self._session() as client:
            return self._put(client, item)

    def _put(self, client: Any, item: dict[str, Any]) -> bool:
        return _holds(
            lambda: client.put_item(
                TableName=self.table,
                Item=item,
                ConditionExpression="attribute_not_exists(destination)",
            )
        )

    def read(self, destinations: Sequence[str]) -> list[Record]:
        found: list[Record] = []
        for at in range(0, len(destinations), GETS_AT_ONCE):
            keys = [self._key(name) for name in dict.fromkeys(destinations[at : at + GETS_AT_ONCE])]
            items = self._items({self.table: {"Keys": keys, "ConsistentRead": True}})
            found += map(_record, items)
        return found

    def _items(self, pending: dict[str, Any]) -> list[dict[str, Any]]:
        """Request unprocessed keys again while their number shrinks; then it is throttled."""
        found: list[dict[str, Any]] = []
        while pending:
            with self._session() as client:
                response = client.batch_get_item(RequestItems=pending)
            found += response["Responses"].get(self.table, [])
            left = response.get("UnprocessedKeys") or {}
            if _keys_in(left) >= _keys_in(pending):
                raise UnavailableError(f"{self!r} throttles reads", kind=ErrorKind.THROTTLED)
            pending = left
        return found

    def commit(self, record: Record) -> None:
        with self._session() as client:
            _holds(
                lambda: client.update_item(
                    TableName=self.table,
                    Key=self._key(record.destination),
                    UpdateExpression="SET committed = :yes",
                    **_if_source(record, {":yes": {"BOOL": True}}),
                )
            )

    def delete(self, records: Sequence[Record]) -> None:
        for record in records:
            with self._session() as client:
                _holds(
                    lambda record=record: client.delete_item(
                        TableName=self.table,
                        Key=self._key(record.destination),
                        **_if_source(record, {}),
                    )
                )

    def page(self, prefix: str, start_after: str, *, unfinished: bool) -> list[Record]:
        """Read pages of the table until one has a record that matches."""
        start = self._key(max(start_after, prefix)) if start_after else None
        found: list[Record] = []
        while True:
            with self._session() as client:
                response = client.query(**self._query(prefix, start, unfinished=unfinished))
            found += map(_record, response["Items"])
            start = response.get("LastEvaluatedKey")
            if found or start is None:
                return found

    def _query(
        self, prefix: str, start: dict[str, Any] | None, *, unfinished: bool
    ) -> dict[str, Any]:
        values: dict[str, Any] = {":scope": {"S": self.scope}}
        condition = "#scope = :scope"
        if prefix:
            values[":prefix"] = {"S": prefix}
            condition += " AND begins_with(destination, :prefix)"
        query: dict[str, Any] = {
            "TableName": self.table,
            "ConsistentRead": True,
            "KeyConditionExpression": condition,
            "ExpressionAttributeNames": {"#scope": "scope"},
            "ExpressionAttributeValues": values,
        }
        if unfinished:  # few of many: Limit bounds the records that are read, not those that match
            values[":no"] = {"BOOL": False}
            query["FilterExpression"] = "committed = :no"
        else:
            query["Limit"] = PAGE
        return query | ({"ExclusiveStartKey": start} if start else {})

    def _key(self, destination: str) -> dict[str, Any]:
        return {"scope": {"S": self.scope}, "destination": {"S": destination}}

    # --- the client ---------------------------------------------------------------
    @contextmanager
    def _session(self) -> Iterator[Any]:
        try:
            client = self._connect()
            if not self._made:
                self._make(client)
            yield client
        except (BotoCoreError, ClientError) as error:
            raise self._translate_error(error) from error

    def _translate_error(self, error: Exception) -> ReefError:
        # An error of the connection has a response, too: None.
        code = (getattr(error, "response", None) or {}).get("Error", {}).get("Code", "")
        missing = (NoCredentialsError, NoRegionError, PartialCredentialsError)
        if code in REFUSALS or isinstance(error, missing):
            return InvalidInputError(f"{self!r} refuses: {error}", kind=ErrorKind.REFUSED_BY_STORE)
        return UnavailableError(f"{self!r} cannot be used: {error}")

    def _connect(self) -> Any:
        process_id = REAL.process_id()
        with self._lock:
            if self._client is None or self._process_id != process_id:
                self._client, self._process_id = self.options.client(), process_id
            return self._client

    def __repr__(self) -> str:
        return f"<DynamoRegister {self.table}>"


def _holds(call: Any) -> bool:
    """Send a conditional request; False if the condition did not hold."""
    try:
        call()
    except ClientError as error:
        if error.response["Error"]["Code"] != TAKEN:
            raise
        return False
    return True


def _keys_in(request: dict[str, Any]) -> int:
    return sum(len(table["Keys"]) for table in request.values())


def _if_source(record: Record, values: dict[str, Any]) -> dict[str, Any]:
    """The condition that the item is still this record."""
    return {
        "ConditionExpression": "#source = :source",
        "ExpressionAttributeNames": {"#source": "source"},
        "ExpressionAttributeValues": {":source": {"S": record.source}, **values},
    }


def _record(item: dict[str, Any]) -> Record:
    return Record(
        item["destination"]["S"],
        item["source"]["S"],
        item["checksum"]["S"],
        committed=item["committed"]["BOOL"],
    )
