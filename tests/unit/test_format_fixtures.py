"""Files of every version of every format that is stored: today's code reads what they say, in full.

They were written once, by the release of their time, see `tests/fixtures/formats/make.py`.
"""

from pathlib import Path

import pyarrow as pa
import pytest
from rocksdict import AccessType, Options, Rdict

from foundation.ids import Token
from merge_engine.bucket import rolled, segment, snapshot_manifest, view_meta
from merge_engine.bucket.bucket import Bucket
from merge_engine.bucket.rolled import decode_rolled
from merge_engine.bucket.segment import Segment, decode_segment, encode_segment, segment_name
from merge_engine.bucket.snapshot_storage import SnapshotStorage, restore_latest
from merge_engine.embedded import catalog
from merge_engine.encoding.stored_rows import SchemaHistory
from merge_engine.storage.objects import LocalStorage
from recovery.embedded.table import Table
from recovery.writer import promise_objects
from recovery.writer.redo import RedoLog
from tests.fixtures.formats import buckets, promises, segments
from tests.fixtures.formats import tables as embedded
from tests.fixtures.formats.kinds import (
    KINDS,
    ROOT,
    Kind,
    copied,
    directory_of,
    files,
    registered,
)
from tests.fixtures.formats.make import MAKERS
from tests.support.buckets import open_view

# That there are some of each


def test_every_version_that_is_read_has_a_fixture_and_every_fixture_is_of_such_a_version() -> None:
    expected = {
        directory_of(formats, version)
        for formats in registered().values()
        for version in formats.readers
    }
    found = {path for path in ROOT.glob("*/v*") if any(one.is_file() for one in path.rglob("*"))}
    assert found == expected


def test_the_fixtures_of_every_format_can_be_made() -> None:
    assert {maker.formats.name: maker.formats for maker in MAKERS} == registered()


# One value in one file

each_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.formats.name)


@each_kind
def test_a_file_of_any_version_is_read_as_the_value_that_it_was_made_of(kind: Kind) -> None:
    for version in kind.formats.readers:
        found = files(kind.formats, version)
        assert found
        assert {name: kind.read(data) for name, data in found.items()} == {
            name: kind.values[name] for name in found
        }


@each_kind
def test_what_is_written_has_the_very_bytes_of_its_version(kind: Kind) -> None:
    """Else it would be another version, whatever its number."""
    written = {name: kind.write(value) for name, value in kind.values.items()}
    assert written == files(kind.formats, kind.formats.current)


# Segments and promises: Arrow has some freedom to lay out the same in other bytes


def assert_same(found: Segment, expected: Segment) -> None:
    assert found.header == expected.header
    assert list(found.keys) == list(expected.keys)
    assert list(found.changes) == list(expected.changes)
    for column, keys in expected.keys.items():
        assert found.keys[column].equals(keys)
    for column, change in expected.changes.items():
        other = found.changes[column]
        assert other.touched_before.tolist() == change.touched_before.tolist()
        assert other.touched_after.tolist() == change.touched_after.tolist()
        assert other.before.equals(change.before)
        assert other.after.equals(change.after)


@pytest.mark.parametrize("version", segment.FORMATS.readers)
def test_a_segment_of_any_version_is_read_in_full(version: int) -> None:
    found = files(segment.FORMATS, version)
    assert found
    for name, data in found.items():
        assert_same(decode_segment(name, data), segments.SEGMENTS[name])


def test_a_segment_is_written_as_its_version_has_it() -> None:
    found = files(segment.FORMATS, segment.FORMATS.current)
    assert set(found) == set(segments.SEGMENTS)
    for name, data in found.items():
        written = encode_segment(segments.SEGMENTS[name])
        assert _arrow(written).equals(_arrow(data))
        assert _arrow(written).schema.equals(_arrow(data).schema, check_metadata=True)
        assert written[-18:-8] == data[-18:-8]


@pytest.mark.parametrize("version", rolled.FORMATS.readers)
def test_rolled_segments_of_any_version_are_read_in_full(version: int) -> None:
    found = files(rolled.FORMATS, version)
    assert found
    for name, data in found.items():
        object_ = decode_rolled(name, data)
        expected = [segments.SEGMENTS[segment_name(h.base_offset)] for h in object_.index.headers]
        assert [one.header for one in expected] == list(object_.index.headers)
        for one in expected:
            assert_same(object_.segment_at(one.header.base_offset), one)


def test_rolled_segments_are_written_as_their_version_has_them() -> None:
    """Compression has some freedom, also that of segments, which are rolled up as they are."""
    [[name, data]] = files(rolled.FORMATS, rolled.FORMATS.current).items()
    old = files(segment.FORMATS, 1)
    written = segments.rolled_up(old)
    stored, made = decode_rolled(name, data), decode_rolled(name, written)
    assert stored.index.headers == made.index.headers
    for number, header in enumerate(made.index.headers):
        base = segment_name(header.base_offset)
        assert_same(
            decode_segment(base, made.data(number)), decode_segment(base, stored.data(number))
        )
        if base in old:
            assert made.data(number) == stored.data(number) == old[base]
    assert written[-18:-8] == data[-18:-8]


def _arrow(data: bytes) -> pa.Table:
    with pa.ipc.open_stream(data) as reader:
        return reader.read_all()


@pytest.mark.parametrize("version", promise_objects.FORMATS.readers)
@pytest.mark.parametrize("promised", promises.PROMISES.values(), ids=promises.PROMISES)
def test_a_promise_of_any_version_is_read_with_all_of_its_parts(
    promised: promises.Promised, version: int, tmp_path: Path
) -> None:
    log = RedoLog(LocalStorage(copied(promise_objects.FORMATS, version, tmp_path)))
    token = Token(promises.EPOCH, promised.batch)
    promise = log.read(log.location_of(promises.UID, promises.OWNER, token))
    assert promise.in_parts == promised.in_parts
    assert promise.contents.form == promised.form
    assert len(promise.contents.objects) == promised.objects
    parts = list(promise.parts(promises.SCHEMA, promises.PARTITIONS))
    expected = [promises.part_of(*part) for part in promised.parts]
    assert [part[:2] for part in parts] == [part[:2] for part in expected]
    assert [part.rows.to_pylist() for part in parts] == [p.rows.to_pylist() for p in expected]
    assert [part.rows.schema for part in parts] == [part.rows.schema for part in expected]


def test_a_promise_is_written_as_its_version_has_it(tmp_path: Path) -> None:
    promises.fill_redo_log(tmp_path)
    before = directory_of(promise_objects.FORMATS, promise_objects.FORMATS.current) / promises.UID
    after = tmp_path / promises.UID
    # Objects with parts have names that are never the same, and promises name them.
    for pattern, count in (("*-7-[12].redo", 2), ("*.part", 3)):
        read = [_whole(path) for path in sorted(after.glob(pattern))]
        assert len(read) == count
        assert sorted(read) == sorted(_whole(path) for path in before.glob(pattern))


def _whole(path: Path) -> str:
    """Return all that an object of a promise says, as text."""
    with pa.ipc.open_stream(path.read_bytes()[:-8]) as reader:
        described = {key: text.decode() for key, text in (reader.schema.metadata or {}).items()}
        batches = list(reader.iter_batches_with_custom_metadata())
        fields = [str(field) for field in reader.schema]
    rows = [(dict(metadata), rows.to_pylist()) for rows, metadata in batches]
    return f"{described} {fields} {rows}"


# Whole tables, buckets and snapshots


@pytest.mark.parametrize("version", catalog.FORMATS.readers)
def test_an_embedded_table_is_opened_and_replayed(version: int, tmp_path: Path) -> None:
    with Table.open(copied(catalog.FORMATS, version, tmp_path) / "everything") as table:
        assert table.to_arrow().to_pylist() == embedded.EVERYTHING_ROWS
        assert table.lookup({"name": ["new", "gone"], "id": [5, 0]}, ["clicks"]).to_pylist() == [
            {"name": "new", "id": 5, "clicks": 4},
            {"name": "gone", "id": 0, "clicks": None},
        ]
        [bucket_id] = table.bucket_ids()
        changes = [
            record
            for batch in table.changelog(bucket_id, 9, isolation="latest")
            for record in batch.to_pylist()
        ]
        assert [(one["_owner"], one["_change_type"]) for one in changes] == (
            embedded.EVERYTHING_CHANGES
        )
        times_s = {one["_commit_timestamp"].timestamp() for one in changes}
        assert times_s == {buckets.MADE_MS / 1000}
        schemas = table.bucket(bucket_id).history.schemas
        assert schemas[1] == embedded.EVERYTHING
        assert list(schemas) == [1, 2, 3, 4]


@pytest.mark.parametrize("version", catalog.PARTITION_FORMATS.readers)
def test_an_embedded_table_with_partitions_is_opened_and_replayed(
    version: int, tmp_path: Path
) -> None:
    with Table.open(copied(catalog.PARTITION_FORMATS, version, tmp_path) / "by-day") as table:
        assert table.schema == embedded.BY_DAY
        assert table.partitions().to_pylist() == embedded.BY_DAY_PARTITIONS
        rows = table.to_arrow().to_pylist()
        assert sorted(rows, key=lambda row: (row["day"], row["customer_id"])) == (
            embedded.BY_DAY_ROWS
        )
        # A key is looked for in the bucket that it was put into.
        names = ["day", "country", "customer_id"]
        keys = pa.Table.from_pylist(
            list(embedded.BY_DAY_ROWS), embedded.BY_DAY.arrow_schema()
        ).select(names)
        assert table.lookup(keys).to_pylist() == embedded.BY_DAY_ROWS


def assert_is_the_bucket(log: Path, view_path: Path) -> None:
    """Open a bucket; it has the rows, and knows what was applied."""
    bucket = Bucket(
        LocalStorage(log), view_path, SchemaHistory(buckets.SCHEMAS), identity=buckets.IDENTITY
    )
    try:
        assert bucket.start_offset == buckets.APPLIED
        assert [row for batch in bucket.scan() for row in batch.to_pylist()] == buckets.ROWS
        for owner, applied in buckets.TOKENS.items():
            if applied is not None:
                deletes = pa.table({"name": ["new"], "id": pa.array([1], pa.int16()), "op": [1]})
                again = bucket.put(deletes, operation_column="op", owner=owner, token=applied.token)
                assert again.repeated
    finally:
        bucket.close()


@pytest.mark.parametrize("version", view_meta.FORMATS.readers)
def test_a_view_is_read_byte_by_byte(version: int, tmp_path: Path) -> None:
    directory = copied(view_meta.FORMATS, version, tmp_path) / "bucket" / buckets.VIEW
    expected = buckets.CHECKPOINT._replace(works=buckets.WORKS[version])
    assert view_meta.read_checkpoint(directory) == expected
    database = Rdict(str(directory), Options(raw_mode=True), access_type=AccessType.read_only())
    stored = {key: bytes.fromhex(value) for key, value in buckets.STORED[version].items()}
    assert dict(database.items()) == stored
    database.close()


@pytest.mark.parametrize("version", view_meta.FORMATS.readers)
def test_a_view_knows_what_was_applied(version: int, tmp_path: Path) -> None:
    directory = copied(view_meta.FORMATS, version, tmp_path) / "bucket" / buckets.VIEW
    opened = open_view(directory, buckets.IDENTITY)
    assert (opened.applied, opened.meta.schema_version) == (buckets.APPLIED, 2)
    assert {owner: opened.meta.token(owner) for owner in buckets.TOKENS} == buckets.TOKENS
    assert {owner: opened.meta.parts(owner) for owner in buckets.PARTS} == buckets.PARTS
    assert opened.meta.works == buckets.WORKS[version]
    opened.close()
    again = open_view(directory, buckets.IDENTITY)
    assert again.meta.works == buckets.WORKS[version], "also once it is of the current version"
    again.close()


@pytest.mark.parametrize("version", view_meta.FORMATS.readers)
def test_a_bucket_goes_on_with_its_view_where_the_log_was_cleaned(
    version: int, tmp_path: Path
) -> None:
    bucket = copied(view_meta.FORMATS, version, tmp_path) / "bucket"
    assert_is_the_bucket(bucket / buckets.LOG, bucket / buckets.VIEW)


@pytest.mark.parametrize("version", snapshot_manifest.FORMATS.readers)
def test_a_bucket_is_restored_from_its_snapshot(version: int, tmp_path: Path) -> None:
    log = copied(snapshot_manifest.FORMATS, version, tmp_path) / "bucket" / buckets.LOG
    storage = SnapshotStorage(LocalStorage(log / buckets.SNAPSHOTS))
    view_path = tmp_path / "restored"
    manifest = restore_latest(storage, [(buckets.SNAPSHOT_ID, buckets.TERM)], view_path)
    assert manifest is not None
    assert (manifest.applied, manifest.stable) == (buckets.APPLIED, buckets.STABLE)
    assert (manifest.identity, manifest.schema_version) == (buckets.IDENTITY, 2)
    assert manifest.created_ms == buckets.MADE_MS
    assert [file.name for file in manifest.files] == buckets.FILES
    expected = buckets.CHECKPOINT._replace(works=buckets.WORKS[version])
    assert view_meta.read_checkpoint(view_path) == expected
    assert_is_the_bucket(log, view_path)
