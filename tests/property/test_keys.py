"""Keys come back from their bytes, and their bytes are ordered as they are."""

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from foundation.errors import InvalidKey, SchemaError
from merge_engine.encoding.keys import KeyCodec
from merge_engine.merging.hashing import bucket_of, bucket_of_few, spark_xxhash64
from tests.property.strategies import arrays_of, key_types, plain
from tests.support.examples import examples

quick = settings(deadline=None, max_examples=examples(100, per=2))


@st.composite
def keys(draw: st.DrawFn) -> list[pa.Array]:
    types = draw(st.lists(key_types(), min_size=1, max_size=4))
    rows = draw(st.integers(0, 5))
    return [draw(arrays_of(kind, rows, nullable=False)) for kind in types]


@st.composite
def similar_keys(draw: st.DrawFn) -> list[pa.Array]:
    """Keys of bytes where one is often the beginning of another."""
    kinds = draw(st.lists(st.sampled_from([pa.binary(), pa.int8()]), min_size=2, max_size=3))
    texts = st.text("\0\x01\xff", max_size=4).map(lambda text: text.encode("latin-1"))
    column = {
        pa.binary(): st.lists(texts, min_size=6, max_size=6),
        pa.int8(): st.lists(st.sampled_from([-128, -1, 0, 1]), min_size=6, max_size=6),
    }
    return [pa.array(draw(column[kind]), kind) for kind in kinds]


def codec_of(columns: list[pa.Array]) -> KeyCodec:
    return KeyCodec([column.type for column in columns])


@quick
@given(keys() | similar_keys())
def test_keys_come_back_from_their_bytes(columns: list[pa.Array]) -> None:
    codec = codec_of(columns)
    encoded = codec.encode(columns)
    assert encoded.null_count == 0
    for original, decoded in zip(columns, codec.decode(encoded), strict=True):
        decoded.validate(full=True)
        assert decoded.type == original.type
        assert plain(decoded) == plain(original)


@quick
@given(keys() | similar_keys())
def test_the_order_of_the_bytes_is_the_order_of_the_keys(columns: list[pa.Array]) -> None:
    encoded = codec_of(columns).encode(columns).to_pylist()
    tuples = list(zip(*map(plain, columns), strict=True))
    for i, one in enumerate(tuples):
        for j, other in enumerate(tuples):
            assert (one < other) == (encoded[i] < encoded[j])
            assert (one == other) == (encoded[i] == encoded[j])


@quick
@given(keys(), st.integers(0, 5), st.integers(0, 5))
def test_slices_of_the_bytes_decode_to_slices_of_the_keys(
    columns: list[pa.Array], start: int, size: int
) -> None:
    start = min(start, len(columns[0]))
    codec = codec_of(columns)
    decoded = codec.decode(codec.encode(columns).slice(start, size))
    assert list(map(plain, decoded)) == [plain(column.slice(start, size)) for column in columns]


@quick
@given(st.lists(key_types(), min_size=1, max_size=4), st.lists(st.binary(max_size=30), max_size=4))
def test_garbage_is_refused_or_decodes_to_something_valid(
    types: list[pa.DataType], garbage: list[bytes]
) -> None:
    try:
        columns = KeyCodec(types).decode(pa.array(garbage, pa.binary()))
    except ValueError:
        return
    for column in columns:
        column.validate()


def spark_bytes(value: Any, kind: pa.DataType) -> bytes:
    """What Spark hashes for a value, in plain Python."""
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, bytes):
        return value
    if pa.types.is_decimal(kind):
        number = int(value.scaleb(kind.scale)) if kind.precision <= 28 else _unscaled(value)
        if kind.precision > 18:
            magnitude = number if number >= 0 else ~number
            return number.to_bytes(magnitude.bit_length() // 8 + 1, "big", signed=True)
        return number.to_bytes(8, "little", signed=True)
    width = 8 if kind == pa.int64() or pa.types.is_timestamp(kind) else 4
    return int(value).to_bytes(width, "little", signed=True)


def _unscaled(value: Any) -> int:
    sign, digits, _ = value.as_tuple()
    number = int("".join(map(str, digits)))
    return -number if sign else number


@quick
@given(st.data())
def test_the_hash_is_xxh64_chained_over_the_columns(data: st.DataObject) -> None:
    types = data.draw(st.lists(key_types(), min_size=1, max_size=4))
    rows = data.draw(st.integers(0, 4))
    columns = [data.draw(arrays_of(kind, rows)) for kind in types]
    expected = []
    for row in zip(*map(plain, columns), strict=True):
        state = 42
        for value, kind in zip(row, types, strict=True):
            if value is not None:
                state = xxhash.xxh64_intdigest(spark_bytes(value, kind), state)
        expected.append(state)
    hashes = spark_xxhash64(columns)
    assert hashes.view(np.uint64).tolist() == expected
    many = [pa.concat_arrays([column] * 100) for column in columns]  # They take another path.
    assert spark_xxhash64(many).view(np.uint64).tolist() == 100 * expected
    signed = hashes.tolist()
    assert bucket_of(columns, 7).tolist() == [hashed % 7 for hashed in signed]


@quick
@given(
    st.lists(st.tuples(st.integers(-(2**63), 2**63 - 1), st.text(max_size=40)), max_size=5),
    st.integers(1, 1000),
)
def test_numbers_and_texts_go_to_the_same_bucket_without_arrow(
    rows: list[tuple[int, str]], buckets: int
) -> None:
    numbers, texts = [row[0] for row in rows], [row[1] for row in rows]
    arrays = [pa.array(numbers, pa.int64()), pa.array(texts, pa.string())]
    assert bucket_of_few([numbers, texts], buckets) == bucket_of(arrays, buckets).tolist()
    assert bucket_of_few([numbers], buckets) == bucket_of(arrays[:1], buckets).tolist()


def test_a_null_key_is_refused() -> None:
    with pytest.raises(InvalidKey, match="null"):
        KeyCodec([pa.int64()]).encode([pa.array([1, None])])


def test_a_type_without_an_order_of_bytes_is_refused() -> None:
    for kind in [pa.float64(), pa.list_(pa.int64()), pa.timestamp("ns"), pa.uint8()]:
        with pytest.raises(SchemaError, match="cannot be a key"):
            KeyCodec([kind])


def test_a_key_without_columns_is_refused() -> None:
    with pytest.raises(SchemaError, match="at least one"):
        KeyCodec([])
