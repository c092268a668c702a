"""What the checks of the bed of several hosts would notice: each is shown what it must refuse."""

import json
from typing import Any

import pytest

from tests.multihost.batches import (
    COUNTER,
    Prefixes,
    State,
    batch_of,
    wrong_prefix,
    wrong_values,
)
from tests.multihost.budgets import BUDGETS, EXPECTED, BudgetExceeded, check_budget
from tests.multihost.clients import apply_changes
from tests.multihost.faults import FAULTS, SHORT
from tests.multihost.history import History
from tests.multihost.parts import SESSION_S

COLUMN = "plain"


def after(count: int) -> State:
    return dict(Prefixes(COLUMN, 7).after(count))


# --- Batches --------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 5])
def test_a_state_of_whole_batches_is_right(count: int) -> None:
    assert wrong_prefix(Prefixes(COLUMN, 7), after(count), count, count) is None


def test_half_a_batch_is_noticed() -> None:
    seen = after(5)
    rows = batch_of(COLUMN, 7, 4)
    seen[rows["k"][0]] -= rows[COLUMN][0]
    assert "1 keys differ" in str(wrong_prefix(Prefixes(COLUMN, 7), seen, 0, None))


def test_a_key_that_is_missing_or_too_many_is_noticed() -> None:
    less, more = after(3), after(3)
    del less[8]
    more[COUNTER + 1] = 1
    for seen in (less, more):
        assert "1 keys differ" in str(wrong_prefix(Prefixes(COLUMN, 7), seen, 0, None))


def test_an_acknowledged_batch_that_is_missing_is_noticed() -> None:
    assert "6 were acknowledged" in str(wrong_prefix(Prefixes(COLUMN, 7), after(5), 6, None))


def test_a_batch_that_nobody_has_begun_is_noticed() -> None:
    assert "only 4 had begun" in str(wrong_prefix(Prefixes(COLUMN, 7), after(5), 4, 4))


def test_a_reader_that_goes_back_is_noticed() -> None:
    prefixes = Prefixes(COLUMN, 7)
    assert wrong_prefix(prefixes, after(5), 0, None) is None
    assert "5 seen before" in str(wrong_prefix(prefixes, after(4), 0, None))


def test_the_latest_value_of_a_key_is_of_any_batch_that_was_under_way() -> None:
    seen = after(5)
    rows = batch_of(COLUMN, 7, 5)
    for key, amount in list(zip(rows["k"], rows[COLUMN], strict=True))[:30]:
        seen[key] += amount  # As a batch that some buckets have, and others do not have yet.
    assert wrong_values(Prefixes(COLUMN, 7), seen, 5, 6) is None
    assert "not one of" in str(wrong_values(Prefixes(COLUMN, 7), seen, 5, 5))
    assert "not one of" in str(wrong_values(Prefixes(COLUMN, 7), after(4), 5, 6))


# --- Changes --------------------------------------------------------------------------------------


def record(kind: str, value: int) -> dict[str, Any]:
    empty = dict.fromkeys(("plain", "driver", "executors"))
    return {"k": 1, **empty, COLUMN: value, "_changed_columns": [COLUMN], "_change_type": kind}


def test_changes_lead_from_one_state_to_the_next() -> None:
    rows: dict[int, dict[str, Any]] = {}
    records = [record("insert", 3), record("update_preimage", 3), record("update_postimage", 5)]
    assert list(apply_changes(rows, records)) == []
    assert rows[1][COLUMN] == 5
    assert list(apply_changes(rows, [record("delete", 5)])) == []
    assert rows[1][COLUMN] is None


@pytest.mark.parametrize("kind", ["insert", "update_preimage", "delete"])
def test_a_change_that_begins_elsewhere_is_noticed(kind: str) -> None:
    rows = {1: {"k": 1, "plain": 3, "driver": None, "executors": None}}
    assert len(list(apply_changes(rows, [record(kind, 4)]))) == 1


# --- History and budgets --------------------------------------------------------------------------


def line(kind: str, began: float, ended: float, **more: Any) -> str:
    return json.dumps({"kind": kind, "number": 1, "began": began, "ended": ended, **more})


def test_the_slowest_of_each_kind_is_compared_with_its_budget_and_the_history_is_told() -> None:
    history = History()
    history.add(line("plain", 100, 104))
    history.add(line("latest", 100, 100.5))
    check_budget("rolling restart", history, 100)
    errors = [{"after_s": 3.0, "error": "ServerUnavailable: nobody"}]
    history.add(line("latest", 101, 102.5, errors=errors))
    with pytest.raises(BudgetExceeded, match=r"latest 1 took 1\.5 s, not 1") as told:
        check_budget("rolling restart", history, 100)
    assert "+2.5 s  latest 1 ended after 1.5 s" in str(told.value)
    assert "3.0 s: ServerUnavailable: nobody" in str(told.value)


def test_what_ended_before_the_fault_does_not_count_and_what_began_before_it_does() -> None:
    history = History()
    for each in (line("plain", 0, 50), line("plain", 90, 101)):
        history.add(each)
    with pytest.raises(BudgetExceeded, match=r"took 11\.0 s"):
        check_budget("rolling restart", history, 100)


def test_a_second_outage_is_noticed() -> None:
    history = History()
    for began in (100.0, 120.0):
        history.add(line("plain", began, began + SESSION_S + 1))
    with pytest.raises(BudgetExceeded, match="plain waited long 2 times, not 1"):
        check_budget("cable pulled", history, 100)


def test_a_history_is_read_as_it_grows_and_has_what_is_wrong(tmp_path: Any) -> None:
    path, history = tmp_path / "load.log", History()
    whole = line("plain", 1, 2) + "\na library says something\n"
    path.write_text(whole + '{"wrong": "half a')
    history.read(path)
    assert (history.kinds(), history.wrong) == ({"plain"}, [])
    path.write_text(whole + '{"wrong": "half a batch", "at": 3.0}\n')
    history.read(path)
    assert len(history.operations) == 1
    assert history.wrong == ["half a batch"]
    assert "WRONG: half a batch" in history.told(0)


def test_a_client_that_has_not_gone_on_since_then_is_waited_for() -> None:
    history = History()
    history.add(line("plain", 90, 110))
    assert not history.has_gone_on(100, ["plain"])
    history.add(line("plain", 101, 110))
    assert history.has_gone_on(100, ["plain"])
    assert not history.has_gone_on(100, ["plain", "latest"])


def test_every_fault_has_a_budget() -> None:
    assert set(BUDGETS) == set(FAULTS) >= {*SHORT, *EXPECTED}
