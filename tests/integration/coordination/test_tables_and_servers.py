"""Tables by name and id, and the servers there are, on both stores."""

from dataclasses import replace

import pytest

from foundation.errors import (
    Fenced,
    InvalidInput,
    LockHeld,
    SessionLost,
    TableAltered,
    TableExists,
    UnknownTable,
)
from locks.catalog.definitions import CatalogTable
from locks.cluster.servers import LEAVING, Members
from locks.coordinator import Coordinator
from tests.support.coordinators import (
    COLUMNS,
    DEFINITION,
    LATER,
    Cluster,
    expired_lock_that_commits_in_between,
    ready,
)


def test_a_table_is_found_by_name_and_by_id(coordinator: Coordinator, cluster: Cluster) -> None:
    assert coordinator.tables.names() == []
    table = coordinator.tables.create("customers", DEFINITION)
    coordinator.tables.create("a.b-c_9", DEFINITION)
    other = cluster.coordinator()
    assert other.tables.get("customers") == table
    assert other.tables.get_by_id(table.table_id) == table
    assert other.tables.names() == ["a.b-c_9", "customers"]
    assert table.definition == DEFINITION


def test_a_table_of_a_name_that_is_taken_is_refused(
    coordinator: Coordinator, table: CatalogTable
) -> None:
    with pytest.raises(TableExists, match="there is a table customers already"):
        coordinator.tables.create("customers", DEFINITION)


def test_an_unknown_table_is_an_error_that_lists_the_known_ones(
    coordinator: Coordinator, table: CatalogTable
) -> None:
    with pytest.raises(UnknownTable, match="no table orders; the tables are: customers"):
        coordinator.tables.get("orders")
    with pytest.raises(UnknownTable, match="no table with id 999"):
        coordinator.tables.get_by_id(999)


@pytest.mark.parametrize(
    "name", ["", ".", "..", "a/b", "/a", "../x", "a b", "-a", ".a", "ü", "x" * 201]
)
def test_a_table_name_with_tricks_is_refused(coordinator: Coordinator, name: str) -> None:
    with pytest.raises(InvalidInput, match="is not a table name"):
        coordinator.tables.create(name, DEFINITION)
    with pytest.raises(InvalidInput, match="is not a table name"):
        coordinator.tables.get(name)


def test_a_re_created_table_has_a_new_id_and_no_locks(
    coordinator: Coordinator, table: CatalogTable
) -> None:
    ready(coordinator, table, "etl-1", "orders").release()
    coordinator.drop_table(table)
    assert coordinator.tables.names() == []
    with pytest.raises(UnknownTable):
        coordinator.tables.get_by_id(table.table_id)
    again = coordinator.tables.create("customers", DEFINITION)
    assert again.table_id > table.table_id
    assert coordinator.locks.all(again) == []
    with pytest.raises(UnknownTable, match="was dropped"):
        coordinator.locks.acquire(table, "etl-1", ["orders"])
    with pytest.raises(UnknownTable, match="was dropped"):
        coordinator.drop_table(table)
    assert coordinator.tables.get("customers") == again


def test_a_table_is_altered_by_whoever_saw_it_last(
    cluster: Cluster, coordinator: Coordinator, table: CatalogTable
) -> None:
    wider = replace(DEFINITION, columns={**COLUMNS, "visits": 15})
    altered = coordinator.alter_table(table, wider)
    assert cluster.coordinator().tables.get("customers") == altered
    assert altered.version == table.version + 1
    with pytest.raises(TableAltered, match=r"altered meanwhile \(version 1, not 0\)"):
        coordinator.alter_table(table, replace(DEFINITION, buckets=9))
    coordinator.drop_table(altered)
    with pytest.raises(UnknownTable, match="was dropped"):
        coordinator.alter_table(altered, wider)


def test_a_table_with_a_live_lock_is_dropped_only_by_force_which_fences(
    coordinator: Coordinator, table: CatalogTable
) -> None:
    lock = ready(coordinator, table, "etl-1", "orders")
    with pytest.raises(LockHeld, match="held by `etl-1`"):
        coordinator.drop_table(table)
    coordinator.drop_table(table, force=True)
    with pytest.raises(Fenced, match="is gone: forgotten, or its table was dropped; stop for good"):
        lock.commit(0, LATER, [])


def test_a_lock_that_comes_alive_while_its_table_is_dropped_is_in_the_way(
    cluster: Cluster, coordinator: Coordinator, table: CatalogTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = expired_lock_that_commits_in_between(cluster, coordinator, table, monkeypatch)
    if cluster.memory is not None:
        with pytest.raises(LockHeld, match="held by `etl-1`"):
            coordinator.drop_table(table)
        lock.commit(1, LATER, [])
    else:  # The lock has a TTL of a millisecond there: the second look finds it expired again.
        coordinator.drop_table(table)
        with pytest.raises(Fenced):
            lock.renew()


def test_servers_are_listed_while_their_session_lasts(
    cluster: Cluster, coordinator: Coordinator
) -> None:
    other = cluster.coordinator()
    first = other.servers.register("127.0.0.1:1")
    second = coordinator.servers.register("127.0.0.1:2")
    assert sorted(s.address for s in coordinator.servers.all()) == ["127.0.0.1:1", "127.0.0.1:2"]
    assert first.name != other.servers.register("127.0.0.1:1").name
    other.store.close()
    assert coordinator.servers.all() == [second]
    with pytest.raises(SessionLost):
        other.servers.all()


def test_a_server_stands_aside_until_it_comes_back_or_its_session_ends(
    cluster: Cluster, coordinator: Coordinator
) -> None:
    other = cluster.coordinator()
    first = other.servers.register("127.0.0.1:1")
    second = coordinator.servers.register("127.0.0.1:2")
    for _ in range(2):
        other.servers.stand_aside(first, LEAVING)
    members = coordinator.servers.members()
    assert members.aside == {first.name: LEAVING}
    assert members.able == members.candidates == [second]
    assert members.named(first.name) == first
    coordinator.servers.stand_aside(second, "it cannot")
    everybody = coordinator.servers.members()
    assert everybody.able == []
    assert sorted(one.name for one in everybody.candidates) == sorted([first.name, second.name])
    for _ in range(2):
        coordinator.servers.come_back(second)
    assert coordinator.servers.members().able == [second]
    other.store.close()
    assert coordinator.servers.members() == Members(live=[second])
    with pytest.raises(SessionLost):
        coordinator.servers.stand_aside(first, LEAVING)
