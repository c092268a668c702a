"""What a tiering job can be told, and what it says of itself."""

from math import inf, nan
from typing import Any

import pytest

from foundation.errors import InvalidInput
from recovery.reader.cut import Cut, OwnerCut
from sink.lake.state import Layout
from sink.tiering.options import TieringOptions
from sink.tiering.progress import Lag, Round, RoundKind, Summary
from tests.support.lakes import a_cut

SECRET = {"access_key_id": "me", "secret_access_key": "hush"}

# Options


def options(**given: Any) -> TieringOptions:
    return TieringOptions(**{"table": "orders", "to": "/lake", **given})


def test_a_table_and_a_place_are_enough() -> None:
    given = options()
    assert given.chosen_layout() is Layout.VECTORS
    assert (given.place.location, given.once, given.begin_again) == ("/lake", False, False)
    assert options(layout="rewrite").chosen_layout() is Layout.REWRITE
    assert options(format="parquet").chosen_layout() is Layout.REWRITE


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"to": ""}, "where to? Give a directory, or a URL such as s3://bucket/path"),
        ({"interval_s": -1.0}, "interval_s is -1; it is a number of seconds, 0 or more"),
        ({"interval_s": nan}, "interval_s is nan; it is a number of seconds, 0 or more"),
        ({"interval_s": inf}, "interval_s is inf; it is a number of seconds, 0 or more"),
        ({"retention_s": -0.5}, "retention_s is -0.5; it is a number of seconds, 0 or more"),
        ({"retention_s": inf}, "retention_s is inf; it is a number of seconds, 0 or more"),
        ({"hold_s": -1.0}, "hold_s is -1; it is a number of seconds, 0 or more"),
        ({"lag_target_s": 0.0}, "lag_target_s is 0; it is more than 0"),
        ({"lag_target_s": nan}, "lag_target_s is nan; it is more than 0"),
        ({"lease_s": 0.0}, "lease_s is 0; a lease lasts from 2 s to 604800 s"),
        ({"attempts": 0}, "attempts is 0; it is 1 or more"),
        ({"format": "delt"}, "a lake of the format 'delt'; did you mean 'delta'?"),
        ({"format": "iceberg"}, "a lake of the format 'iceberg'; there are delta and parquet"),
        ({"layout": "vector"}, "a layout 'vector'; did you mean 'vectors'?"),
        ({"layout": "mor"}, "a layout 'mor'; there are vectors and rewrite"),
        (
            {"format": "parquet", "layout": "vectors"},
            "the format parquet has no deletion vectors: leave the layout, or make a Delta table",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        options(**given)
    assert str(refused.value) == message


@pytest.mark.parametrize("name", ["lease_s", "hold_s"])
@pytest.mark.parametrize("value", [0.001, 1e12, inf, nan])
def test_a_lease_lasts_as_long_as_leases_do(name: str, value: float) -> None:
    with pytest.raises(
        InvalidInput, match=rf"{name} is .*; (a lease lasts from \d+ s|it is a number)"
    ):
        options(**{name: value})


def test_a_place_that_cannot_be_opened_is_refused_at_once() -> None:
    with pytest.raises(InvalidInput, match="cannot use 'nope://lake'"):
        options(to="nope://lake")
    with pytest.raises(InvalidInput, match="is a directory and takes no settings"):
        options(storage_settings={"region": "eu"})


def test_secrets_are_not_shown() -> None:
    given = options(to="s3://bucket/lake", storage_settings=SECRET)
    assert "hush" not in repr(given)
    assert given.place.settings == SECRET


# How far it is behind


def a_later_cut(epoch: int = 1, **batches: int) -> Cut:
    owners = {owner: OwnerCut(batch=batch) for owner, batch in batches.items()}
    return Cut(table="t-1", epoch=epoch, time_ms=0, owners=owners)


@pytest.mark.parametrize(
    ("table", "batches"),
    [
        (a_later_cut(etl=8), 5),
        (a_later_cut(etl=3, other=1), 2),
        (a_later_cut(etl=4, other=0), 2),
        (a_later_cut(epoch=2, etl=3), 0),  # Somebody has acquired a lock; nothing came of it yet.
        (a_later_cut(epoch=2, etl=0), 0),  # Was forgotten, and began anew.
        (a_later_cut(epoch=2), 0),
    ],
)
def test_a_copy_is_behind_by_the_batches_that_are_not_in_it(table: Cut, batches: int) -> None:
    copy = a_cut(3)
    lag = Lag.between(copy, table, copy.time_ms + 1_500)
    assert lag == Lag(batches=batches, seconds=1.5)
    assert str(lag) == f"{batches} batches, 1.5 s behind"


def test_a_copy_that_has_all_there_is_is_not_behind_however_old_it_is() -> None:
    copy = a_cut(3)
    assert Lag.between(copy, a_cut(3), copy.time_ms + 10**9) == Lag(batches=0, seconds=0.0)


def test_a_clock_that_was_set_back_does_not_make_a_copy_early() -> None:
    copy = a_cut(3)
    assert Lag.between(copy, a_later_cut(etl=4), copy.time_ms - 5_000).seconds == 0.0


# What it says


def a_round(kind: RoundKind = RoundKind.CHANGES, **given: Any) -> Round:
    return Round(kind=kind, number=7, version=9, cut=a_cut(3), **given)


def test_a_round_says_what_it_has_done() -> None:
    done = a_round(
        rows=12_345,
        deleted=6,
        bytes=3 * 2**20,
        files=1_024,
        table_rows=10**6,
        seconds=1.25,
        lag=Lag(batches=2, seconds=3.0),
    )
    assert str(done) == (
        "round 7: applied what changed: 12,345 rows, 6 deleted, 3.0 MiB in 1.2 s; the copy has "
        "1,000,000 rows in 1,024 files (version 9), 2 batches, 3.0 s behind"
    )
    assert ", 50 compacted," in str(a_round(compacted=50))
    assert str(a_round(RoundKind.NOTHING)) == "round 7: nothing is new"
    assert str(a_round(RoundKind.COPY)).startswith("round 7: copied all rows: 0 rows")


def test_a_summary_adds_rounds_up_but_for_those_that_had_nothing_to_do() -> None:
    summary = Summary()
    assert str(summary) == "0 rounds in 0.0 s: 0 rows, 0 deleted, 0.0 KiB"
    for done in (
        a_round(RoundKind.COPY, rows=1_000, bytes=2**20),
        a_round(rows=5, deleted=2, bytes=2**19),
        a_round(RoundKind.NOTHING),
    ):
        summary = summary.plus(done)
    assert str(summary) == (
        "2 rounds in 0.0 s: 1,005 rows, 2 deleted, 1.5 MiB; the copy is at version 9"
    )
    assert summary.last is not None
    assert summary.last.kind is RoundKind.NOTHING
