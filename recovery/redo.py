"""The redo log: folded batches that will be applied, whoever has to do it.

One object per prepared batch, `<hash of the owner>-<epoch>-<batch>.redo`: an Arrow IPC stream whose
schema carries, under `tallybook`, how to read it, and behind the stream its checksum (xxh3_64, 8
bytes). Columns are named by their ids, so a batch can be rolled forward under a later schema.
"""

import hashlib
import json
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import pyarrow as pa
import xxhash

from merge_engine import AggMode, CorruptSegment, ObjectStorage, Schema, Token
from merge_engine.storage import AlreadyExists, MissingObject
from merge_engine.table import as_arrow
from recovery.access import Rows

FORMAT = 1
SUFFIX = ".redo"
_KEY = b"tallybook"
_OPERATION = "operation"
_CHECKSUM_BYTES = 8


class RedoLog:
    """Keeps batches from `prepare` to `commit`, in a storage that outlives the writer."""

    def __init__(self, storage: ObjectStorage) -> None:
        self._storage = storage

    def write(self, owner: str, token: Token, rows: Rows, schema: Schema) -> str:
        """Store a batch, durable on return; return its location."""
        name = f"{_prefix(owner)}{token.epoch}-{token.batch}{SUFFIX}"
        with suppress(AlreadyExists):  # Our own, sent twice underneath us: the epoch is ours.
            self._storage.create(name, _encode(rows, schema))
        return name

    def read(self, location: str, schema: Schema) -> Rows:
        """Return a batch under the current schema; columns that were dropped since are left out.

        If `columns` is empty, nothing of the batch is left to be put.
        """
        try:
            return _decode(self._storage.read(location), schema)
        except MissingObject as exc:
            raise CorruptSegment(
                f"{location} is missing from {self._storage}: a batch was promised and cannot be "
                "rolled forward; restore the object"
            ) from exc
        except (pa.ArrowException, ValueError, KeyError) as exc:
            raise CorruptSegment(f"{location} in {self._storage} is damaged: {exc}") from exc

    def delete(self, locations: Sequence[str]) -> None:
        """Drop batches that are committed, and that nobody has as a debt."""
        self._storage.delete(locations)

    def of_owner(self, owner: str, *, before_epoch: int) -> list[str]:
        """Return the locations of the batches that an owner's earlier epochs have left."""
        prefix = _prefix(owner)
        return [
            name
            for name in self._storage.names()
            if name.startswith(prefix)
            and name.endswith(SUFFIX)
            and int(name.removeprefix(prefix).partition("-")[0]) < before_epoch
        ]


def _prefix(owner: str) -> str:
    return f"{hashlib.sha256(owner.encode()).hexdigest()[:32]}-"


def _encode(rows: Rows, schema: Schema) -> bytes:
    data = as_arrow(rows.data, schema)
    table = data if isinstance(data, pa.Table) else pa.table(data)
    ids = {column.name: str(column.id) for column in schema.columns}
    orders = {
        column.function.order_by
        for column in schema.value_columns
        if column.function is not None and column.function.order_by is not None
    }
    names = {**{name: f"order:{name}" for name in orders}, **ids}
    if rows.operation_column is not None:
        names[rows.operation_column] = _OPERATION
    header = {
        "format": FORMAT,
        "mode": int(rows.mode),
        "operation": rows.operation_column is not None,
        "columns": [schema.column(name).id for name in _written(table, rows, schema)],
    }
    renamed = table.rename_columns([names[name] for name in table.column_names])
    stored = renamed.replace_schema_metadata({_KEY: json.dumps(header).encode()})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(
        sink, stored.schema, options=pa.ipc.IpcWriteOptions(compression="lz4")
    ) as writer:
        writer.write_table(stored)
    stream = bytes(sink.getvalue())
    return stream + xxhash.xxh3_64_digest(stream)


def _written(table: pa.Table, rows: Rows, schema: Schema) -> Sequence[str]:
    """Return the columns that the put writes, by name.

    Spelled out: under a later schema, "those that the batch has" and "all" may be others.
    """
    if rows.columns is not None:
        return rows.columns
    values = [column.name for column in schema.value_columns]
    return [name for name in values if name in table.column_names] or values


def _decode(data: bytes, schema: Schema) -> Rows:
    stream, checksum = data[:-_CHECKSUM_BYTES], data[-_CHECKSUM_BYTES:]
    if xxhash.xxh3_64_digest(stream) != checksum:
        raise ValueError("it does not match its checksum")
    with pa.ipc.open_stream(stream) as reader:
        table = reader.read_all()
    header: dict[str, Any] = json.loads(table.schema.metadata[_KEY])
    if header["format"] != FORMAT:
        raise ValueError(f"format {header['format']}, this release reads {FORMAT}; upgrade")
    names = {str(column.id): column.name for column in schema.columns}
    names[_OPERATION] = "_operation"
    kept = [name for name in table.column_names if name in names or name.startswith("order:")]
    table = table.select(kept).replace_schema_metadata(None)
    table = table.rename_columns([names.get(name, name.removeprefix("order:")) for name in kept])
    columns = header["columns"]
    if columns is not None:
        by_id = {column.id: column.name for column in schema.columns}
        columns = [by_id[number] for number in columns if number in by_id]
    return Rows(
        data=table,
        columns=columns,
        mode=AggMode(header["mode"]),
        operation_column="_operation" if header["operation"] else None,
    )
