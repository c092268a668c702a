"""A real ZooKeeper that is killed, stopped and cut off, and what its clients make of it.

The servers here belong to the tests that hurt them; the one of the module is never hurt itself: a
proxy in between loses requests and answers.
"""

import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

import pytest
from kazoo.client import KazooClient

from locks import (
    BucketKey,
    ColumnLock,
    Coordinator,
    EmbeddedZooKeeper,
    FreshRecords,
    LockHeld,
    Offsets,
    ServerNotStarted,
    SessionLost,
    Table,
    TableDefinition,
    Unavailable,
    UnknownOutcome,
    ZooKeeperStore,
)
from locks.store import Check, Create, Write
from tests.zookeeper_server import chroot, needs_java, wait_until, zookeeper_server

DEFINITION = TableDefinition(
    schema="{}", columns={"x": 1, "y": 2, "z": 3}, key_columns=("k",), buckets=1
)
ENDS = Offsets({BucketKey(0, 0): 5})
LATER = Offsets({BucketKey(0, 0): 9})
ROUNDS = 1_000
Result = TypeVar("Result")


@pytest.fixture(scope="module")
def zookeeper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedZooKeeper]:
    with zookeeper_server(tmp_path_factory.mktemp("faults")) as server:
        yield server


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[EmbeddedZooKeeper]:
    """Return a server that the test may do anything to."""
    with zookeeper_server(tmp_path) as server:
        yield server


@contextmanager
def session(
    address: str, *, session_timeout_s: float = 5, deadline_s: float = 20
) -> Iterator[ZooKeeperStore]:
    store = ZooKeeperStore(address, session_timeout_s=session_timeout_s, deadline_s=deadline_s)
    with closing(store):
        yield store


def table_of(coordinator: Coordinator) -> Table:
    return coordinator.create_table("t", DEFINITION)


def is_alive(pid: int) -> bool:
    """Whether there is a process of this id that is not a zombie."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


# The embedded server


def test_a_server_restarts_with_its_data_on_the_same_address(own_server: EmbeddedZooKeeper) -> None:
    address = own_server.address
    for number, end in enumerate([own_server.stop, own_server.kill]):
        with session(address) as store:
            store.transact([Create(f"/{number}", b"kept")])
        pid = own_server.pid
        end()
        assert not is_alive(pid)
        own_server.start()
        assert own_server.address == address
        with session(address) as store:
            node = store.read(f"/{number}")
            assert node is not None
            assert node.data == b"kept"
    with pytest.raises(ServerNotStarted, match="runs already"):
        own_server.start()


def test_a_server_has_no_address_before_its_first_start_and_may_be_stopped_twice(
    tmp_path: Path,
) -> None:
    server = EmbeddedZooKeeper(tmp_path)
    with pytest.raises(ServerNotStarted, match="no address before its first start"):
        _ = server.address
    server.stop()
    server.kill()


def test_a_port_that_is_taken_is_an_error_with_the_log(tmp_path: Path) -> None:
    needs_java()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            ServerNotStarted, match=rf"did not start on 127.0.0.1:{port}; see .*log"
        ):
            EmbeddedZooKeeper(tmp_path, port=port).start()


@pytest.mark.parametrize("how", ["no java on the path", "a wrong JAVA_HOME"])
def test_without_java_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    reason = "there is none on the PATH"
    if how == "a wrong JAVA_HOME":
        monkeypatch.setenv("JAVA_HOME", str(tmp_path))
        reason = f"JAVA_HOME is {tmp_path}"
    with pytest.raises(ServerNotStarted) as missing:
        EmbeddedZooKeeper(tmp_path / "data").start()
    assert f"needs Java 17 or newer, and {reason}: install it" in str(missing.value)


def test_a_java_that_does_not_run_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    java = tmp_path / "bin" / "java"
    java.parent.mkdir()
    java.write_text("not a program")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(ServerNotStarted, match="cannot run"):
        EmbeddedZooKeeper(tmp_path / "data").start()
    java.write_text("#!/bin/sh\necho a broken Java >&2\nexit 1\n")
    java.chmod(0o755)
    with pytest.raises(ServerNotStarted, match="a broken Java"):
        EmbeddedZooKeeper(tmp_path / "data").start()


STARTER = """
import sys
from locks import EmbeddedZooKeeper
server = EmbeddedZooKeeper(sys.argv[1]).start()
print(server.pid, server._guardian.pid, flush=True)
sys.stdin.read()
"""


def test_no_process_is_left_behind_when_the_starter_is_killed(tmp_path: Path) -> None:
    needs_java()
    with subprocess.Popen(
        [sys.executable, "-c", STARTER, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as starter:
        assert starter.stdout is not None
        pids = [int(pid) for pid in starter.stdout.readline().split()]
        assert [is_alive(pid) for pid in pids] == [True, True]
        starter.kill()
        starter.wait()
        wait_until(lambda: not any(map(is_alive, pids)), "server and guardian to end")


# A server that is gone for a while


def test_clients_resume_within_their_deadline_when_the_server_comes_back(
    own_server: EmbeddedZooKeeper,
) -> None:
    with session(own_server.address, session_timeout_s=10, deadline_s=30) as store:
        coordinator = Coordinator(store)
        table = table_of(coordinator)
        server = coordinator.register_server("127.0.0.1:1")
        lock = coordinator.acquire(table, "a", ["x"])
        lock.ready(ENDS, [server.name])
        fresh = FreshRecords(coordinator, table)
        wait_until(lambda: fresh.records() == {"a": lock.record}, "the view to be fresh")
        own_server.kill()
        wait_until(lambda: not store.connected, "the connection to be lost")
        restart = threading.Thread(target=own_server.start)
        restart.start()
        try:
            lock.commit(0, LATER, [server.name])  # Waits, and goes on in the same session.
        finally:
            restart.join()
        assert coordinator.records(table)["a"].batch == 0
        assert coordinator.list_servers() == [server]
        wait_until(lambda: fresh.records() == {"a": lock.record}, "the view to be fresh again")


def test_without_a_server_calls_wait_for_their_deadline_and_may_be_tried_again(
    own_server: EmbeddedZooKeeper,
) -> None:
    with session(own_server.address, session_timeout_s=10, deadline_s=0.5) as store:
        coordinator = Coordinator(store, deadline_s=0.5)
        table = table_of(coordinator)
        lock = coordinator.acquire(table, "a", ["x"])
        lock.ready(ENDS, [])
        own_server.kill()
        wait_until(lambda: not store.connected, "the connection to be lost")
        calls: list[Callable[[], object]] = [
            lambda: store.read("/x"),
            lambda: store.children("/x"),
            store.sync,
            store.now_ms,
            lambda: store.transact([Check("/x")]),
            lock.renew,
            lock.check,
            lambda: lock.commit(0, LATER, []),
            lambda: coordinator.acquire(table, "b", ["y"]),
        ]
        for call in calls:
            started = time.monotonic()
            with pytest.raises(Unavailable, match=r"did not answer within 0.5 s; try again"):
                call()
            assert 0.4 < time.monotonic() - started < 3
        own_server.start()
        wait_until(lambda: store.connected, "the connection to be back")
        lock.commit(0, LATER, [])
        assert coordinator.records(table)["a"].batch == 0


def test_a_server_that_does_not_answer_leaves_the_outcome_unknown_until_it_does(
    own_server: EmbeddedZooKeeper,
) -> None:
    with session(own_server.address, session_timeout_s=10, deadline_s=0.5) as store:
        coordinator = Coordinator(store, deadline_s=0.5)
        table = table_of(coordinator)
        lock = coordinator.acquire(table, "a", ["x"])
        lock.ready(ENDS, [])
        os.kill(own_server.pid, signal.SIGSTOP)
        try:
            with pytest.raises(UnknownOutcome, match="could not be read back"):
                lock.commit(0, LATER, [])
            with pytest.raises(Unavailable):
                lock.check()
        finally:
            os.kill(own_server.pid, signal.SIGCONT)

        def answers() -> bool:
            with suppress(Unavailable):
                lock.check()
                return True
            return False

        wait_until(answers, "the server to answer again")
        # It was in the socket all the time, and was carried out when the server woke up.
        assert lock.batch == 0
        assert coordinator.records(table)["a"] == lock.record
        lock.commit(1, LATER, [])


def test_no_server_at_all_is_unavailable(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    with pytest.raises(Unavailable, match=rf"no ZooKeeper at {address} within 0.3 s"):
        ZooKeeperStore(address, deadline_s=0.3)


# A session that is lost


def expire(zookeeper: EmbeddedZooKeeper, store: ZooKeeperStore) -> None:
    """End a session from outside: whoever has its id and password may close it."""
    twin = KazooClient(zookeeper.address, client_id=store._client.client_id)
    twin.start()
    twin.stop()
    twin.close()


def test_a_lost_session_ends_every_handle_and_its_ephemeral_nodes(
    zookeeper: EmbeddedZooKeeper,
) -> None:
    address = chroot(zookeeper)
    with session(address) as store, session(address) as other_store:
        coordinator, other = Coordinator(store), Coordinator(other_store)
        table = table_of(coordinator)
        coordinator.register_server("127.0.0.1:1")
        lock = coordinator.acquire(table, "a", ["x"])
        lock.ready(ENDS, [])
        expire(zookeeper, store)
        wait_until(store._lost.is_set, "the session to be lost")
        calls: list[Callable[[], object]] = [
            lambda: lock.commit(0, LATER, []),
            lock.renew,
            lock.check,
            lock.release,
            lock.abandon,
            store.sync,
            lambda: coordinator.records(table),
            lambda: coordinator.register_server("127.0.0.1:1"),
            lambda: coordinator.acquire(table, "a", ["x"]),
            lambda: store.watch("/x", lambda: None),
        ]
        for call in calls:
            with pytest.raises(SessionLost, match="is gone; connect again"):
                call()
        assert not store.connected
        assert other.list_servers() == []
        assert other.records(table)["a"] == lock.record
        successor = other.acquire(table, "a", ["x"], only_epoch=lock.epoch)
        assert successor.batch == -1


def test_a_session_is_lost_when_its_client_is_not_heard_of_for_too_long(
    zookeeper: EmbeddedZooKeeper,
) -> None:
    with Proxy(zookeeper) as proxy:
        root = chroot(zookeeper)
        path = root.removeprefix(zookeeper.address)
        with (
            session(proxy.address + path, session_timeout_s=1, deadline_s=10) as store,
            session(root) as other,
        ):
            store.transact([Create("/here", b"", ephemeral=True)])
            proxy.refuse()
            wait_until(lambda: other.read("/here") is None, "the session to expire")
            proxy.accept()
            with pytest.raises(SessionLost):
                store.sync()
            other.sync()
            assert other.children("/") == ["clock"]


# Connections that are cut in the middle of a transaction

MULTI = 14  # ZooKeeper's request type of a transaction.


class Proxy:
    """Passes a client's requests to the server one by one, and loses what it is told to lose."""

    def __init__(self, zookeeper: EmbeddedZooKeeper) -> None:
        self._server = ("127.0.0.1", int(zookeeper.address.rpartition(":")[2]))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._mutex = threading.Lock()
        self._connections: set[socket.socket] = set()
        self._accepting = True
        self._losses: list[str] = []
        self.lost: list[str] = []
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._threads = [threading.Thread(target=self._serve)]
        self._threads[0].start()

    def lose(self, *losses: str) -> None:
        """Cut the connection at the next transactions: their "request" or their "answer"."""
        self._losses = list(losses)
        self.lost = []

    def refuse(self) -> None:
        """Cut all connections, and let nobody through."""
        self._accepting = False
        self._cut()

    def accept(self) -> None:
        """Let clients through again."""
        self._accepting = True

    def __enter__(self) -> "Proxy":
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._cut()
        for thread in self._threads:
            thread.join()

    def _cut(self) -> None:
        with self._mutex:
            for connection in self._connections:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if not self._accepting:
                client.close()
                continue
            server = socket.create_connection(self._server)
            for end in (client, server):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._mutex:
                self._connections |= {client, server}
            losing = threading.Event()
            for pass_on, source, target in (
                (self._pass_requests, client, server),
                (self._pass_answers, server, client),
            ):
                thread = threading.Thread(target=pass_on, args=(source, target, losing))
                self._threads.append(thread)
                thread.start()

    def _pass_requests(
        self, client: socket.socket, server: socket.socket, losing: threading.Event
    ) -> None:
        first = True
        with self._closing(client, server):
            while frame := _frame(client):
                is_transaction = not first and int.from_bytes(frame[8:12], "big") == MULTI
                first = False
                if not is_transaction or not self._losses:
                    server.sendall(frame)
                    continue
                self.lost.append(self._losses.pop(0))
                if self.lost[-1] == "request":
                    return
                losing.set()  # From here on answers are lost; the server's comes, then we cut.
                server.sendall(frame)

    def _pass_answers(
        self, server: socket.socket, client: socket.socket, losing: threading.Event
    ) -> None:
        with self._closing(client, server):
            while frame := _frame(server):
                if losing.is_set():
                    return
                client.sendall(frame)

    @contextmanager
    def _closing(self, client: socket.socket, server: socket.socket) -> Iterator[None]:
        try:
            yield
        except OSError:
            pass
        finally:
            with self._mutex:
                for end in (client, server):
                    with suppress(OSError):
                        end.shutdown(socket.SHUT_RDWR)
            client.close()
            server.close()


def _frame(source: socket.socket) -> bytes:
    """Read a message with its length, or nothing at the end."""
    head = _exactly(source, 4)
    return head and head + _exactly(source, int.from_bytes(head, "big"))


def _exactly(source: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = source.recv(size - len(data))
        if not more:
            return b""
        data += more
    return data


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

    table = cut(lambda: table_of(coordinator))
    assert (other.list_tables(), table.table_id) == (["t"], 1)
    altered = cut(lambda: coordinator.alter_table(table, DEFINITION))
    assert other.table("t") == altered
    server = cut(lambda: coordinator.register_server("127.0.0.1:1"))
    assert other.list_servers() == [server]
    lock = cut(lambda: coordinator.acquire(table, "a", ["x"]))
    assert (lock.epoch, other.records(table)) == (1, {"a": lock.record})
    cut(lambda: lock.ready(ENDS, [server.name]))
    for batch in range(3):
        cut(partial(lock.commit, batch, LATER, [server.name]))
        assert other.records(table) == {"a": lock.record}
        assert lock.batch == batch
    again = cut(lambda: coordinator.acquire(table, "a", ["x"], only_epoch=lock.epoch))
    assert again.epoch == 2
    again.ready(ENDS, [])
    cut(again.release)
    assert not other.records(table)["a"].held
    cut(lambda: coordinator.forget(table, "a"))
    assert other.records(table) == {}
    cut(lambda: coordinator.drop_table(altered))
    assert other.list_tables() == []


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
    table = table_of(coordinator)
    lock = coordinator.acquire(table, "a", ["x"])
    lock.ready(ENDS, [])
    proxy.lose("answer")
    outcome: list[BaseException] = []

    def commit() -> None:
        try:
            lock.commit(0, LATER, [])
        except Exception as exc:
            outcome.append(exc)

    thread = threading.Thread(target=commit)
    thread.start()
    wait_until(lambda: other.records(table)["a"].batch == 0, "the commit to take effect")
    successor: ColumnLock = other.acquire(table, "a", ["x"])
    thread.join()
    assert successor.batch == 0
    # Either it read back in time, or it hears that it is fenced; the batch is there once.
    assert [type(exc).__name__ for exc in outcome] in ([], ["Fenced"])
    with pytest.raises(LockHeld):
        other.acquire(table, "b", ["x"], handover=True)


# Processes that race

RACER = """
import sys
from locks import Coordinator, LockHeld, ZooKeeperStore

address, owner, columns = sys.argv[1], sys.argv[2], sys.argv[3:]
coordinator = Coordinator(ZooKeeperStore(address))
table = coordinator.table("t")
print("here", flush=True)
for _ in sys.stdin:
    try:
        lock = coordinator.acquire(table, owner, columns)
    except LockHeld:
        print("refused", flush=True)
        continue
    print("won", lock.epoch, flush=True)
    if sys.stdin.readline() == "release\\n":
        lock.ready({}, [])
        lock.release()
    else:
        lock.abandon()
    print("gave it up", flush=True)
"""


def test_three_processes_race_for_overlapping_columns_and_one_wins_every_time(
    zookeeper: EmbeddedZooKeeper,
) -> None:
    address, seed = chroot(zookeeper), random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    # Any two of them have a column in common.
    wanted = {"a": ["x", "y"], "b": ["y", "z"], "c": ["z", "x"]}
    with session(address) as store, ExitStack() as stack:
        coordinator = Coordinator(store)
        table = table_of(coordinator)
        racers = {
            owner: stack.enter_context(racer(address, owner, columns))
            for owner, columns in wanted.items()
        }
        for process in racers.values():
            assert answer(process) == ["here"]
        won = dict.fromkeys(racers, 0)
        for number in range(1, ROUNDS + 1):
            for process in rng.sample(list(racers.values()), 3):
                tell(process, "go")
            answers = {owner: answer(process) for owner, process in racers.items()}
            winners = [owner for owner, words in answers.items() if words[0] == "won"]
            assert len(winners) == 1, f"seed {seed}: {answers}"
            (winner,) = winners
            # Nobody acquired besides, not even for a moment: each time there is one epoch more.
            assert answers[winner] == ["won", str(number)], f"seed {seed}"
            won[winner] += 1
            tell(racers[winner], rng.choice(["release", "abandon"]))
            assert answer(racers[winner]) == ["gave", "it", "up"]
        assert sum(record.held for record in coordinator.records(table).values()) <= 1
        print(f"won: {won}")


@contextmanager
def racer(address: str, owner: str, columns: list[str]) -> Iterator["subprocess.Popen[str]"]:
    with subprocess.Popen(
        [sys.executable, "-c", RACER, address, owner, *columns],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def tell(process: "subprocess.Popen[str]", what: str) -> None:
    assert process.stdin is not None
    process.stdin.write(f"{what}\n")
    process.stdin.flush()


def answer(process: "subprocess.Popen[str]") -> list[str]:
    assert process.stdout is not None
    words = process.stdout.readline().split()
    assert words, f"a racer ended with {process.wait()}"
    return words
