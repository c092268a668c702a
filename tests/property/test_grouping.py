"""Rows come together by key, in key order, and keep their order within a key."""

from collections import defaultdict

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from merge_engine.encoding.key_hashes import key_hashes
from merge_engine.encoding.keys import KeyCodec
from merge_engine.merging.grouping import group_by_key, group_numbers, group_rows

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


@given(st.lists(FEW, max_size=40), st.booleans())
def test_groups_by_hash_are_the_same_groups_also_where_hashes_collide(
    keys: list[bytes], collide: bool
) -> None:
    expected = defaultdict(list)
    for row, key in enumerate(keys):
        expected[key].append(row)
    array = pa.array(keys, pa.binary())
    hashes = np.zeros(len(keys), np.uint64) if collide else key_hashes(array)
    groups = group_rows(array, hashes)
    found = np.split(groups.order, groups.starts[1:]) if keys else []
    assert sorted(rows.tolist() for rows in found) == sorted(expected.values())


@given(st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(-9, 9), max_size=40))
def test_numbers_of_keys_have_the_groups_of_their_bytes(keys: list[int]) -> None:
    codec, columns = KeyCodec([pa.int64()]), [pa.array(keys, pa.int64())]
    numbers = codec.numbers(columns)
    assert numbers is not None
    groups, expected = group_numbers(numbers), group_by_key(codec.encode(columns))
    assert groups.order.tolist() == expected.order.tolist()
    assert groups.starts.tolist() == expected.starts.tolist()
    assert groups.in_order == expected.in_order


def test_groups_of_a_slice_are_those_of_its_rows() -> None:
    keys = pa.array([f"{number % 7:08d}".encode() for number in range(100)], pa.binary())
    groups = group_by_key(keys.slice(3, 50))
    assert len(groups.starts) == 7
    assert sorted(groups.order.tolist()) == list(range(50))


@pytest.mark.parametrize("width", [8, 5])
def test_rows_that_come_folded_are_taken_as_they_are(width: int) -> None:
    keys = pa.array([f"{number:0{width}d}".encode() for number in range(40)], pa.binary())
    assert group_by_key(keys).in_order
    for mixed in ([*range(39), 38], [1, 0, *range(2, 40)], [*range(38), 39, 38]):
        assert not group_by_key(keys.take(pa.array(mixed))).in_order
