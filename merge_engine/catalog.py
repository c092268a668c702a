"""What an embedded table keeps about itself, beside its buckets' logs.

Objects in the table's storage, each created once and never changed. All of them are a line of JSON
and a line with its checksum (xxh3_64, in hexadecimal):

    table.json               {"format": 2, "table_id": "...", "buckets": 4}
    schema/<version>.json    one per schema version, 8 digits
    partition/<hash>.json    {"key": "<hex of the encoded partition columns>", "id": "..."}, named
                             by the SHA-256 of the key, so that a key has one partition at a time,
                             whoever creates it and however often; a dropped partition is deleted
                             here first, and its id is never given again
    log/<partition id>/<bucket>/...    the segments
"""

import hashlib
import json
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import xxhash

from merge_engine.errors import CorruptTable, InvalidInput, SchemaError, UnknownFormat
from merge_engine.schema import Schema
from merge_engine.storage import AlreadyExists, MissingObject, ObjectStorage
from merge_engine.stored import SchemaHistory

FORMAT = 2
UNPARTITIONED = "table"
_TABLE = "table.json"


class BucketId(NamedTuple):
    """A bucket of a table: the id of its partition, and its number."""

    partition: str
    number: int


class Catalog:
    """A table's identity, schemas and partitions, as stored. Not safe for concurrent use."""

    def __init__(self, storage: ObjectStorage, table_id: str, buckets: int) -> None:
        self._storage = storage
        self.table_id = table_id
        self.buckets = buckets
        self.history = self._read_history()
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
        description = {"format": FORMAT, "table_id": table_id, "buckets": buckets}
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
                if description["format"] != FORMAT:
                    raise UnknownFormat(
                        f"{_TABLE} in {storage} has format {description['format']}, this release "
                        f"reads {FORMAT}; it was written by another release"
                    )
                table_id, buckets = str(description["table_id"]), int(description["buckets"])
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

    def create_partition(self, key: bytes) -> str:
        """Register a partition and return its id. After UnknownOutcome, call again."""
        storage = self._storage.child("partition")
        partition_id = uuid.uuid4().hex
        document = _checked(json.dumps({"key": key.hex(), "id": partition_id}))
        try:
            storage.create(_partition_name(key), document)
        except AlreadyExists:  # An earlier attempt, of unknown outcome then, has succeeded.
            _, partition_id = _read_partition(storage, _partition_name(key))
        self.partitions[key] = partition_id
        return partition_id

    def drop_partition(self, key: bytes) -> str:
        """Forget a partition; its data is the caller's to delete."""
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
        return self._storage.child(f"log/{bucket_id.partition}/{bucket_id.number}")

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

    def _read_partitions(self) -> dict[bytes, str]:
        if not self.history.current.partition_by:
            return {b"": UNPARTITIONED}
        storage = self._storage.child("partition")
        return dict(_read_partition(storage, name) for name in storage.names())


def _checked(text: str) -> bytes:
    """Return a text with its checksum in a line behind it."""
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
        key = bytes.fromhex(document["key"])
        if _partition_name(key) != name:
            raise ValueError("it is that of another partition")
        return key, str(document["id"])


@contextmanager
def _said_where(storage: ObjectStorage, name: str) -> Iterator[None]:
    """What is wrong with an object is damage, and is said together with where it is."""
    try:
        yield
    except (ValueError, KeyError, TypeError, SchemaError) as exc:
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


def _partition_name(key: bytes) -> str:
    return f"{hashlib.sha256(key).hexdigest()}.json"


def _schema_name(version: int) -> str:
    return f"{version:08d}.json"
