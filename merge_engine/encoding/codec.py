"""Values as bytes, and back, for every type that a column state can have.

    bool                 1 byte, 0 or 1
    int8 ... int64       little-endian, 1 to 8 bytes
    float32, float64     IEEE 754, little-endian, bit for bit
    date32               days, int32
    timestamp[us]        microseconds, int64
    decimal128           the unscaled number, 16 bytes, little-endian
    string, binary       the bytes
    struct               null bits: bit j of byte j // 8, counted from the lowest, is set iff field
                           j is null
                         per field, in order: its bytes if its type has a fixed width, else the
                           length of its bytes, u32
                         the bytes of the variable fields, in order
    list                 the number of elements, u32
                         per element: 1 byte, 0 iff the element is null
                         per element: the length of its bytes, u32; absent for fixed width
                         the bytes of the elements
    map                  as list<struct<key, value>>

A struct of fixed-width fields has a fixed width itself. Whether the outermost value is null is not
in its bytes: that is the caller's to keep. A null, at every level, has all-zero bytes if its type
has a fixed width, and no bytes if not, so that equal states have equal bytes.

Everything works on whole columns. The elements of the lists of a column are contiguous in Arrow,
and so are the pieces of a cut column (`ragged.split`): lists are coded by arithmetic on offsets.
"""

from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types as arrow_types

from foundation.errors import SchemaError
from merge_engine.encoding import ragged
from merge_engine.encoding.ragged import Bytes, Flags

# Records are one NumPy item per value, of the width of its bytes.
Records = npt.NDArray[Any]

_PRIMITIVE_WIDTHS = {
    pa.bool_(): 1,
    pa.int8(): 1,
    pa.int16(): 2,
    pa.int32(): 4,
    pa.int64(): 8,
    pa.float32(): 4,
    pa.float64(): 8,
    pa.date32(): 4,
}


@lru_cache(maxsize=1024)
def fixed_width(data_type: pa.DataType) -> int | None:
    """Return how many bytes every value of the type takes, or None if that varies.

    Raises `SchemaError` for a type that cannot be stored.
    """
    if data_type in _PRIMITIVE_WIDTHS:
        return _PRIMITIVE_WIDTHS[data_type]
    if arrow_types.is_timestamp(data_type) and data_type.unit == "us":
        return 8
    if arrow_types.is_decimal128(data_type):
        return 16
    if arrow_types.is_struct(data_type) and data_type.num_fields > 0:
        return _layout(data_type).fixed_width
    if arrow_types.is_list(data_type) or arrow_types.is_map(data_type):
        fixed_width(_element_type(data_type))  # refuses elements that cannot be stored
    elif data_type not in (pa.string(), pa.binary()):
        raise SchemaError(f"type {data_type} cannot be stored")
    return None


def encode(array: pa.Array) -> pa.BinaryArray:
    """Return the bytes of each value, without nulls; a null has the bytes of its type's null."""
    data_type = array.type
    width = fixed_width(data_type)
    if width is not None:
        return ragged.from_fixed(_as_bytes(to_records(array), width))
    if data_type == pa.binary():
        return ragged.without_nulls(array)
    if data_type == pa.string():
        return ragged.without_nulls(array.view(pa.binary()))
    valid = ragged.validity(array)
    if valid is not None:
        return ragged.spread(encode(array.drop_null()), valid)
    if arrow_types.is_struct(data_type):
        return _layout(data_type).encode(array.flatten())
    return _encode_lists(array)


def decode(values: pa.BinaryArray, data_type: pa.DataType) -> pa.Array:
    """Turn bytes back into values; a null among the bytes becomes a null.

    Bytes that are no encoding of the type are a `ValueError`: nothing is read out of bounds.
    """
    width = fixed_width(data_type)
    if width is not None:
        matrix = ragged.to_matrix(values, width)
        return from_records(_as_records(matrix), data_type, ragged.validity(values))
    if data_type == pa.binary():
        return values
    if data_type == pa.string():
        return values.cast(pa.string())  # checks UTF-8
    if not arrow_types.is_struct(data_type):
        return _decode_lists(values, data_type)
    valid = ragged.validity(values)
    if valid is None:
        _, fields = _layout(data_type).decode(values)
        return pa.Array.from_buffers(data_type, len(values), [None], children=fields)
    positions = pa.array(np.cumsum(valid) - 1, mask=~valid)
    return decode(values.drop_null(), data_type).take(positions)


def same(left: pa.Array, right: pa.Array) -> Flags:
    """Tell, element by element, whether two arrays of one type hold the identical state.

    Null is the same as null. Floats are compared bit for bit: NaN is the same as NaN, 0.0 is not
    the same as -0.0.
    """
    equal: Flags
    width = fixed_width(left.type)
    if arrow_types.is_list(left.type) or arrow_types.is_map(left.type):
        equal = _same_lists(left, right)
    elif width is None:
        equal = pc.equal(encode(left), encode(right)).to_numpy(zero_copy_only=False)
    elif width in (1, 2, 4, 8):
        equal = to_records(left) == to_records(right)
    else:
        equal = (_as_bytes(to_records(left), width) == _as_bytes(to_records(right), width)).all(1)
    if left.null_count or right.null_count:
        equal &= pc.equal(left.is_valid(), right.is_valid()).to_numpy(zero_copy_only=False)
    return equal


def to_records(array: pa.Array) -> Records:
    """Return the bytes of an array of a fixed-width type as one record per value.

    Zero-copy where Arrow's layout is ours and nothing is null: do not write to the result.
    """
    data_type = array.type
    record = record_type(data_type)
    valid = ragged.validity(array)
    if len(array) == 0:
        return np.zeros(0, record)
    if arrow_types.is_struct(data_type):
        records = _as_records(_layout(data_type).encode_fixed(array.flatten()))
    elif arrow_types.is_boolean(data_type):
        records = array.fill_null(False).cast(pa.uint8()).to_numpy()
    else:
        start = array.offset * record.itemsize
        records = np.frombuffer(array.buffers()[1], record, len(array), start)
    return records if valid is None else np.where(valid, records, np.zeros((), record))


def from_records(records: Records, data_type: pa.DataType, valid: Flags | None) -> pa.Array:
    """Turn records back into an array, null where `valid` is false (None: nowhere)."""
    records = np.ascontiguousarray(records)
    validity = ragged.bitmap(valid)
    if arrow_types.is_struct(data_type):
        layout = _layout(data_type)
        fields = layout.decode_fixed(_as_bytes(records, records.dtype.itemsize))
        return pa.Array.from_buffers(data_type, len(records), [validity], children=fields)
    if arrow_types.is_boolean(data_type):
        values = ragged.bitmap(records != 0)
    else:
        values = pa.py_buffer(records.view(np.uint8))
    return pa.Array.from_buffers(data_type, len(records), [validity, values])


def record_type(data_type: pa.DataType) -> np.dtype[Any]:
    """Return the NumPy type of the records of a fixed-width type.

    Floats are handled as integers, so that no copy can change the bits of a NaN.
    """
    width = fixed_width(data_type)
    assert width is not None, f"{data_type} has no fixed width"
    return _record_of(width)


# Up to so many rows, plain Python beats the fixed costs of vectorised code.
FEW = 16


class StructLayout:
    """The layout of a struct, optionally after a prefix of so many bytes that the caller fills."""

    def __init__(self, types: Sequence[pa.DataType], prefix: int = 0) -> None:
        self.types = tuple(types)
        self.prefix = prefix
        self.head = prefix + (len(self.types) + 7) // 8
        self.variable = [j for j, kind in enumerate(self.types) if fixed_width(kind) is None]
        formats = [_record_of(fixed_width(kind) or 4) for kind in self.types]
        starts = np.cumsum([self.head, *(one.itemsize for one in formats)]).tolist()
        self.width: int = starts[-1]
        self.record = np.dtype(
            {
                "names": [str(j) for j in range(len(formats))],
                "formats": formats,
                "offsets": starts[:-1],
                "itemsize": self.width,
            }
        )

    @property
    def fixed_width(self) -> int | None:
        """The width of every value, or None if a field is variable."""
        return None if self.variable else self.width

    def encode(self, columns: Sequence[pa.Array], prefix: Bytes | None = None) -> pa.BinaryArray:
        """Return one value per row of the columns."""
        bodies = {j: encode(columns[j]) for j in self.variable}
        matrix = self.encode_fixed(columns, bodies)
        if prefix is not None:
            matrix[:, : self.prefix] = prefix
        return ragged.join([ragged.from_fixed(matrix), *bodies.values()])

    def encode_fixed(
        self, columns: Sequence[pa.Array], bodies: dict[int, pa.BinaryArray] | None = None
    ) -> Bytes:
        """Return the part before the variable data, one row per value; the prefix is zero."""
        matrix = np.empty((len(columns[0]), self.width), np.uint8)
        matrix[:, : self.head] = 0
        records = matrix.view(self.record)[:, 0]
        for j, column in enumerate(columns):
            body = bodies.get(j) if bodies else None
            records[str(j)] = to_records(column) if body is None else ragged.lengths(body)
            valid = ragged.validity(column)
            if valid is not None:
                matrix[:, self.prefix + j // 8] |= (~valid).view(np.uint8) << (j % 8)
        return matrix

    def decode(
        self, values: pa.BinaryArray, columns: Sequence[int] | None = None
    ) -> tuple[Bytes, list[pa.Array]]:
        """Return the fixed part of each row (read-only), and the chosen columns (None: all)."""
        chosen = range(len(self.types)) if columns is None else columns
        if not self.variable:
            matrix = ragged.to_matrix(values, self.width)
            return matrix, self.decode_fixed(matrix, chosen)
        if len(values) <= FEW:
            return self.decode_few(values.to_pylist(), chosen)
        whole = ragged.lengths(values).astype(np.int64)
        head = np.full_like(whole, self.width)
        cuts = ragged.cut(values, np.stack([head, whole - head], axis=1))
        matrix = ragged.to_matrix(ragged.piece(cuts, 0, 2), self.width)
        if not any(j in chosen for j in self.variable):
            return matrix, self.decode_fixed(matrix, chosen)
        records = self._records(matrix)
        sizes = [records[str(j)].astype(np.int64) for j in self.variable]
        cuts = ragged.cut(values, np.stack([head, *sizes], axis=1))
        bodies = {
            j: ragged.piece(cuts, index, len(self.variable) + 1)
            for index, j in enumerate(self.variable, start=1)
            if j in chosen
        }
        return matrix, self.decode_fixed(matrix, chosen, bodies)

    def decode_few(
        self, values: Sequence[bytes], columns: Sequence[int]
    ) -> tuple[Bytes, list[pa.Array]]:
        """The same for a look-up of few keys: cutting them costs less than a call of NumPy."""
        heads = b"".join([value[: self.width] for value in values])
        if len(heads) != len(values) * self.width:
            raise ValueError("a value too short for a row")
        matrix = np.frombuffer(heads, np.uint8).reshape(len(values), self.width)
        records = self._records(matrix)
        starts = [self.width] * len(values)
        bodies = {}
        for j in self.variable:
            ends = [
                start + size for start, size in zip(starts, records[str(j)].tolist(), strict=True)
            ]
            cuts = zip(values, starts, ends, strict=True)
            bodies[j] = pa.array([value[start:end] for value, start, end in cuts], pa.binary())
            starts = ends
        if starts != list(map(len, values)):
            raise ValueError("the lengths of the pieces do not add up to the length of the value")
        return matrix, self.decode_fixed(matrix, columns, bodies)

    def decode_fixed(
        self,
        matrix: Bytes,
        columns: Sequence[int] | None = None,
        bodies: dict[int, pa.BinaryArray] | None = None,
    ) -> list[pa.Array]:
        """Turn rows of the fixed part, and the bodies of variable columns, into columns."""
        records = self._records(matrix)
        result = []
        any_null = matrix[:, self.prefix : self.head].any()
        for j in range(len(self.types)) if columns is None else columns:
            valid = None
            if any_null:
                nulls = matrix[:, self.prefix + j // 8] & np.uint8(1 << j % 8)
                valid = nulls == 0 if nulls.any() else None
            body = bodies.get(j) if bodies else None
            if body is None:
                result.append(from_records(records[str(j)], self.types[j], valid))
            else:
                body = body if valid is None else ragged.with_validity(body, valid)
                result.append(decode(body, self.types[j]))
        return result

    def _records(self, matrix: Bytes) -> Records:
        return np.ascontiguousarray(matrix).view(self.record)[:, 0]


@lru_cache(maxsize=256)
def _layout(data_type: pa.DataType) -> StructLayout:
    return StructLayout([field.type for field in data_type])


@cache
def _record_of(width: int) -> np.dtype[Any]:
    return np.dtype(f"<u{width}" if width in (1, 2, 4, 8) else f"V{width}")


def _as_bytes(records: Records, width: int) -> Bytes:
    return np.ascontiguousarray(records).view(np.uint8).reshape(len(records), width)


def _as_records(matrix: Bytes) -> Records:
    return np.ascontiguousarray(matrix).view(_record_of(matrix.shape[1]))[:, 0]


def _element_type(data_type: pa.DataType) -> pa.DataType:
    if arrow_types.is_map(data_type):
        return pa.struct([data_type.key_field, data_type.item_field])
    return data_type.value_type


def _same_lists(left: pa.Array, right: pa.Array) -> Flags:
    """Tell which lists or maps have the same elements; a null has what any other one has."""
    (left_bounds, left_elements), (right_bounds, right_elements) = _apart(left), _apart(right)
    counts = np.diff(left_bounds)
    equal: Flags = counts == np.diff(right_bounds)
    for array in (left, right):  # What a null hides is nothing.
        valid = ragged.validity(array)
        if valid is not None:
            equal |= ~valid
            counts = counts * valid
    rows = np.flatnonzero(equal & (counts > 0))
    # Most of those that differ do in the last element, to which others are added.
    last = [(left_elements, left_bounds), (right_elements, right_bounds)]
    left_last, right_last = (array.take(pa.array(at[rows + 1] - 1)) for array, at in last)
    equal[rows] = same(left_last, right_last)
    rows = rows[equal[rows]]
    counts = counts[rows]
    elements = same(
        left_elements.take(pa.array(ragged.ranges(left_bounds[rows], counts))),
        right_elements.take(pa.array(ragged.ranges(right_bounds[rows], counts))),
    )
    equal[rows[np.repeat(np.arange(len(rows)), counts)[~elements]]] = False
    return equal


def _apart(array: pa.Array) -> tuple[npt.NDArray[np.int64], pa.Array]:
    """Return where the elements of lists or maps begin, and where the last end; and all of them."""
    count = len(array)
    if count == 0:
        return np.zeros(1, np.int64), pa.nulls(0, _element_type(array.type))
    bounds = np.frombuffer(array.buffers()[1], np.int32, count + 1, array.offset * 4)
    if arrow_types.is_map(array.type):
        entry = _element_type(array.type)
        elements = pa.StructArray.from_arrays([array.keys, array.items], fields=list(entry))
    else:
        elements = array.values
    first, last = int(bounds[0]), int(bounds[-1])
    return (bounds - first).astype(np.int64), elements.slice(first, last - first)


def _encode_lists(array: pa.Array) -> pa.BinaryArray:
    """Encode lists or maps, none of which is null: their elements are contiguous."""
    count = len(array)
    if count == 0:
        return pa.array([], pa.binary())
    bounds, elements = _apart(array)
    valid = ragged.validity(elements)
    flags = np.ones(len(elements), np.uint8) if valid is None else valid.view(np.uint8)
    counts = np.diff(bounds)
    pieces = [
        ragged.from_fixed(counts.astype("<u4").view(np.uint8).reshape(count, 4)),
        ragged.over(bounds.astype(np.int32), flags),
    ]
    body = encode(elements)
    if fixed_width(elements.type) is None:
        sizes = ragged.lengths(body).astype("<u4")
        pieces.append(ragged.over(ragged.offsets_of(counts * 4), sizes.view(np.uint8)))
    body_bounds = np.ascontiguousarray(ragged.offsets(body)[bounds])
    pieces.append(ragged.over(body_bounds, body.buffers()[2] or np.zeros(0, np.uint8)))
    return ragged.join(pieces)


def _decode_lists(values: pa.BinaryArray, data_type: pa.DataType) -> pa.Array:
    """Decode lists or maps: their elements are the pieces of the rows one after the other."""
    valid = ragged.validity(values)
    dense = values if valid is None else values.drop_null()
    element = _element_type(data_type)
    width = fixed_width(element)
    whole = ragged.lengths(dense).astype(np.int64)
    head = np.full_like(whole, 4)
    cuts = ragged.cut(dense, np.stack([head, whole - head], axis=1))
    counts = ragged.data(ragged.piece(cuts, 0, 2)).view("<u4").astype(np.int64)
    lengths_size = counts * (4 if width is None else 0)
    rest = whole - head - counts - lengths_size
    cuts = ragged.cut(dense, np.stack([head, counts, lengths_size, rest], axis=1))
    flags, body = ragged.piece(cuts, 1, 4), ragged.piece(cuts, 3, 4)
    if width is None:
        sizes = ragged.data(ragged.piece(cuts, 2, 4)).view("<u4").astype(np.int64)
    else:
        sizes = np.full(len(ragged.data(flags)), width, np.int64)
    # The elements of a row must end where the row ends, not only those of the last row.
    ends = np.concatenate([[0], np.cumsum(sizes)])[np.cumsum(counts)]
    if not np.array_equal(ends, np.cumsum(rest)):
        raise ValueError("the lengths of the elements do not add up to the length of the list")
    present = ragged.data(flags) != 0
    bytes_of_elements = ragged.over(
        ragged.offsets_of(sizes), ragged.data(body), None if present.all() else present
    )
    elements = decode(bytes_of_elements, element)
    if valid is not None:
        spread_counts = np.zeros(len(valid), np.int64)
        spread_counts[valid] = counts
        counts = spread_counts
    if arrow_types.is_map(data_type) and (elements.null_count or elements.field(0).null_count):
        raise ValueError("a key of a map is null")
    buffers = [ragged.bitmap(valid), pa.py_buffer(ragged.offsets_of(counts))]
    return pa.Array.from_buffers(data_type, len(values), buffers, children=[elements])
