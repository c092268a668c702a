"""The files of a copy: written, read without the rows that are not there any more, searched."""

from collections.abc import Iterable, Sequence
from contextlib import closing

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyroaring import BitMap64

from foundation.errors import CorruptLake, MissingObject, StorageUnavailable
from foundation.ids import BucketId
from merge_engine.bucket.options import MEBIBYTE
from merge_engine.encoding.keys import KeyCodec
from merge_engine.storage.objects import ObjectStorage
from sink.lake.state import LakeFile, file_name

# A file is cut off at so many rows, or bytes in memory: it is written anew as a whole.
FILE_ROWS = 250_000
FILE_BYTES = 128 * MEBIBYTE
# With so many bytes on disk, it is large enough.
LARGE_BYTES = 16 * MEBIBYTE
_ROW_GROUP_ROWS = 125_000


class FileWriter:
    """Writes the rows of a bucket to files of a good size; `close` returns them."""

    def __init__(
        self, storage: ObjectStorage, bucket: BucketId, step: int, fields: pa.Schema
    ) -> None:
        self._storage = storage
        self._bucket = bucket
        self._step = step
        self._fields = fields
        self._waiting: list[pa.RecordBatch] = []
        self._rows = self._bytes = 0
        self._files: list[LakeFile] = []

    def add(self, rows: pa.RecordBatch | pa.Table) -> None:
        """Take rows; columns of the copy that they do not have are null."""
        for batch in conformed(rows, self._fields).to_batches():
            # As if rows were of the same size: files need not be full to the byte.
            width = max(1, batch.nbytes // max(1, batch.num_rows))
            start = 0
            while start < batch.num_rows:
                room = min(FILE_ROWS - self._rows, -(-(FILE_BYTES - self._bytes) // width))
                part = batch.slice(start, room)
                start += part.num_rows
                self._waiting.append(part)
                self._rows += part.num_rows
                self._bytes += part.num_rows * width
                if self._rows >= FILE_ROWS or self._bytes >= FILE_BYTES:
                    self._write()

    def close(self) -> list[LakeFile]:
        """Write what waits, and return all files."""
        if self._waiting:
            self._write()
        return self._files

    def _write(self) -> None:
        table = pa.Table.from_batches(self._waiting, self._fields)
        self._waiting, self._rows, self._bytes = [], 0, 0
        name = file_name(self._bucket, self._step)
        sink = pa.BufferOutputStream()
        pq.write_table(table, sink, row_group_size=_ROW_GROUP_ROWS, compression="zstd")
        data = sink.getvalue()
        self._storage.create(name, data.to_pybytes())
        file = LakeFile(name=name, rows=table.num_rows, size=data.size, bounds=_bounds(table))
        self._files.append(file)


def conformed(rows: pa.RecordBatch | pa.Table, fields: pa.Schema) -> pa.Table:
    """Return rows with just these columns; those that they do not have are null."""
    names = frozenset(rows.schema.names)
    columns = [
        _cast(rows.column(field.name), field.type)
        if field.name in names
        else pa.nulls(rows.num_rows, field.type)
        for field in fields
    ]
    return pa.Table.from_arrays(columns, schema=fields)


def read_rows(
    storage: ObjectStorage, file: LakeFile, columns: Sequence[str] | None = None
) -> pa.Table:
    """Return the rows of a file that are there, in its order; columns that it has not are left."""
    rows = _read(storage, file, columns)
    if not file.dead:
        return rows
    there = np.ones(file.rows, bool)
    there[np.asarray(file.dead.to_array(), dtype=np.int64)] = False
    return rows.filter(pa.array(there))


def find_keys(
    storage: ObjectStorage,
    file: LakeFile,
    names: Sequence[str],
    codec: KeyCodec,
    wanted: pa.BinaryArray,
) -> BitMap64:
    """Return which rows of a file have one of these keys, dead ones too."""
    rows = _read(storage, file, names)
    found = pc.is_in(encoded_keys(rows, names, codec), value_set=wanted)
    return BitMap64(np.flatnonzero(found.to_numpy(zero_copy_only=False)).astype(np.uint64))


def encoded_keys(
    rows: pa.Table | pa.RecordBatch, names: Sequence[str], codec: KeyCodec
) -> pa.BinaryArray:
    """Return the keys of rows, encoded as the table does."""
    columns = [
        _cast(rows.column(name), kind) for name, kind in zip(names, codec.types, strict=True)
    ]
    whole = [one.combine_chunks() if isinstance(one, pa.ChunkedArray) else one for one in columns]
    return codec.encode(whole)


def _read(storage: ObjectStorage, file: LakeFile, columns: Sequence[str] | None) -> pa.Table:
    what = f"{file.name} of {storage!r}"
    try:
        with closing(storage.open(file.name)) as opened, pq.ParquetFile(opened) as parquet:
            count = parquet.metadata.num_rows
            if count != file.rows:  # Dead ones are told by their numbers.
                raise CorruptLake(f"{what} has {count} rows, and not {file.rows}: restore it")
            known = frozenset(parquet.schema_arrow.names)
            wanted = None if columns is None else [name for name in columns if name in known]
            return parquet.read(wanted, use_threads=False)
    except MissingObject as exc:
        raise CorruptLake(
            f"{what} is gone, though the copy needs it: restore it, or begin again"
        ) from exc
    except (pa.ArrowException, OSError) as exc:
        if isinstance(exc, OSError) and exc.errno is not None:
            raise StorageUnavailable(f"{what}: {exc.strerror}") from exc
        raise CorruptLake(
            f"{what} cannot be read ({str(exc).splitlines()[0]}): restore it, or begin again"
        ) from exc


def _cast(column: pa.Array | pa.ChunkedArray, kind: pa.DataType) -> pa.Array | pa.ChunkedArray:
    return column if column.type == kind else column.cast(kind)


def _bounds(table: pa.Table) -> tuple[int, int] | None:
    """Return the bounds of the first key column, by which readers pass files over."""
    if not pa.types.is_integer(table.schema.field(0).type):
        return None
    found = pc.min_max(table.column(0)).as_py()
    return found["min"], found["max"]


def sorted_by_key(rows: pa.Table, names: Iterable[str], codec: KeyCodec) -> pa.Table:
    """Return rows in the order of their keys, as tables have them."""
    return rows.take(pc.sort_indices(encoded_keys(rows, list(names), codec)))
