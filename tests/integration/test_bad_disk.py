"""A disk that is full, or gives back other bytes than it was given."""

import random
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pytest

import tallybook as tb
from foundation.errors import CorruptView, Retryable, StorageFull, TallybookError
from foundation.ids import Token
from merge_engine.bucket.bucket import Bucket
from merge_engine.bucket.database import Database
from merge_engine.bucket.options import BucketOptions
from merge_engine.bucket.segment import segment_name
from merge_engine.encoding.stored_rows import SchemaHistory
from merge_engine.storage.objects import LocalStorage
from tests.conftest import SUMS, batch, rows_of, schema_of
from tests.support.small_disk import small_file_system

# Full disks


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with small_file_system(tmp_path / "small", "3m") as directory:
        yield directory


TEXTS = schema_of(text=(pa.string(), "last_value"))


def random_texts(seed: int, count: int) -> list[str]:
    """Texts that no compression makes small."""
    source = random.Random(seed)
    return [source.randbytes(1000).hex() for _ in range(count)]


def put_until_refused(bucket: Bucket, model: dict[int, str]) -> TallybookError:
    """Put new rows, ten at a time, until one is refused; the model has those that were not."""
    for turn in range(1000):
        keys = list(range(turn * 10, turn * 10 + 10))
        texts = random_texts(turn, 10)
        try:
            bucket.put(batch(k=keys, text=texts), owner="me", token=Token(1, turn))
        except TallybookError as exc:
            return exc
        model.update(zip(keys, texts, strict=True))
    raise AssertionError("the disk was never full")


def texts_of(bucket: Bucket) -> dict[int, str]:
    return {key: text for key, (text,) in rows_of(bucket).items()}


def test_with_a_full_log_disk_a_put_changes_nothing_and_goes_on_when_there_is_room(
    small_disk: Path, tmp_path: Path
) -> None:
    filler = small_disk / "filler"
    filler.write_bytes(bytes(2 << 20))
    storage = LocalStorage(small_disk / "log")
    bucket = Bucket(storage, tmp_path / "view", SchemaHistory([TEXTS]), identity="full")
    model: dict[int, str] = {}
    refused = put_until_refused(bucket, model)
    assert type(refused) is StorageFull
    assert str(refused).startswith(f"no room to create {small_disk / 'log'}")
    assert str(refused).endswith("; nothing was written; make room and try again")
    assert model
    names, end = storage.names(), bucket.end_offset
    assert texts_of(bucket) == model
    with pytest.raises(StorageFull):
        bucket.put(batch(k=[1], text=["".join(random_texts(-1, 20))]))
    assert (storage.names(), bucket.end_offset) == (names, end)
    assert [path.name for path in sorted((small_disk / "log").iterdir())] == names
    filler.unlink()
    token = Token(1, len(model) // 10)
    assert not bucket.put(batch(k=[1], text=["after"]), owner="me", token=token).repeated
    model[1] = "after"
    assert texts_of(bucket) == model
    bucket.close()
    rebuilt = Bucket(storage, tmp_path / "new-view", SchemaHistory([TEXTS]), identity="full")
    assert texts_of(rebuilt) == model
    rebuilt.close()


def test_with_a_full_view_disk_puts_stay_committed_until_the_limit_and_it_goes_on_with_room(
    small_disk: Path, tmp_path: Path
) -> None:
    filler = small_disk / "filler"
    filler.write_bytes(bytes(2 << 20))
    storage = LocalStorage(tmp_path / "log")
    options = BucketOptions(
        behind_max_bytes=64 << 10, write_buffer_bytes=128 << 10, stall_deadline_s=0.1
    )
    bucket = Bucket(
        storage, small_disk / "view", SchemaHistory([TEXTS]), identity="full", options=options
    )
    model: dict[int, str] = {}
    refused = put_until_refused(bucket, model)
    assert isinstance(refused, Retryable)
    assert str(small_disk / "view") in str(refused)
    assert bucket.end_offset == 1 + len(model), "what was refused must not be in the log"
    keys = list(model)
    assert bucket.lookup(batch(k=keys)).column("text").to_pylist() == list(model.values())
    last = bucket.last_token("me")
    assert last is not None
    assert last.token == Token(1, len(model) // 10 - 1)
    elsewhere = Bucket(
        _copied(storage, tmp_path / "copy"),
        tmp_path / "copied-view",
        SchemaHistory([TEXTS]),
        identity="full",
    )
    assert texts_of(elsewhere) == model, "the log alone must have every put"
    elsewhere.close()

    filler.unlink()
    # RocksDB looks by itself every five seconds whether there is room again.
    _until_it_works(lambda: bucket.put(batch(k=[1], text=["after"])), deadline_s=40)
    model[1] = "after"
    assert texts_of(bucket) == model
    bucket.close()
    reopened = Bucket(
        storage, small_disk / "view", SchemaHistory([TEXTS]), identity="full", options=options
    )
    assert texts_of(reopened) == model
    reopened.close()


def _copied(storage: LocalStorage, directory: Path) -> LocalStorage:
    copy = LocalStorage(directory)
    for name in storage.names():
        copy.create(name, storage.read(name))
    return copy


def _until_it_works(call: Callable[[], object], *, deadline_s: float) -> None:
    """Call again while the answer is a Retryable error, as a caller should."""
    deadline = time.monotonic() + deadline_s
    while True:
        try:
            call()
            return
        except Retryable:
            if time.monotonic() > deadline:
                raise
            threading.Event().wait(0.05)


def fill(disk: Path) -> Path:
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            return filler


def test_a_writer_waits_while_the_disk_is_full_as_a_bucket_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The view of a new partition was rocksdict's bare exception, and failed the batch."""
    schema = (
        tb.SchemaBuilder()
        .column("k", pa.int64())
        .column("p", pa.int32())
        .agg_column("n", pa.int64(), "sum")
        .primary_key("k", "p")
        .partitioned_by("p")
        .build()
    )
    with small_file_system(tmp_path / "small", "6m") as disk:
        table = tb.Table.create(disk / "table", schema, buckets=1)
        writer = table.writer(owner_id="o", columns=["n"], deadline_s=60).start()
        writer.write(0, {"k": [1], "p": [1], "n": [1]})
        create, release = LocalStorage.create, Database.close
        fillers: list[Path] = []
        closed_full: list[Path] = []

        def create_after_filling(storage: LocalStorage, name: str, data: bytes) -> None:
            if name == segment_name(0) and not fillers:
                fillers.append(fill(disk))
            create(storage, name, data)

        def close(database: Database) -> None:
            release(database)
            if fillers and fillers[0].exists():  # It could not be opened: make room again.
                closed_full.append(database.path)
                fillers[0].unlink()

        monkeypatch.setattr(LocalStorage, "create", create_after_filling)
        monkeypatch.setattr(Database, "close", close)
        writer.write(1, {"k": [1], "p": [2], "n": [1]})
        assert len(closed_full) == 1
        assert sorted(row["p"] for row in table.to_arrow().to_pylist()) == [1, 2]
        writer.close()
        table.close()


def test_a_table_that_is_closed_while_the_disk_is_full_is_closed_and_loses_nothing(
    tmp_path: Path,
) -> None:
    with small_file_system(tmp_path / "small", "6m") as disk:
        table = tb.Table.create(disk / "table", SUMS, buckets=2)
        table.put({"k": list(range(2000)), "a": [1] * 2000})
        filler = fill(disk)
        table.close()
        table.close()
        filler.unlink()
        with tb.Table.open(disk / "table") as again:
            assert again.to_arrow().num_rows == 2000


# Damage in the view


ROWS = 3000


def _flipped(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    for at in range(position, position + 8):
        data[at] ^= 0x55
    path.write_bytes(data)


@pytest.fixture(scope="module")
def large_bucket(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, str]]:
    """A closed bucket of many blocks, all of them in SST files."""
    directory = tmp_path_factory.mktemp("large")
    model = dict(enumerate(text[:400] for text in random_texts(0, ROWS)))
    bucket = _open_large(directory)
    bucket.put(batch(k=list(model), text=list(model.values())))
    bucket.flush()
    bucket.close()
    return directory, model


def _open_large(directory: Path) -> Bucket:
    storage, history = LocalStorage(directory / "log"), SchemaHistory([TEXTS])
    return Bucket(storage, directory / "view", history, identity="large")


@pytest.mark.parametrize("part", [0.1, 0.35, 0.5, 0.77, 0.9])
def test_flipped_bytes_in_the_view_are_noticed_by_every_read_path(
    large_bucket: tuple[Path, dict[int, str]], tmp_path: Path, part: float
) -> None:
    original, model = large_bucket
    directory = tmp_path / "bucket"
    shutil.copytree(original, directory)
    largest = max((directory / "view").glob("*.sst"), key=lambda path: path.stat().st_size)
    assert largest.stat().st_size > 500_000
    _flipped(largest, int(largest.stat().st_size * part))
    bucket = _open_large(directory)
    try:
        end = bucket.end_offset
        damaged: list[list[int]] = []
        messages: list[str] = []
        for start in range(0, ROWS, 10):
            keys = list(range(start, start + 10))
            try:
                found = bucket.lookup(batch(k=keys)).column("text").to_pylist()
            except CorruptView as exc:
                damaged.append(keys)
                messages.append(str(exc))
            else:
                assert found == [model[key] for key in keys], "a damaged row was read as another"
        assert 1 <= len(damaged) <= 5, "one block was damaged"
        for message in messages:
            assert str(directory / "view") in message
            assert "remove the directory to rebuild it from the log" in message
        with pytest.raises(CorruptView, match="remove the directory to rebuild it"):
            list(bucket.scan())
        with pytest.raises(CorruptView, match="remove the directory to rebuild it"):
            list(bucket.scan(batch_size=7))
        with pytest.raises(CorruptView, match="remove the directory to rebuild it"):
            bucket.put(batch(k=damaged[0], text=["new"] * 10))
        assert bucket.end_offset == end
        bucket.put(batch(k=[-1], text=["new"]))
    finally:
        bucket.close()
    shutil.rmtree(directory / "view")
    rebuilt = _open_large(directory)
    assert texts_of(rebuilt) == model | {-1: "new"}
    rebuilt.close()
