"""What the cluster is told of copies in lakes: how far they are, until nobody keeps them."""

import pytest

from locks.catalog.copies import LakeCopy
from locks.catalog.definitions import TableDefinition
from locks.coordinator import Coordinator
from locks.store.memory import MemoryCoordination

COPY = LakeCopy(location="/lake", format="delta", had_all_ms=10_000, batches={"a": 3})


@pytest.fixture
def coordinator() -> Coordinator:
    return Coordinator(MemoryCoordination().connect())


def test_what_is_told_last_is_known_by_table_and_name(coordinator: Coordinator) -> None:
    coordinator.copies.tell(1, "c", COPY)
    coordinator.copies.tell(1, "d", COPY)
    coordinator.copies.tell(11, "c", COPY)
    later = LakeCopy(location="/lake", format="delta", had_all_ms=11_000, batches={"a": 4})
    coordinator.copies.tell(1, "c", later)
    coordinator.copies.tell(1, "c", later)
    assert coordinator.copies.all(1) == {"c": later, "d": COPY}
    coordinator.copies.forget(1, "c")
    coordinator.copies.forget(1, "c")
    assert coordinator.copies.all(1) == {"d": COPY}
    assert coordinator.copies.all(11) == {"c": COPY}
    assert coordinator.copies.all(2) == {}


def test_a_copy_is_behind_by_the_batches_that_it_does_not_have() -> None:
    assert COPY.lag({"a": 3}, 60_000) == (0, 0.0)
    assert COPY.lag({"a": 5}, 60_000) == (2, 50.0)
    assert COPY.lag({"a": 3, "b": 0}, 60_000) == (1, 50.0)
    assert COPY.lag({"a": 2, "b": -1}, 60_000) == (0, 0.0)
    assert COPY.lag({"a": 5}, 9_000) == (2, 0.0)


def test_copies_are_forgotten_with_their_table(coordinator: Coordinator) -> None:
    definition = TableDefinition(schema="{}", columns={"x": 2}, key_columns=("k",), buckets=1)
    table = coordinator.tables.create("t", definition)
    coordinator.copies.tell(table.table_id, "c", COPY)
    coordinator.drop_table(table)
    assert coordinator.copies.all(table.table_id) == {}
