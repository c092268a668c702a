"""Coordinators on all stores: in memory, in memory and kept in a directory, and a real ZooKeeper.

One server for all tests of this directory, which none of them hurts; each has a chroot of its own.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from locks.catalog.definitions import CatalogTable
from locks.coordinator import Coordinator
from locks.store.base import CoordinationStore
from locks.store.durable import DurableCoordination
from locks.store.embedded_zookeeper import EmbeddedZooKeeper
from locks.store.memory import MemoryCoordination
from merge_engine.storage.objects import LocalStorage
from tests.support.coordinators import DEFINITION, Cluster
from tests.support.zookeeper_server import chroot, session, zookeeper_server


@pytest.fixture(scope="package")
def zookeeper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedZooKeeper]:
    with zookeeper_server(tmp_path_factory.mktemp("coordination")) as server:
        yield server


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[EmbeddedZooKeeper]:
    """Return a server that the test may do anything to."""
    with zookeeper_server(tmp_path) as server:
        yield server


@pytest.fixture(params=["memory", "durable", "zookeeper"])
def cluster(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Cluster]:
    """Return what opens sessions with one and the same store, and coordinators in them."""
    if request.param == "memory":
        memory = MemoryCoordination()
        yield Cluster(memory.connect, memory)
        return
    if request.param == "durable":
        durable = DurableCoordination(LocalStorage(tmp_path / "locks"), clock=lambda: 1_000_000)
        yield Cluster(durable.connect, durable)
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
def table(coordinator: Coordinator) -> CatalogTable:
    return coordinator.tables.create("customers", DEFINITION)
