"""The redo log: promised batches, which will be applied, whoever has to do it.

A promise is kept under any later schema: it has folded states, which need no other column of the
input, and all columns go by their ids. Its rows are in parts, each for one bucket of a partition
that goes by its id: what is dropped stays dropped, and whoever has to go on with a promise finds
the same parts in the same order. Below the table's uid:

    <uid>/<hash of the owner>-<epoch>-<batch>.redo        the promise, with its parts if it is small
    <uid>/<hash of the owner>-<epoch>-<batch>-<hex>.part  parts of a large one, which names them

`promise_objects` has what is in them. A lock record has the whole location, storage included, so
that whoever has to keep the promise finds it.
"""

import hashlib
import re
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

import pyarrow as pa

from foundation.errors import (
    AlreadyExists,
    CorruptSegment,
    InvalidInput,
    StorageUnavailable,
    UnknownSchema,
)
from foundation.ids import BucketId, Token
from merge_engine.bucket.options import MEBIBYTE
from merge_engine.bucket.segment import AggMode
from merge_engine.merging.local_aggregation import OPERATION, fold_locally, with_operations
from merge_engine.schema.schema import Schema
from merge_engine.storage.objects import ObjectStorage, local_directory, open_storage
from recovery.writer.parts import Part
from recovery.writer.promise_objects import (
    Contents,
    Form,
    StoredObject,
    encode_object,
    read_object,
    sound,
)
from recovery.writer.rows import Rows

SUFFIX = ".redo"
PART_SUFFIX = ".part"
_TOKEN = re.compile(rf"(\d+)-(\d+)(?:{re.escape(SUFFIX)}|-[0-9a-f]+({re.escape(PART_SUFFIX)}))")
_OPERATION = "operation"
_OBJECT_BYTES = 16 * MEBIBYTE
_PIECE_ROWS = 250_000


def folded_rows(rows: Rows, schema: Schema) -> Rows | None:
    """Return the rows as a promise has them: states, in pieces that come once; None if none are."""
    pieces = (
        fold_locally(
            piece.slice(at, _PIECE_ROWS),
            schema,
            columns=rows.columns,
            operation_column=rows.operation_column,
            mode=rows.mode,
        )
        for piece in rows.pieces(schema)
        for at in range(0, piece.num_rows, _PIECE_ROWS)
    )
    first = next(pieces, None)
    if first is None:
        return None
    operation = None if rows.operation_column is None else OPERATION
    tables = (with_operations(one.data, operation) for one in chain([first], pieces))
    return Rows(
        data=lambda: tables,
        columns=first.columns,
        mode=rows.mode if rows.mode is AggMode.REPLACE else AggMode.MERGE_STATE,
        operation_column=operation,
        schema=schema,
    )


class Promise:
    """A promised batch, as whoever has to keep it reads it.

    `in_parts`: it is put part by part, else as one put per bucket; whoever goes on with it does as
    who began.
    """

    def __init__(self, storage: ObjectStorage, name: str) -> None:
        """Read the promise itself; its parts are read as they are asked for."""
        self._storage = storage
        self._own = read_object(storage, name)
        self.name = name
        with sound(storage, name):
            self.contents, self.in_parts = self._own.format.promise(self._own.header)

    def rows(self, schema: Schema) -> Rows | None:
        """Return how its rows are to be read under a schema; None if there is nothing to put.

        `schema` is the table's, no older than the promise. A column that it does not have was
        dropped.
        """
        form = self.contents.form
        if form is None:
            return None
        if schema.version < form.schema_version:
            raise UnknownSchema(
                f"a batch was promised under schema version {form.schema_version}, and only "
                f"{schema.version} is known here; read the table's definition again",
                form.schema_version,
            )
        names = {column.id: column.name for column in schema.columns}
        columns = [names[number] for number in form.columns if number in names]
        if not columns:
            return None
        return Rows(
            data=(),
            columns=columns,
            mode=form.mode,
            operation_column=OPERATION if form.operations else None,
            schema=schema,
        )

    def parts(self, schema: Schema, partitions: frozenset[int]) -> Iterator[Part]:
        """Yield what is left of it, with the names of the schema; CorruptSegment if it is damaged.

        `partitions` are the ids of those that there are: rows of others are gone.
        """
        names = {str(column.id): column.name for column in schema.columns}
        names[_OPERATION] = OPERATION
        found: Counter[BucketId] = Counter()
        for part in self._stored():
            if part.number != found[part.key]:
                break
            found[part.key] += 1
            if part.key.partition in partitions:
                yield part._replace(rows=_renamed(part.rows, names))
        if found != self.contents.parts:
            raise CorruptSegment(f"{self.name} in {self._storage} has not all of its parts")

    def _stored(self) -> Iterator[Part]:
        yield from self._parts_in(self.name, self._own)
        for name in self.contents.objects:
            yield from self._parts_in(name, read_object(self._storage, name))

    def _parts_in(self, name: str, stored: StoredObject) -> list[Part]:
        with sound(self._storage, name), pa.ipc.open_stream(stored.stream) as reader:
            return [
                stored.format.part(rows, metadata)
                for rows, metadata in reader.iter_batches_with_custom_metadata()
            ]


class PromiseWriter:
    """Writes a promise down: its parts as they come, and at the end that it is one.

    Not safe for threads. Several may write parts of one promise, each of other buckets: all but one
    `spill`, and the last one `takes` what they have written, and finishes it.
    """

    def __init__(self, storage: ObjectStorage, name: str, *, object_bytes: int) -> None:
        self._storage = storage
        self._name = name
        self._object_bytes = object_bytes
        self._shared = False
        self._form: Form | None = None
        self._objects: list[str] = []
        self._parts: dict[BucketId, int] = {}
        self._names: Mapping[str, str] = {}
        self._waiting: list[Part] = []
        self._waiting_bytes = 0
        self.in_parts = False

    def begin(self, rows: Rows) -> None:
        """Say how the parts are to be read: as these folded rows."""
        assert rows.schema is not None
        self._form = Form.of(rows)
        names = {column.name: str(column.id) for column in rows.schema.columns}
        self._names = {**names, OPERATION: _OPERATION}

    def add(self, part: Part) -> None:
        """Write a part down, or keep it until an object is full; parts of a bucket in order."""
        self._parts[part.key] = part.number + 1
        self._waiting.append(part._replace(rows=_renamed(part.rows, self._names)))
        self._waiting_bytes += part.rows.nbytes
        if self._waiting_bytes >= self._object_bytes:
            self.spill()

    def spill(self) -> Contents:
        """Write down what is waiting, in an object of its own; return all that was written."""
        if self._waiting:
            stem = self._name.removesuffix(SUFFIX)
            name = f"{stem}-{uuid.uuid4().hex}{PART_SUFFIX}"
            self._storage.create(name, encode_object({}, self._waiting))
            self._objects.append(name)
            self._waiting, self._waiting_bytes = [], 0
        return self._contents()

    def take(self, contents: Contents) -> None:
        """Add what another writer of this promise has spilled."""
        self._form = self._form or contents.form
        self._objects += contents.objects
        self._parts |= contents.parts
        self._shared = True

    def finish(self) -> None:
        """Write the promise itself, durable on return: all of it can be found from there."""
        if self._objects:
            self.spill()
        if self._shared and not {*self._objects} <= {*self._storage.names()}:
            raise InvalidInput(
                f"what the tasks have written of batch {self._name} is not in {self._storage}: the "
                "redo log has to be a place that the driver and all executors share"
            )
        header = {**self._contents().to_json(), "in_parts": self.in_parts}
        data = encode_object(header, self._waiting)
        try:
            self._storage.create(self._name, data)
        except AlreadyExists as exc:
            # Our own, sent twice underneath us: the epoch is ours. Anything else is no promise.
            if self._storage.read(self._name) != data:
                raise CorruptSegment(
                    f"{self._name} in {self._storage} holds another batch than the one that is "
                    "promised: was ZooKeeper set back to an earlier state? Move the object away"
                ) from exc

    def written(self) -> Promise:
        """Return the promise as whoever has to keep it reads it; once it is finished."""
        return Promise(self._storage, self._name)

    @property
    def objects(self) -> tuple[str, ...]:
        """The names of the objects that have its parts."""
        return tuple(self._objects)

    def _contents(self) -> Contents:
        return Contents(form=self._form, objects=self.objects, parts=self._parts)


class RedoLog:
    """Keeps promises from `prepare` to `commit`, in a storage that outlives the writer.

    One that has a location can be pickled, with its settings.
    """

    def __init__(
        self,
        storage: ObjectStorage,
        location: str = "",
        settings: Mapping[str, Any] | None = None,
        *,
        object_bytes: int = _OBJECT_BYTES,
    ) -> None:
        """`location`: where others find the storage; without one, only who has this log does.

        `settings`: what the object store was opened with. `object_bytes`: about how much of a large
        promise is in one object, and in memory.
        """
        self._storage = storage
        self._settings = dict(settings or {})
        self._object_bytes = object_bytes
        self.location = location

    def __repr__(self) -> str:
        return f"RedoLog({self.location or 'of this process'})"

    @classmethod
    def open(cls, location: str, **settings: Any) -> "RedoLog":
        """Open the redo log at a directory, or at a URL such as `s3://bucket/redo`.

        `settings` go to the object store.
        """
        directory = local_directory(location)
        whole = location.rstrip("/") if directory is None else str(directory.resolve())
        return cls(open_storage(whole, **settings), whole, settings)

    def __reduce__(self) -> Any:
        return partial(RedoLog.open, **self._settings), (self.location,)

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

    def begin(self, table: str, owner: str, token: Token) -> PromiseWriter:
        """Begin to write a promise of a table, by its uid."""
        storage = self._storage.child(table)
        return PromiseWriter(storage, _name(owner, token), object_bytes=self._object_bytes)

    def location_of(self, table: str, owner: str, token: Token) -> str:
        """Return where a promise is found, once it is written."""
        return f"{self.location}/{table}/{_name(owner, token)}"

    def read(self, location: str) -> Promise:
        """Return a promise; CorruptSegment if it is damaged or gone, UnknownFormat if too new."""
        return Promise(*self._find(location))

    def delete(self, location: str, others: Sequence[str] = ()) -> None:
        """Drop a promise that is kept, and that nobody has as a debt: its objects, itself last.

        Of a large one, also the parts that lost attempts of tasks have left, at this batch or an
        earlier one of its epoch: nobody has named them, and nobody will.
        """
        storage, name = self._find(location)
        storage.delete([*others, *(_left_by_attempts(storage, name) if others else ())])
        storage.delete([name])

    def delete_of(self, table: str, owner: str, *, before_epoch: int) -> None:
        """Drop what earlier epochs of an owner have left, promises or parts of what became none."""
        prefix, storage = _prefix(owner), self._storage.child(table)
        storage.delete(
            [
                name
                for name in storage.names()
                if name.startswith(prefix)
                and (found := _TOKEN.fullmatch(name.removeprefix(prefix))) is not None
                and int(found[1]) < before_epoch
            ]
        )

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


def _name(owner: str, token: Token) -> str:
    return f"{_prefix(owner)}{token.epoch}-{token.batch}{SUFFIX}"


def _left_by_attempts(storage: ObjectStorage, promise: str) -> Iterator[str]:
    """Yield the parts of a promise's epoch, up to its own batch."""
    prefix, told = promise.split("-", 1)
    last = _TOKEN.fullmatch(told)
    assert last is not None, "what `_name` has made"
    for name in storage.names():
        found = _TOKEN.fullmatch(name.removeprefix(f"{prefix}-"))
        if found is None or not name.startswith(f"{prefix}-") or found[3] is None:
            continue
        if found[1] == last[1] and int(found[2]) <= int(last[2]):
            yield name


def _renamed(rows: pa.RecordBatch, names: Mapping[str, str]) -> pa.RecordBatch:
    """Return the columns that have another name there, under it."""
    kept = [name for name in rows.schema.names if name in names]
    return rows.select(kept).rename_columns([names[name] for name in kept])
