"""One contract for every storage, and a table on a real S3 API."""

import json
import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pytest
from obstore.store import MemoryStore

from foundation.errors import (
    AlreadyExists,
    Deposed,
    InUse,
    InvalidInput,
    MissingObject,
    StorageFull,
    StorageUnavailable,
    UnknownOutcome,
)
from foundation.failpoints import arm
from merge_engine.storage import objects as storage_module
from merge_engine.storage.environment import store_variables
from merge_engine.storage.objects import (
    STALE_TEMPORARY_SECONDS,
    TEMPORARY_PREFIX,
    LocalStorage,
    ObjectStorage,
    RemoteStorage,
    open_storage,
)
from recovery.embedded.table import Table
from recovery.writer.rows import Rows
from recovery.writer.table_writer import TableWriter
from tests.conftest import SUMS, rows_of
from tests.support.faulty_storage import interrupt
from tests.support.moto_server import S3Server, s3_server


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    with s3_server() as server:
        yield server


@pytest.fixture(params=["local", "memory", "s3", "s3 below a prefix"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStorage:
    if request.param == "local":
        return LocalStorage(tmp_path / "objects")
    if request.param == "memory":
        return RemoteStorage(MemoryStore())
    server: S3Server = request.getfixturevalue("s3")
    url = server.create_bucket()
    return open_storage(url if request.param == "s3" else f"{url}/some/prefix", **server.settings)


# The contract


def test_an_object_is_read_as_it_was_created(storage: ObjectStorage) -> None:
    for name, data in (("empty", b""), ("small", b"\x00\xff"), ("large", os.urandom(300_000))):
        storage.create(name, data)
        assert storage.read(name) == data


def test_a_name_is_created_once_and_never_overwritten(storage: ObjectStorage) -> None:
    storage.create("0.seg", b"first")
    with pytest.raises(AlreadyExists, match=r"0\.seg exists already"):
        storage.create("0.seg", b"second")
    assert storage.read("0.seg") == b"first"
    assert storage.names() == ["0.seg"]


def test_what_does_not_exist_cannot_be_read(storage: ObjectStorage) -> None:
    with pytest.raises(MissingObject, match=r"9\.seg does not exist"):
        storage.read("9.seg")
    storage.create("8.seg", b"")
    with pytest.raises(MissingObject, match=r"9\.seg does not exist"):
        storage.read("9.seg")


def test_an_object_is_read_in_parts_as_a_file(storage: ObjectStorage) -> None:
    data = os.urandom(300_000)
    storage.create("large", data)
    with storage.open("large") as file:
        assert (file.readable(), file.seekable(), file.tell()) == (True, True, 0)
        assert file.read(10) == data[:10]
        assert file.tell() == 10
        assert file.seek(200_000) == 200_000
        assert file.read(100_000) == data[200_000:]
        assert file.read(1) == b""
        assert file.seek(-8, os.SEEK_END) == 299_992
        assert file.read() == data[-8:]
        assert file.seek(5) == 5
        assert file.seek(7, os.SEEK_CUR) == 12
        assert file.read(3) == data[12:15]
        assert file.seek(10**9) == 10**9  # Beyond the end there is nothing.
        assert file.read(5) == b""
        file.seek(0)
        assert file.read() == data
        with pytest.raises((ValueError, OSError)):
            file.seek(-1)
    assert file.closed
    with pytest.raises(ValueError, match="closed"):
        file.read(1)


def test_an_empty_object_is_an_empty_file(storage: ObjectStorage) -> None:
    storage.create("empty", b"")
    with storage.open("empty") as file:
        assert (file.read(), file.read(10), file.seek(0, os.SEEK_END)) == (b"", b"", 0)


def test_what_does_not_exist_cannot_be_opened(storage: ObjectStorage) -> None:
    with pytest.raises(MissingObject, match=r"9\.seg does not exist"):
        storage.open("9.seg")
    storage.child("below").create("9.seg", b"")
    with pytest.raises(MissingObject, match=r"9\.seg does not exist"):
        storage.open("9.seg")


def test_names_are_sorted_and_complete(storage: ObjectStorage) -> None:
    assert storage.names() == []
    for number in (10, 9, 1, 2):
        storage.create(f"{number:020d}.seg", b"x")
    assert storage.names() == [f"{number:020d}.seg" for number in (1, 2, 9, 10)]


def test_sizes_are_those_of_all_objects_by_their_names(storage: ObjectStorage) -> None:
    assert storage.sizes() == {}
    for name, size in (("b", 3), ("a", 0), ("c", 1)):
        storage.create(name, b"x" * size)
    assert list(storage.sizes().items()) == [("a", 0), ("b", 3), ("c", 1)]


def test_a_deleted_object_is_gone_and_deleting_it_again_is_fine(storage: ObjectStorage) -> None:
    storage.delete([])
    storage.delete(["never-existed"])
    for name in "abc":
        storage.create(name, b"x")
    storage.delete(["a", "never-existed", "c"])
    assert storage.names() == ["b"]
    storage.delete(["a", "b"])
    assert storage.names() == []
    with pytest.raises(MissingObject):
        storage.read("b")


def test_what_is_left_of_an_empty_place_is_removed_and_nothing_else(
    storage: ObjectStorage,
) -> None:
    for path in ("a/b", "a/b/c", "d"):
        storage.child(path).create("1", b"one")
    storage.remove_empty("a/b")
    assert storage.child("a/b").names() == storage.child("a/b/c").names() == ["1"]
    storage.child("a/b/c").delete(["1"])
    storage.child("a/b").delete(["1"])
    storage.remove_empty("a/b")
    storage.remove_empty("never/was")
    assert storage.child("d").read("1") == b"one"
    if isinstance(storage, LocalStorage):
        assert [one.name for one in Path(str(storage)).iterdir()] == ["d"]
    storage.child("a/b").create("1", b"again")
    assert storage.child("a/b").names() == ["1"]


def test_a_child_has_names_of_its_own(storage: ObjectStorage) -> None:
    child, sibling = storage.child("log/table/0"), storage.child("log/table/01")
    storage.create("x", b"parent")
    child.create("x", b"child")
    child.create("y", b"")
    sibling.create("z", b"")
    assert (storage.read("x"), child.read("x")) == (b"parent", b"child")
    assert (storage.names(), child.names(), sibling.names()) == (["x"], ["x", "y"], ["z"])
    assert storage.child("log").child("table").child("0").names() == ["x", "y"]
    assert storage.child("log").names() == []
    child.delete(["x"])
    assert storage.names() == ["x"]


def test_of_concurrent_creates_exactly_one_wins(storage: ObjectStorage) -> None:
    contenders = 4
    start = threading.Barrier(contenders)

    def create(contender: int, name: str) -> bool:
        start.wait()
        try:
            storage.create(name, b"%d" % contender * 5000)
        except AlreadyExists:
            return False
        return True

    with ThreadPoolExecutor(contenders) as pool:
        for turn in range(8):
            futures = [pool.submit(create, who, f"{turn}.seg") for who in range(contenders)]
            winners = [who for who, future in enumerate(futures) if future.result()]
            assert len(winners) == 1
            assert storage.read(f"{turn}.seg") == b"%d" % winners[0] * 5000


def test_a_storage_says_where_it_is(storage: ObjectStorage) -> None:
    text = repr(storage.child("log"))
    assert text.startswith(("LocalStorage(", "RemoteStorage("))
    assert "log" in text


# A directory


@pytest.fixture
def local(tmp_path: Path) -> LocalStorage:
    return LocalStorage(tmp_path / "objects")


@pytest.mark.parametrize(
    ("failpoint", "there"), [("storage.written", False), ("storage.linked", True)]
)
def test_an_object_is_there_whole_or_not_at_all_and_leaves_nothing_else(
    local: LocalStorage, tmp_path: Path, failpoint: str, there: bool
) -> None:
    with arm(failpoint, interrupt), pytest.raises(KeyboardInterrupt):
        local.create("x", b"data")
    assert local.names() == (["x"] if there else [])
    assert sorted(path.name for path in (tmp_path / "objects").iterdir()) == local.names()


def test_what_a_killed_process_left_is_hidden_and_removed_when_it_is_old(
    local: LocalStorage, tmp_path: Path
) -> None:
    local.create("x", b"")
    old, new = (tmp_path / "objects" / f"{TEMPORARY_PREFIX}{name}" for name in ("old", "new"))
    for path in (old, new):
        path.write_bytes(b"half")
    stamp = old.stat().st_mtime - STALE_TEMPORARY_SECONDS - 10
    os.utime(old, (stamp, stamp))
    assert local.names() == ["x"]
    assert (old.exists(), new.exists()) == (False, True)


def test_a_machine_whose_clock_is_ahead_removes_nothing_that_is_being_written(
    local: LocalStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local.create("x", b"")
    writing = tmp_path / "objects" / f"{TEMPORARY_PREFIX}under way"
    writing.write_bytes(b"half")
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + 2 * STALE_TEMPORARY_SECONDS)
    assert local.names() == ["x"]
    assert [path.name for path in (tmp_path / "objects").iterdir() if path != writing] == ["x"]
    assert writing.exists()


def test_an_object_is_synced_before_its_name_and_the_name_before_the_return(
    local: LocalStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local.create("first", b"")
    steps: list[str] = []
    fsync, link = os.fsync, os.link

    def traced_fsync(descriptor: int) -> None:
        target = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        steps.append("sync directory" if target.is_dir() else "sync file")
        fsync(descriptor)

    def traced_link(source: Path, target: Path) -> None:
        steps.append("link")
        link(source, target)

    monkeypatch.setattr(os, "fsync", traced_fsync)
    monkeypatch.setattr(os, "link", traced_link)
    local.create("second", b"data")
    assert steps == ["sync file", "link", "sync directory"]
    steps.clear()
    with pytest.raises(AlreadyExists):
        local.create("second", b"data")
    assert steps == ["sync file", "link", "sync directory"]


def test_a_directory_that_cannot_be_synced_leaves_the_outcome_unknown(
    local: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    local.create("first", b"")

    def fail(directory: Path) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(storage_module, "_sync_directory", fail)
    with pytest.raises(UnknownOutcome, match="second: Input/output error"):
        local.create("second", b"")


@pytest.mark.parametrize("number", [28, 122, 27])
def test_no_room_is_an_error_of_its_own_and_leaves_nothing(
    local: LocalStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    local.create("first", b"")

    def fail(descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(StorageFull, match=r"no room to create .*second; nothing was written;"):
            local.create("second", b"data")
    assert [path.name for path in (tmp_path / "objects").iterdir()] == ["first"]
    local.create("second", b"data")


def test_a_path_that_is_a_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    blocked = LocalStorage(tmp_path / "file")
    calls: list[Callable[[], object]] = [
        lambda: blocked.create("x", b""),
        lambda: blocked.read("x"),
        lambda: blocked.open("x"),
        blocked.names,
        lambda: blocked.delete(["x"]),
    ]
    for call in calls:
        with pytest.raises(StorageUnavailable, match=str(tmp_path / "file")):
            call()


# Opening


def test_a_directory_is_opened_by_path_by_text_and_by_url(tmp_path: Path) -> None:
    directory = tmp_path / "with space"
    for location in (directory, str(directory), directory.as_uri(), f"file://{directory}"):
        opened = open_storage(location)
        assert repr(opened) == f"LocalStorage({str(directory)!r})"


def test_a_table_at_a_file_url_keeps_its_view_beside_its_log(tmp_path: Path) -> None:
    location = (tmp_path / "with space").as_uri()
    with Table.create(location, SUMS, buckets=1) as table:
        table.put({"k": [1], "a": [1]})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["with space"]
    assert (tmp_path / "with space" / "view").is_dir()


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_a_directory_takes_no_settings(tmp_path: Path, scheme: str) -> None:
    with pytest.raises(
        InvalidInput, match=r"is a directory and takes no settings: \['secret_access_key'\]$"
    ):
        open_storage(f"{scheme}{tmp_path}", secret_access_key="hush")


@pytest.mark.parametrize("location", ["nope://bucket/x", "s3://"])
def test_a_url_that_cannot_be_used_is_an_error_that_shows_it(location: str) -> None:
    with pytest.raises(InvalidInput, match=f"cannot use '{location}': .*URL"):
        open_storage(location)


def test_a_setting_that_the_store_does_not_know_is_an_error_that_shows_it() -> None:
    with pytest.raises(InvalidInput, match=r"cannot use 's3://bucket': .*no_such_setting"):
        open_storage("s3://bucket", no_such_setting="x")


def test_settings_of_the_client_may_stand_beside_those_of_the_store_as_text(s3: S3Server) -> None:
    """Options of a command, or of Spark, are texts: they cannot be one within another."""
    settings = {**s3.settings, "allow_http": "true", "timeout": "20s"}
    settings["client_options"] = {"user_agent": "us"}
    opened = open_storage(s3.create_bucket(), **settings)
    opened.create("x", b"1")
    assert opened.read("x") == b"1"


def test_a_setting_that_obstore_panics_over_is_an_error_like_any_other() -> None:
    with pytest.raises(InvalidInput, match="cannot use 's3://bucket': Expected config prefix"):
        open_storage("s3://bucket", http2_keep_alive_while_idle="x")


def test_settings_and_their_secrets_are_not_shown_by_a_storage(s3: S3Server) -> None:
    opened = open_storage(s3.create_bucket(), **s3.settings | {"secret_access_key": "hush"})
    assert "hush" not in repr(opened)


# S3


def test_a_bucket_that_does_not_exist_is_certain_not_to_take_a_write(s3: S3Server) -> None:
    missing = open_storage("s3://no-such-bucket", **s3.settings)
    with pytest.raises(StorageUnavailable, match=r"x: .*(NoSuchBucket|not found)"):
        missing.create("x", b"")
    with pytest.raises(StorageUnavailable):
        missing.names()


def test_a_store_that_cannot_be_reached_leaves_a_create_unknown(s3: S3Server) -> None:
    gone = open_storage("s3://bucket", **s3.settings | {"endpoint": "http://127.0.0.1:1"})
    with pytest.raises(UnknownOutcome, match=r"^x: "):
        gone.create("x", b"")
    with pytest.raises(StorageUnavailable, match=r"^x: "):
        gone.read("x")
    with pytest.raises(StorageUnavailable, match=r"^x: "):
        gone.open("x")
    with pytest.raises(StorageUnavailable):
        gone.names()
    with pytest.raises(StorageUnavailable, match=r"^x: "):
        gone.delete(["x"])


def test_an_error_that_comes_again_reads_the_same(s3: S3Server) -> None:
    """obstore says how long the request took."""
    storage = open_storage("s3://no-such-bucket/log", **s3.settings)
    errors = set()
    for _ in range(3):
        with pytest.raises(StorageUnavailable) as refused:
            storage.create("a", b"")
        errors.add(str(refused.value))
    [error] = errors
    assert f"PUT {s3.endpoint}/no-such-bucket/log/a - Server returned" in error


def test_a_store_without_what_it_needs_says_where_that_is_looked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in store_variables():
        monkeypatch.delenv(name)
    with pytest.raises(InvalidInput, match=r"obstore looks at .* AZURE_STORAGE_ACCOUNT_NAME"):
        open_storage("az://container/log")


def test_a_table_on_s3_is_the_same_when_it_is_opened_with_an_empty_view_directory(
    s3: S3Server, tmp_path: Path
) -> None:
    url = f"{s3.create_bucket()}/tables/orders"
    with Table.create(
        url, SUMS, buckets=2, view_directory=tmp_path / "first", **s3.settings
    ) as table:
        table.put({"k": list(range(20)), "a": list(range(20))})
        table.put({"k": [1, 2], "a": [100, 100]}, owner="me")
        table.delete({"k": [3]})
        table.add_column("c", pa.string(), "string_agg")
        table.put({"k": [1], "c": ["new"]})
        before, identity = rows_of(table), table.table_id
    assert before[1] == (101, None, "new")
    assert len(before) == 19
    with Table.open(url, view_directory=tmp_path / "second", **s3.settings) as table:
        assert (rows_of(table), table.table_id) == (before, identity)
        table.put({"k": [1], "a": [1]})
    with Table.open(url, view_directory=tmp_path / "first", **s3.settings) as table:
        assert rows_of(table) == before | {1: (102, None, "new")}


def test_a_remote_table_needs_a_view_directory(s3: S3Server) -> None:
    with pytest.raises(InvalidInput, match=r"is remote: give a local view_directory as well"):
        Table.create(s3.create_bucket(), SUMS, **s3.settings)


def test_of_two_handles_on_one_log_the_first_is_deposed_and_its_put_changes_nothing(
    s3: S3Server, tmp_path: Path
) -> None:
    url = s3.create_bucket()
    first = Table.create(url, SUMS, buckets=1, view_directory=tmp_path / "first", **s3.settings)
    second = Table.open(url, view_directory=tmp_path / "second", **s3.settings)
    with first, second:
        first.put({"k": [1], "a": [1]})
        second.put({"k": [1], "a": [10]})
        with pytest.raises(Deposed, match="another leader has taken this bucket since term 0"):
            first.put({"k": [1, 2], "a": [100, 100]})
        second.put({"k": [1], "a": [1000]})
        assert rows_of(second) == {1: (1011, None)}
        with pytest.raises(Deposed):
            first.put({"k": [1], "a": [100]})
    with Table.open(url, view_directory=tmp_path / "third", **s3.settings) as third:
        assert rows_of(third) == {1: (1011, None)}


def test_a_writer_keeps_its_lock_in_an_object_store_and_the_last_one_has_it(
    s3: S3Server, tmp_path: Path
) -> None:
    url = s3.create_bucket()
    rows = Rows(data={"k": list(range(10)), "a": [1] * 10})

    def writer(table: Table) -> TableWriter:
        return table.writer(owner_id="etl", columns=["a"], deadline_s=5).start()

    first = Table.create(url, SUMS, buckets=2, view_directory=tmp_path / "first", **s3.settings)
    second = Table.open(url, view_directory=tmp_path / "second", **s3.settings)
    with first, second:
        here = writer(first)
        assert here.write(0, rows)
        with arm("writer.put", interrupt), pytest.raises(KeyboardInterrupt):
            here.write(1, rows)
        there = writer(second)
        assert there.progress.undone_keys == 10
        assert there.write(1, rows)
        with pytest.raises(InUse, match="another process"):
            here.write(1, rows)
        here.close()
        there.close()
    with Table.open(url, view_directory=tmp_path / "third", **s3.settings) as third:
        assert set(third.to_arrow(["a"])["a"].to_pylist()) == {2}
        again = writer(third)
        assert again.batch == 1
        again.close()


OTHER_PROCESS = """
    import json, sys
    from recovery.embedded.table import Table

    location, views, settings = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    with Table.open(location, view_directory=views, **settings) as table:
        table.put({"k": [1], "a": [10]})
        print("ready", flush=True)
        sys.stdin.readline()
        table.put({"k": [1], "a": [1000]})
        print(table.lookup({"k": [1]}).column("a").to_pylist(), flush=True)
"""


def test_of_two_processes_on_one_log_the_first_is_deposed_and_its_put_changes_nothing(
    s3: S3Server, tmp_path: Path
) -> None:
    url = s3.create_bucket()
    with Table.create(
        url, SUMS, buckets=1, view_directory=tmp_path / "first", **s3.settings
    ) as table:
        table.put({"k": [1], "a": [1]})
        arguments = [url, str(tmp_path / "second"), json.dumps(s3.settings)]
        process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(OTHER_PROCESS), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            with pytest.raises(Deposed):
                table.put({"k": [1, 2], "a": [100, 100]})
            answer, _ = process.communicate("go on\n", timeout=180)
            assert (answer, process.returncode) == ("[1011]\n", 0)
        finally:
            process.kill()
            process.wait()
