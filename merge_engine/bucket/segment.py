"""A segment: one atomic commit of a bucket, as bytes.

Layout of a segment object, named by its base offset in 20 digits:

    Arrow IPC stream           one record batch, compressed by lz4 unless it is small; the header is
                                 JSON under `tallybook` in its schema
    format version             u16, little-endian
    magic                      b"TALLYSEG"
    checksum                   u64, little-endian: xxh3_64 of everything before it

The trailer stands after the end-of-stream mark, so any Arrow reader can open a segment. Columns,
by column id: `key.<id>`, then `operation` (0 upsert, 1 delete) and, per written column,
`touched_before.<id>`, `before.<id>`, `touched_after.<id>`, `after.<id>` (states). One offset per
row; a segment without rows takes one offset: `leader`, `empty`, a write that changed nothing but
has a token to remember, and an undo of changes that had cancelled each other. That one still names
the columns that it is about; earlier releases named none, and meant all.

Format 2 has `part` and `more` in the header, for puts of several segments; format 1 is read as puts
of one. Format 3 has `locked`: of puts before it, it is not known, and read as not. Format 4 has it
of undos, too: of those before it, it is not known, and read as yes.
"""

import json
import struct
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum, StrEnum
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from foundation.errors import CorruptSegment, UnknownFormat
from foundation.formats import Formats
from foundation.ids import Token

MAGIC = b"TALLYSEG"
SUFFIX = ".seg"
_HEADER_KEY = b"tallybook"
_TRAILER = struct.Struct("<H8sQ")
# To compress a smaller segment takes longer than to sync what that saves. Once it is old it is
# rolled up (`roll_up`), and then compressed with its neighbours, better than it was alone.
_WORTH_COMPRESSING = 250_000
# Of a smaller segment, to hand the columns to other threads takes longer than to read them.
_WORTH_THREADS = 1 << 18


class SegmentKind(StrEnum):
    """What a segment records."""

    WRITE = "write"
    UNDO = "undo"
    LEADER = "leader"
    EMPTY = "empty"


class AggMode(IntEnum):
    """How a put's values meet the stored states. The numbers are the wire format's."""

    REPLACE = 0
    ACCUMULATE = 1
    MERGE_STATE = 2


class Operation(IntEnum):
    """What a row of a batch, or of the log, does to its key."""

    UPSERT = 0
    DELETE = 1


@dataclass(frozen=True, kw_only=True)
class SegmentHeader:
    """What is known of a commit besides its rows.

    `owner` is whose columns changed: the writer's own, or the debtor's in an undo. `undo_from` is
    the offset that an undo goes back to. A large put is several segments, the parts 0, 1, ... of
    one token; all but the last say that there is `more` to come, and the token is applied with it.
    `locked`: it was put by the holder of a column lock, whose epoch is in the token; or it is an
    undo that pays a lock's debt.
    """

    kind: SegmentKind
    base_offset: int
    term: int
    nonce: str
    timestamp_ms: int
    rows: int = 0
    schema_version: int = 0
    owner: str = ""
    token: Token | None = None
    column_ids: tuple[int, ...] = ()
    agg_mode: AggMode | None = None
    undo_from: int | None = None
    part: int = 0
    more: bool = False
    locked: bool = False

    @property
    def end_offset(self) -> int:
        """The offset after this segment's last; the next segment's base."""
        return self.base_offset + max(self.rows, 1)

    @property
    def lock_token(self) -> Token | None:
        """The token, if its epoch is that of a lock: whoever has none chooses his tokens."""
        return self.token if self.locked else None

    @property
    def is_payment(self) -> bool:
        """Whether it takes back what no commit has covered: nobody is to see either of the two.

        Any other undo is a change: what was put without a lock is committed as soon as it is put.
        """
        return self.kind is SegmentKind.UNDO and self.locked

    @property
    def is_change(self) -> bool:
        """Whether it is an owner's: a `leader` or `empty` segment is nobody's."""
        return self.kind in (SegmentKind.WRITE, SegmentKind.UNDO)


@dataclass(frozen=True)
class Change:
    """One written column of a segment: its states and touched bits before and after."""

    touched_before: npt.NDArray[np.bool_]
    before: pa.Array
    touched_after: npt.NDArray[np.bool_]
    after: pa.Array

    def slice(self, start: int, stop: int) -> "Change":
        """Return the change of these rows."""
        return Change(
            self.touched_before[start:stop],
            self.before[start:stop],
            self.touched_after[start:stop],
            self.after[start:stop],
        )


@dataclass(frozen=True)
class Segment:
    """A header and its rows: key columns and changes by column id."""

    header: SegmentHeader
    keys: Mapping[int, pa.Array]
    changes: Mapping[int, Change]

    def slice(self, start: int, length: int) -> "Segment":
        """Return the segment with only these rows; the header still speaks of all of them."""
        return Segment(
            self.header,
            {column: keys.slice(start, length) for column, keys in self.keys.items()},
            {
                column: change.slice(start, start + length)
                for column, change in self.changes.items()
            },
        )

    def reversed(self) -> "Segment":
        """Return the segment as a change back: what was after it is before it."""
        changes = {
            column: Change(one.touched_after, one.after, one.touched_before, one.before)
            for column, one in self.changes.items()
        }
        return Segment(self.header, self.keys, changes)

    def without(self, columns: Collection[int]) -> "Segment":
        """Return the segment without the changes of these columns; the header still has them."""
        kept = {column: change for column, change in self.changes.items() if column not in columns}
        return Segment(self.header, self.keys, kept)


def segment_name(base_offset: int) -> str:
    """Return the object name of the segment at an offset."""
    return f"{base_offset:020d}{SUFFIX}"


def encode_segment(segment: Segment) -> bytes:
    """Return the segment's bytes."""
    batch = _to_batch(segment)
    sink = pa.BufferOutputStream()
    compression = "lz4" if batch.nbytes >= _WORTH_COMPRESSING else None
    options = pa.ipc.IpcWriteOptions(compression=compression, use_threads=False)
    with pa.ipc.new_stream(sink, batch.schema, options=options) as writer:
        if segment.header.rows:
            writer.write_batch(batch)
    sink.write(_TRAILER.pack(FORMATS.current, MAGIC, 0)[:-8])
    body = sink.getvalue()
    return b"".join((body, struct.pack("<Q", xxhash.xxh3_64_intdigest(body))))


def decode_segment(name: str, data: bytes) -> Segment:
    """Read a segment back; CorruptSegment or UnknownFormat if it is not what was written."""
    read = check_trailer(name, data)
    try:
        options = pa.ipc.IpcReadOptions(use_threads=len(data) >= _WORTH_THREADS)
        with pa.ipc.open_stream(pa.py_buffer(data), options=options) as reader:
            table = reader.read_all()
        segment = read(table)
        header = segment.header
        is_swapped = segment_name(header.base_offset) != name or header.rows != table.num_rows
    except (pa.ArrowException, ValueError, KeyError, TypeError, AttributeError) as exc:
        raise CorruptSegment(f"segment {name}: the checksum holds, but {exc!r}") from exc
    if is_swapped:
        raise CorruptSegment(
            f"segment {name}: it holds {table.num_rows} rows at offset {header.base_offset}; "
            "the object was renamed or swapped; restore it from a copy of the log"
        )
    return segment


def check_trailer(name: str, data: bytes) -> Callable[[pa.Table], Segment]:
    """Return what reads the segment; raise unless the bytes are a whole one of a known format.

    The trailer is the same in all formats: whether a segment is whole is told before its version
    means anything.
    """
    where = f"segment {name} (log offset {name.removesuffix(SUFFIX).lstrip('0') or '0'})"
    if len(data) < _TRAILER.size:
        raise CorruptSegment(f"{where}: only {len(data)} bytes; restore it from a copy of the log")
    version, magic, checksum = _TRAILER.unpack_from(data, len(data) - _TRAILER.size)
    if magic != MAGIC:
        raise CorruptSegment(f"{where}: truncated, or not a segment; restore it from a copy")
    if xxhash.xxh3_64_intdigest(memoryview(data)[:-8]) != checksum:
        raise CorruptSegment(f"{where}: checksum mismatch; restore it from a copy of the log")
    return FORMATS.reader(version, where)


def _to_batch(segment: Segment) -> pa.RecordBatch:
    names: list[str] = []
    arrays: list[pa.Array] = []
    for column, keys in segment.keys.items():
        names.append(f"key.{column}")
        arrays.append(keys)
    if segment.changes:
        names.append("operation")
        arrays.append(pa.array(_operations(list(segment.changes.values()))))
    for column, change in segment.changes.items():
        names += [f"{part}.{column}" for part in _CHANGE_PARTS]
        arrays += [
            pa.array(change.touched_before),
            change.before,
            pa.array(change.touched_after),
            change.after,
        ]
    metadata = {_HEADER_KEY: json.dumps(vars(segment.header), separators=(",", ":"))}
    schema = pa.schema(
        [pa.field(name, array.type) for name, array in zip(names, arrays, strict=True)],
        metadata=metadata,
    )
    return pa.record_batch(arrays, schema=schema)


_CHANGE_PARTS = ("touched_before", "before", "touched_after", "after")


def _operations(changes: Sequence[Change]) -> npt.NDArray[np.int8]:
    """A row that is left with none of the written columns was deleted, as its owner sees it."""
    touched = np.logical_or.reduce([change.touched_after for change in changes])
    return np.where(touched, Operation.UPSERT, Operation.DELETE).astype(np.int8)


def _from_table(header: SegmentHeader, table: pa.Table) -> Segment:
    columns = {
        name: column.combine_chunks() if column.num_chunks != 1 else column.chunk(0)
        for name, column in zip(table.column_names, table.columns, strict=True)
    }
    keys = {
        int(name.removeprefix("key.")): array
        for name, array in columns.items()
        if name.startswith("key.")
    }
    changes = {}
    for column in header.column_ids:
        touched_before, before, touched_after, after = (
            columns[f"{part}.{column}"] for part in _CHANGE_PARTS
        )
        changes[column] = Change(
            touched_before.to_numpy(zero_copy_only=False),
            before,
            touched_after.to_numpy(zero_copy_only=False),
            after,
        )
    return Segment(header, keys, changes)


def _fields_of(table: pa.Table) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads((table.schema.metadata or {})[_HEADER_KEY])
    return fields


def header_of(fields: dict[str, Any]) -> SegmentHeader:
    """Return the header whose fields JSON has said."""
    token = fields.pop("token")
    mode = fields.pop("agg_mode")
    return SegmentHeader(
        **{
            **fields,
            "kind": SegmentKind(fields["kind"]),
            "column_ids": tuple(fields["column_ids"]),
            "token": None if token is None else Token(*token),
            "agg_mode": None if mode is None else AggMode(mode),
        }
    )


def header_before_format_4(fields: dict[str, Any]) -> SegmentHeader:
    """Return the header whose fields JSON has said, before undos said what they are."""
    header = header_of(fields)
    return replace(header, locked=True) if header.kind is SegmentKind.UNDO else header


def _read_format_1(table: pa.Table) -> Segment:
    fields = {**_fields_of(table), "part": 0, "more": False}
    return _from_table(header_before_format_4(fields), table)


def _read_format_2(table: pa.Table) -> Segment:
    return _from_table(header_before_format_4(_fields_of(table)), table)


def _read_format_4(table: pa.Table) -> Segment:
    return _from_table(header_of(_fields_of(table)), table)


FORMATS: Formats[Callable[[pa.Table], Segment]] = Formats(
    name="segment",
    current=4,
    readers={1: _read_format_1, 2: _read_format_2, 3: _read_format_2, 4: _read_format_4},
    error=UnknownFormat,
)
