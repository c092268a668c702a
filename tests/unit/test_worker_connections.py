"""The connections of Spark's Python workers, between one batch and the next."""

from types import SimpleNamespace
from typing import Any

import pytest

from foundation.errors import SessionLost
from server.client.cluster import Recipe
from sink import worker_connections
from sink.executors import ready_connection


class FakeCluster:
    """Counts how often it looked who leads."""

    def __init__(self, *, lost: bool = False) -> None:
        self.looked = 0
        self.lost = lost
        self.coordinator = SimpleNamespace(store=SimpleNamespace(sync=self._sync))
        self.calls = SimpleNamespace(directory=SimpleNamespace(refresh=self._refresh))

    def _sync(self) -> None:
        if self.lost:
            raise SessionLost("gone")

    def _refresh(self) -> None:
        self.looked += 1

    def close(self) -> None:
        pass


@pytest.fixture
def clusters(monkeypatch: pytest.MonkeyPatch) -> list[FakeCluster]:
    """Connect to fakes, and return those that were connected to."""
    made: list[FakeCluster] = []

    def connect(_: Recipe, patience_s: float | None = None) -> FakeCluster:
        made.append(FakeCluster())
        return made[-1]

    monkeypatch.setattr(Recipe, "connect", connect)
    monkeypatch.setattr(worker_connections, "_clusters", {})
    monkeypatch.setattr(worker_connections, "_epochs", {})
    return made


def job_of(owner: str, epoch: int) -> Any:
    grant = SimpleNamespace(owner=owner, writer=SimpleNamespace(epoch=epoch))
    return SimpleNamespace(recipe=Recipe("zk:2181", {}), grant=grant)


def test_a_worker_looks_who_leads_once_per_epoch(clusters: list[FakeCluster]) -> None:
    looked = []
    for owner, epoch in [("etl", 1), ("etl", 1), ("etl", 2), ("etl", 2), ("other", 2)]:
        ready_connection(job_of(owner, epoch))
        looked.append(clusters[0].looked)
    assert looked == [1, 1, 2, 2, 3]
    assert len(clusters) == 1


def test_a_lost_session_is_replaced_before_rows_are_read(clusters: list[FakeCluster]) -> None:
    job = job_of("etl", 1)
    ready_connection(job)
    clusters[0].lost = True
    ready: Any = ready_connection(job)
    shared: Any = worker_connections.connected(job.recipe)
    assert ready is shared is clusters[1]
