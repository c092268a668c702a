"""What goes over the network: read strictly, whatever the other side sends."""

import json
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import flight

from foundation.errors import (
    AccessRefused,
    BadRequest,
    Fenced,
    NotLeader,
    Overflow,
    Overloaded,
    ServerFailed,
    ServerUnavailable,
    UnknownColumn,
)
from server.protocol import wire

NUMBERS = pa.schema([("k", pa.int64())])


def _batch(*values: int) -> pa.RecordBatch:
    return pa.record_batch([pa.array(values, pa.int64())], schema=NUMBERS)


# --- Errors -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error",
    [
        AccessRefused("no"),
        Overloaded("no"),
        ServerUnavailable("no"),
        NotLeader("no"),
        Overflow("no"),
        UnknownColumn("é ' \" \\"),
        Fenced("no"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_comes_out_as_it_went_in(error: Exception) -> None:
    found = wire.from_flight_error(wire.to_flight_error(error))
    assert type(found) is type(error)
    assert str(found) == str(error)


def test_an_error_that_a_client_does_not_know_is_a_failure_of_the_server() -> None:
    info = json.dumps({"error": "SystemExit", "message": "what it says"}).encode()
    found = wire.from_flight_error(flight.FlightServerError("x", info))
    assert type(found) is ServerFailed
    assert str(found) == "what it says"


@pytest.mark.parametrize(
    "info", [b"", b"{", b"[]", b"{}", b"\xff", b'"x"', b"null", b'{"error":1}']
)
def test_an_error_without_a_name_is_the_networks(info: bytes) -> None:
    assert wire.from_flight_error(flight.FlightServerError("x", info)) is None


@given(st.text(st.characters(), max_size=3_000))
def test_a_message_is_printable_and_fits_into_headers(text: str) -> None:
    message = wire.readable(f"{text}; do this")
    assert message.isprintable()
    assert len(message.encode()) <= 910
    assert message.endswith("; do this")
    error = wire.to_flight_error(BadRequest(text))
    assert len(error.extra_info) < 2_100


def test_a_long_message_loses_its_middle() -> None:
    message = wire.readable("what happened " + "é" * 5_000 + " what to do")
    assert message.startswith("what happened éé")
    assert " ... é" in message
    assert message.endswith("é what to do")


# --- Fields -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [
        *(b"", b"\xff\xfe", b"{", b"[]", b"null", b"1", b'"x"', b"{}", b'{"format":2}'),
        *(b'{"format":"1"}', b'{"format":1}}', b"[" * 100_000, b'{"a":' * 100_000),
        b'{"format":1,"x":' + b"9" * 5_000 + b"}",
        b" " * (wire.LONGEST_REQUEST + 1),
    ],
    ids=lambda data: data[:16],
)
def test_what_is_no_request_is_refused(data: bytes) -> None:
    with pytest.raises(BadRequest, match="a request"):
        wire.decode(data)


@pytest.mark.parametrize("value", [None, True, 1.0, "1", [1], {"a": 1}, 1 << 63, -(1 << 63) - 1])
def test_a_number_is_a_whole_number_of_64_bits(value: Any) -> None:
    fields = wire.decode(wire.encode({"x": value, "all": [value], "rows": [[value]]}))
    with pytest.raises(BadRequest, match="`x`"):
        fields.get("x", int)
    with pytest.raises(BadRequest, match="`all` are not whole numbers"):
        fields.integers("all")
    with pytest.raises(BadRequest, match="`rows` are not 1 whole numbers"):
        fields.rows("rows", 1)


@pytest.mark.parametrize("value", [0, 1, -1, (1 << 63) - 1, -(1 << 63)])
def test_numbers_of_64_bits_are_read(value: int) -> None:
    fields = wire.decode(wire.encode({"x": value, "all": [value], "rows": [[value, 1]]}))
    assert fields.get("x", int) == value
    assert fields.integers("all") == [value]
    assert fields.rows("rows", 2) == [[value, 1]]


@pytest.mark.parametrize("value", [1, True, ["x"], "\ud800", "x" * (wire.LONGEST_TEXT + 1)])
def test_a_text_is_unicode_and_not_too_long(value: Any) -> None:
    fields = wire.decode(wire.encode({"x": value, "all": ["good", value]}))
    with pytest.raises(BadRequest, match="`x`"):
        fields.get("x", str)
    with pytest.raises(BadRequest, match="`all` are not texts"):
        fields.texts("all")


def test_true_and_false_are_no_numbers_and_numbers_are_neither() -> None:
    fields = wire.decode(wire.encode({"yes": True, "no": False, "one": 1}))
    assert fields.get("yes", bool) is True
    assert fields.get("no", bool) is False
    with pytest.raises(BadRequest, match="without true or false as `one`"):
        fields.get("one", bool)


def test_what_may_be_missing_may_be_null() -> None:
    fields = wire.decode(wire.encode({"x": None}))
    for name in ("x", "y"):
        assert name not in fields
        assert fields.texts(name) is None


@pytest.mark.parametrize("rows", [[[1]], [[1, 2, 3]], [1], ["ab"], {"a": 1}, [{"a": 1, "b": 2}]])
def test_rows_have_the_width_that_they_must_have(rows: Any) -> None:
    with pytest.raises(BadRequest, match="`rows`"):
        wire.decode(wire.encode({"rows": rows})).rows("rows", 2)


# --- Frames -------------------------------------------------------------------------------------


def test_a_frame_comes_out_as_it_went_in() -> None:
    fields, batches = wire.unframe(wire.frame({"x": 1}, NUMBERS, [_batch(1, 2), _batch()]))
    assert fields.get("x", int) == 1
    assert list(batches) == [_batch(1, 2), _batch()]


def test_a_frame_that_is_cut_is_refused_or_has_fewer_batches() -> None:
    whole = wire.frame({"x": 1}, NUMBERS, [_batch(1, 2), _batch(3)])
    for length in range(len(whole) - 8):
        try:
            _, batches = wire.unframe(whole[:length])
        except BadRequest:
            continue
        # The stream was cut between two messages; the request says how many there must be.
        assert len(batches) < 2


@given(at=st.floats(0, 1, exclude_max=True), mask=st.integers(1, 255))
def test_a_frame_with_a_damaged_byte_is_read_or_refused(at: float, mask: int) -> None:
    body = bytearray(wire.frame({"x": 1}, NUMBERS, [_batch(1, 2)]).to_pybytes())
    body[int(at * len(body))] ^= mask
    try:
        wire.unframe(pa.py_buffer(bytes(body)))
    except BadRequest as exc:
        refusal = str(exc)
        assert refusal.startswith("a request")


# --- Puts ---------------------------------------------------------------------------------------


def test_a_checksum_is_of_the_values_and_not_of_their_buffers() -> None:
    one, other = wire.Checksum(), wire.Checksum()
    one.add(_batch(1, 2, 3).slice(1))
    other.add(_batch(2, 3))
    one.check(wire.decode(other.closing()))


@pytest.mark.parametrize("others", [[], [_batch(1)], [_batch(2, 1)], [_batch(1, 2), _batch()]])
def test_other_rows_do_not_have_the_checksum(others: list[pa.RecordBatch]) -> None:
    one, other = wire.Checksum(), wire.Checksum()
    one.add(_batch(1, 2))
    for batch in others:
        other.add(batch)
    with pytest.raises(BadRequest, match="or arrived damaged; nothing was written, send it again"):
        one.check(wire.decode(other.closing()))


def test_a_batch_is_taken_without_the_memory_that_it_came_in() -> None:
    large = pa.record_batch([pa.array(np.zeros(1_000_000, np.int64))], names=["k"])
    checksum = wire.Checksum()
    kept, size = checksum.take(large.slice(5, 1))
    assert kept == large.slice(5, 1)
    assert size < 1_000
    assert kept.column(0).buffers()[1].size < 1_000
    assert checksum.rows == 1


@pytest.mark.parametrize("offsets", [(0, 1, 7), (0, 2, 1 << 30), (-4, 1, 2), (3, 2, 1)])
def test_a_batch_that_points_outside_itself_is_not_taken(offsets: tuple[int, ...]) -> None:
    texts = pa.array(["ab", "cdef"])
    for array in (texts, pa.StructArray.from_arrays([texts], ["x"])):
        good = pa.record_batch([array], names=["k"])
        data = good.serialize().to_pybytes()
        damaged = data.replace(
            np.array([0, 2, 6], np.int32).tobytes(), np.array(offsets, np.int32).tobytes()
        )
        assert damaged != data
        batch = pa.ipc.read_record_batch(pa.py_buffer(damaged), good.schema)
        with pytest.raises(BadRequest, match="batches are damaged"):
            wire.Checksum().take(batch)


@pytest.mark.parametrize(
    "kind",
    [
        pa.dictionary(pa.int8(), pa.string()),
        pa.list_(pa.dictionary(pa.int8(), pa.string())),
        pa.struct([("x", pa.map_(pa.string(), pa.dictionary(pa.int8(), pa.string())))]),
    ],
    ids=str,
)
def test_dictionaries_are_found_however_deep(kind: pa.DataType) -> None:
    with pytest.raises(BadRequest, match="a put of dictionaries; send their values"):
        wire.check_plain(pa.schema([("k", pa.int64()), ("x", kind)]))


def test_other_types_are_plain() -> None:
    kinds = [pa.string(), pa.list_(pa.int8()), pa.struct([("x", pa.string())]), pa.uuid()]
    wire.check_plain(pa.schema([(str(at), kind) for at, kind in enumerate(kinds)]))


def test_an_answer_comes_back_in_parts_some_of_them_empty() -> None:
    batches = [_batch(1, 2), _batch(), _batch(3)]
    assert wire.read_answer(wire.answer(batches), NUMBERS) == batches
    assert wire.read_answer(wire.answer([]), NUMBERS) == []
