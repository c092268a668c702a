"""Connecting to a wrong address: within seconds, with the reason; and nothing is made there."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

import tallybook as tb
from foundation.errors import InvalidInput, Unavailable, UnknownCluster
from locks.store.embedded_zookeeper import EmbeddedZooKeeper
from locks.store.zookeeper import ZooKeeperStore
from server.client.cluster import connect
from tallybook.connecting import CONFIG_VARIABLE
from tests.support.zookeeper_server import chroot, wait_until, zookeeper_server


@pytest.fixture(scope="module")
def zookeeper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedZooKeeper]:
    with zookeeper_server(tmp_path_factory.mktemp("connecting")) as server:
        yield server


@contextmanager
def listening(greeting: bytes | None) -> Iterator[str]:
    """Listen at a free port, and say this to everybody; None: nothing."""
    kept: list[socket.socket] = []

    def serve(listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            if greeting is None:
                kept.append(connection)
            else:
                with connection:
                    connection.sendall(greeting)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, args=(listener,), daemon=True)
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
    thread.join()
    for connection in kept:
        connection.close()


def refusal(address: str) -> str:
    begun = time.monotonic()
    with pytest.raises(Unavailable) as told:
        tb.connect(address, patience_s=0.2)
    assert time.monotonic() - begun < 10
    return str(told.value)


def test_a_port_where_nobody_listens_is_told_as_such() -> None:
    message = refusal("127.0.0.1:1")
    assert "no ZooKeeper at 127.0.0.1:1 within 0.2 s" in message
    assert "127.0.0.1:1: the connection was refused: nothing listens at this port" in message


def test_a_name_that_nobody_knows_is_told_as_such() -> None:
    assert "no host of the name nowhere.invalid is known here" in refusal("nowhere.invalid:2181")


@pytest.mark.parametrize(
    ("greeting", "told"),
    [(b"HTTP/1.1 400 Bad Request\r\n\r\n", "not ZooKeeper answers"), (None, "says nothing")],
)
def test_something_else_at_the_port_is_told_as_such(greeting: bytes | None, told: str) -> None:
    with listening(greeting) as address:
        assert told in refusal(address)


def test_of_several_hosts_each_is_told() -> None:
    with listening(None) as other:
        message = refusal(f"127.0.0.1:1,{other}/chroot")
    assert "127.0.0.1:1: the connection was refused" in message
    assert f"{other}: something listens there" in message


def test_a_zookeeper_that_comes_within_the_deadline_is_waited_for_unless_one_is_impatient(
    tmp_path: Path,
) -> None:
    with zookeeper_server(tmp_path) as server:
        server.kill()
        starting = threading.Thread(target=server.start)
        starting.start()
        try:
            with closing(ZooKeeperStore(server.address, deadline_s=60)) as store:
                assert store.connected
        finally:
            starting.join()


def test_a_chroot_without_a_cluster_is_told_with_those_that_have_one_and_stays_as_it_is(
    zookeeper: EmbeddedZooKeeper,
) -> None:
    there, wrong = chroot(zookeeper), chroot(zookeeper)
    with connect(there, create=True) as made:
        assert made.list_tables() == []
        with pytest.raises(UnknownCluster) as told:
            tb.connect(wrong, patience_s=0.2)
        assert f"there is no cluster below /{wrong.partition('/')[2]}" in str(told.value)
        assert f"clusters are at {there}" in str(told.value)
        assert "/" + wrong.partition("/")[2] not in {
            f"/{name}" for name in children(zookeeper.address)
        }
    with tb.connect(there) as again:
        assert again.list_tables() == []


def children(address: str) -> list[str]:
    with closing(ZooKeeperStore(address, create=False)) as store:
        return store.children("/")


def test_a_cluster_that_is_about_to_be_made_is_waited_for(zookeeper: EmbeddedZooKeeper) -> None:
    address, waiting = chroot(zookeeper), threading.Event()
    found: list[list[str]] = []

    def connect_early() -> None:
        waiting.set()
        with tb.connect(address, patience_s=20) as cluster:
            found.append(cluster.list_tables())

    thread = threading.Thread(target=connect_early)
    thread.start()
    waiting.wait()
    with connect(address, create=True):
        wait_until(lambda: bool(found), "it connects")
    thread.join()
    assert found == [[]]


def test_without_an_address_the_environment_is_asked_and_then_the_file(
    zookeeper: EmbeddedZooKeeper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = chroot(zookeeper)
    connect(address, create=True).close()
    (tmp_path / "config.toml").write_text(f'zookeeper = "{address}"')
    monkeypatch.setenv(CONFIG_VARIABLE, str(tmp_path / "config.toml"))
    with tb.connect() as cluster:
        assert cluster.address == address
    monkeypatch.setenv("TALLYBOOK_ZOOKEEPER", "127.0.0.1:1")
    with pytest.raises(Unavailable, match=r"127\.0\.0\.1:1: the connection was refused"):
        tb.connect(patience_s=0.1)
    with pytest.raises(InvalidInput, match="is a text, host:port, not 2181"):
        tb.connect(2181)  # type: ignore[arg-type]
