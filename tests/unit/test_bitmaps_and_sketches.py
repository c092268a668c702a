"""Bitmaps and sketches: one form of bytes, bounded errors, and damage that is noticed."""

import random
from collections.abc import Callable
from decimal import Decimal
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from datasketches import hll_sketch, tgt_hll_type, update_theta_sketch
from pyroaring import BitMap, BitMap64

from merge_engine.aggregates.base import Fault
from merge_engine.aggregates.sketch_layout import hll_in_one_form
from tests.support.aggregates import NAN, build, read, state_of


def test_bitmaps_read_as_a_count_or_as_bytes_of_the_portable_format() -> None:
    values = [3, None, 1, 3, 2**32 - 1]
    assert read(build("rbm32", pa.int64()), values, pa.int64()) == 3
    data = read(build("rbm32", pa.binary()), values, pa.int64())
    assert list(BitMap.deserialize(data)) == [1, 3, 2**32 - 1]
    data = read(build("rbm64", pa.binary()), [2**64 - 1, 0], pa.uint64())
    assert list(BitMap64.deserialize(data)) == [0, 2**64 - 1]
    assert read(build("rbm32", pa.int64()), [None], pa.int64()) == 0


@pytest.mark.parametrize(
    ("name", "kind", "value"),
    [("rbm32", pa.int64(), -1), ("rbm32", pa.int64(), 2**32), ("rbm64", pa.int8(), -128)],
)
def test_a_number_outside_a_bitmap_is_a_fault_that_shows_it(
    name: str, kind: pa.DataType, value: int
) -> None:
    function = build(name, pa.int64())
    values = pa.array([1, None, 2, None, value, 3], kind)
    with pytest.raises(Fault, match=f"^at 1: {value} is outside") as caught:
        function.accumulate(values, None, np.array([0, 3, 5]))
    assert caught.value.index == 1
    with pytest.raises(Fault) as caught:
        function.lift(values)
    assert caught.value.index == 4


def test_a_bitmap_has_the_same_bytes_whether_runs_came_before_or_after_the_rest() -> None:
    # {1..4, 10} takes ten bytes as runs and as an array: a tie that the library leaves open.
    for name in ("rbm32", "rbm64"):
        function = build(name, pa.binary())
        run, rest, both = (
            function.accumulate(pa.array(values), None, np.array([0]))
            for values in ([1, 2, 3, 4], [10], [1, 2, 3, 4, 10])
        )
        assert function.combine(run, rest) == both
        assert function.combine(both, run) == both


def test_a_full_container_has_the_same_bytes_however_it_was_filled() -> None:
    function = build("rbm32", pa.binary())
    everything = np.arange(65536)
    even, odd, whole = (
        function.accumulate(pa.array(values), None, np.array([0]))
        for values in (everything[::2], everything[1::2], everything)
    )
    assert function.combine(even, odd) == whole


def test_large_bitmaps_with_containers_of_every_kind_stay_in_one_form() -> None:
    generator = random.Random(5)
    values = [
        *range(100_000, 200_000),
        *generator.sample(range(300_000, 365_000), 30_000),
        *(2**40 + number for number in (1, 2, 3, 4, 10)),
        *(2**41 + 3 * number for number in range(100)),
        *(2**20 * number for number in range(5)),
    ]
    function = build("rbm64", pa.binary())
    whole = function.accumulate(pa.array(values), None, np.array([0]))
    generator.shuffle(values)
    parts = [values[:50_000], values[50_000:], [2**40 + number for number in (1, 2, 3, 4)]]
    pieces = [function.accumulate(pa.array(part), None, np.array([0])) for part in parts]
    assert function.combine(function.combine(pieces[2], pieces[0]), pieces[1]) == whole
    assert build("rbm64", pa.int64()).finish(whole).to_pylist() == [len(set(values))]


@pytest.mark.parametrize("name", ["rbm32", "rbm64", "hll_sketch", "theta_sketch"])
@pytest.mark.parametrize("garbage", [b"", b"\x00", b"garbage, not a bitmap", b"\xff" * 64])
def test_bytes_that_are_no_set_are_a_fault(name: str, garbage: bytes) -> None:
    function = build(name, pa.int64())
    good = function.accumulate(pa.array([1]), None, np.array([0]))
    states = pa.array([None, good[0].as_py(), garbage], pa.binary())
    function.accept(states.slice(0, 2))
    for attempt in (
        function.accept,
        lambda bad: function.combine(bad, good.take([0] * 3)),
    ):
        with pytest.raises(Fault, match=r"is damaged|cannot be taken") as caught:
            attempt(states)
        assert caught.value.index == 2


@pytest.mark.parametrize("name", ["rbm32", "rbm64", "hll_sketch", "theta_sketch"])
def test_damaged_bytes_never_do_worse_than_raise(name: str) -> None:
    seed = random.randrange(2**32)
    generator = random.Random(seed)
    function = build(name, pa.int64())
    refused = 0
    for _ in range(400):
        spread = generator.choice([20, 1000, 2**20])
        count = generator.choice([1, 5, 50, 700])
        values = pa.array([generator.randrange(spread) for _ in range(count)])
        good = function.accumulate(values, None, np.array([0]))
        damaged = bytearray(good[0].as_py())
        if generator.random() < 0.5:
            del damaged[generator.randrange(len(damaged)) :]
        for _ in range(min(len(damaged), generator.randrange(4))):
            damaged[min(generator.randrange(len(damaged)), generator.randrange(200))] ^= 1 + (
                generator.randrange(255)
            )
        states = pa.array([bytes(damaged)], pa.binary())
        try:
            function.accept(states)
            function.finish(function.combine(good, states))
        except Fault:
            refused += 1
    assert refused > 100, f"seed {seed}"


def test_an_hll_sketch_whose_mode_is_damaged_does_not_end_the_process() -> None:
    # Read as registers of four bits, this one crashed the library when it was merged.
    function = build("hll_sketch", pa.int64(), lg_k=5)
    state = bytearray(state_of("hll_sketch", lg_k=5))
    for mode in {*range(256)} - {state[7]}:
        state[7] = mode
        with pytest.raises(Fault, match="do not fit together"):
            function.accept(pa.array([bytes(state)], pa.binary()))


@pytest.mark.parametrize("name", ["hll_sketch", "theta_sketch"])
@pytest.mark.parametrize("count", [1, 7, 8, 24, 25, 31, 32, 33, 100, 500])
@pytest.mark.parametrize("lg_k", [5, 8, 9])
def test_any_single_damaged_byte_of_a_sketch_is_noticed_or_harmless(
    name: str, count: int, lg_k: int
) -> None:
    function = build(name, pa.int64(), lg_k=lg_k)
    values = pa.array([f"value-{number}" for number in range(count)])
    good = function.accumulate(values, None, np.array([0]))
    function.accept(good)
    generator = random.Random(count)
    data = good[0].as_py()
    for position in {*range(min(len(data), 64)), generator.randrange(len(data))}:
        damaged = bytearray(data)
        damaged[position] ^= 1 + generator.randrange(255)
        states = pa.array([bytes(damaged)], pa.binary())
        try:
            function.finish(function.combine(good, states))
        except Fault:
            continue
        # Only hashes are free to be anything, as long as they are in order.
        assert position >= 8, f"byte {position} of the header"
    with pytest.raises(Fault):
        function.accept(pa.array([data + b"\0"], pa.binary()))


def of_library(name: str, lg_k: int, values: list[Any]) -> bytes:
    """Return what the library makes of these values, one by one."""
    if name == "hll_sketch":
        hll = hll_sketch(lg_k, tgt_hll_type.HLL_8)
        for value in values:
            hll.update(value)
        return hll_in_one_form(hll.serialize_compact())
    theta = update_theta_sketch(lg_k)
    for value in values:
        theta.update(value)
    theta.trim()
    return bytes(theta.compact().serialize())


@pytest.mark.parametrize("lg_k", [5, 8, 10])
@pytest.mark.parametrize("name", ["hll_sketch", "theta_sketch"])
@pytest.mark.parametrize(
    ("kind", "make"),
    [
        (pa.int64(), lambda number: number * 7_919 - 3 * 2**60),
        (pa.float64(), lambda number: number / 7),
        (pa.string(), lambda number: "äx"[number % 2] * (number % 37) + str(number)),
    ],
)
def test_sketches_have_the_bytes_that_the_library_makes(
    name: str, lg_k: int, kind: pa.DataType, make: Callable[[int], Any]
) -> None:
    function = build(name, pa.binary(), lg_k=lg_k)
    lengths = [1, 2, 7, 8, 9, 23, 24, 25, 31, 32, 33, 48, 49, 96, 97, 200, 700, 2_000]
    values = [make(number) for number in range(sum(lengths))]
    starts = np.cumsum([0, *lengths])
    built = function.accumulate(pa.array(values, kind), None, starts[:-1])
    expected = [
        of_library(name, lg_k, values[start:end]) for start, end in pairwise(starts.tolist())
    ]
    assert built.to_pylist() == expected
    # The same in pieces, which come twice, and some of which are null.
    halves = [*range(0, len(values), 3), *range(1, len(values), 3), *range(2, len(values), 3)]
    pieces = function.lift(pa.array([values[at] for at in halves], kind))
    runs = np.searchsorted(starts, halves, side="right") - 1
    order = np.argsort(np.concatenate([runs, runs, np.arange(len(lengths))]), kind="stable")
    states = pa.concat_arrays([pieces, pieces, pa.nulls(len(lengths), pa.binary())])
    folded = function.fold(states.take(pa.array(order)), 2 * starts[:-1] + np.arange(len(lengths)))
    assert folded.to_pylist() == expected
    assert function.combine(folded, built) == built
    shifted = built.take(pa.array(np.roll(np.arange(len(built)), 1)))
    both = function.combine(shifted, built).to_pylist()
    bounds = list(pairwise(starts.tolist()))
    assert both[1:] == [
        of_library(name, lg_k, values[before[0] : after[1]]) for before, after in pairwise(bounds)
    ]


@pytest.mark.parametrize("name", ["hll_sketch", "theta_sketch"])
def test_sketches_estimate_within_their_error_bound(name: str) -> None:
    function = build(name, pa.int64())
    distinct = 50_000
    values = pa.array([f"user-{number}" for number in range(distinct)] * 2)
    states = function.accumulate(values, None, np.arange(0, 2 * distinct, 20_000))
    estimate = function.finish(function.fold(states, np.array([0]))).to_pylist()[0]
    # Four standard errors of 1.6 %; the hashes are fixed, so this always gives the same number.
    assert abs(estimate - distinct) < 0.065 * distinct
    assert estimate != distinct


@pytest.mark.parametrize("name", ["hll_sketch", "theta_sketch"])
@pytest.mark.parametrize(
    ("kind", "values", "distinct"),
    [
        (pa.int8(), [1, 2, 1], 2),
        (pa.uint64(), [2**64 - 1, 2**64 - 2, 2**63], 3),
        (pa.float64(), [0.0, -0.0, NAN, -NAN, 1.5], 3),
        (pa.string(), ["", "a", "", "\x00"], 3),
        (pa.binary(), [b"", b"a", b"", b"\xff"], 3),
        (pa.bool_(), [True, False, True], 2),
        (pa.date32(), [0, 1, 0], 2),
        (pa.timestamp("us"), [0, 1, 0], 2),
        (pa.decimal128(38, 2), [Decimal("1.50"), Decimal("-1.5"), Decimal("9" * 36)], 3),
    ],
)
def test_sketches_count_values_of_every_plain_type(
    name: str, kind: pa.DataType, values: list[Any], distinct: int
) -> None:
    function = build(name, pa.int64())
    assert function.check_input(kind) is None
    assert read(function, [*values, None], kind) == distinct


def _instants(unit: str, seconds: list[int]) -> pa.Array:
    return pa.array(seconds, pa.timestamp("s")).cast(pa.timestamp(unit))


_TEXTS = pa.array(["", "a", "ü"])
_BYTES = pa.array([b"\x00", b"a", b"\xff"])
_DECIMALS = pa.array([Decimal("1.5"), Decimal(100), Decimal("-0.1")], pa.decimal128(5, 1))

SAME: dict[str, list[pa.Array]] = {
    "whole numbers of every width": [
        *(pa.array([1, 2, 3], kind) for kind in (pa.int8(), pa.int16(), pa.int32(), pa.int64())),
        *(pa.array([1, 2, 3], kind) for kind in (pa.uint8(), pa.uint32(), pa.uint64())),
    ],
    "floats of every width": [
        pa.array([0.0, 0.5, NAN], pa.float64()),
        pa.array([-0.0, 0.5, -NAN], pa.float32()),
        pa.array(np.array([0.0, 0.5, NAN], np.float16)),
    ],
    "decimals of every scale": [
        _DECIMALS,
        _DECIMALS.cast(pa.decimal128(38, 9)),
        _DECIMALS.cast(pa.decimal256(76, 2)),
    ],
    "instants in every unit and time zone": [
        *(_instants(unit, [-7, 0, 2**31]) for unit in ("s", "ms", "us", "ns")),
        _instants("ms", [-7, 0, 2**31]).cast(pa.timestamp("ms", tz="Asia/Kathmandu")),
    ],
    "strings": [
        _TEXTS,
        _TEXTS.cast(pa.large_string()),
        _TEXTS.cast(pa.string_view()),
        _TEXTS.dictionary_encode().cast(pa.string()),
    ],
    "binary values": [
        _BYTES,
        _BYTES.cast(pa.large_binary()),
        _BYTES.cast(pa.binary_view()),
        pa.array([b"\x00", b"a", b"\xff"], pa.binary(1)),
    ],
}


@pytest.mark.parametrize("name", ["hll_sketch", "theta_sketch"])
@pytest.mark.parametrize("arrays", SAME.values(), ids=SAME)
def test_a_value_is_the_same_to_a_sketch_however_it_is_spelled(
    arrays: list[pa.Array], name: str
) -> None:
    function = build(name, pa.binary())
    states = {
        function.accumulate(array, None, np.array([0]))[0].as_py()
        for array in arrays
        if function.check_input(array.type) is None
    }
    assert len(states) == 1
    assert [function.check_input(array.type) for array in arrays] == [None] * len(arrays)
    assert build(name, pa.int64()).finish(pa.array(states, pa.binary())).to_pylist() == [3]


@pytest.mark.parametrize("name", ["hll_sketch", "theta_sketch"])
def test_instants_that_are_no_bigint_of_microseconds_count_all_the_same(name: str) -> None:
    function = build(name, pa.int64())
    assert read(function, [0, 1, 999, 1000, -1, -999, -1000], pa.timestamp("ns")) == 7
    assert read(function, [2**62, -(2**62), 2**62 + 1, 5], pa.timestamp("s")) == 4
    late = [([9 * 10**15], pa.timestamp("s")), ([9 * 10**18], pa.timestamp("ms"))]
    assert len({read(build(name, pa.binary()), values, kind) for values, kind in late}) == 1


def test_kinds_of_values_are_told_apart_by_a_sketch() -> None:
    function = build("theta_sketch", pa.int64())
    kinds = [
        pa.array([1]),
        pa.array([1.0]),
        pa.array([Decimal(1)]),
        pa.array(["1"]),
        pa.array([b"1"]),
    ]
    states = [function.accumulate(array, None, np.array([0])) for array in kinds]
    # The digits of a decimal and equal bytes are hashed alike; no column has both.
    merged = function.fold(pa.concat_arrays(states), np.array([0]))
    assert function.finish(merged).to_pylist() == [4]


@pytest.mark.parametrize("name", ["rbm32", "rbm64", "hll_sketch", "theta_sketch"])
def test_a_column_of_nothing_but_nulls_needs_no_type(name: str) -> None:
    function = build(name, pa.int64())
    assert function.check_input(pa.null()) is None
    states = function.accumulate(pa.nulls(3), None, np.array([0, 2]))
    assert states.to_pylist() == [None, None]
    assert function.finish(states).to_pylist() == [0, 0]
    assert function.lift(pa.nulls(2)).type == pa.binary()
