"""Arrays of byte strings: joined, cut, and turned into matrices and back."""

import numpy as np
import pyarrow as pa
import pytest

from foundation.errors import ColumnTooLarge
from merge_engine.encoding import ragged


def binary(*values: bytes | None) -> pa.BinaryArray:
    return pa.array(values, pa.binary())


def hidden_bytes() -> pa.BinaryArray:
    """An array whose null has bytes in its slot, as Arrow allows."""
    offsets = pa.py_buffer(np.array([0, 1, 3, 4], np.int32))
    validity = pa.py_buffer(np.array([0b101], np.uint8))
    return pa.BinaryArray.from_buffers(pa.binary(), 3, [validity, offsets, pa.py_buffer(b"a??b")])


def test_join_concatenates_element_by_element() -> None:
    joined = ragged.join([binary(b"a", b"", b"c"), binary(b"1", b"2", b"")])
    assert joined.to_pylist() == [b"a1", b"2", b"c"]


def test_join_takes_a_null_for_empty_whatever_its_slot_holds() -> None:
    assert ragged.join([hidden_bytes(), binary(b"1", None, b"3")]).to_pylist() == [
        b"a1",
        b"",
        b"b3",
    ]
    assert ragged.join([hidden_bytes()]).to_pylist() == [b"a", b"", b"b"]


def test_join_takes_slices() -> None:
    left = binary(b"x", b"a", b"b", b"y").slice(1, 2)
    right = binary(b"1", b"2", b"z").slice(0, 2)
    assert ragged.join([left, right]).to_pylist() == [b"a1", b"b2"]


def test_split_cuts_each_value_into_its_own_pieces() -> None:
    values = binary(b"abc", b"", b"defg")
    first, second = ragged.split(values, np.array([[1, 2], [0, 0], [4, 0]]))
    assert first.to_pylist() == [b"a", b"", b"defg"]
    assert second.to_pylist() == [b"bc", b"", b""]


def test_split_takes_slices() -> None:
    values = binary(b"skipped", b"abc", b"de", b"skipped").slice(1, 2)
    first, second = ragged.split(values, np.array([[2, 1], [0, 2]]))
    assert first.to_pylist() == [b"ab", b""]
    assert second.to_pylist() == [b"c", b"de"]


def test_split_of_nothing_is_nothing() -> None:
    pieces = ragged.split(binary(), np.zeros((0, 3), np.int64))
    assert [piece.to_pylist() for piece in pieces] == [[], [], []]


@pytest.mark.parametrize(
    "lengths",
    [
        [[1, 1], [1, 1]],  # too short
        [[2, 2], [1, 1]],  # right in sum, but the first value reaches into the second
        [[4, -1], [1, 2]],  # right in sum, but backwards
        [[3, 0]],  # a row is missing
    ],
)
def test_split_refuses_lengths_that_do_not_add_up(lengths: list[list[int]]) -> None:
    with pytest.raises(ValueError, match="lengths"):
        ragged.split(binary(b"abc", b"def"), np.array(lengths))


def test_join_of_what_split_cut_is_the_whole() -> None:
    values = binary(b"abc", b"", b"defg")
    pieces = ragged.split(values, np.array([[1, 1, 1], [0, 0, 0], [0, 4, 0]]))
    assert ragged.join(pieces).equals(values)


def test_a_matrix_becomes_values_and_comes_back_without_a_copy() -> None:
    matrix = np.arange(12, dtype=np.uint8).reshape(4, 3)
    values = ragged.from_fixed(matrix)
    assert values.to_pylist() == [bytes(row) for row in matrix]
    assert np.shares_memory(ragged.to_matrix(values, 3), matrix)
    assert ragged.to_matrix(values.slice(1, 2), 3).tolist() == matrix[1:3].tolist()


def test_a_matrix_with_strides_becomes_values() -> None:
    matrix = np.arange(12, dtype=np.uint8).reshape(4, 3)[::2, 1:]
    assert ragged.from_fixed(matrix).to_pylist() == [b"\x01\x02", b"\x07\x08"]


def test_to_matrix_refuses_values_of_another_length() -> None:
    with pytest.raises(ValueError, match="2 bytes"):
        ragged.to_matrix(binary(b"a", b"bcd"), 2)


def test_bytes_objects_become_values_and_come_back() -> None:
    objects = [b"", b"\x00", b"abc", b"\xff" * 20]
    values = ragged.from_pybytes_list(objects)
    assert values.type == pa.binary()
    assert ragged.to_pybytes_list(values) == objects
    assert ragged.to_pybytes_list(values.slice(1, 2)) == objects[1:3]
    assert ragged.to_pybytes_list(ragged.from_pybytes_list([])) == []


def test_ranges_are_concatenated() -> None:
    ranges = ragged.ranges(np.array([5, 0, 7]), np.array([2, 0, 3]))
    assert ranges.tolist() == [5, 6, 7, 8, 9]
    assert ragged.ranges(np.zeros(0, np.int64), np.zeros(0, np.int64)).tolist() == []


def test_spread_puts_values_where_the_flags_are() -> None:
    values = binary(b"skipped", b"a", b"bc").slice(1)
    valid = np.array([False, True, False, True, False])
    assert ragged.spread(values, valid).to_pylist() == [b"", b"a", b"", b"bc", b""]


def test_validity_of_a_slice_starts_at_the_slice() -> None:
    array = pa.array([None if i % 3 == 0 else i for i in range(30)])
    for start in range(20):
        valid = ragged.validity(array.slice(start, 10))
        assert valid is not None
        assert valid.tolist() == [i % 3 != 0 for i in range(start, start + 10)]


def test_with_validity_sets_and_removes_nulls() -> None:
    values = binary(b"x", b"a", b"b").slice(1)
    nulls = ragged.with_validity(values, np.array([False, True]))
    assert nulls.to_pylist() == [None, b"b"]
    assert ragged.with_validity(nulls, None).to_pylist() == [b"a", b"b"]


def test_more_bytes_than_offsets_reach_raise_and_do_not_wrap() -> None:
    with pytest.raises(ColumnTooLarge, match="send fewer rows"):
        ragged.offsets_of(np.array([2**30, 2**30]))
    assert ragged.offsets_of(np.array([2**30, 2**30 - 1])).tolist() == [0, 2**30, 2**31 - 1]


def test_a_join_of_more_bytes_than_offsets_reach_raises() -> None:
    # Zeros that nobody reads or writes take no memory, and the join is refused unread.
    half = ragged.over(np.array([0, 2**30], np.int32), np.zeros(2**30, np.uint8))
    with pytest.raises(ColumnTooLarge, match="send fewer rows"):
        ragged.join([half, half])


def test_a_matrix_of_more_bytes_than_offsets_reach_is_refused() -> None:
    with pytest.raises(ColumnTooLarge, match="send fewer rows"):
        ragged.from_fixed(np.broadcast_to(np.uint8(0), (2**17, 2**14)))
