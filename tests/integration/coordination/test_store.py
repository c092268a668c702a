"""One contract for both coordination stores: in memory, and a real ZooKeeper."""

import itertools
import threading
import time
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest
from kazoo.client import KazooClient
from kazoo.security import ACL, ANYONE_ID_UNSAFE, Permissions

from foundation.errors import AccessDenied, RecordTooLarge, SessionLost
from locks.cluster.picture import ClusterPicture
from locks.cluster.servers import Servers
from locks.coordinator import Coordinator
from locks.store.base import (
    MAX_TRANSACTION_BYTES,
    Check,
    Conflict,
    CoordinationStore,
    Create,
    Delete,
    Node,
    Write,
)
from locks.store.embedded_zookeeper import EmbeddedZooKeeper
from locks.store.memory import MemoryCoordination
from locks.store.zookeeper import ZooKeeperStore
from tests.support.coordinators import DEFINITION, Cluster
from tests.support.zookeeper_server import chroot, session, wait_until

Connect = Callable[[], CoordinationStore]


@pytest.fixture
def connect(cluster: Cluster) -> Connect:
    """Return what opens sessions with one and the same store."""
    return cluster.connect


@pytest.fixture
def store(connect: Connect) -> CoordinationStore:
    return connect()


def read(store: CoordinationStore, path: str) -> Node:
    node = store.read(path)
    assert node is not None
    return node


def conflict_of(store: CoordinationStore, *operations: Any) -> str:
    """Return the path of the condition that does not hold."""
    with pytest.raises(Conflict) as caught:
        store.transact(operations)
    return caught.value.path


def test_a_node_is_read_as_it_was_created_and_a_missing_one_is_none(
    store: CoordinationStore,
) -> None:
    assert store.read("/a") is None
    before_ms = store.now_ms()
    store.transact([Create("/a", b"one")])
    node = read(store, "/a")
    assert (node.data, node.version) == (b"one", 0)
    assert before_ms <= node.modified_ms <= store.now_ms()


def test_versions_rise_by_one_with_every_write(store: CoordinationStore) -> None:
    store.transact([Create("/a", b"0")])
    for version in range(5):
        store.transact([Write("/a", str(version + 1).encode(), version)])
        assert read(store, "/a")[:2] == (str(version + 1).encode(), version + 1)


def test_children_are_sorted_names_and_none_of_a_missing_node(store: CoordinationStore) -> None:
    store.transact([Create("/p", b""), Create("/p/b", b""), Create("/p/a", b"")])
    store.transact([Create("/p/a/deep", b""), Create("/pp", b"")])
    assert store.children("/p") == ["a", "b"]
    assert store.children("/p/b") == []
    assert store.children("/missing") == []


def test_a_condition_that_does_not_hold_is_a_conflict_that_names_the_node(
    store: CoordinationStore,
) -> None:
    store.transact([Create("/a", b""), Create("/a/b", b"")])
    assert conflict_of(store, Create("/a", b"")) == "/a"
    assert conflict_of(store, Create("/missing/child", b"")) == "/missing/child"
    assert conflict_of(store, Write("/a", b"", 1)) == "/a"
    assert conflict_of(store, Write("/missing", b"", 0)) == "/missing"
    assert conflict_of(store, Check("/a", 1)) == "/a"
    assert conflict_of(store, Check("/missing")) == "/missing"
    assert conflict_of(store, Delete("/a")) == "/a"
    assert conflict_of(store, Delete("/a/b", 3)) == "/a/b"
    assert conflict_of(store, Delete("/missing")) == "/missing"


def test_conditions_that_hold_let_the_operation_through(store: CoordinationStore) -> None:
    store.transact([Create("/a", b""), Create("/a/b", b"")])
    store.transact([Check("/a"), Check("/a", 0), Write("/a", b"x", -1), Check("/a", 1)])
    store.transact([Delete("/a/b", 0), Delete("/a", 1)])
    assert store.read("/a") is None


@pytest.mark.parametrize("position", range(4))
def test_a_transaction_takes_effect_whole_or_not_at_all(
    store: CoordinationStore, position: int
) -> None:
    store.transact([Create("/a", b"old"), Create("/gone", b"")])
    operations: list[Any] = [Write("/a", b"new", 0), Create("/b", b""), Delete("/gone")]
    operations.insert(position, Check("/missing"))
    assert conflict_of(store, *operations) == "/missing"
    assert read(store, "/a")[:2] == (b"old", 0)
    assert store.read("/b") is None
    assert store.read("/gone") is not None


def test_the_first_condition_that_does_not_hold_is_the_one_named(store: CoordinationStore) -> None:
    store.transact([Create("/a", b"")])
    assert conflict_of(store, Write("/a", b"", 7), Check("/missing")) == "/a"
    assert conflict_of(store, Check("/missing"), Write("/a", b"", 7)) == "/missing"


def test_ephemeral_nodes_go_with_their_session_and_take_no_children(connect: Connect) -> None:
    ours, theirs = connect(), connect()
    ours.transact([Create("/p", b""), Create("/p/here", b"x", ephemeral=True)])
    theirs.transact([Create("/p/there", b"", ephemeral=True), Create("/p/stays", b"")])
    assert conflict_of(ours, Create("/p/here/child", b"")) == "/p/here/child"
    ours.transact([Write("/p/here", b"y", 0)])
    ours.close()
    theirs.sync()
    assert theirs.children("/p") == ["stays", "there"]


def test_a_closed_store_says_that_its_session_is_gone(connect: Connect) -> None:
    store = connect()
    store.transact([Create("/a", b"")])
    store.close()
    store.close()
    calls: list[Callable[[], object]] = [
        lambda: store.read("/a"),
        lambda: store.children("/a"),
        store.sync,
        store.now_ms,
        lambda: store.transact([Check("/a")]),
        lambda: store.watch("/a", lambda: None),
    ]
    for call in calls:
        with pytest.raises(SessionLost, match="connect again"):
            call()


def test_after_sync_a_session_sees_what_another_wrote_before(connect: Connect) -> None:
    ours, theirs = connect(), connect()
    ours.transact([Create("/a", b"0")])
    for version in range(20):
        ours.transact([Write("/a", str(version).encode(), version)])
        theirs.sync()
        assert read(theirs, "/a").data == str(version).encode()


def test_of_two_writers_that_read_the_same_version_one_wins(connect: Connect) -> None:
    first, second = connect(), connect()
    first.transact([Create("/a", b"0")])
    won = [0, 0]

    def race(number: int, store: CoordinationStore) -> None:
        for _ in range(50):
            store.sync()
            node = read(store, "/a")
            try:
                store.transact([Write("/a", str(int(node.data) + 1).encode(), node.version)])
            except Conflict:
                continue
            won[number] += 1

    threads = [
        threading.Thread(target=race, args=(number, store))
        for number, store in enumerate((first, second))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    first.sync()
    assert int(read(first, "/a").data) == sum(won) == read(first, "/a").version


def test_the_clock_is_the_store_s_own_and_goes_forward(store: CoordinationStore) -> None:
    times = [store.now_ms() for _ in range(20)]
    assert times == sorted(times)
    if isinstance(store, ZooKeeperStore):  # It runs on this machine, so it is our clock, too.
        assert abs(times[-1] - time.time() * 1000) < 5_000


def test_the_clock_in_memory_moves_only_when_told_and_also_backwards() -> None:
    shared = MemoryCoordination()
    store = shared.connect()
    before = store.now_ms()
    shared.advance(500)
    assert store.now_ms() == before + 500
    shared.advance(-2_000)
    store.transact([Create("/a", b"")])
    assert read(store, "/a").modified_ms == before - 1_500


def test_a_transaction_that_zookeeper_would_not_take_is_refused_before_it_is_sent(
    store: CoordinationStore,
) -> None:
    half = bytes(MAX_TRANSACTION_BYTES // 2 + 1)
    with pytest.raises(RecordTooLarge, match="900,002 bytes; ZooKeeper takes 900,000"):
        store.transact([Create("/a", half), Create("/b", half)])
    assert store.read("/a") is None
    store.transact([Create("/a", bytes(MAX_TRANSACTION_BYTES))])
    assert len(read(store, "/a").data) == MAX_TRANSACTION_BYTES


class Calls:
    """Counts, and waits for more."""

    def __init__(self) -> None:
        self._count = itertools.count(1)
        self.made = 0

    def __call__(self) -> None:
        self.made = next(self._count)

    def wait_for_another_than(self, made: int) -> None:
        wait_until(lambda: self.made > made, "a call of the watch")


def test_a_watch_is_called_after_every_kind_of_change(connect: Connect) -> None:
    watching, writing = connect(), connect()
    calls = Calls()
    watching.watch("/a", calls)
    calls.wait_for_another_than(0)
    changes: list[list[Any]] = [
        [Create("/a", b"")],
        [Write("/a", b"1", 0)],
        [Write("/a", b"2", 1)],
        [Create("/a/child", b"")],
        [Delete("/a/child")],
        [Delete("/a")],
        [Create("/a", b"")],
        [Create("/a/child", b"")],
        [Write("/a", b"3", 0)],
    ]
    for change in changes:
        watching.sync()
        watching.read("/a")  # What is read after a call is watched.
        made = calls.made
        writing.transact(change)
        calls.wait_for_another_than(made)


def test_a_watch_until_its_node_is_deleted_tells_of_that_and_is_over(connect: Connect) -> None:
    watching, writing = connect(), connect()
    writing.transact([Create("/a", b""), Create("/b", b"")])
    calls, others = Calls(), Calls()
    watching.watch("/a", calls, until_deleted=True)
    watching.watch("/b", others)
    for change in ([Write("/a", b"1", 0)], [Create("/a/child", b"")], [Delete("/a/child")]):
        watching.sync()
        made = calls.made
        writing.transact(change)
        calls.wait_for_another_than(made)
    watching.sync()
    made = calls.made
    writing.transact([Delete("/a")])
    calls.wait_for_another_than(made)
    watching.sync()
    made = calls.made
    writing.transact([Create("/a", b"")])
    writing.transact([Write("/a", b"1", 0)])
    # What is told of later was told of after it, if at all.
    watching.sync()
    told = others.made
    writing.transact([Write("/b", b"1", 0)])
    others.wait_for_another_than(told)
    assert calls.made == made


def test_tables_that_come_and_go_leave_nothing_with_kazoo(zookeeper: EmbeddedZooKeeper) -> None:
    address = chroot(zookeeper)
    with session(address) as watching, session(address) as acting:
        picture = ClusterPicture(watching, Servers(watching, 30.0), lambda: None)
        coordinator = Coordinator(acting)

        def known() -> int:
            picture.look()
            return len(picture.tables)

        def watched() -> int:
            client = watching._client
            both = (client._data_watchers, client._child_watchers)
            return sum(len(found) for paths in both for found in list(paths.values()))

        for number in range(5):
            coordinator.tables.create(f"t{number}", DEFINITION)
        wait_until(lambda: known() == 5, "they are seen")
        wait_until(lambda: watched() > 2 * 5, "they are watched")
        for number in range(5):
            coordinator.drop_table(coordinator.tables.get(f"t{number}"))
        wait_until(lambda: known() == 0, "they are gone")
        # The three lists of the picture, each as a node and for its children, if it is there.
        wait_until(lambda: watched() <= 2 * 3, "none of them is watched any more")


def test_a_watch_does_not_miss_a_change_whatever_the_pace(connect: Connect) -> None:
    """Reads only when told to: it must end up with the last value."""
    watching, writing = connect(), connect()
    writing.transact([Create("/a", b"0")])
    dirty = threading.Event()
    watching.watch("/a", dirty.set)
    for version in range(200):
        writing.transact([Write("/a", str(version + 1).encode(), version)])
    seen = b""

    def read_when_told() -> bool:
        nonlocal seen
        if dirty.is_set():
            dirty.clear()
            seen = read(watching, "/a").data
        return seen == b"200"

    wait_until(read_when_told, "the last value")


def test_a_watch_of_children_tells_of_ephemeral_nodes_that_go(connect: Connect) -> None:
    watching, other = connect(), connect()
    watching.transact([Create("/p", b"")])
    other.transact([Create("/p/x", b"", ephemeral=True)])
    calls = Calls()
    watching.watch("/p", calls)
    watching.sync()
    made = calls.made
    other.close()
    calls.wait_for_another_than(made)
    assert watching.children("/p") == []


def test_zookeeper_refuses_whoever_has_not_the_credentials(zookeeper: EmbeddedZooKeeper) -> None:
    address = chroot(zookeeper)
    with (
        closing(ZooKeeperStore(address, credentials=("tallybook", "secret"))) as ours,
        closing(ZooKeeperStore(zookeeper.address)) as theirs,
    ):
        ours.transact([Create("/a", b"ours")])
        path = address.removeprefix(zookeeper.address) + "/a"
        calls: list[Callable[[], object]] = [
            lambda: ZooKeeperStore(address),
            lambda: ZooKeeperStore(f"{address}/below"),
            lambda: ZooKeeperStore(address, credentials=("tallybook", "guess")),
            lambda: theirs.read(path),
            lambda: theirs.children(path),
            lambda: theirs.transact([Write(path, b"theirs", 0)]),
            lambda: theirs.transact([Create(f"{path}/child", b"theirs")]),
        ]
        for number, call in enumerate(calls):
            what = "with these credentials" if number == 2 else "without credentials"
            with pytest.raises(AccessDenied, match=f"{what}; give the user and the password"):
                call()
        with closing(ZooKeeperStore(address, credentials=("tallybook", "secret"))) as again:
            assert read(again, "/a")[:2] == (b"ours", 0)


def test_nodes_that_anybody_may_change_are_told_from_those_that_are_closed(
    zookeeper: EmbeddedZooKeeper,
) -> None:
    address, credentials = chroot(zookeeper), ("tallybook", "secret")
    root = address.removeprefix(zookeeper.address)
    with (
        closing(ZooKeeperStore(address)) as before,
        closing(ZooKeeperStore(address, credentials=credentials)) as ours,
        closing(KazooClient(hosts=zookeeper.address)) as kazoo,
    ):
        before.transact([Create("/open", b""), Create("/read", b""), Create("/deleted", b"")])
        ours.transact([Create("/closed", b"")])
        kazoo.start()
        read, delete = Permissions.READ, Permissions.DELETE
        for path, permissions in (("/read", read), ("/deleted", read | delete)):
            kazoo.set_acls(root + path, [ACL(permissions, ANYONE_ID_UNSAFE)])
        kazoo.stop()
        paths = ["", "/closed", "/open", "/missing", "/read", "/deleted", "/clock"]
        with pytest.raises(AccessDenied, match="without credentials"):
            before.world_writable(["/closed"])
        assert ours.world_writable(paths) == ["", "/open", "/deleted", "/clock"]
    with closing(ZooKeeperStore(f"{address}/below", credentials=credentials)) as below:
        assert below.world_writable(["", "/clock"]) == []
    with closing(ZooKeeperStore(zookeeper.address, credentials=credentials)) as top:
        assert top.world_writable([""]) == [""], "what ZooKeeper begins with"
