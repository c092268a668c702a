"""States from outside: what a function accepts can be read, whatever it is merged with."""

import struct
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from datasketches import hll_sketch, tgt_hll_type, update_theta_sketch
from hypothesis import given, settings
from hypothesis import strategies as st
from pyroaring import BitMap, BitMap64

from merge_engine.aggregates.base import AggregateFunction, Fault
from merge_engine.aggregates.registry import AggFunction
from merge_engine.encoding.codec import same
from tests.property.models import CASES, case
from tests.property.strategies import values_of
from tests.support.examples import examples

thorough = settings(max_examples=examples(8, per=10), deadline=None, print_blob=True)

each_function = pytest.mark.parametrize(
    "function", [function for functions in CASES.values() for function in functions], ids=repr
)
_SETS = ("rbm32", "rbm64", "hll_sketch", "theta_sketch")
_LG_K = (5, 8, 12)


def states_for(function: AggregateFunction) -> st.SearchStrategy[Any]:
    """States of the right type, and often of no other merit."""
    if function.name in _SETS:
        return st.none() | st.binary(max_size=60) | _damaged(sets_of(function.name))
    if function.name == "avg":
        sums = values_of(function.state_type.field("sum").type)
        counts = st.sampled_from([-1, 0, 1, 2, 2**40, 2**63 - 1])
        pair = {"sum": st.none() | st.just(0) | sums, "count": st.none() | counts}
        return st.none() | st.fixed_dictionaries(pair)
    return st.none() | values_of(function.state_type)


@st.composite
def sets_of(draw: st.DrawFn, name: str) -> bytes:
    """Bitmaps and sketches as other programs write them."""
    count = draw(st.sampled_from([0, 1, 3, 7, 8, 20, 33, 300, 5000]))
    step = draw(st.sampled_from([1, 7, 2**13]))
    values = range(0, count * step, step)
    if name in ("rbm32", "rbm64"):
        return bytes((BitMap if name == "rbm32" else BitMap64)(values).serialize())
    lg_k = draw(st.sampled_from(_LG_K))
    if name == "theta_sketch":
        theta = update_theta_sketch(lg_k)
        for value in values:
            theta.update(value)
        return bytes(theta.compact(draw(st.booleans())).serialize())
    kinds = [tgt_hll_type.HLL_4, tgt_hll_type.HLL_6, tgt_hll_type.HLL_8]
    hll = hll_sketch(lg_k, draw(st.sampled_from(kinds)))
    for value in values:
        hll.update(value)
    if draw(st.booleans()):
        return bytes(hll.serialize_updatable())
    return bytes(hll.serialize_compact())


@st.composite
def _damaged(draw: st.DrawFn, originals: st.SearchStrategy[bytes]) -> bytes:
    """Flip bytes, cut or extend some of them, and leave half of them as they are."""
    data = bytearray(draw(originals))
    for _ in range(draw(st.sampled_from([0, 0, 0, 1, 2]))):
        if data:
            data[draw(st.integers(0, min(len(data), 80) - 1))] ^= draw(st.integers(1, 255))
    end = draw(st.sampled_from([0, 0, 0, 0, 1, 4]))
    return bytes(data[:-end] if end and draw(st.booleans()) else data + b"x" * end)


def assert_readable(function: AggregateFunction, states: pa.Array) -> None:
    """Check that readers can read the states, and that they are as they would be stored."""
    states.validate(full=True)
    assert states.type == function.state_type
    finished = function.finish(states)
    finished.validate(full=True)
    assert finished.type == function.result_type
    assert same(function.accept(states), states).all()


def tried(call: Callable[..., pa.Array], *arguments: Any) -> pa.Array | Fault:
    try:
        return call(*arguments)
    except Fault as fault:
        return fault


def accepted_of(function: AggregateFunction, states: Sequence[Any]) -> list[pa.Array]:
    """Return those of the states that are accepted by themselves."""
    arrays = [pa.array([state], function.state_type) for state in states]
    results = [tried(function.accept, array) for array in arrays]
    assert all(one.index == 0 for one in results if isinstance(one, Fault))
    return [one for one in results if not isinstance(one, Fault)]


@each_function
@thorough
@given(data=st.data())
def test_what_is_accepted_can_be_read_and_what_is_merged_of_it_too(
    function: AggregateFunction, data: st.DataObject
) -> None:
    drawn = data.draw(st.lists(states_for(function), min_size=1, max_size=5))
    accepted = accepted_of(function, drawn)
    for state in accepted:
        assert_readable(function, state)
    if not accepted:
        return
    states = pa.concat_arrays(accepted)
    # Rows of one key each are stored as rows that had to be folded.
    single = function.fold(states, np.arange(len(states)))
    assert same(single, states).all()
    for merged in (
        tried(function.fold, states, np.array([0])),
        tried(reduce, function.combine, accepted),
    ):
        if isinstance(merged, Fault):
            assert merged.overflow
        else:
            assert_readable(function, merged)


@each_function
@thorough
@given(data=st.data())
def test_a_batch_of_states_is_accepted_as_each_of_them_is(
    function: AggregateFunction, data: st.DataObject
) -> None:
    drawn = data.draw(st.lists(states_for(function), min_size=1, max_size=5))
    whole = pa.array([*drawn, None], function.state_type).slice(0, len(drawn))
    one_by_one = accepted_of(function, drawn)
    accepted = tried(function.accept, whole)
    if isinstance(accepted, Fault):
        assert accepted_of(function, [drawn[accepted.index]]) == []
    else:
        assert same(accepted, pa.concat_arrays(one_by_one)).all()


@pytest.mark.parametrize("lg_k", [4, 12, 21])
def test_registers_that_stand_for_more_than_a_bigint_read_as_very_many(lg_k: int) -> None:
    function = case(AggFunction.HLL_SKETCH, pa.int64(), lg_k=lg_k)
    size = 1 << lg_k
    head = bytes([10, 1, 7, lg_k, 0, 8, 0, 10]) + struct.pack("<dddII", 0, 0, size * 2**-63, 0, 0)
    accepted = function.accept(pa.array([head + b"\x3f" * size]))
    assert_readable(function, accepted)
    assert function.finish(accepted).to_pylist()[0] > 2**62
