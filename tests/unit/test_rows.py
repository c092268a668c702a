"""Stored rows: the exact bytes, what is canonical, and what is refused."""

from collections.abc import Iterator
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pytest

from foundation.errors import SchemaError
from merge_engine.encoding import codec
from merge_engine.encoding.row_codec import RowCodec, versions


@pytest.fixture(scope="module", autouse=True, params=[16, -1], ids=["few", "many"])
def path(request: pytest.FixtureRequest) -> Iterator[None]:
    """Few rows are cut by plain Python, many by NumPy: here both are tried with few."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(codec, "FEW", request.param)
        yield


MIXED = [pa.int16(), pa.string(), pa.bool_(), pa.list_(pa.int8())]


def mixed_states() -> list[pa.Array]:
    return [
        pa.array([258, None], pa.int16()),
        pa.array(["hi", None]),
        pa.array([True, None]),
        pa.array([[1, None, 3], None], pa.list_(pa.int8())),
    ]


def test_a_row_has_the_documented_bytes() -> None:
    touched = np.array([[True, True, True, True], [True, False, False, True]])
    encoded = RowCodec(0x0102, MIXED).encode(touched, mixed_states())
    assert encoded.to_pylist() == [
        b"\x02\x01"  # version
        b"\x0f"  # touched
        b"\x00"  # nulls
        b"\x02\x01"  # int16
        b"\x02\x00\x00\x00"  # length of the string
        b"\x01"  # bool
        b"\x0a\x00\x00\x00"  # length of the list
        b"hi"
        b"\x03\x00\x00\x00"  # elements
        b"\x01\x00\x01"  # the second is null
        b"\x01\x00\x03",
        b"\x02\x01\x09\x0f" + bytes(2 + 4 + 1 + 4),
    ]


def test_lists_of_variable_elements_and_structs_have_the_documented_bytes() -> None:
    entry = pa.struct([("a", pa.int8()), ("b", pa.string())])
    array = pa.array([[{"a": 7, "b": "xy"}, {"a": None, "b": None}]], pa.list_(entry))
    assert codec.encode(array).to_pylist() == [
        b"\x02\x00\x00\x00"  # elements
        b"\x01\x01"  # none is null
        b"\x08\x00\x00\x00\x06\x00\x00\x00"  # their lengths
        b"\x00\x07\x02\x00\x00\x00xy"  # nulls, a, length of b, b
        b"\x03\x00\x00\x00\x00\x00"
    ]


def test_a_struct_of_fixed_fields_has_a_fixed_width() -> None:
    inner = pa.struct([("a", pa.int64()), ("b", pa.decimal128(20, 2))])
    outer = pa.struct([(f"f{i}", pa.bool_()) for i in range(8)] + [("s", inner)])
    assert codec.fixed_width(inner) == 1 + 8 + 16
    assert codec.fixed_width(outer) == 2 + 8 + 25
    assert codec.fixed_width(pa.struct([("a", pa.int64()), ("b", pa.string())])) is None


def test_rows_come_back() -> None:
    touched = np.array([[True, True, True, True], [True, False, False, True]])
    row_codec = RowCodec(1, MIXED)
    decoded_touched, states = row_codec.decode(row_codec.encode(touched, mixed_states()))
    assert decoded_touched.tolist() == touched.tolist()
    assert [state.to_pylist() for state in states] == [
        state.to_pylist() for state in mixed_states()
    ]


def test_only_the_columns_asked_for_are_decoded_in_the_order_asked_for() -> None:
    row_codec = RowCodec(1, MIXED)
    encoded = row_codec.encode(np.ones((2, 4), np.bool_), mixed_states())
    touched, states = row_codec.decode(encoded, columns=[1, 0])
    assert touched.shape == (2, 4)
    assert [state.to_pylist() for state in states] == [["hi", None], [258, None]]
    assert row_codec.decode(encoded, columns=[2])[1][0].to_pylist() == [True, None]
    assert row_codec.decode(encoded, columns=[])[1] == []


def test_what_stands_in_an_untouched_state_does_not_matter() -> None:
    row_codec = RowCodec(1, [pa.int64(), pa.string()])
    touched = np.array([[False, True], [True, False]])
    garbage = row_codec.encode(touched, [pa.array([99, 1]), pa.array(["a", "garbage"])])
    clean = row_codec.encode(touched, [pa.array([None, 1]), pa.array(["a", None])])
    assert garbage.equals(clean)


def test_bytes_hidden_under_a_null_do_not_matter() -> None:
    values = pa.py_buffer(np.array([5, 6], np.int64))
    hidden = pa.Array.from_buffers(
        pa.int64(), 2, [pa.py_buffer(np.array([0b10], np.uint8)), values]
    )
    touched = np.ones((2, 1), np.bool_)
    row_codec = RowCodec(1, [pa.int64()])
    assert row_codec.encode(touched, [hidden]).equals(
        row_codec.encode(touched, [pa.array([None, 6])])
    )


def test_the_bits_of_a_nan_survive() -> None:
    bits = np.array([0x7FF8000000000001, 0x7FF0000000000001, 0xFFF8000000000000], np.uint64)
    states = [pa.array(bits.view(np.float64))]
    row_codec = RowCodec(1, [pa.float64()])
    _, (decoded,) = row_codec.decode(row_codec.encode(np.ones((3, 1), np.bool_), states))
    assert decoded.to_numpy().view(np.uint64).tolist() == bits.tolist()


@pytest.mark.parametrize(
    ("kind", "zero"),
    [
        (pa.int64(), 0),
        (pa.bool_(), False),
        (pa.string(), ""),
        (pa.decimal128(20, 0), Decimal(0)),
        (pa.list_(pa.int8()), []),
        (pa.struct([("a", pa.int8())]), {"a": 0}),
    ],
)
def test_null_is_the_same_as_null_and_not_as_zero_or_empty(kind: pa.DataType, zero: object) -> None:
    left = pa.array([None, None, zero, zero], kind)
    right = pa.array([None, zero, None, zero], kind)
    assert codec.same(left, right).tolist() == [True, False, False, True]


def test_floats_are_the_same_bit_for_bit() -> None:
    left = pa.array([float("nan"), 0.0, 1.5, None])
    right = pa.array([float("nan"), -0.0, 1.5, float("nan")])
    assert codec.same(left, right).tolist() == [True, False, True, False]


def test_no_rows_are_no_rows() -> None:
    row_codec = RowCodec(1, MIXED)
    empty = row_codec.encode(np.zeros((0, 4), np.bool_), [pa.array([], kind) for kind in MIXED])
    assert len(empty) == 0
    touched, states = row_codec.decode(empty)
    assert touched.shape == (0, 4)
    assert [state.type for state in states] == MIXED
    assert [len(state) for state in states] == [0, 0, 0, 0]


def test_versions_are_read_from_rows_of_any_version() -> None:
    rows = pa.array([b"skipped", b"\x01\x00abc", b"\x02\x01", b"\xff\xff..."], pa.binary())
    assert versions(rows.slice(1)).tolist() == [1, 0x0102, 0xFFFF]
    assert versions(rows.slice(0, 0)).tolist() == []


def test_rows_of_another_version_are_refused() -> None:
    types = [pa.int64()]
    encoded = RowCodec(1, types).encode(np.ones((1, 1), np.bool_), [pa.array([1])])
    with pytest.raises(ValueError, match="version 2"):
        RowCodec(2, types).decode(encoded)


@pytest.mark.parametrize(
    "row", [b"", b"\x01", b"\x01\x00", b"\x01\x00\x01\x00\x05\x00\x00\x00abcd"]
)
def test_a_row_that_is_too_short_is_refused(row: bytes) -> None:
    with pytest.raises(ValueError, match=r"short|length"):
        RowCodec(1, [pa.string()]).decode(pa.array([row], pa.binary()))


def test_a_row_that_is_too_long_is_refused() -> None:
    row = b"\x01\x00\x01\x00\x01\x00\x00\x00ab"
    with pytest.raises(ValueError, match="length"):
        RowCodec(1, [pa.string()]).decode(pa.array([row], pa.binary()))


def test_a_length_that_reaches_into_the_next_row_is_refused() -> None:
    rows = [b"\x01\x00\x01\x00\x03\x00\x00\x00ab", b"\x01\x00\x01\x00\x01\x00\x00\x00ab"]
    with pytest.raises(ValueError, match="length"):
        RowCodec(1, [pa.string()]).decode(pa.array(rows, pa.binary()))


def test_list_elements_that_reach_into_the_next_list_are_refused() -> None:
    one = b"\x01\x00\x00\x00\x01\x03\x00\x00\x00ab"
    two = b"\x01\x00\x00\x00\x01\x01\x00\x00\x00cd"
    with pytest.raises(ValueError, match="elements"):
        codec.decode(pa.array([one, two], pa.binary()), pa.list_(pa.string()))


def test_a_null_key_in_a_map_is_refused() -> None:
    entry = b"\x01\x00\x00\x00"  # key is null, value is 0
    with pytest.raises(ValueError, match="key"):
        codec.decode(
            pa.array([b"\x01\x00\x00\x00\x01" + entry[:3]], pa.binary()),
            pa.map_(pa.int8(), pa.int8()),
        )


def test_text_that_is_not_utf8_is_refused() -> None:
    with pytest.raises(ValueError, match="UTF8"):
        codec.decode(pa.array([b"\xff"]), pa.string())


@pytest.mark.parametrize(
    "kind",
    [
        pa.uint8(),
        pa.timestamp("ns"),
        pa.large_string(),
        pa.struct([]),
        pa.list_(pa.null()),
        pa.map_(pa.string(), pa.time64("us")),
    ],
)
def test_a_type_that_cannot_be_stored_is_refused(kind: pa.DataType) -> None:
    with pytest.raises(SchemaError, match="cannot be stored"):
        codec.fixed_width(kind)


def test_states_that_do_not_fit_the_codec_are_refused() -> None:
    row_codec = RowCodec(1, [pa.int64()])
    touched = np.ones((1, 1), np.bool_)
    with pytest.raises(ValueError, match="int64"):
        row_codec.encode(touched, [pa.array([1], pa.int32())])
    with pytest.raises(ValueError, match="expected"):
        row_codec.encode(touched, [pa.array([1, 2])])
    with pytest.raises(ValueError, match="1 columns"):
        row_codec.encode(touched, [])
    with pytest.raises(ValueError, match="16 bits"):
        RowCodec(2**16, [pa.int64()])
