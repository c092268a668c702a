"""Functions that gather: joined strings, lists, sets and maps."""

import numpy as np
import pyarrow as pa
import pytest

from merge_engine.aggregates.base import Fault
from tests.support.aggregates import MAP, NAN, build, merged, read


def test_strings_are_joined_with_the_delimiter_and_empty_ones_stay() -> None:
    assert read(build("string_agg", pa.string()), ["a", None, "", "b"]) == "a,,b"
    assert read(build("listagg", pa.string(), delimiter=" - "), ["a", "b"]) == "a - b"
    assert read(build("string_agg", pa.string(), delimiter=""), ["a", "b"]) == "ab"
    assert read(build("string_agg", pa.string()), [""]) == ""
    assert read(build("string_agg", pa.string()), [None]) is None


def test_a_value_that_contains_the_delimiter_is_one_item() -> None:
    function = build("string_agg", pa.string(), limit=2)
    assert read(function, ["a,b", "c", "d"]) == "c,d"
    assert read(function, ["a,b", "c"]) == "a,b,c"


def test_a_limit_keeps_the_newest() -> None:
    function = build("array_agg", pa.list_(pa.int64()), limit=2)
    assert read(function, [1, 2, None, 3]) == [2, 3]
    two = pa.array([[1, 2]], pa.list_(pa.int64()))
    assert function.combine(two, pa.array([[3]], two.type)).to_pylist() == [[2, 3]]
    assert function.combine(two, pa.array([[3, 4, 5]], two.type)).to_pylist() == [[4, 5]]


@pytest.mark.parametrize("limit", [2**31, 2**63, "1" + "0" * 30])
def test_a_limit_may_be_any_number(limit: int | str) -> None:
    function = build("array_agg", pa.list_(pa.int64()), limit=limit)
    assert function.parameters == {"limit": int(limit)}
    one = pa.array([[1]], function.state_type)
    assert function.combine(one, one).to_pylist() == [[1, 1]]
    assert read(function, [1, 2]) == [1, 2]
    assert read(build("string_agg", pa.string(), limit=limit), ["a", "b"]) == "a,b"
    assert read(build("collect_set", pa.list_(pa.int64()), limit=limit), [1, 1]) == [1]


def test_a_set_that_grows_past_its_limit_is_a_fault() -> None:
    function = build("collect_set", pa.list_(pa.string()), limit=2)
    assert read(function, ["b", "a", "b", None]) == ["b", "a"]
    states = pa.array([["a"], ["a", "b"]], function.state_type)
    with pytest.raises(Fault, match="past its limit of 2") as caught:
        function.combine(states, pa.array([["a"], ["c"]], function.state_type))
    assert caught.value.index == 1


def test_nans_of_other_bits_are_one_inside_structs_lists_and_maps_too() -> None:
    bits = np.array([0x7FF8000000000000, 0x7FF8000000000001, 0xFFF8000000000000], np.uint64)
    nans = pa.array(bits.view(np.float64))
    offsets = pa.array([0, 1, 2, 3], pa.int32())
    lists = pa.ListArray.from_arrays(offsets, nans)
    nested = {
        "structs": pa.StructArray.from_arrays([nans, pa.array([1, 1, 1])], ["a", "b"]),
        "lists": lists,
        "lists in structs": pa.StructArray.from_arrays([lists], ["a"]),
        "maps": pa.MapArray.from_arrays(offsets, ["x"] * 3, nans),
        "numbers": nans,
    }
    for name, values in nested.items():
        function = build("collect_set", pa.list_(values.type))
        states = function.accumulate(values, None, np.array([0]))
        assert len(states[0]) == 1, name
        assert len(function.combine(states, function.lift(values[1:2]))[0]) == 1, name
        twice = pa.ListArray.from_arrays([0, 2], values[:2]).cast(function.state_type)
        with pytest.raises(Fault, match="a value twice"):
            function.accept(twice)
    keys = build("merge_map", pa.map_(lists.type, pa.int64()))
    maps = pa.MapArray.from_arrays(offsets, lists, pa.array([1, 2, 3]))
    merged_maps = keys.accumulate(maps, None, np.array([0])).to_pylist()
    assert [[value for _, value in one] for one in merged_maps] == [[3]]


def test_a_set_has_one_nan_and_two_zeros() -> None:
    result = read(build("collect_set", pa.list_(pa.float64())), [NAN, 0.0, -NAN, -0.0, 0.0])
    assert [str(number) for number in result] == ["nan", "0.0", "-0.0"]


def test_a_set_tells_nested_values_apart_by_their_parts() -> None:
    kind = pa.list_(pa.list_(pa.string()))
    values = [["a", "b"], ["ab"], [], [None], ["a", "b"], [""]]
    assert read(build("collect_set", kind), values) == [["a", "b"], ["ab"], [], [None], [""]]


def test_the_later_value_of_a_map_key_wins_and_the_key_stays_in_place() -> None:
    function = build("merge_map", MAP)
    assert merged(function, [("a", 1), ("b", 2)], [("c", 3), ("a", None)]) == [
        ("a", None),
        ("b", 2),
        ("c", 3),
    ]


def test_of_equal_keys_in_one_map_the_last_wins() -> None:
    function = build("merge_map", MAP)
    assert read(function, [[("a", 1), ("b", 2), ("a", 3)]]) == [("a", 3), ("b", 2)]
    lifted = function.lift(pa.array([[("a", 1), ("a", 3)], None, []], MAP))
    assert lifted.to_pylist() == [[("a", 3)], None, []]


def test_items_that_a_null_list_hides_are_not_seen() -> None:
    hiding = pa.ListArray.from_arrays(
        pa.array([0, 2, 3], pa.int32()), pa.array([1, 2, 3]), mask=pa.array([True, False])
    )
    function = build("array_agg", pa.list_(pa.int64()))
    assert function.fold(hiding, np.array([0])).to_pylist() == [[3]]
