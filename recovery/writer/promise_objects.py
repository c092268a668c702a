"""The objects of a promise, as bytes: how its parts are stored, and what says how to read them.

Each is an Arrow IPC stream whose schema carries, under `tallybook`, how to read it, and whose
batches say which part they are; after the stream is its checksum (xxh3_64, 8 bytes).

How to read it is JSON: the `format` and, of the promise itself, in format 3:

    form        null if there is nothing to put; or schema_version, mode, columns (their ids) and
                operations: whether the rows have a column `operation`
    objects     the names of the objects with parts
    parts       [partition id, bucket number, how many parts] of each bucket
    in_parts    whether it is put part by part

A batch is one part: its columns are named by their ids, and its metadata has under `part` the
partition's id, the bucket's number and the part's, in ASCII and with blanks between.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pyarrow as pa
import xxhash

from foundation.errors import CorruptSegment, MissingObject, UnknownFormat
from foundation.formats import Formats
from foundation.ids import BucketId
from merge_engine.bucket.segment import AggMode
from merge_engine.storage.objects import ObjectStorage
from recovery.writer.parts import Part
from recovery.writer.rows import Rows

_KEY = b"tallybook"
_PART = b"part"
_CHECKSUM_BYTES = 8
_DAMAGED = (pa.ArrowException, ValueError, KeyError, TypeError, AttributeError)


@dataclass(frozen=True, kw_only=True)
class Form:
    """How the rows of a promise are to be read.

    `columns` are the ids of those that are written. `operations`: the rows say what they do.
    """

    schema_version: int
    mode: AggMode
    columns: tuple[int, ...]
    operations: bool

    @classmethod
    def of(cls, rows: Rows) -> "Form":
        """Return the form of folded rows."""
        assert rows.schema is not None
        ids = tuple(rows.schema.column(name).id for name in rows.columns or ())
        return cls(
            schema_version=rows.schema.version,
            mode=rows.mode,
            columns=ids,
            operations=rows.operation_column is not None,
        )

    def to_json(self) -> dict[str, Any]:
        """Return it as `from_json` takes it."""
        return {
            "schema_version": self.schema_version,
            "mode": int(self.mode),
            "columns": list(self.columns),
            "operations": self.operations,
        }

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "Form":
        """Return what `to_json` was asked for."""
        return cls(
            schema_version=fields["schema_version"],
            mode=AggMode(fields["mode"]),
            columns=tuple(fields["columns"]),
            operations=fields["operations"],
        )


@dataclass(frozen=True, kw_only=True)
class Contents:
    """What was written down of a promise: the objects that have its parts, and how to read them."""

    form: Form | None = None
    objects: tuple[str, ...] = ()
    parts: Mapping[BucketId, int] = field(default_factory=dict)

    def __add__(self, other: "Contents") -> "Contents":
        """Return the contents of both, which are of different buckets."""
        return Contents(
            form=self.form or other.form,
            objects=self.objects + other.objects,
            parts={**self.parts, **other.parts},
        )

    def to_json(self) -> dict[str, Any]:
        """Return it as `from_json` takes it."""
        return {
            "form": None if self.form is None else self.form.to_json(),
            "objects": list(self.objects),
            "parts": [[*key, count] for key, count in sorted(self.parts.items())],
        }

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "Contents":
        """Return what `to_json` was asked for."""
        form = fields["form"]
        return cls(
            form=None if form is None else Form.from_json(form),
            objects=tuple(fields["objects"]),
            parts={BucketId(p, number): count for p, number, count in fields["parts"]},
        )


def encode_object(header: Mapping[str, Any], parts: Sequence[Part]) -> bytes:
    """Return an object with these parts, of one schema; the header goes before them."""
    schema = parts[0].rows.schema if parts else pa.schema([])
    stored = {_KEY: json.dumps({"format": FORMATS.current, **header}).encode()}
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(
        sink,
        schema.with_metadata(stored),
        options=pa.ipc.IpcWriteOptions(compression="lz4"),
    ) as writer:
        for key, number, rows in parts:
            place = f"{key.partition} {key.number} {number}"
            writer.write_batch(rows.replace_schema_metadata(stored), {_PART: place.encode()})
    stream = bytes(sink.getvalue())
    return stream + xxhash.xxh3_64_digest(stream)


class PromiseFormat(NamedTuple):
    """What reads a format: a promise's header, and each of its parts."""

    promise: Callable[[Mapping[str, Any]], tuple[Contents, bool]]
    part: Callable[[pa.RecordBatch, Mapping[bytes, bytes]], Part]


def _read_promise_3(header: Mapping[str, Any]) -> tuple[Contents, bool]:
    """Return the contents, and whether they are put part by part."""
    return Contents.from_json(header), bool(header["in_parts"])


def _read_part_3(rows: pa.RecordBatch, metadata: Mapping[bytes, bytes]) -> Part:
    partition, number, part = map(int, metadata[_PART].split())
    return Part(BucketId(partition, number), part, rows)


FORMATS: Formats[PromiseFormat] = Formats(
    name="promise",
    current=3,
    readers={3: PromiseFormat(_read_promise_3, _read_part_3)},
    error=UnknownFormat,
)


class StoredObject(NamedTuple):
    """An object of a promise: its stream, what that says of itself, and what reads it."""

    stream: bytes
    header: Mapping[str, Any]
    format: PromiseFormat


def read_object(storage: ObjectStorage, name: str) -> StoredObject:
    """Return an object, if it is whole; UnknownFormat if it is not of our time."""
    try:
        data = storage.read(name)
    except MissingObject as exc:
        raise CorruptSegment(
            f"{name} is missing from {storage}: a batch was promised and cannot be rolled "
            "forward; restore the object, or start on a machine that has this place"
        ) from exc
    with sound(storage, name):
        stream, checksum = data[:-_CHECKSUM_BYTES], data[-_CHECKSUM_BYTES:]
        if xxhash.xxh3_64_digest(stream) != checksum:
            raise ValueError("it does not match its checksum")
        with pa.ipc.open_stream(stream) as reader:
            header: dict[str, Any] = json.loads(reader.schema.metadata[_KEY])
        read = FORMATS.reader(header["format"], f"{name} in {storage}")
    return StoredObject(stream, header, read)


@contextmanager
def sound(storage: ObjectStorage, name: str) -> Iterator[None]:
    """What cannot be read in the block is damaged: CorruptSegment, with where it is."""
    try:
        yield
    except _DAMAGED as exc:
        raise CorruptSegment(f"{name} in {storage} is damaged: {exc}") from exc
