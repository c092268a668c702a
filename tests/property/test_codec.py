"""Every value of every type survives its bytes, and no bytes can hurt."""

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from merge_engine.encoding import codec, ragged
from merge_engine.encoding.row_codec import RowCodec, versions
from tests.property.strategies import arrays_of, data_types, flags, flat_types, plain
from tests.support.examples import examples

quick = settings(
    deadline=None,
    max_examples=examples(40, per=4),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@pytest.fixture(scope="module", autouse=True, params=[16, -1], ids=["few", "many"])
def path(request: pytest.FixtureRequest) -> Iterator[None]:
    """Few rows are cut by plain Python, many by NumPy: here both are tried with few."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(codec, "FEW", request.param)
        yield


@st.composite
def arrays(draw: st.DrawFn, types: st.SearchStrategy[Any]) -> pa.Array:
    return draw(arrays_of(draw(types), draw(st.integers(0, 5))))


def with_nulls_of(values: pa.BinaryArray, array: pa.Array) -> pa.BinaryArray:
    return ragged.with_validity(values, ragged.validity(array))


@quick
@given(arrays(data_types()))
def test_every_value_comes_back_from_its_bytes(array: pa.Array) -> None:
    encoded = codec.encode(array)
    assert encoded.null_count == 0
    decoded = codec.decode(with_nulls_of(encoded, array), array.type)
    decoded.validate(full=True)
    assert decoded.type == array.type
    assert plain(decoded) == plain(array)


@quick
@given(arrays(flat_types()))
def test_every_flat_value_comes_back_from_its_bytes(array: pa.Array) -> None:
    decoded = codec.decode(with_nulls_of(codec.encode(array), array), array.type)
    decoded.validate(full=True)
    assert plain(decoded) == plain(array)


@quick
@given(arrays(data_types()), st.integers(0, 5), st.integers(0, 5))
def test_slices_of_the_bytes_decode_to_slices_of_the_values(
    array: pa.Array, start: int, size: int
) -> None:
    encoded = with_nulls_of(codec.encode(array), array).slice(min(start, len(array)), size)
    expected = array.slice(min(start, len(array)), size)
    assert plain(codec.decode(encoded, array.type)) == plain(expected)


@pytest.mark.parametrize("items", [pa.string(), pa.int64()])
def test_lists_are_the_same_only_if_all_of_their_elements_are(items: pa.DataType) -> None:
    of = str if items == pa.string() else int
    numbers = [None, [], [1], [1, 2], [2, 2], [1, 1, 2], [1, 3], [None, 2], [2, None], [1, None]]
    values = [one and [None if item is None else of(item) for item in one] for one in numbers]
    pairs = [(one, other) for one in values for other in values]
    left, right = (pa.array(side, pa.list_(items)) for side in zip(*pairs, strict=True))
    assert codec.same(left, right).tolist() == [one == other for one, other in pairs]
    assert codec.same(left[7:90], right[7:90]).tolist() == [
        one == other for one, other in pairs[7:90]
    ]


@quick
@given(arrays(data_types()))
def test_bytes_are_equal_exactly_where_states_are(array: pa.Array) -> None:
    values = plain(array)
    encoded = codec.encode(array).to_pylist()
    valid = array.is_valid().to_pylist()
    for i, one in enumerate(values):
        for j, other in enumerate(values):
            assert (one == other) == ((valid[i], encoded[i]) == (valid[j], encoded[j]))


@quick
@given(st.data())
def test_same_agrees_with_the_model(data: st.DataObject) -> None:
    kind = data.draw(data_types())
    left = data.draw(arrays_of(kind, 4))
    right = data.draw(arrays_of(kind, 4) | st.permutations(range(4)).map(left.take))
    expected = [one == other for one, other in zip(plain(left), plain(right), strict=True)]
    assert codec.same(left, right).tolist() == expected
    assert codec.same(left, left).all()


@quick
@given(data_types(), st.lists(st.binary(max_size=40), max_size=4), st.booleans())
def test_garbage_is_refused_or_decodes_to_something_valid(
    kind: pa.DataType, garbage: list[bytes], zeroed: bool
) -> None:
    if zeroed:  # small numbers get further into the decoder than random ones
        garbage = [bytes(byte % 5 for byte in value) for value in garbage]
    try:
        decoded = codec.decode(pa.array(garbage, pa.binary()), kind)
    except ValueError:
        return
    decoded.validate()
    assert len(decoded) == len(garbage)
    codec.encode(decoded)


@quick
@given(arrays(data_types()), st.data())
def test_damaged_bytes_are_refused_or_decode_to_something_valid(
    array: pa.Array, data: st.DataObject
) -> None:
    encoded = codec.encode(array.drop_null()).to_pylist()
    damaged = []
    for value in encoded:
        if value and data.draw(st.booleans()):
            position = data.draw(st.integers(0, len(value) - 1))
            byte = bytes([data.draw(st.integers(0, 255))])
            damaged.append(value[:position] + byte + value[position + 1 :])
        else:
            damaged.append(value[: data.draw(st.integers(0, len(value)))])
    try:
        decoded = codec.decode(pa.array(damaged, pa.binary()), array.type)
    except ValueError:
        return
    decoded.validate()
    codec.encode(decoded)


@quick
@given(st.data())
def test_rows_come_back_with_their_touched_bits(data: st.DataObject) -> None:
    types = data.draw(st.lists(data_types(), min_size=1, max_size=10))
    rows = data.draw(st.integers(0, 3))
    touched = data.draw(st.composite(flags)(rows, len(types)))
    states = [data.draw(arrays_of(kind, rows)) for kind in types]
    row_codec = RowCodec(data.draw(st.integers(0, 2**16 - 1)), types)
    encoded = row_codec.encode(touched, states)
    assert versions(encoded).tolist() == [row_codec.version] * rows
    chosen = data.draw(st.none() | st.lists(st.sampled_from(range(len(types))), unique=True))
    decoded_touched, decoded = row_codec.decode(encoded, chosen)
    assert decoded_touched.tolist() == touched.tolist()
    for j, state in zip(range(len(types)) if chosen is None else chosen, decoded, strict=True):
        state.validate(full=True)
        expected = plain(states[j])
        assert plain(state) == [
            value if there else None for value, there in zip(expected, touched[:, j], strict=True)
        ]


@quick
@given(st.lists(data_types(), min_size=1, max_size=9), st.lists(st.binary(max_size=60), max_size=3))
def test_garbage_rows_are_refused_or_decode_to_something_valid(
    types: list[pa.DataType], garbage: list[bytes]
) -> None:
    row_codec = RowCodec(7, types)
    rows = [b"\x07\x00" + value for value in garbage]
    try:
        _, states = row_codec.decode(pa.array(rows, pa.binary()))
    except ValueError:
        return
    for state in states:
        state.validate()
