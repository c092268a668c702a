"""What it costs an owner to start over does not depend on how many owners the table has.

All owners of a table start over at once when a server that leads some of its buckets is gone.
"""

import threading

import pytest

from benchmarks.scale.counting import CountingStore, Counts
from foundation.errors import LockHeld
from locks.catalog.definitions import CatalogTable, TableDefinition
from locks.column_locks.locks import SHORTEST_TTL_MS
from locks.coordinator import Coordinator
from locks.store.memory import MemoryCoordination
from tests.support.coordinators import ready

OWNERS = [f"etl-{number}" for number in range(40)]
WIDE = TableDefinition(
    schema="{}",
    columns={owner: 10 + number for number, owner in enumerate(OWNERS)},
    key_columns=("k",),
    buckets=4,
    options={},
)


class Owners:
    """So many owners, each with a ready lock on the column that is called like it."""

    def __init__(self, count: int) -> None:
        self.memory = MemoryCoordination()
        self.coordinator = Coordinator(self.memory.connect())
        self.table: CatalogTable = self.coordinator.tables.create("wide", WIDE)
        self.locks = {
            owner: ready(self.coordinator, self.table, owner, owner, ttl_ms=SHORTEST_TTL_MS)
            for owner in OWNERS[:count]
        }

    def start_over(self, owner: str, *more: str) -> Counts:
        """Let an owner acquire again, in a session of its own; return what that asked for."""
        store = CountingStore(self.memory.connect())
        coordinator = Coordinator(store)
        before = store.counts
        self.locks[owner] = coordinator.locks.acquire(
            self.table, owner, [owner, *more], only_epoch=self.locks[owner].epoch
        )
        return store.counts - before


def test_who_starts_over_with_what_it_holds_reads_no_other_record() -> None:
    few, many = (Owners(count).start_over(OWNERS[0]) for count in (2, 40))
    assert (few.reads, few.listings) == (many.reads, many.listings) == (2, 0)


def test_who_wants_another_column_meets_its_holder() -> None:
    owners = Owners(3)
    with pytest.raises(LockHeld, match=r"columns etl-2 of table wide .* are held by `etl-2`"):
        owners.start_over("etl-1", "etl-2")
    assert owners.start_over("etl-1", "etl-7").listings, "a column that it did not hold is new"


def test_debts_that_are_not_paid_yet_are_taken_along() -> None:
    owners = Owners(3)
    owners.memory.advance(SHORTEST_TTL_MS)
    taken = owners.coordinator.locks.acquire(owners.table, "etl-1", ["etl-1", "etl-2"])
    debts = taken.record.debts
    assert {debt.owner for debt in debts} == {"etl-1", "etl-2"}
    owners.locks["etl-1"] = taken
    assert owners.start_over("etl-1").listings == 0
    assert owners.locks["etl-1"].record.debts == debts


def test_all_of_them_get_through_at_once_each_at_an_epoch_of_its_own() -> None:
    owners = Owners(12)
    threads = [
        threading.Thread(target=owners.start_over, args=(owner,)) for owner in list(owners.locks)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(180)
    epochs = sorted(lock.epoch for lock in owners.locks.values())
    assert epochs == list(range(13, 25))
    assert owners.coordinator.locks.read(owners.table).epoch == 24
