"""Rows come together by key, in key order, and keep their order within a key."""

from collections import defaultdict

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from merge_engine.merging.grouping import group_by_key

FEW = st.sampled_from([b"", b"a", b"ab", b"b\x00", b"\xff" * 9])
NARROW = st.integers(0, 20).map(lambda number: number.to_bytes(8, "big"))
WIDE = st.sampled_from([0, 1, 2**31, 2**63, 2**64 - 1]).map(lambda n: n.to_bytes(8, "big"))


@given(st.sampled_from([FEW, NARROW, WIDE]).flatmap(lambda keys: st.lists(keys, max_size=40)))
def test_groups_are_those_of_a_dictionary_in_key_order(keys: list[bytes]) -> None:
    expected = defaultdict(list)
    for row, key in enumerate(keys):
        expected[key].append(row)
    groups = group_by_key(pa.array(keys, pa.binary()))
    found = np.split(groups.order, groups.starts[1:]) if keys else []
    assert [rows.tolist() for rows in found] == [expected[key] for key in sorted(expected)]
    assert [keys[row] for row in groups.first_rows.tolist()] == sorted(expected)
    assert groups.last_rows.tolist() == [expected[key][-1] for key in sorted(expected)]


def test_groups_of_a_slice_are_those_of_its_rows() -> None:
    keys = pa.array([f"{number % 7:08d}".encode() for number in range(100)], pa.binary())
    groups = group_by_key(keys.slice(3, 50))
    assert len(groups.starts) == 7
    assert sorted(groups.order.tolist()) == list(range(50))
