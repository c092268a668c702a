"""What a server says when its disk is full, or a bucket cannot be opened: once, aloud, and why."""

import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from foundation.errors import Retryable, ServerUnavailable, StorageFull
from locks.column_locks.locks import ColumnLocks
from locks.store.embedded_zookeeper import EmbeddedZooKeeper
from merge_engine.storage.objects import LocalStorage
from recovery.writer.parts import PartSizes
from recovery.writer.redo import RedoLog
from recovery.writer.rows import Rows
from server.client.cluster import connect
from server.client.remote_table import RemoteTable
from server.client.writer_access import RemoteAccess
from server.page.overview import Overview
from server.protocol.puts import Advance, AdvanceAnswer
from server.tablet import large_puts
from server.tablet.config import ServerConfig
from server.tablet.large_puts import LargePuts
from server.tablet.limits import SpoolLimits
from server.tablet.tablet_server import TabletServer
from tallybook.commands.status import problems_of, status_rows
from tests.conftest import schema_of
from tests.support.small_disk import small_file_system
from tests.support.zookeeper_server import chroot, wait_until, zookeeper_server

TEXTS = schema_of(text=(pa.string(), "last_value"))


@pytest.fixture(scope="module")
def zookeeper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedZooKeeper]:
    with zookeeper_server(tmp_path_factory.mktemp("troubles")) as running:
        yield running


@contextmanager
def serving(address: str, logs: Path, views: Path, **settings: Any) -> Iterator[TabletServer]:
    config = ServerConfig(zookeeper=address, logs=str(logs), views=views, **settings)
    with TabletServer(config) as server:
        yield server


def fill(table: RemoteTable) -> StorageFull:
    """Put what no compression makes small until there is no room."""
    for key in range(1000):
        try:
            table.put({"k": [key], "text": [os.urandom(50_000).hex()]})
        except StorageFull as exc:
            return exc
    raise AssertionError("the disk was never full")


def errors(caplog: pytest.LogCaptureFixture, about: str) -> list[str]:
    return [
        record.getMessage()
        for record in caplog.records
        if record.levelno >= logging.ERROR and about in record.getMessage()
    ]


def test_a_full_log_disk_is_an_error_that_is_said_once_and_everywhere(
    zookeeper: EmbeddedZooKeeper, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    address = chroot(zookeeper)
    with (
        small_file_system(tmp_path / "logs", "3m") as logs,
        serving(address, logs, tmp_path / "views") as server,
        connect(address) as client,
    ):
        filler = logs / "filler"
        filler.write_bytes(bytes(2 << 20))
        table = client.create_table("t", TEXTS, buckets=1, column_locks=False)
        refused = fill(table)
        assert "no room" in str(refused)
        for _ in range(5):
            with pytest.raises(StorageFull):
                table.put({"k": [1], "text": [os.urandom(200_000).hex()]})
        said = errors(caplog, "disk full")
        assert len(said) == 1, said
        assert str(logs) in said[0]
        assert list(server.status()["problems"]) == ["disk full"]
        assert "disk full" in "\n".join(problems_of(Overview(client).look(), snapshot_age_s=60.0))
        filler.unlink()
        table.put({"k": [1], "text": ["there is room"]})
        assert server.status()["problems"] == {}


def test_a_bucket_that_cannot_be_opened_says_why_to_operators_and_clients(
    zookeeper: EmbeddedZooKeeper, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    address, logs = chroot(zookeeper), tmp_path / "logs"
    with connect(address, deadline_s=3.0, create=True) as client:
        table = client.create_table("t", TEXTS, buckets=1, column_locks=False)
        with serving(address, logs, tmp_path / "views"):
            wait_until(lambda: _put(table), "the table is served")
        segment = max(logs.rglob("*.seg"))
        good = segment.read_bytes()
        segment.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
        with serving(address, logs, tmp_path / "other-views") as server:
            wait_until(lambda: bool(server.status()["unopened"]), "it cannot be opened")
            with pytest.raises(ServerUnavailable, match=r"cannot be opened: .*checksum mismatch"):
                table.lookup({"k": [1]})
            [listed] = [row for row in status_rows(client.status()) if "0/0" in row]
            assert listed[-1] == "(cannot be opened: see below)"
            told = "\n".join(problems_of(Overview(client).look(), snapshot_age_s=3600.0))
            assert f"{server.address}: bucket 0/0 of table 1 cannot be opened: segment" in told
            assert "table t: bucket 0/0 without a leader: segment" in told
            assert len(errors(caplog, "cannot be opened")) == 1
            before = sorted(logs.rglob("*.seg"))
            segment.write_bytes(good)
            wait_until(lambda: _put(table), "it is served again")
            assert server.status()["unopened"] == []
        # One leader came; those that could not lead have left nothing.
        assert len(list(logs.rglob("*.seg"))) == len(before) + 1


def _put(table: RemoteTable) -> bool:
    try:
        table.put({"k": [1], "text": ["x"]})
    except Retryable:
        return False
    return True


@pytest.fixture(autouse=True)
def _quiet_clients(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)


def test_what_is_committed_is_read_while_the_log_store_says_nothing(
    zookeeper: EmbeddedZooKeeper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address, answers = chroot(zookeeper), threading.Event()
    answers.set()
    read = LocalStorage.read

    def slow(storage: LocalStorage, name: str) -> bytes:
        assert answers.wait(180)
        return read(storage, name)

    monkeypatch.setattr(LocalStorage, "read", slow)
    with (
        serving(address, tmp_path / "logs", tmp_path / "views"),
        connect(address, attempt_s=2.0) as client,
    ):
        table = client.create_table("t", TEXTS, buckets=2)
        rows = {"k": [1, 2, 3], "text": ["a", "b", "c"]}
        with table.writer(owner_id="me", columns=["text"]) as writer:
            writer.write(0, Rows(data=pa.table(rows)))
        answers.clear()
        try:  # Whoever finds that out waits for its own time-out; others do not.
            for _ in range(3):
                found = table.lookup({"k": [1, 2, 3]}, isolation="committed")
                assert found.column("text").to_pylist() == ["a", "b", "c"]
            assert table.scan().to_arrow().num_rows == 3
        finally:
            answers.set()


def test_buckets_of_different_size_are_tried_in_as_many_calls_as_the_largest_takes(
    zookeeper: EmbeddedZooKeeper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that was tried whole waits for the others, and is not tried again meanwhile."""
    address = chroot(zookeeper)
    monkeypatch.setattr(large_puts, "_ALONE_S", 1e9)
    with (
        serving(address, tmp_path / "logs", tmp_path / "views") as server,
        connect(address) as client,
    ):
        server._service._large._advance_s = 0.0
        advance, calls = LargePuts.advance, [0]

        def counted_advance(large: LargePuts, call: Advance) -> AdvanceAnswer:
            calls[0] += call.try_only
            return advance(large, call)

        server._service._actions = {
            **server._service._actions,
            Advance.name: (Advance, partial(counted_advance, server._service._large)),
        }
        table = client.create_table("t", TEXTS, buckets=2)
        redo = RedoLog.open(str(tmp_path / "redo"))
        with table.writer(owner_id="etl", columns=["text"], redo=redo) as writer:
            access = writer.access
            assert isinstance(access, RemoteAccess)
            access.sizes = PartSizes(call_rows=1, rows=10)
            writer.write(0, Rows(data={"k": list(range(250)), "text": ["x"] * 250}))
        assert 10 < calls[0] <= 20, "a part of each bucket with every call"
        assert table.to_arrow().num_rows == 250


def test_an_upload_outlives_a_pause_of_its_source(
    zookeeper: EmbeddedZooKeeper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer is there, and waits for more rows; the server looks for it again and again."""
    address = chroot(zookeeper)
    spool = SpoolLimits(ttl_s=0.2)
    with (
        serving(address, tmp_path / "logs", tmp_path / "views", spool=spool) as server,
        connect(address) as client,
    ):
        table = client.create_table("t", TEXTS, buckets=1)
        look, looks, asked = ColumnLocks.look, 0, 0

        def counted_look(locks: ColumnLocks, *arguments: Any) -> Any:
            nonlocal looks
            looks += 1
            return look(locks, *arguments)

        monkeypatch.setattr(ColumnLocks, "look", counted_look)

        def pieces() -> Iterator[pa.Table]:
            nonlocal asked
            asked += 1
            for first in (0, 1_000):
                keys = range(first, first + 1_000)
                yield pa.table({"k": keys, "text": ["x" * 1_000] * 1_000})
                if first == 0:
                    wait_until(lambda: len(server._staging) == 1, "there is an upload")
                    wait_until(lambda: looks >= 3 or not len(server._staging), "it is looked at")

        with table.writer(owner_id="etl", columns=["text"]) as writer:
            access = writer.access
            assert isinstance(access, RemoteAccess)
            access.sizes = PartSizes(call_rows=1, rows=100, chunk_bytes=1)
            assert writer.write(0, Rows(data=pieces))
            assert (asked, writer.progress.starts) == (1, 1)
        assert len(server._staging) == 0
