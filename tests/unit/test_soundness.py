"""Values that are not what their types say are found, row by row, and can be shown."""

import datetime as dt
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foundation.errors import InvalidInput
from merge_engine.encoding.soundness import (
    as_bytes,
    complaint,
    is_sound,
    readable,
    readable_rows,
    readable_values,
    show,
    unsound_rows,
)
from tests.support.unsound import NO_TEXT, TEXTS, damaged, decimals, hidden, nested, texts

NESTED, HIDDEN = nested(), hidden()


def unsound(values: pa.Array | pa.ChunkedArray) -> list[bool]:
    flags: list[bool] = unsound_rows(values, column="c").tolist()
    return flags


@pytest.mark.parametrize("name", NESTED)
def test_the_row_with_text_that_is_not_utf_8_is_found_and_shown(name: str) -> None:
    array = NESTED[name]
    assert unsound(array) == [False, True]
    assert unsound(pa.chunked_array([array, array.slice(0, 1)])) == [False, True, False]
    shown = complaint(array, 1)
    assert shown.startswith("text that is not UTF-8: ")
    assert r"\xff\xfe" in shown
    assert len(shown) < 100


@pytest.mark.parametrize("name", HIDDEN)
def test_what_nobody_can_see_is_no_part_of_a_value(name: str) -> None:
    array = HIDDEN[name]
    assert unsound(array) == [False] * len(array)


@given(
    st.lists(st.none() | st.binary(max_size=6) | st.text(max_size=4).map(str.encode), max_size=20),
    st.sampled_from(TEXTS),
    st.integers(0, 3),
)
def test_text_is_what_python_can_decode(
    values: list[bytes | None], kind: pa.DataType, skipped: int
) -> None:
    def is_text(value: bytes | None) -> bool:
        try:
            (value or b"").decode()
        except UnicodeDecodeError:
            return False
        return True

    values = values[skipped:]
    assert unsound(texts([b"", *values], kind).slice(1)) == [not is_text(value) for value in values]


@pytest.mark.parametrize(
    "value",
    [b"\xc0\x80", b"\xe0\x80\x80", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xe2\x82", b"a\x80"],
    ids=["too long", "far too long", "half a character", "beyond Unicode", "cut short", "a rest"],
)
def test_what_looks_like_utf_8_and_is_not(value: bytes) -> None:
    assert unsound(texts([value, "\U0010ffff\ud7ff\ue000\n".encode()])) == [True, False]


def test_numbers_of_more_digits_than_their_type_has_are_found() -> None:
    assert unsound(decimals()) == [False, True]
    assert complaint(decimals(), 1) == "Decimal value 123456 does not fit in precision of " + str(
        pa.decimal128(3, 0)
    )


@pytest.mark.parametrize(
    "array",
    [
        damaged(0, 1 << 30, 6),
        damaged(0, 5, 1),
        pa.ListArray.from_arrays([0, 1, 2], damaged(0, -5, 6)),
        pa.StructArray.from_arrays([damaged(0, 5, 1)], ["a"], mask=pa.array([True, True])),
    ],
    ids=["beyond the data", "falling", "below zero in a list", "behind a null struct"],
)
def test_offsets_that_lead_nowhere_are_no_matter_of_one_row(array: pa.Array) -> None:
    with pytest.raises(InvalidInput, match="column 'c' is damaged: "):
        unsound_rows(array, column="c")
    assert "is damaged" in str(show(array, 1))


@pytest.mark.parametrize("array", NESTED.values(), ids=NESTED)
def test_unsound_text_can_be_kept_as_bytes(array: pa.Array, tmp_path: Any) -> None:
    assert is_sound(as_bytes(array))
    table = readable(pa.table({"fine": list("abcd"), "broken": pa.chunked_array([array, array])}))
    assert table.column("fine").type == pa.string()
    assert repr(NO_TEXT)[2:-1] in repr(table.column("broken").to_pylist()[3])
    if not pa.types.is_list_view(array.type):  # Parquet has none.
        pq.write_table(table, tmp_path / "rows.parquet")
        assert pq.read_table(tmp_path / "rows.parquet").to_pylist() == table.to_pylist()


def test_any_value_can_be_shown() -> None:
    late = pa.array([2**62], pa.int64()).view(pa.timestamp("us"))
    assert "4611686018427387904" in str(show(late, 0))
    assert "1073741824" in str(show(pa.array([2**30], pa.int32()).view(pa.date32()), 0))
    assert show(pa.array([0], pa.date32()), 0) == dt.date(1970, 1, 1)
    assert show(pa.chunked_array([["a"], [None]]), 1) is None
    assert show(texts([NO_TEXT]), 0) == NO_TEXT


def test_a_column_of_nothing_but_garbage_is_judged_at_once() -> None:
    garbage = texts([NO_TEXT] * 100_000)
    assert np.count_nonzero(unsound_rows(garbage, column="c")) == len(garbage)


BEYOND = pa.array([3_000_000, 0], pa.date32())  # The first is in the year 10,183.


def test_dates_beyond_those_of_python_are_texts_and_all_others_what_they_were() -> None:
    moments = pa.array([2**60, -(2**62), 0], pa.int64()).cast(pa.timestamp("us"))
    assert readable_values(BEYOND) == ["10183-09-21", dt.date(1970, 1, 1)]
    assert readable_values(moments) == [
        "<value out of range: 1152921504606846976>",
        "<value out of range: -4611686018427387904>",
        dt.datetime(1970, 1, 1),
    ]
    rows = pa.table(
        {
            "lists": pa.ListArray.from_arrays([0, 2, 2], BEYOND),
            "structs": pa.StructArray.from_arrays([BEYOND, pa.array([1, 2])], ["at", "n"]),
            "maps": pa.MapArray.from_arrays([0, 1, 2], BEYOND, BEYOND),
        }
    )
    epoch = dt.date(1970, 1, 1)
    expected = [
        {
            "lists": ["10183-09-21", epoch],
            "structs": {"at": "10183-09-21", "n": 1},
            "maps": [("10183-09-21", "10183-09-21")],
        },
        {"lists": [], "structs": {"at": epoch, "n": 2}, "maps": [(epoch, epoch)]},
    ]
    assert readable_rows(rows) == expected
    assert readable_rows(rows.to_batches()[0]) == expected
    assert readable_rows(rows.slice(1)) == rows.slice(1).to_pylist()
