"""Coordinators on both stores: in memory, and a real ZooKeeper.

One server for all tests of this directory, which none of them hurts; each has a chroot of its own.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from locks import CoordinationStore, Coordinator, EmbeddedZooKeeper, MemoryCoordination, Table
from tests.coordinators import DEFINITION, Cluster
from tests.zookeeper_server import chroot, session, zookeeper_server


@pytest.fixture(scope="package")
def zookeeper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedZooKeeper]:
    with zookeeper_server(tmp_path_factory.mktemp("coordination")) as server:
        yield server


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[EmbeddedZooKeeper]:
    """Return a server that the test may do anything to."""
    with zookeeper_server(tmp_path) as server:
        yield server


@pytest.fixture(params=["memory", "zookeeper"])
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """Return what opens sessions with one and the same store, and coordinators in them."""
    if request.param == "memory":
        memory = MemoryCoordination()
        yield Cluster(memory.connect, memory)
        return
    address = chroot(request.getfixturevalue("zookeeper"))
    with ExitStack() as stack:

        def connect() -> CoordinationStore:
            return stack.enter_context(session(address))

        yield Cluster(connect)


@pytest.fixture
def coordinator(cluster: Cluster) -> Coordinator:
    return cluster.coordinator()


@pytest.fixture
def table(coordinator: Coordinator) -> Table:
    return coordinator.create_table("customers", DEFINITION)
