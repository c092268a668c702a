"""A cluster of two servers for a module of faults, and a client per test."""

from collections.abc import Iterator

import pytest

from server.client.cluster import Cluster
from server.launch.local_cluster import LocalCluster
from tests.fault.cluster_load import client_of, local_cluster


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
