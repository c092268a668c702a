"""Connections that are cut in the middle of a transaction: what it did is read back."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import TypeVar

import pytest

from foundation.errors import LockHeld, UnknownOutcome
from locks.column_locks.column_lock import ColumnLock
from locks.coordinator import Coordinator
from locks.store.base import Create, Write
from locks.store.embedded_zookeeper import EmbeddedZooKeeper
from tests.support.coordinators import DEFINITION, ENDS, LATER, ready
from tests.support.zookeeper_proxy import Proxy
from tests.support.zookeeper_server import chroot, session, wait_until

Result = TypeVar("Result")


@pytest.fixture
def proxy(zookeeper: EmbeddedZooKeeper) -> Iterator[Proxy]:
    with Proxy(zookeeper) as running:
        yield running


@pytest.fixture
def cut_off(
    zookeeper: EmbeddedZooKeeper, proxy: Proxy
) -> Iterator[tuple[Coordinator, Coordinator]]:
    """Return a coordinator behind the proxy, and one beside it that is never cut off."""
    root = chroot(zookeeper)
    path = root.removeprefix(zookeeper.address)
    with session(proxy.address + path) as store, session(root) as other:
        yield Coordinator(store), Coordinator(other)


LOSSES = [["request"], ["answer"], ["answer", "request"], ["request", "answer", "answer"]]


@pytest.mark.parametrize("losses", LOSSES, ids=" then ".join)
def test_a_transaction_that_was_cut_off_is_resolved_by_reading_back_exactly_once(
    cut_off: tuple[Coordinator, Coordinator], proxy: Proxy, losses: list[str]
) -> None:
    coordinator, other = cut_off
    # An attempt that took effect is not repeated: what was to be lost after it, is not.
    expected = losses[: losses.index("answer") + 1] if "answer" in losses else losses

    def cut(call: Callable[[], Result]) -> Result:
        proxy.lose(*losses)
        result = call()
        assert proxy.lost == expected
        proxy.lose()
        return result

    table = cut(lambda: coordinator.tables.create("t", DEFINITION))
    assert (other.tables.names(), table.table_id) == (["t"], 1)
    evolved = replace(DEFINITION, schema='{"version": 2}', former=(DEFINITION.schema,))
    altered = cut(lambda: coordinator.alter_table(table, evolved))
    assert other.tables.get("t") == altered
    server = cut(lambda: coordinator.servers.register("127.0.0.1:1"))
    assert other.servers.all() == [server]
    lock = cut(lambda: coordinator.locks.acquire(table, "a", ["orders"]))
    assert (lock.epoch, other.locks.records(table)) == (1, {"a": lock.record})
    cut(lambda: lock.ready(ENDS, [server.name]))
    for batch in range(3):
        cut(partial(lock.commit, batch, LATER, [server.name]))
        assert other.locks.records(table) == {"a": lock.record}
        assert lock.batch == batch
    again = cut(lambda: coordinator.locks.acquire(table, "a", ["orders"], only_epoch=lock.epoch))
    assert again.epoch == 2
    again.ready(ENDS, [])
    cut(again.release)
    assert not other.locks.records(table)["a"].held
    cut(lambda: coordinator.locks.forget(table, "a"))
    assert other.locks.records(table) == {}
    cut(lambda: coordinator.drop_table(altered))
    assert other.tables.names() == []


def test_a_write_that_was_cut_off_is_an_unknown_outcome_of_the_store(
    cut_off: tuple[Coordinator, Coordinator], proxy: Proxy
) -> None:
    store = cut_off[0].store
    store.transact([Create("/a", b"0")])
    for loss, applied in (("request", False), ("answer", True)):
        before = store.read("/a")
        assert before is not None
        proxy.lose(loss)
        with pytest.raises(UnknownOutcome):
            store.transact([Write("/a", loss.encode(), before.version)])
        store.sync()
        after = store.read("/a")
        assert after is not None
        assert (after.version - before.version, after.data == loss.encode()) == (applied, applied)


def test_a_commit_that_took_effect_before_its_writer_was_fenced_is_not_committed_again(
    cut_off: tuple[Coordinator, Coordinator], proxy: Proxy
) -> None:
    """The answer is lost, and a successor is there before the connection is back."""
    coordinator, other = cut_off
    table = coordinator.tables.create("t", DEFINITION)
    lock = ready(coordinator, table, "a", "orders")
    proxy.lose("answer")
    outcome: list[BaseException] = []

    def commit() -> None:
        try:
            lock.commit(0, LATER, [])
        except Exception as exc:
            outcome.append(exc)

    thread = threading.Thread(target=commit)
    thread.start()
    wait_until(lambda: other.locks.records(table)["a"].batch == 0, "the commit to take effect")
    successor: ColumnLock = other.locks.acquire(table, "a", ["orders"])
    thread.join()
    assert successor.batch == 0
    # Either it read back in time, or it hears that it is fenced; the batch is there once.
    assert [type(exc).__name__ for exc in outcome] in ([], ["Fenced"])
    with pytest.raises(LockHeld):
        other.locks.acquire(table, "b", ["orders"], handover=True)
