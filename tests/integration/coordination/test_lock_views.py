"""The locks as others see them, on both stores."""

from locks.catalog.definitions import CatalogTable
from locks.coordinator import Coordinator
from tests.support.coordinators import Cluster, ready


def test_locks_are_listed_with_what_they_hold_and_until_when(
    cluster: Cluster, coordinator: Coordinator, table: CatalogTable
) -> None:
    assert coordinator.locks.all(table) == []
    ready(coordinator, table, "etl-2", "tags").release()
    lock = ready(coordinator, table, "etl-1", "orders", ttl_ms=60_000)
    now_ms = coordinator.store.now_ms()
    first, second = cluster.coordinator().locks.all(table)
    assert (first.owner, first.record, first.live) == ("etl-1", lock.record, True)
    assert now_ms + 50_000 < first.expires_ms <= now_ms + 60_000
    assert (second.owner, second.live, second.record.held) == ("etl-2", False, False)
