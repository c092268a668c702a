"""Whether rows are worth folding before they are sent: told from a sample of their keys."""

import numpy as np
import pyarrow as pa
import pytest

from merge_engine.merging.local_aggregation import is_worth_folding
from tests.conftest import SUMS


@pytest.mark.parametrize(
    ("rows", "keys", "worth"),
    [
        (100_000, 1_000_000, False),
        (100_000, 300_000, False),
        (100_000, 20_000, True),
        (100_000, 1, True),
        (5_000, 1, False),
    ],
)
def test_rows_are_folded_where_keys_come_about_twice(rows: int, keys: int, worth: bool) -> None:
    drawn = np.random.default_rng(15).integers(0, keys, rows)
    assert is_worth_folding(pa.table({"k": drawn, "a": drawn}), SUMS) is worth


def test_what_cannot_be_read_is_left_for_others_to_complain_about() -> None:
    nulls = pa.nulls(20_000, pa.int64())
    assert not is_worth_folding(pa.table({"a": nulls}), SUMS)
    assert is_worth_folding(pa.table({"k": nulls, "a": nulls}), SUMS)
