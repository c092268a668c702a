"""The redo log: promised batches, which will be applied, whoever has to do it.

A promise is kept under any later schema: it has folded states, which need no other column of the
input, and all columns go by their ids. It names the ids of its partitions: what is dropped stays
dropped. One object per promise, below the table's uid:

    <uid>/<hash of the owner>-<epoch>-<batch>.redo

An Arrow IPC stream whose schema carries, under `tallybook`, how to read it, and behind the stream
its checksum (xxh3_64, 8 bytes). A lock record has the whole location, storage included, so that
whoever has to keep the promise finds it.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash

from merge_engine import (
    AggMode,
    CorruptSegment,
    InvalidInput,
    ObjectStorage,
    Schema,
    StorageUnavailable,
    Token,
    UnknownSchema,
    open_storage,
)
from merge_engine.batch import read_keys
from merge_engine.local import fold_locally
from merge_engine.routing import route
from merge_engine.storage import AlreadyExists, MissingObject, local_directory
from merge_engine.table import as_arrow
from recovery.access import Rows

FORMAT = 2
SUFFIX = ".redo"
_EPOCH_AND_BATCH = re.compile(r"(\d+)-\d+" + re.escape(SUFFIX))
_KEY = b"tallybook"
_OPERATION = "operation"
_CHECKSUM_BYTES = 8


@dataclass(frozen=True, kw_only=True)
class Promise:
    """A folded batch: keys and states under their column ids, as text, and the operation if any.

    `partitions` are the ids of the partitions that the rows are for, by partition key.
    """

    schema_version: int
    mode: AggMode
    partitions: Mapping[bytes, int]
    columns: tuple[int, ...]
    data: pa.Table

    @classmethod
    def of(cls, rows: Rows, schema: Schema, partitions: Mapping[bytes, int]) -> "Promise":
        """Fold the rows, whose names are those of the schema."""
        data = as_arrow(rows.data, schema)
        if data.num_rows == 0:
            return cls(
                schema_version=schema.version,
                mode=rows.mode,
                partitions={},
                columns=(),
                data=pa.table({}),
            )
        folded = fold_locally(
            data,
            schema,
            columns=rows.columns,
            operation_column=rows.operation_column,
            mode=rows.mode,
        )
        ids = {column.name: str(column.id) for column in schema.columns}
        if folded.operation_column is not None:
            ids[folded.operation_column] = _OPERATION
        needed = {target.partition_key for target in _routes(folded.data, schema)}
        return cls(
            schema_version=schema.version,
            mode=rows.mode if rows.mode is AggMode.REPLACE else AggMode.MERGE_STATE,
            partitions={key: number for key, number in partitions.items() if key in needed},
            columns=tuple(schema.column(name).id for name in folded.columns),
            data=folded.data.rename_columns([ids[name] for name in folded.data.column_names]),
        )

    def rows(self, schema: Schema, partitions: Mapping[bytes, int]) -> Rows | None:
        """Return what is left of the batch to be put: None if nothing is.

        `schema` is the table's, no older than the promise; `partitions` are those that there are. A
        column that the schema does not have was dropped, and so was a partition whose key has no
        id, or another one, by now.
        """
        if schema.version < self.schema_version:
            raise UnknownSchema(
                f"a batch was promised under schema version {self.schema_version}, and only "
                f"{schema.version} is known here; read the table's definition again",
                self.schema_version,
            )
        names = {str(column.id): column.name for column in schema.columns}
        columns = [names[str(number)] for number in self.columns if str(number) in names]
        if not columns:
            return None
        kept = [name for name in self.data.column_names if name in (*names, _OPERATION)]
        operation = "_operation" if _OPERATION in kept else None
        data = self.data.select(kept)
        data = data.rename_columns([names.get(name, "_operation") for name in kept])
        there = [
            target.positions
            for target in _routes(data, schema)
            if _is_same(self.partitions, partitions, target.partition_key)
        ]
        if not there:
            return None
        data = data.take(pa.array(np.sort(np.concatenate(there))))
        return Rows(
            data=data, columns=columns, mode=self.mode, operation_column=operation, schema=schema
        )


class RedoLog:
    """Keeps promises from `prepare` to `commit`, in a storage that outlives the writer."""

    def __init__(
        self,
        storage: ObjectStorage,
        location: str = "",
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        """`location`: where others find the storage; without one, only who has this log does.

        `settings`: what the object store was opened with.
        """
        self._storage = storage
        self._settings = dict(settings or {})
        self.location = location

    @classmethod
    def open(cls, location: str, **settings: Any) -> "RedoLog":
        """Open the redo log at a directory, or at a URL such as `s3://bucket/redo`.

        `settings` go to the object store.
        """
        directory = local_directory(location)
        whole = location.rstrip("/") if directory is None else str(directory.resolve())
        return cls(open_storage(whole, **settings), whole, settings)

    @classmethod
    def holding(cls, location: str, own: "RedoLog | None") -> "RedoLog":
        """Return the log that has a promise: one's own, or the one that its location names.

        A record has no settings of object stores, which may be secret: those of one's own are tried
        there, too.
        """
        base = location.rsplit("/", 2)[0] if location.count("/") > 1 else ""
        if own is not None and own.location == base:
            return own
        if not base:
            raise InvalidInput(
                f"a promised batch lies at {location}, in a redo log that only its writer knows: "
                "it has to be rolled forward by a writer with that redo log"
            )
        is_remote = local_directory(base) is None
        return cls.open(base, **(own._settings if own is not None and is_remote else {}))

    def write(self, table: str, owner: str, token: Token, promise: Promise) -> str:
        """Store a promise of a table, by its uid, durable on return; return its location."""
        name = f"{_prefix(owner)}{token.epoch}-{token.batch}{SUFFIX}"
        storage, data = self._storage.child(table), _encode(promise)
        try:
            storage.create(name, data)
        except AlreadyExists as exc:
            # Our own, sent twice underneath us: the epoch is ours. Anything else is no promise.
            if storage.read(name) != data:
                raise CorruptSegment(
                    f"{name} in {storage} holds another batch than the one that is promised: was "
                    "ZooKeeper set back to an earlier state? Move the object away"
                ) from exc
        return f"{self.location}/{table}/{name}"

    def read(self, location: str) -> Promise:
        """Return a promise; CorruptSegment if it is damaged or gone."""
        storage, name = self._find(location)
        try:
            return _decode(storage.read(name))
        except MissingObject as exc:
            raise CorruptSegment(
                f"{name} is missing from {storage}: a batch was promised and cannot be rolled "
                "forward; restore the object, or start on a machine that has this place"
            ) from exc
        except (pa.ArrowException, ValueError, KeyError, TypeError, AttributeError) as exc:
            raise CorruptSegment(f"{name} in {storage} is damaged: {exc}") from exc

    def delete(self, locations: Sequence[str]) -> None:
        """Drop promises that are kept, and that nobody has as a debt."""
        for location in locations:
            storage, name = self._find(location)
            storage.delete([name])

    def of_owner(self, table: str, owner: str, *, before_epoch: int) -> list[str]:
        """Return the locations of the promises that an owner's earlier epochs have left."""
        prefix = _prefix(owner)
        return [
            f"{self.location}/{table}/{name}"
            for name in self._storage.child(table).names()
            if name.startswith(prefix)
            and (found := _EPOCH_AND_BATCH.fullmatch(name.removeprefix(prefix))) is not None
            and int(found[1]) < before_epoch
        ]

    def _find(self, location: str) -> tuple[ObjectStorage, str]:
        table, name = location.rsplit("/", 2)[-2:]
        return self._storage.child(table), name


def read_promise(location: str, own: RedoLog | None) -> Promise:
    """Return a promise, from one's own redo log or wherever it is; errors as of `RedoLog.read`."""
    redo = RedoLog.holding(location, own)
    try:
        return redo.read(location)
    except StorageUnavailable as exc:
        if redo is own:
            raise
        raise StorageUnavailable(
            f"a batch was promised in {redo.location}, which cannot be read from here: {exc}; "
            "start the writer with that redo log, and with the settings of its object store"
        ) from exc


def _prefix(owner: str) -> str:
    return f"{hashlib.sha256(owner.encode()).hexdigest()[:32]}-"


def _routes(data: pa.Table, schema: Schema) -> Any:
    return route(schema, read_keys(data, schema), 1)


def _is_same(promised: Mapping[bytes, int], now: Mapping[bytes, int], key: bytes) -> bool:
    return key in promised and promised[key] == now.get(key)


def _encode(promise: Promise) -> bytes:
    header = {
        "format": FORMAT,
        "schema_version": promise.schema_version,
        "mode": int(promise.mode),
        "columns": promise.columns,
        "partitions": {key.hex(): number for key, number in promise.partitions.items()},
    }
    stored = promise.data.replace_schema_metadata({_KEY: json.dumps(header).encode()})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(
        sink, stored.schema, options=pa.ipc.IpcWriteOptions(compression="lz4")
    ) as writer:
        writer.write_table(stored)
    stream = bytes(sink.getvalue())
    return stream + xxhash.xxh3_64_digest(stream)


def _decode(data: bytes) -> Promise:
    stream, checksum = data[:-_CHECKSUM_BYTES], data[-_CHECKSUM_BYTES:]
    if xxhash.xxh3_64_digest(stream) != checksum:
        raise ValueError("it does not match its checksum")
    with pa.ipc.open_stream(stream) as reader:
        table = reader.read_all()
    header: dict[str, Any] = json.loads(table.schema.metadata[_KEY])
    if header["format"] != FORMAT:
        raise ValueError(f"format {header['format']}, this release reads {FORMAT}")
    return Promise(
        schema_version=header["schema_version"],
        mode=AggMode(header["mode"]),
        partitions={bytes.fromhex(key): number for key, number in header["partitions"].items()},
        columns=tuple(header["columns"]),
        data=table.replace_schema_metadata(None),
    )
