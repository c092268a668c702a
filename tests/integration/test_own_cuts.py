"""A log that is cleaned beside a read: only a cut that the caller has given may be too old."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import tallybook as tb
from foundation.errors import CutTooOld
from recovery.embedded import table as embedded
from recovery.reader.table_scan import TableScan
from server.tablet import looking_up, reading, scanning
from tests.conftest import SUMS
from tests.support.raw_flight import client_of, running
from tests.support.zookeeper_server import chroot, zookeeper_server

KEYS = list(range(40))


class World:
    """A table of two buckets whose log is cleaned, after one more batch, just before a read."""

    def __init__(self, table: Any, clean: Callable[[], None], stack: ExitStack) -> None:
        self.table = table
        self.clean = clean
        self.cleaned = 0
        self.writer = stack.enter_context(table.writer(owner_id="o", columns=["a"]))
        self.batch()
        self.clean()

    @property
    def batches(self) -> int:
        """How many have been committed; each adds 1 to every key."""
        return int(self.writer.next_batch())

    def batch(self) -> None:
        rows = tb.Rows(data={"k": KEYS, "a": [1] * len(KEYS)})
        self.writer.write(self.writer.next_batch(), rows)

    def overtake(
        self, module: Any, name: str, monkeypatch: pytest.MonkeyPatch, times: int = 1
    ) -> None:
        """The next calls of this function come after a batch and its cleaning."""
        real, left = getattr(module, name), times

        def call(*arguments: Any, **settings: Any) -> Any:
            nonlocal left
            if left:
                left -= 1
                self.batch()
                self.clean()
                self.cleaned += 1
            return real(*arguments, **settings)

        monkeypatch.setattr(module, name, call)

    def assert_whole(self, found: pa.Table) -> None:
        assert sorted(found["k"].to_pylist()) == KEYS
        assert found["a"].to_pylist() == [self.batches] * len(KEYS)
        assert self.cleaned


@pytest.fixture
def local(tmp_path: Path) -> Iterator[World]:
    with ExitStack() as stack:
        table = stack.enter_context(tb.Table.create(tmp_path / "table", SUMS, buckets=2))
        yield World(table, table.clean, stack)


@pytest.fixture
def remote(tmp_path: Path) -> Iterator[World]:
    with ExitStack() as stack:
        address = chroot(stack.enter_context(zookeeper_server(tmp_path)))
        server = stack.enter_context(running(address, tmp_path / "server"))
        client = stack.enter_context(client_of(address, deadline_s=60.0))
        table = client.create_table("t", SUMS, buckets=2)

        def clean() -> None:
            for led in server.hosting.led().values():
                led.bucket.clean(led.bucket.end_offset)

        yield World(table, clean, stack)


def lookup(world: World, keys: list[int], **settings: Any) -> pa.Table:
    return world.table.lookup({"k": keys}, ["a"], isolation="committed", **settings)


# --- One process ----------------------------------------------------------------------------------


@pytest.mark.parametrize("times", [1, 3])
def test_a_look_up_beside_cleaning_takes_another_cut(
    times: int, local: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    local.overtake(embedded, "committed_lookup", monkeypatch, times)
    local.assert_whole(lookup(local, KEYS))
    assert local.cleaned == times


def test_a_cut_that_was_given_is_too_old(local: World, monkeypatch: pytest.MonkeyPatch) -> None:
    cut = local.table.cut()
    local.overtake(embedded, "committed_lookup", monkeypatch)
    with pytest.raises(CutTooOld, match="take another cut"):
        lookup(local, KEYS, at=cut)
    with pytest.raises(CutTooOld):
        local.table.scan(at=cut).to_arrow()
    with pytest.raises(CutTooOld):
        local.table.changes(since=cut).to_arrow()


def test_who_is_overtaken_for_ever_is_told_in_the_end(
    local: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    local.overtake(embedded, "committed_lookup", monkeypatch, 1_000)
    with pytest.raises(CutTooOld):
        lookup(local, KEYS)
    assert local.cleaned == 5


TAKES: dict[str, Callable[[TableScan], pa.Table]] = {
    "whole": TableScan.to_arrow,
    "one by one": lambda scan: pa.Table.from_batches(list(scan), scan.schema),
    "by a library": pa.table,
}


@pytest.mark.parametrize("take", TAKES)
def test_a_scan_beside_cleaning_takes_another_cut(
    take: str, local: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    local.overtake(embedded, "open_scan", monkeypatch)
    scan = local.table.scan(["a"])
    local.assert_whole(TAKES[take](scan))
    assert scan.cut is not None
    assert not local.table.changes(scan.cut).to_arrow().num_rows, "it says where it has stood"


def test_a_scan_whose_cut_was_asked_for_stays_there(
    local: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The changes from that cut on go with the rows at it, and with no others."""
    local.overtake(embedded, "open_scan", monkeypatch)
    scan = local.table.scan(["a"])
    assert scan.cut is not None
    with pytest.raises(CutTooOld):
        scan.to_arrow()


def test_a_scan_that_has_given_rows_stays_where_they_are(
    local: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    scan = local.table.scan(["a"])
    first = scan.to_arrow()
    assert first["a"].to_pylist() == [local.batches] * len(KEYS)
    local.overtake(embedded, "open_scan", monkeypatch)
    with pytest.raises(CutTooOld):
        scan.to_arrow()


def test_changes_from_the_beginning_begin_later_when_the_beginning_goes(
    local: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    local.batch()
    local.overtake(embedded, "open_changes_between", monkeypatch)
    changes = local.table.changes()
    assert changes.to_arrow().num_rows == 0, "all of it was cleaned"
    assert local.cleaned == 1
    local.batch()
    later = local.table.changes(changes.until).to_arrow()
    assert later["_batch"].unique().to_pylist() == [local.batches - 1]


# --- Servers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("keys", [KEYS, KEYS[:1]], ids=["of all buckets", "of one bucket"])
@pytest.mark.parametrize("found", [False, True])
def test_a_look_up_on_servers_takes_another_cut(
    found: bool, keys: list[int], remote: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of many keys is taken by the client; that of a few by the leader."""
    lookup(remote, keys)
    remote.batch()
    remote.overtake(looking_up, "committed_lookup", monkeypatch)
    rows = lookup(remote, keys, found=found)
    assert rows["a"].to_pylist() == [remote.batches] * len(keys)
    assert remote.cleaned == 1


def test_a_scan_on_servers_takes_another_cut(
    remote: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote.overtake(scanning, "open_scan", monkeypatch)
    remote.assert_whole(remote.table.scan(["a"]).to_arrow())
    cut = remote.table.cut()
    remote.batch()
    remote.clean()
    with pytest.raises(CutTooOld):
        remote.table.scan(at=cut).to_arrow()


def test_changes_on_servers_begin_later_when_the_beginning_goes(
    remote: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote.batch()
    remote.overtake(reading, "open_changes_between", monkeypatch)
    assert remote.table.changes().to_arrow().num_rows == 0
    assert remote.cleaned == 1
