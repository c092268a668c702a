"""A cluster of two servers for a module of faults, and a client per test."""

from collections.abc import Iterator

import pytest

from server.client.cluster import Cluster
from server.launch.local_cluster import LocalCluster
from tests.fault.cluster_load import DEADLINE_S, client_of, local_cluster


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with local_cluster(tmp_path_factory.mktemp("cluster")) as running:
        yield running


@pytest.fixture
def client(cluster: LocalCluster) -> Iterator[Cluster]:
    """Connect to the cluster, all of whose servers run."""
    for server in cluster.servers:
        if not server.alive:
            server.start()
    cluster.wait_until_joined()
    with client_of(cluster) as connected:
        yield connected


@pytest.fixture
def patient(cluster: LocalCluster, client: Cluster) -> Iterator[Cluster]:
    """Connect a client that waits for an answer as long as for a call.

    For puts without a token, which are in doubt once an answer is given up: a slow machine is none
    of the faults that are looked at.
    """
    with client_of(cluster, attempt_s=DEADLINE_S) as connected:
        yield connected
