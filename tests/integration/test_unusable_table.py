"""A table that cannot be used as it lies there: damaged, of a newer format, or in use."""

import json
import shutil
import struct
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import xxhash

from foundation.errors import Corrupt, CorruptSegment, CorruptTable, InUse, LogGap, UnknownFormat
from merge_engine.bucket.segment import segment_name
from merge_engine.schema.builder import SchemaBuilder
from recovery.embedded.table import Table
from tests.conftest import rows_of, schema_of


@pytest.fixture
def closed_table(tmp_path: Path) -> Path:
    """A closed table of one bucket with segments at 0 (leader), 1 and 3, and no view."""
    schema = schema_of(a=(pa.int64(), "sum"))
    with Table.create(tmp_path / "table", schema, buckets=1) as table:
        table.put({"k": [1, 2], "a": [1, 2]})
        table.put({"k": [1], "a": [10]})
    shutil.rmtree(tmp_path / "table" / "view")
    return tmp_path / "table"


def log_of(table: Path) -> Path:
    return table / "log" / "table" / "0"


def open_and_read(table: Path) -> Any:
    with Table.open(table) as opened:
        return rows_of(opened)


def test_a_flipped_bit_in_a_segment_is_reported_with_file_and_offset(closed_table: Path) -> None:
    path = log_of(closed_table) / segment_name(1)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)
    names = sorted(path.name for path in log_of(closed_table).iterdir())
    with pytest.raises(CorruptSegment) as caught:
        open_and_read(closed_table)
    assert f"segment {segment_name(1)} (log offset 1): checksum mismatch" in str(caught.value)
    assert str(log_of(closed_table)) in str(caught.value)
    data[len(data) // 2] ^= 4
    path.write_bytes(data)
    assert open_and_read(closed_table) == {1: (11,), 2: (2,)}
    assert set(names) < {path.name for path in log_of(closed_table).iterdir()}


def test_a_segment_of_a_newer_format_is_reported_with_both_versions(closed_table: Path) -> None:
    path = log_of(closed_table) / segment_name(3)
    body = bytearray(path.read_bytes()[:-8])
    body[-10:-8] = struct.pack("<H", 9)
    path.write_bytes(body + struct.pack("<Q", xxhash.xxh3_64_intdigest(bytes(body))))
    with pytest.raises(UnknownFormat) as caught:
        open_and_read(closed_table)
    assert "(log offset 3) of format 9, this release reads 1, 2, 3 and 4; " in str(caught.value)
    assert str(log_of(closed_table)) in str(caught.value)


def test_a_missing_segment_is_reported_with_file_and_place(closed_table: Path) -> None:
    (log_of(closed_table) / segment_name(1)).unlink()
    with pytest.raises(LogGap) as caught:
        open_and_read(closed_table)
    assert f"segment {segment_name(1)} is missing from" in str(caught.value)
    assert str(log_of(closed_table)) in str(caught.value)


@pytest.mark.parametrize("name", ["table.json", "schema/00000001.json"])
def test_a_description_of_a_newer_format_is_refused(closed_table: Path, name: str) -> None:
    path = closed_table / name
    document = json.loads(path.read_text().splitlines()[0])
    newer = json.dumps(document | {"format": 9})
    path.write_text(f"{newer}\n{xxhash.xxh3_64_hexdigest(newer.encode())}\n")
    with pytest.raises(UnknownFormat, match=r"of format 9, this release reads \d; .*: upgrade"):
        Table.open(closed_table)


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("table.json", {"buckets": None}, "it has no 'buckets'"),
        ("table.json", {"table_id": None}, "it has no 'table_id'"),
        ("table.json", {"format": None}, "it has no 'format'"),
        ("schema/00000001.json", {"version": 2}, "it is that of version 2"),
    ],
)
def test_a_description_that_was_sealed_by_somebody_else_is_looked_through(
    closed_table: Path, name: str, change: dict[str, object], words: str
) -> None:
    path = closed_table / name
    document = json.loads(path.read_text().splitlines()[0]) | change
    other = json.dumps({key: value for key, value in document.items() if value is not None})
    path.write_text(f"{other}\n{xxhash.xxh3_64_hexdigest(other.encode())}\n")
    with pytest.raises(CorruptTable, match=f"{path.name} in .* is damaged: {words}"):
        Table.open(closed_table)


def test_the_description_of_another_partition_is_not_taken_for_this_one_s(tmp_path: Path) -> None:
    schema = (
        SchemaBuilder()
        .column("day", pa.int64())
        .primary_key("day")
        .partitioned_by("day")
        .agg_column("n", pa.int64(), "sum")
        .build()
    )
    with Table.create(tmp_path, schema, buckets=1) as table:
        table.put({"day": [1, 2], "n": [1, 1]})
    first, second = (tmp_path / "partition").iterdir()
    first.write_bytes(second.read_bytes())
    with pytest.raises(CorruptTable, match=f"{first.name} in .* it is that of another partition"):
        Table.open(tmp_path)


def test_a_damaged_description_is_reported_by_name(closed_table: Path) -> None:
    (closed_table / "table.json").write_text("{")
    with pytest.raises(CorruptTable, match=r"table\.json in .* is damaged"):
        Table.open(closed_table)


# Two processes


HOLDER = """
    import sys
    from recovery.embedded.table import Table

    with Table.open(sys.argv[1]) as table:
        table.put({"k": [1], "a": [100]})
        print("open", flush=True)
        sys.stdin.readline()
        table.put({"k": [1], "a": [1000]})
"""


def test_a_second_process_is_told_that_the_bucket_is_in_use_and_harms_nobody(
    closed_table: Path,
) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(HOLDER), str(closed_table)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "open\n"
        with Table.open(closed_table) as table:
            with pytest.raises(InUse) as caught:
                table.put({"k": [1], "a": [5]})
            view = closed_table / "view" / "table" / "0"
            assert str(caught.value) == (
                f"{view} is open in another process or handle; close that one first"
            )
            with pytest.raises(InUse):
                table.lookup({"k": [1]})
            process.communicate("go on\n", timeout=180)
            assert process.returncode == 0
            assert rows_of(table) == {1: (1111,), 2: (2,)}, "it can be opened when it is free"
    finally:
        process.kill()
        process.wait()


def test_no_bit_of_what_a_table_says_about_itself_can_be_flipped_unnoticed(tmp_path: Path) -> None:
    schema = (
        SchemaBuilder()
        .column("day", pa.int64())
        .column("k", pa.int64())
        .primary_key("day", "k")
        .partitioned_by("day")
        .agg_column("s", pa.string(), "string_agg", delimiter="|")
        .build()
    )
    with Table.create(tmp_path, schema, buckets=4) as table:
        table.put({"day": [1], "k": [1], "s": ["a"]})
        table.add_column("n", pa.int64(), "sum")
    told = [path for path in tmp_path.rglob("*.json") if not path.is_relative_to(tmp_path / "view")]
    assert len(told) == 4
    for path in told:
        whole = path.read_bytes()
        for bit in range(8 * len(whole)):
            damaged = bytearray(whole)
            damaged[bit // 8] ^= 1 << bit % 8
            path.write_bytes(damaged)
            with pytest.raises(Corrupt):
                Table.open(tmp_path)
        path.write_bytes(whole)
    with Table.open(tmp_path) as table:
        assert table.to_arrow().to_pylist() == [{"day": 1, "k": 1, "s": "a", "n": None}]
