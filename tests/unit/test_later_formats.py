"""Files of versions that no release has written yet: each is refused, and the error says so."""

import json
import struct
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import xxhash
from rocksdict import Options, Rdict

from foundation.errors import CorruptRecord, UnknownFormat
from foundation.formats import Formats
from foundation.ids import Token
from merge_engine.bucket import log_start, rolled, segment, snapshot_manifest, view_meta
from merge_engine.bucket.rolled import decode_rolled
from merge_engine.bucket.segment import decode_segment
from merge_engine.embedded import catalog
from merge_engine.schema import schema
from merge_engine.storage.objects import LocalStorage
from recovery.embedded.table import Table
from recovery.writer import promise_objects
from recovery.writer.redo import RedoLog
from sink.lake import parquet_log
from sink.lake import state as lake_state
from tests.fixtures.formats import buckets, promises
from tests.fixtures.formats import tables as embedded
from tests.fixtures.formats.kinds import KINDS, Kind, copied, files, registered
from tests.support.buckets import open_view


def of_a_later_version(kind: Kind, data: bytes) -> bytes:
    """Return a file's bytes as the next version of its format would begin, or end."""
    later = after(kind.formats)
    if kind.formats in (schema.FORMATS, lake_state.FORMATS, parquet_log.FORMATS):
        return json.dumps(json.loads(data) | {"format": later}).encode()
    if kind.formats in (snapshot_manifest.FORMATS, log_start.FORMATS):
        return sealed(data[:8] + struct.pack("<H", later) + data[10:-8])
    return bytes([later]) + data[1:]


def after(formats: Formats[Any]) -> int:
    """Return the version after the last one."""
    return max(formats.readers) + 1


def sealed(data: bytes) -> bytes:
    return data + struct.pack("<Q", xxhash.xxh3_64_intdigest(data))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.formats.name)
def test_a_later_version_of_a_value_is_refused_as_such(kind: Kind) -> None:
    for data in files(kind.formats, kind.formats.current).values():
        with refused(kind.formats):
            kind.read(of_a_later_version(kind, data))


def refused(formats: Formats[Any]) -> "pytest.RaisesExc[Exception]":
    """Expect the error for the version after the last one."""
    later = after(formats)
    error = CorruptRecord if formats.error is CorruptRecord else UnknownFormat
    return pytest.raises(
        error,
        match=rf" of format {later}, this release reads (\d.* and )?{later - 1}; it was written by "
        "a newer release: upgrade",
    )


def test_a_later_segment_is_refused_as_such() -> None:
    for name, data in files(segment.FORMATS, segment.FORMATS.current).items():
        later = struct.pack("<H", after(segment.FORMATS))
        with refused(segment.FORMATS):
            decode_segment(name, sealed(data[:-18] + later + data[-16:-8]))


def test_later_rolled_segments_are_refused_as_such() -> None:
    """Their checksum is of what follows the segments."""
    for name, data in files(rolled.FORMATS, rolled.FORMATS.current).items():
        [stored, *_] = struct.unpack_from("<Q", data, len(data) - 58)
        later = struct.pack("<H", after(rolled.FORMATS))
        with refused(rolled.FORMATS):
            decode_rolled(name, data[:stored] + sealed(data[stored:-18] + later + data[-16:-8]))


def test_a_later_promise_is_refused_as_such(tmp_path: Path) -> None:
    """Also if its first object is of this time: a part may have been added by a later release."""
    directory = copied(promise_objects.FORMATS, promise_objects.FORMATS.current, tmp_path)
    log = RedoLog(LocalStorage(directory))
    location = log.location_of(promises.UID, promises.OWNER, Token(promises.EPOCH, 3))
    for part in (directory / promises.UID).glob("*.part"):
        _make_later(part)
    promise = log.read(location)
    with refused(promise_objects.FORMATS):
        list(promise.parts(promises.SCHEMA, promises.PARTITIONS))
    _make_later(directory / location.removeprefix("/"))
    with refused(promise_objects.FORMATS):
        log.read(location)


def _make_later(path: Path) -> None:
    """Give an object of a promise the next version."""
    with pa.ipc.open_stream(path.read_bytes()[:-8]) as reader:
        described, batches = reader.schema.metadata, list(reader)
        header = json.loads(described[b"tallybook"]) | {"format": after(promise_objects.FORMATS)}
        later = reader.schema.with_metadata({b"tallybook": json.dumps(header)})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, later) as writer:
        for rows in batches:
            writer.write_batch(rows.replace_schema_metadata(later.metadata))
    stream = bytes(sink.getvalue())
    path.write_bytes(stream + xxhash.xxh3_64_digest(stream))


def test_a_later_embedded_table_is_refused_as_such(tmp_path: Path) -> None:
    directory = copied(catalog.FORMATS, catalog.FORMATS.current, tmp_path) / "everything"
    _reformat(directory / "table.json", after(catalog.FORMATS))
    with refused(catalog.FORMATS):
        Table.open(directory)


def test_a_later_partition_is_refused_as_such(tmp_path: Path) -> None:
    """The first version has no number. One that says that it is the first is the same."""
    formats = catalog.PARTITION_FORMATS
    directory = copied(formats, formats.current, tmp_path) / "by-day"
    first, *_ = sorted((directory / "partition").iterdir())
    assert b"format" not in first.read_bytes()
    _reformat(first, 1)
    with Table.open(directory) as table:
        assert table.partitions().to_pylist() == embedded.BY_DAY_PARTITIONS
    _reformat(first, after(formats))
    with refused(formats):
        Table.open(directory)


def _reformat(path: Path, version: int) -> None:
    """Give a document of an embedded table another version."""
    document, _, _ = path.read_bytes().partition(b"\n")
    text = json.dumps(json.loads(document) | {"format": version})
    path.write_text(f"{text}\n{xxhash.xxh3_64_hexdigest(text.encode())}\n")


def test_a_later_view_is_refused_as_such_and_so_is_a_copy_of_it(tmp_path: Path) -> None:
    directory = (
        copied(view_meta.FORMATS, view_meta.FORMATS.current, tmp_path) / "bucket" / buckets.VIEW
    )
    database = Rdict(str(directory), Options(raw_mode=True))
    database[b"mformat"] = str(after(view_meta.FORMATS)).encode()
    database.close()
    with refused(view_meta.FORMATS) as caught:
        open_view(directory, buckets.IDENTITY)
    assert str(caught.value).endswith("or remove the directory to rebuild it from the log")
    with refused(view_meta.FORMATS):
        view_meta.read_checkpoint(directory)


def test_every_format_is_tried_in_a_later_version() -> None:
    tried = {kind.formats.name for kind in KINDS}
    tried |= {
        one.name
        for one in (segment.FORMATS, rolled.FORMATS, promise_objects.FORMATS, view_meta.FORMATS)
    }
    tried |= {catalog.FORMATS.name, catalog.PARTITION_FORMATS.name}
    assert tried == set(registered())
