"""RocksDB is closed when nobody is inside any more, and what comes later is told so."""

import ast
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pytest
from rocksdict import DbClosedError, Options, WriteBatch

from foundation.errors import (
    Closed,
    CorruptView,
    InUse,
    StorageFull,
    StorageUnavailable,
    TallybookError,
)
from merge_engine.bucket.database import Database
from merge_engine.bucket.options import write_options
from merge_engine.bucket.pinned_rows import PinnedRows
from merge_engine.bucket.rocksdb_errors import translated
from tests.conftest import BucketFactory, batch
from tests.support.buckets import add
from tests.support.small_disk import small_file_system
from tests.unit.test_architecture import SOURCES

WAIT_S = 30.0
KEYS = [b"r%06d" % number for number in range(2_000)]
Use = Callable[[Database], object]


def opened(path: Path) -> Database:
    return Database(path / "database", Options(raw_mode=True))


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    database = opened(tmp_path)
    write(database)
    yield database
    database.close()


def write(database: Database) -> None:
    rows = WriteBatch(raw_mode=True)
    for key in KEYS:
        rows.put(key, key * 10)
    database.write(rows, write_options())


def scan(database: Database) -> None:
    rows = PinnedRows(database, b"r")
    try:
        assert sum(len(keys) for keys, _ in rows.batches(None, 100)) == len(KEYS)
    finally:
        rows.close()


USES: dict[str, Use] = {
    "get": lambda database: database.get(KEYS),
    "keys_below": lambda database: database.keys_below(b"r", 100),
    "count": lambda database: database.count("rocksdb.estimate-num-keys"),
    "write": write,
    "flush": Database.flush,
    "flush_for_copy": lambda database: database.flush_for_copy(bool),
    "scan": scan,
}


@pytest.mark.parametrize("name", USES)
def test_closing_beside_any_use_closes_and_frees_the_directory(name: str, tmp_path: Path) -> None:
    """Whatever threads do: each call ends, or is told that it was closed; then it can be opened."""
    for number in range(5):
        database = opened(tmp_path / str(number))
        write(database)
        barrier = threading.Barrier(4)

        def use(database: Database = database, barrier: threading.Barrier = barrier) -> str:
            barrier.wait(WAIT_S)
            while True:
                try:
                    USES[name](database)
                except Closed as exc:
                    return str(exc)

        with ThreadPoolExecutor(3) as pool:
            told = [pool.submit(use) for _ in range(3)]
            barrier.wait(WAIT_S)
            database.close()
            assert database.is_closed
            assert all("closed" in future.result(WAIT_S) for future in told)
        opened(tmp_path / str(number)).close()


def test_close_waits_for_those_inside_and_lets_nobody_else_in(database: Database) -> None:
    closer = threading.Thread(target=database.close)
    with database.inside() as rdict:
        closer.start()
        while True:  # Until the closer has come: from then on nobody is let in.
            try:
                database.get(KEYS[:1])
            except Closed:
                break
        assert not database.is_closed
        assert rdict.get(KEYS[0]) == KEYS[0] * 10
    closer.join(WAIT_S)
    assert database.is_closed


def test_whoever_closes_second_returns_when_it_is_closed(database: Database) -> None:
    with ThreadPoolExecutor(4) as pool:
        with database.inside():
            closing = [pool.submit(database.close) for _ in range(4)]
            assert not any(future.done() for future in closing)
        for future in closing:
            future.result(WAIT_S)
            assert database.is_closed
    database.close()


def test_pinned_rows_do_not_keep_the_directory(tmp_path: Path, database: Database) -> None:
    rows = PinnedRows(database, b"r")
    batches = rows.batches(None, 10)
    assert len(next(batches)[0]) == 10
    with pytest.raises(InUse, match="open in another process or handle"):
        opened(tmp_path)
    database.close()
    with pytest.raises(Closed, match="begin another scan"):
        next(batches)
    opened(tmp_path).close()


def test_rows_are_not_pinned_of_what_is_closed(database: Database) -> None:
    database.close()
    with pytest.raises(Closed):
        PinnedRows(database, b"r")


def test_a_checkpoint_of_what_is_closed_says_so(database: Database, tmp_path: Path) -> None:
    database.checkpoint(tmp_path / "copy")
    database.close()
    with pytest.raises(Closed):
        database.checkpoint(tmp_path / "another")
    copy = Database(tmp_path / "copy", Options(raw_mode=True), read_only=True)
    assert len(copy.keys_below(b"r")) == len(KEYS)
    copy.close()


def test_a_bucket_that_is_closed_beside_look_ups_can_be_opened_again(
    bucket_factory: BucketFactory,
) -> None:
    """A look-up in flight left RocksDB open: nobody could open the bucket in this process again."""
    for number in range(5):
        name = f"bucket-{number}"
        bucket = bucket_factory(name=name)
        add(bucket, list(range(5_000)), list(range(5_000)))
        bucket.close()
        bucket = bucket_factory(name=name)  # Now its rows are on disk.
        keys = pa.record_batch({"k": pa.array(range(0, 10_000, 3), pa.int64())})
        barrier = threading.Barrier(5)

        def look_up(bucket=bucket, keys=keys, barrier=barrier) -> None:  # type: ignore[no-untyped-def]
            barrier.wait(WAIT_S)
            while True:
                try:
                    bucket.lookup(keys)
                except Closed:
                    return

        with ThreadPoolExecutor(4) as pool:
            reading = [pool.submit(look_up) for _ in range(4)]
            barrier.wait(WAIT_S)
            bucket.close()
            for future in reading:
                future.result(WAIT_S)
        again = bucket_factory(name=name)
        assert again.lookup(batch(k=[4_999]))["a"].to_pylist() == [4_999]
        again.close()


# What is translated


@pytest.mark.parametrize(
    ("raised", "error"),
    [
        (Exception("IO error: No space left on device: While appending to file"), StorageFull),
        (Exception("IO error: Disk quota exceeded"), StorageFull),
        (OSError(28, "No space left on device"), StorageFull),
        (OSError(13, "Permission denied"), StorageUnavailable),
        (OSError(24, "Too many open files"), StorageUnavailable),
        (Exception("IO error: While open a file: Too many open files"), StorageUnavailable),
        (Exception("IO error: While pread: Input/output error"), StorageUnavailable),
        (Exception("Result incomplete: Write stall"), StorageUnavailable),
        (Exception("Shutdown in progress: "), StorageUnavailable),
        (Exception("Resource busy: "), StorageUnavailable),
        (Exception("Operation aborted: "), StorageUnavailable),
        (RuntimeError("Already borrowed"), StorageUnavailable),
        (RuntimeError("Already mutably borrowed"), StorageUnavailable),
        (Exception("Corruption: block checksum mismatch"), CorruptView),
        (Exception("Invalid argument: does not exist (create_if_missing is false)"), CorruptView),
        (Exception("Not implemented: unknown footer version"), CorruptView),
        (Exception("what no release has said yet"), CorruptView),
        (Exception("IO error: While lock file: x/LOCK: Resource temporarily unavailable"), InUse),
        (Exception("DB already closed"), Closed),
        (DbClosedError("DB already closed"), Closed),
        (Closed("ours already"), Closed),
    ],
    ids=str,
)
def test_whatever_rocksdict_raises_becomes_one_of_our_errors(
    raised: Exception, error: type[TallybookError], tmp_path: Path
) -> None:
    with pytest.raises(error) as caught, translated(tmp_path):
        raise raised
    assert type(caught.value) is error


def test_a_panic_of_the_library_ends_no_thread(tmp_path: Path) -> None:
    """PyO3 raises it as no `Exception`: what catches those would let it through."""
    panic = type("PanicException", (BaseException,), {})
    with pytest.raises(StorageUnavailable, match="library failed: bad"), translated(tmp_path):
        raise panic("bad")


@pytest.mark.parametrize("raised", [KeyError("k"), AssertionError(), KeyboardInterrupt()], ids=repr)
def test_what_is_not_rocksdicts_passes(raised: BaseException, tmp_path: Path) -> None:
    with pytest.raises(type(raised)), translated(tmp_path):
        raise raised


def test_no_other_module_has_the_database_itself() -> None:
    """Else there is a way past the guard."""
    of_rocksdict = {}
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module == "rocksdict":
                of_rocksdict[path.name] = {name.name for name in node.names}
            assert not (
                isinstance(node, ast.Import) and any(one.name == "rocksdict" for one in node.names)
            ), path
    having = [name for name, names in of_rocksdict.items() if names & {"Rdict", "Checkpoint"}]
    assert having == ["database.py"]


# A full disk


def fill(directory: Path) -> Path:
    filler = directory / "filler"
    with filler.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            return filler


def test_a_full_disk_is_said_by_every_step_but_close_which_closes(tmp_path: Path) -> None:
    with small_file_system(tmp_path / "small", "8m") as disk:
        database = Database(disk / "database", Options(raw_mode=True))
        write(database)
        filler = fill(disk)
        with pytest.raises(StorageFull, match="make room"):
            Database(disk / "other", Options(raw_mode=True))
        with pytest.raises(StorageFull):
            database.flush()
        with pytest.raises((StorageFull, StorageUnavailable)):
            database.checkpoint(disk / "copy")
        database.close()
        assert database.is_closed
        filler.unlink()
        again = Database(disk / "database", Options(raw_mode=True))
        again.get(KEYS[:1])
        again.close()
