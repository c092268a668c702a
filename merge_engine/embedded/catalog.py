"""What an embedded table keeps about itself, beside its buckets' logs.

Objects in the table's storage, each created once and never changed. All of them are a line of JSON
and a line with its checksum (xxh3_64, in hexadecimal):

    table.json               {"format": 2, "table_id": "...", "buckets": 4}
    schema/<version>.json    one per schema version, 8 digits
    partition/<hash>.json    {"key": "<hex of the encoded partition columns>", "id": "..."}, named
                             by the SHA-256 of the key, so that a key has one partition at a time,
                             whoever creates it and however often; a dropped partition is deleted
                             here first, and its id is never given again. Without "format", as
                             all are so far, it is of format 1
    log/<partition id>/<bucket>/...    the segments

In a `BucketId` a partition goes by a number, as in a cluster: the last 43 bits of its id, or 0 for
the one partition, called "table", of a table without partition columns.
"""

import hashlib
import json
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import xxhash

from foundation.errors import (
    AlreadyExists,
    CorruptTable,
    InvalidInput,
    MissingObject,
    SchemaError,
    UnknownFormat,
)
from foundation.formats import Formats
from foundation.ids import BucketId
from merge_engine.encoding.stored_rows import SchemaHistory
from merge_engine.schema.schema import Schema
from merge_engine.storage.objects import ObjectStorage

UNPARTITIONED = "table"
_TABLE = "table.json"
_NUMBER_BITS = 43


class Catalog:
    """A table's identity, schemas and partitions, as stored. Not safe for concurrent use."""

    def __init__(self, storage: ObjectStorage, table_id: str, buckets: int) -> None:
        self._storage = storage
        self.table_id = table_id
        self.buckets = buckets
        self.history = self._read_history()
        self._ids: dict[int, str] = {}
        self.partitions = self._read_partitions()

    @classmethod
    def create(cls, storage: ObjectStorage, schema: Schema, buckets: int) -> "Catalog":
        """Create a table; InvalidInput if there is one already.

        The table exists when table.json does, so that comes last.
        """
        if buckets < 1:
            raise InvalidInput(f"a table needs at least one bucket, not {buckets}")
        if _TABLE in storage.names():
            raise InvalidInput(f"there is a table in {storage} already; open it instead")
        _create_or_same(storage.child("schema"), _schema_name(schema.version), schema.to_json())
        table_id = uuid.uuid4().hex
        description = {"format": FORMATS.current, "table_id": table_id, "buckets": buckets}
        try:
            storage.create(_TABLE, _checked(json.dumps(description)))
        except AlreadyExists as exc:
            raise InvalidInput(f"there is a table in {storage} already; open it instead") from exc
        return cls(storage, table_id, buckets)

    @classmethod
    def open(cls, storage: ObjectStorage) -> "Catalog":
        """Open the table that is there; InvalidInput if there is none."""
        try:
            with _said_where(storage, _TABLE):
                description = _read(storage, _TABLE)
                read = FORMATS.reader(description["format"], f"{_TABLE} in {storage}")
                table_id, buckets = read(description)
        except MissingObject as exc:
            raise InvalidInput(f"there is no table in {storage}; create one first") from exc
        return cls(storage, table_id, buckets)

    def evolve(self, schema: Schema) -> SchemaHistory:
        """Store a new schema version and return the history with it.

        After UnknownOutcome, call again: the very same version that is there already is ours, or
        as good as ours.
        """
        storage = self._storage.child("schema")
        name, document = _schema_name(schema.version), _checked(schema.to_json())
        try:
            storage.create(name, document)
        except AlreadyExists as exc:
            if storage.read(name) != document:
                raise InvalidInput(
                    f"schema version {schema.version} exists already: the table was altered "
                    "elsewhere; open it again"
                ) from exc
        return self.read_schemas()

    def read_schemas(self) -> SchemaHistory:
        """Read all schema versions again: the table may have been altered elsewhere."""
        self.history = self._read_history()
        return self.history

    def create_partition(self, key: bytes) -> int:
        """Register a partition and return its number. After UnknownOutcome, call again."""
        storage = self._storage.child("partition")
        partition_id = uuid.uuid4().hex
        while _number_of(partition_id) in {0, *self._ids}:
            partition_id = uuid.uuid4().hex
        document = _checked(json.dumps({"key": key.hex(), "id": partition_id}))
        try:
            storage.create(_partition_name(key), document)
        except AlreadyExists:  # An earlier attempt, of unknown outcome then, has succeeded.
            _, partition_id = _read_partition(storage, _partition_name(key))
        self.partitions[key] = self._number(partition_id)
        return self.partitions[key]

    def drop_partition(self, key: bytes) -> int:
        """Forget a partition; its data, by its number, is the caller's to delete."""
        self._storage.child("partition").delete([_partition_name(key)])
        return self.partitions.pop(key)

    def bucket_ids(self) -> list[BucketId]:
        """Return all buckets, by partition key and number."""
        partitions = dict(self.partitions)
        return [
            BucketId(partitions[key], number)
            for key in sorted(partitions)
            for number in range(self.buckets)
        ]

    def log_storage(self, bucket_id: BucketId) -> ObjectStorage:
        """Return where a bucket's log lives."""
        return self._storage.child(f"log/{self.path(bucket_id)}")

    def path(self, bucket_id: BucketId) -> str:
        """Return where a bucket's log is below all logs, and its view below all views."""
        return f"{self._ids[bucket_id.partition]}/{bucket_id.number}"

    def _read_history(self) -> SchemaHistory:
        storage = self._storage.child("schema")
        schemas = []
        for name in storage.names():
            with _said_where(storage, name):
                schema = Schema.from_json(_checked_text(storage.read(name)))
                if _schema_name(schema.version) != name:
                    raise ValueError(f"it is that of version {schema.version}")
            schemas.append(schema)
        if not schemas:
            raise CorruptTable(f"{storage} has no schema; restore it from a copy")
        return SchemaHistory(schemas)

    def _read_partitions(self) -> dict[bytes, int]:
        if not self.history.current.partition_by:
            return {b"": self._number(UNPARTITIONED)}
        storage = self._storage.child("partition")
        found = (_read_partition(storage, name) for name in storage.names())
        return {key: self._number(partition_id) for key, partition_id in found}

    def _number(self, partition_id: str) -> int:
        number = _number_of(partition_id)
        if self._ids.setdefault(number, partition_id) != partition_id:
            raise CorruptTable(
                f"partitions {partition_id} and {self._ids[number]} of {self._storage} have the "
                "same number; restore them from a copy"
            )
        return number


def _checked(text: str) -> bytes:
    """Return a text with its checksum in a line after it."""
    data = text.encode()
    return data + b"\n" + xxhash.xxh3_64_hexdigest(data).encode() + b"\n"


def _checked_text(data: bytes) -> str:
    """Return the text; ValueError if it is not what was written."""
    text, _, checksum = data.removesuffix(b"\n").rpartition(b"\n")
    if checksum != xxhash.xxh3_64_hexdigest(text).encode():
        raise ValueError("it does not match its checksum")
    return text.decode()


def _read(storage: ObjectStorage, name: str) -> dict[str, Any]:
    """Return a document; within `_said_where`."""
    document: dict[str, Any] = json.loads(_checked_text(storage.read(name)))
    return document


def _read_partition(storage: ObjectStorage, name: str) -> tuple[bytes, str]:
    """Return the key and the id of a partition."""
    with _said_where(storage, name):
        document = _read(storage, name)
        read = PARTITION_FORMATS.reader(document.get("format", 1), f"{name} in {storage}")
        key, partition_id = read(document)
        if _partition_name(key) != name:
            raise ValueError("it is that of another partition")
        _number_of(partition_id)
        return key, partition_id


def _read_table_2(document: Mapping[str, Any]) -> tuple[str, int]:
    """Return the table's id, and how many buckets it has."""
    return str(document["table_id"]), int(document["buckets"])


def _read_partition_1(document: Mapping[str, Any]) -> tuple[bytes, str]:
    """Return the key and the id of a partition."""
    return bytes.fromhex(document["key"]), str(document["id"])


FORMATS: Formats[Callable[[Mapping[str, Any]], tuple[str, int]]] = Formats(
    name="embedded-table", current=2, readers={2: _read_table_2}, error=UnknownFormat
)
PARTITION_FORMATS: Formats[Callable[[Mapping[str, Any]], tuple[bytes, str]]] = Formats(
    name="embedded-partition", current=1, readers={1: _read_partition_1}, error=UnknownFormat
)


@contextmanager
def _said_where(storage: ObjectStorage, name: str) -> Iterator[None]:
    """What is wrong with an object is damage, and is said together with where it is."""
    try:
        yield
    except (ValueError, KeyError, TypeError, AttributeError, SchemaError) as exc:
        what = f"it has no {exc}" if isinstance(exc, KeyError) else str(exc)
        raise CorruptTable(
            f"{name} in {storage} is damaged: {what}; restore it from a copy"
        ) from exc


def _create_or_same(storage: ObjectStorage, name: str, text: str) -> None:
    """Create, unless a creation that was killed half-way left the same."""
    try:
        storage.create(name, _checked(text))
    except AlreadyExists:
        if storage.read(name) != _checked(text):
            raise InvalidInput(
                f"{storage} holds the schema of another table that was never finished; "
                "empty it first"
            ) from None


def _number_of(partition_id: str) -> int:
    return 0 if partition_id == UNPARTITIONED else int(partition_id, 16) % (1 << _NUMBER_BITS)


def _partition_name(key: bytes) -> str:
    return f"{hashlib.sha256(key).hexdigest()}.json"


def _schema_name(version: int) -> str:
    return f"{version:08d}.json"
