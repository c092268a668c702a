"""Transactions without an answer: whether they took effect is found out by the next call."""

from collections.abc import Callable, Sequence

import pytest

from foundation.errors import (
    Fenced,
    RewoundBatch,
    Unavailable,
    UnknownOutcome,
)
from locks.catalog.definitions import CatalogTable
from locks.column_locks.column_lock import ColumnLock
from locks.coordinator import Coordinator
from locks.store.base import Operation
from locks.store.memory import MemoryCoordination, MemoryStore
from tests.support.coordinators import DEFINITION, LATER, ready


class Unanswering(MemoryStore):
    """Applies transactions, or not, and answers nothing, for as long as it is told to."""

    applies: bool | None = None

    def transact(self, operations: Sequence[Operation]) -> None:
        if self.applies in (None, True):
            super().transact(operations)
        if self.applies is not None:
            raise UnknownOutcome("no answer")

    def sync(self) -> None:
        if self.applies is not None:
            raise Unavailable("no answer")
        super().sync()


@pytest.fixture
def store() -> Unanswering:
    memory = MemoryCoordination()
    return Unanswering(memory, memory.connect().session)


@pytest.fixture
def coordinator(store: Unanswering) -> Coordinator:
    return Coordinator(store)


@pytest.fixture
def lock(coordinator: Coordinator, table: CatalogTable) -> ColumnLock:
    return ready(coordinator, table, "etl-1", "orders")


def apply_without_an_answer(store: Unanswering, call: Callable[[], None]) -> None:
    """Call; it takes effect, and cannot know that."""
    store.applies = True
    with pytest.raises(UnknownOutcome):
        call()
    store.applies = None


def test_a_commit_of_unknown_outcome_is_found_out_by_the_next_call(
    store: Unanswering, coordinator: Coordinator, table: CatalogTable, lock: ColumnLock
) -> None:
    for batch, applied in enumerate([False, True]):
        store.applies = applied
        with pytest.raises(UnknownOutcome, match="no answer, and whether it took effect could not"):
            lock.commit(batch, LATER, [])
        with pytest.raises(Unavailable):
            lock.renew()
        store.applies = None
        if applied:
            with pytest.raises(RewoundBatch, match="is committed already"):
                lock.commit(batch, LATER, [])
        else:
            lock.commit(batch, LATER, [])
        assert lock.batch == batch
    assert coordinator.locks.records(table)["etl-1"] == lock.record


def test_a_lock_that_was_abandoned_without_an_answer_lives_on_with_the_next_call(
    store: Unanswering, coordinator: Coordinator, table: CatalogTable, lock: ColumnLock
) -> None:
    apply_without_an_answer(store, lock.abandon)
    assert coordinator.locks.records(table)["etl-1"].abandoned
    lock.commit(0, LATER, [])
    assert not coordinator.locks.records(table)["etl-1"].abandoned


def test_a_lock_that_was_released_without_an_answer_is_found_released(
    store: Unanswering, lock: ColumnLock
) -> None:
    apply_without_an_answer(store, lock.release)
    with pytest.raises(Fenced, match="taken over or released"):
        lock.renew()


def test_an_acquire_without_an_answer_is_harmless_and_may_be_repeated(
    store: Unanswering, coordinator: Coordinator, table: CatalogTable
) -> None:
    for applied in (False, True):
        store.applies = applied
        with pytest.raises((UnknownOutcome, Unavailable)):
            coordinator.locks.acquire(table, "etl-1", ["orders"])
    store.applies = None
    ready(coordinator, table, "etl-1", "orders").release()


class LosesOneAnswer(MemoryStore):
    """Loses the answer to the next transaction, which it applies, or does not, as it is told."""

    applies: bool | None = None

    def transact(self, operations: Sequence[Operation]) -> None:
        applies, self.applies = self.applies, None
        if applies is not False:
            super().transact(operations)
        if applies is not None:
            raise UnknownOutcome("no answer")


@pytest.mark.parametrize("applies", [True, False])
def test_a_rename_and_a_truncation_whose_answer_is_lost_take_effect_once(applies: bool) -> None:
    memory = MemoryCoordination()
    store = LosesOneAnswer(memory, memory.connect().session)
    coordinator = Coordinator(store)
    table = coordinator.tables.create("t", DEFINITION)
    store.applies = applies
    renamed = coordinator.tables.rename(table, "other")
    assert (renamed.name, renamed.table_id) == ("other", table.table_id)
    assert coordinator.tables.get("other") == renamed
    store.applies = applies
    emptied = coordinator.truncate_table(renamed, lambda definition: definition)
    assert coordinator.tables.names() == ["other"]
    assert coordinator.tables.all() == [coordinator.tables.get("other")] == [emptied]
    assert [one.table.table_id for one in coordinator.dropped.all()] == [table.table_id]
