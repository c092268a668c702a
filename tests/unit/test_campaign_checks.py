"""What the checks of a fault campaign would notice: each is shown what it must refuse."""

from itertools import islice
from typing import Any

import pyarrow as pa
import pytest

from tests.multihost.backfills import wrong_counts
from tests.multihost.campaign import TOGETHER, plan
from tests.multihost.faults import FAULTS
from tests.multihost.hunts import HUNTS, OF_SOURCES
from tests.multihost.operators import days_after
from tests.multihost.rival_batches import (
    COLUMNS,
    Ledger,
    columns_of,
    keys_of,
    number_of,
    rows_of,
    scanned_state,
    state_of,
    wrong_batches,
)
from tests.support import specification

Cells = dict[tuple[str, int], list[int]]


def after(*numbers: int) -> Cells:
    cells: Cells = {}
    for number in numbers:
        for column in columns_of(number):
            for key in keys_of(number):
                cells.setdefault((column, key), []).append(number)
    return cells


def begun(ledger: Ledger, *columns: str) -> int:
    return ledger.begin(columns or COLUMNS)


# --- Rivals ---------------------------------------------------------------------------------------


def test_a_number_says_which_columns_and_keys_its_batch_has() -> None:
    number = number_of(7, ["z", "x"])
    rows = rows_of(number)
    assert columns_of(number) == ["x", "z"]
    assert set(rows) == {"k", "x", "z"}
    assert rows["k"] == keys_of(number)
    assert set(rows["x"]) == {number}


def test_whole_batches_are_right() -> None:
    ledger = Ledger()
    numbers = [begun(ledger, "x"), begun(ledger), begun(ledger, "y", "z")]
    assert ledger.wrong(after(*numbers), numbers[:2], after(numbers[0])) == ""


def test_a_batch_in_part_is_noticed() -> None:
    cells = after(number_of(1, COLUMNS))
    del cells["y", keys_of(number_of(1, COLUMNS))[0]]
    assert len(wrong_batches(cells)) == 1


def test_a_batch_that_counts_twice_is_noticed() -> None:
    number = number_of(1, ["x"])
    cells = after(number)
    cells["x", keys_of(number)[0]].append(number)
    assert len(wrong_batches(cells)) == 1


def test_an_acknowledged_batch_that_is_gone_is_noticed() -> None:
    ledger = Ledger()
    number = begun(ledger)
    assert "were acknowledged" in ledger.wrong({}, [number])


def test_rows_that_came_too_late_are_noticed() -> None:
    ledger = Ledger()
    number = ledger.begin_late(["x"])
    assert "came too late" in ledger.wrong(after(number))


def test_a_value_that_was_withdrawn_or_put_before_another_is_noticed() -> None:
    ledger = Ledger()
    one, other = begun(ledger, "x"), begun(ledger, "x")
    assert "was" in ledger.wrong(after(other), before=after(one))
    assert ledger.wrong(after(one), before=after(one, other)) != ""


def test_a_row_that_nobody_has_written_is_noticed() -> None:
    row: dict[str, Any] = {"k": 3, **dict.fromkeys(COLUMNS)}
    assert wrong_batches(state_of([row])) == []  # A look-up has a row for every key.
    assert len(wrong_batches(scanned_state([row]))) == 1


# --- Backfills and days ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "least", "most", "wrong"),
    [
        ([2, 2, 2], 2, 2, None),
        ([], 0, 1, None),
        ([], 1, 1, "nothing is there"),
        ([2, 2], 2, 2, "2 of 3 keys"),
        ([2, 1, 2], 1, 2, "others 2"),
        ([1, 1, 1], 2, 2, "2 were acknowledged"),
        ([3, 3, 3], 2, 2, "2 begun"),
    ],
)
def test_a_backfill_is_there_whole(
    values: list[int], least: int, most: int, wrong: str | None
) -> None:
    found = wrong_counts(pa.chunked_array([values], pa.int64()), 3, least, most)
    assert found is None if wrong is None else wrong in str(found)


def test_days_that_are_too_old_have_no_rows() -> None:
    assert {day for day, _ in days_after(2)} == {"000000"}
    assert {day for day, _ in days_after(9)} == {"000001", "000002", "000003"}
    assert days_after(9)["000003", 0] == 10


# --- The campaign ---------------------------------------------------------------------------------


def test_faults_are_a_function_of_the_seed() -> None:
    def first(seed: int) -> list[tuple[float, str, float, float]]:
        some = islice(plan(seed, TOGETHER), 20)
        return [(one.after_s, one.name, one.lasts_s, one.chance.random()) for one in some]

    assert first(7) == first(7)
    assert first(7) != first(8)
    assert set(TOGETHER) <= set(FAULTS)


def test_there_is_a_hunt_for_every_rule_of_the_specification() -> None:
    assert [*HUNTS, *OF_SOURCES] == [*specification.load().RULES]
    assert {name for names in HUNTS.values() for name in names} <= set(TOGETHER)
