"""`tallybook export`: all rows of a table in a file, for other programs.

Rows are written as they come, so a table may be larger than memory. They go to a temporary file
beside the target, which takes its name when all of them are there and synced: a file of this name
is whole. A symbolic link stays one: what it leads to is replaced. Pipes, devices and standard
output are written to as they are. All rows are of one cut, unless the latest ones are asked for.
"""

import io
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import pyarrow as pa
import typer
from pyarrow import csv, parquet

from foundation.errors import InvalidInput
from merge_engine.encoding.soundness import readable_values
from tallybook.commands.output import json_text, print_json, print_line, progress, size
from tallybook.commands.reaching import (
    Isolation,
    Json,
    TableName,
    cluster_command,
    connected,
)
from tallybook.commands.rows import Columns, names_of
from tallybook.connecting import Reach

_ROWS_AT_ONCE = 65_536
STANDARD_OUTPUT = Path("-")
_STDOUT = 1  # The number that every process has it under.
Write: TypeAlias = Callable[[pa.Table], None]


class Format(StrEnum):
    """What the file is."""

    CSV = "csv"
    PARQUET = "parquet"
    ARROW = "arrow"


def add_commands(app: typer.Typer) -> None:
    """Add `export` to the application."""
    cluster_command(app, "export", deadline_s=30.0)(export)


def export(
    reach: Reach,
    *,
    table: TableName,
    file: Annotated[Path, typer.Argument(metavar="FILE", show_default=False)],
    format: Annotated[  # noqa: A002
        Format | None, typer.Option(help="unless the name of the file says it")
    ] = None,
    columns: Columns = None,
    isolation: Isolation = "committed",
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="in the place of a file that is there")
    ] = False,
    json: Json = False,
) -> None:
    """Write all rows of a table to a file: CSV, Parquet or Arrow.

    In CSV, nested values are JSON and bytes are hexadecimal. A file of this name appears when it is
    whole; `-` is standard output, for pipes.
    """
    kind = format or format_of(file)
    is_stream = _is_stream(file)
    target = file if is_stream else Path(os.path.realpath(file))
    if not is_stream and target.exists() and not overwrite:
        raise InvalidInput(f"{file} is there already: say --overwrite, or give another name")
    if not is_stream and not target.parent.is_dir():
        raise InvalidInput(f"there is no directory {target.parent}: make it, or give another name")
    write = write_stream if is_stream else write_file
    with connected(reach) as cluster:
        scan = cluster.table(table).scan(names_of(columns), isolation=isolation)
        with progress(f"exporting {table}", None) as advance:
            rows, bytes_written = write(target, kind, scan.schema, _counted(scan, advance))
    if is_stream:  # Standard output may be the stream itself, and has nothing but rows.
        return
    if json:
        print_json({"table": table, "file": str(file), "format": kind, "rows": rows})
    else:
        print_line(f"{file} has {rows:,} rows of table {table}, {size(bytes_written)}")


def _is_stream(file: Path) -> bool:
    """Tell whether this is written to as it is, not replaced: a pipe, a device, standard output."""
    if file == STANDARD_OUTPUT:
        return True
    try:
        found = file.stat()
    except FileNotFoundError:
        return False
    if stat.S_ISDIR(found.st_mode):
        raise InvalidInput(f"{file} is a directory: give the name of a file in it")
    # `/dev/stdout` that a shell has sent to a file leads to that file.
    is_ours = os.path.samestat(found, os.fstat(_STDOUT))
    return is_ours or not stat.S_ISREG(found.st_mode)


def format_of(file: Path) -> Format:
    """Return what a file is by its name."""
    ending = file.suffix.lstrip(".").lower()
    with suppress(ValueError):
        return Format(ending)
    if ending in ("ipc", "feather"):
        return Format.ARROW
    raise InvalidInput(f"{file} does not say what it is: say --format csv, parquet or arrow")


def write_file(
    file: Path, kind: Format, schema: pa.Schema, batches: Iterable[pa.RecordBatch]
) -> tuple[int, int]:
    """Write batches to a file, which is there whole when this returns; return its rows and bytes.

    A file that is replaced hands its permissions on.
    """
    temporary = file.with_name(f".{file.name}.{os.getpid()}.part")
    try:
        with open(temporary, "wb") as sink:
            rows = _write(sink, kind, schema, batches)
            sink.flush()
            os.fsync(sink.fileno())
            written = os.fstat(sink.fileno()).st_size
        with suppress(FileNotFoundError):
            temporary.chmod(stat.S_IMODE(file.stat().st_mode))
        temporary.replace(file)
    finally:
        temporary.unlink(missing_ok=True)
    return rows, written


def write_stream(
    file: Path, kind: Format, schema: pa.Schema, batches: Iterable[pa.RecordBatch]
) -> tuple[int, int]:
    """Write batches to what only takes bytes, one after the other; return its rows and bytes."""
    is_ours = file == STANDARD_OUTPUT
    with open(_STDOUT if is_ours else file, "wb", closefd=not is_ours) as raw:
        sink = _CountingWriter(raw)
        rows = _write(sink, kind, schema, batches)
        raw.flush()
    return rows, sink.position


class _CountingWriter(io.RawIOBase):
    """What Arrow's writers may ask for their position, in place of a pipe, which has none."""

    def __init__(self, raw: io.BufferedWriter) -> None:
        self._raw = raw
        self.position = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self.position += self._raw.write(data)
        return memoryview(data).nbytes

    def tell(self) -> int:
        return self.position


def _write(sink: Any, kind: Format, schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> int:
    rows = 0
    with _WRITERS[kind](sink, schema) as write:
        for some in _gathered(batches, schema):
            write(some)
            rows += some.num_rows
    return rows


def _counted(
    batches: Iterable[pa.RecordBatch], advance: Callable[[int], None]
) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        advance(batch.num_rows)
        yield batch


def _gathered(batches: Iterable[pa.RecordBatch], schema: pa.Schema) -> Iterator[pa.Table]:
    """Yield tables of many rows: a row group of a few would be read slowly."""
    some: list[pa.RecordBatch] = []
    rows = 0
    for batch in batches:
        some.append(batch)
        rows += batch.num_rows
        if rows >= _ROWS_AT_ONCE:
            yield pa.Table.from_batches(some, schema)
            some, rows = [], 0
    if some:
        yield pa.Table.from_batches(some, schema)


@contextmanager
def _to_parquet(sink: Any, schema: pa.Schema) -> Iterator[Write]:
    with parquet.ParquetWriter(sink, schema) as writer:
        yield writer.write_table


@contextmanager
def _to_arrow(sink: Any, schema: pa.Schema) -> Iterator[Write]:
    with pa.ipc.new_file(sink, schema) as writer:
        yield writer.write_table


@contextmanager
def _to_csv(sink: Any, schema: pa.Schema) -> Iterator[Write]:
    flat = pa.schema([(field.name, _flat_type(field.type)) for field in schema])
    with csv.CSVWriter(sink, flat) as writer:
        yield lambda table: writer.write_table(flattened(table, flat))


def flattened(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """Return rows with text where CSV has no type: JSON for nested values, hex for bytes."""
    columns = [
        column if column.type == field.type else _as_text(column)
        for column, field in zip(table.columns, schema, strict=True)
    ]
    return pa.table(columns, schema=schema)


def _flat_type(data_type: pa.DataType) -> pa.DataType:
    is_text = pa.types.is_nested(data_type) or pa.types.is_binary(data_type)
    return pa.string() if is_text else data_type


def _as_text(column: pa.ChunkedArray) -> pa.Array:
    texts = []
    for value in readable_values(column):
        if value is None or isinstance(value, bytes):
            texts.append(None if value is None else value.hex())
        else:
            texts.append(json_text(_json_of(value, column.type)))
    return pa.array(texts, pa.string())


def _json_of(value: Any, data_type: pa.DataType) -> Any:
    """Return a nested value as JSON has it: maps whose keys are text are objects."""
    if value is None:
        return None
    if pa.types.is_map(data_type):
        pairs = [(key, _json_of(one, data_type.item_type)) for key, one in value]
        if pa.types.is_string(data_type.key_type):
            return dict(pairs)
        return [[_json_of(key, data_type.key_type), one] for key, one in pairs]
    if pa.types.is_list(data_type):
        return [_json_of(one, data_type.value_type) for one in value]
    if pa.types.is_struct(data_type):
        return {field.name: _json_of(value[field.name], field.type) for field in data_type}
    return value


_WRITERS = {Format.CSV: _to_csv, Format.PARQUET: _to_parquet, Format.ARROW: _to_arrow}
