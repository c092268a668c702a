"""Keys as bytes whose order (that of memcmp, and so of RocksDB) is the order of the keys.

    bool                       1 byte, 0 or 1
    int8 ... int64, date32,
    timestamp[us], decimal128  big-endian with the sign bit flipped, 1 to 16 bytes
    string, binary             as the last column: the bytes
                               before it: every 00 as 00 FF, then 00 00 as the end

A composite key is its columns one after the other. No key is null. Strings are ordered by their
UTF-8 bytes, which is the order of their code points.

Keys are stored in views, and those of partitions in lists of them (`catalog`, and in ZooKeeper):
this layout is part of the formats of all three.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types as arrow_types

from foundation.errors import InvalidKey, SchemaError
from merge_engine.encoding import ragged
from merge_engine.encoding.codec import fixed_width, from_records, to_records
from merge_engine.encoding.ragged import Bytes

_ESCAPED_ZERO = b"\x00\xff"
_END = b"\x00\x00"
_SIGN = np.uint64(1 << 63)


def is_key_type(data_type: pa.DataType) -> bool:
    """Tell whether a key column may have this type."""
    return (
        data_type in (pa.bool_(), pa.string(), pa.binary(), pa.date32())
        or arrow_types.is_signed_integer(data_type)
        or arrow_types.is_decimal128(data_type)
        or (arrow_types.is_timestamp(data_type) and data_type.unit == "us")
    )


class KeyCodec:
    """Encodes and decodes the keys of one table, whole batches at a time."""

    def __init__(self, types: Sequence[pa.DataType]) -> None:
        self.types = tuple(types)
        if not self.types:
            raise SchemaError("a key needs at least one column")
        for data_type in self.types:
            if not is_key_type(data_type):
                raise SchemaError(f"type {data_type} cannot be a key")
        self._widths = [fixed_width(data_type) for data_type in self.types]

    @property
    def width(self) -> int | None:
        """How many bytes every key takes, or None if that varies."""
        widths = [width for width in self._widths if width is not None]
        return sum(widths) if len(widths) == len(self._widths) else None

    def encode(self, columns: Sequence[pa.Array]) -> pa.BinaryArray:
        """Return one key per row, such that `key(a) < key(b)` iff `a < b` as tuples."""
        for expected, column in zip(self.types, columns, strict=True):
            if column.type != expected:
                raise ValueError(f"expected a key column of type {expected}, got {column.type}")
            if column.null_count:
                raise InvalidKey("a key is null; filter such rows out, or give them a key")
        pieces: list[pa.BinaryArray] = []
        fixed: list[Bytes] = []  # neighbours of fixed width go together
        for position, column in enumerate(columns):
            if self._widths[position] is not None:
                fixed.append(_to_big_endian(column))
                continue
            if fixed:
                pieces.append(_side_by_side(fixed))
                fixed = []
            last = position == len(columns) - 1
            pieces.extend(_encode_bytes(column, last=last))
        if fixed:
            pieces.append(_side_by_side(fixed))
        return ragged.join(pieces)

    def numbers(self, columns: Sequence[pa.Array]) -> npt.NDArray[np.uint64] | None:
        """Return keys of 8 bytes as big-endian numbers, if that is less than to encode them."""
        column = columns[0]
        if self._widths != [8] or column.type != self.types[0] or column.null_count:
            return None
        if len(column) == 0:
            return np.zeros(0, np.uint64)
        return np.frombuffer(column.buffers()[1], np.uint64, len(column), column.offset * 8) ^ _SIGN

    def decode(self, keys: pa.BinaryArray) -> list[pa.Array]:
        """Turn keys back into columns. Bytes that are no key are a `ValueError`."""
        if None not in self._widths:
            return self._decode_fixed(keys)
        result = []
        rest = keys
        for position, (data_type, width) in enumerate(zip(self.types, self._widths, strict=True)):
            if position == len(self.types) - 1:
                result.append(_decode_one(rest, data_type, width))
                break
            whole = ragged.lengths(rest).astype(np.int64)
            if width is not None:
                size = np.full_like(whole, width)
                gap = np.zeros_like(whole)
            else:
                # Every 00 within the value is followed by FF, so the first 00 00 is its end.
                found = pc.find_substring(rest, pattern=_END)
                size = found.to_numpy(zero_copy_only=False).astype(np.int64)
                gap = np.full_like(whole, len(_END))
            value, _, rest = ragged.split(rest, np.stack([size, gap, whole - size - gap], axis=1))
            if width is None:
                value = pc.replace_substring(
                    value, pattern=_ESCAPED_ZERO, replacement=_ESCAPED_ZERO[:1]
                )
            result.append(_decode_one(value, data_type, width))
        return result

    def _decode_fixed(self, keys: pa.BinaryArray) -> list[pa.Array]:
        widths = [width for width in self._widths if width is not None]
        matrix = ragged.to_matrix(keys, sum(widths))
        ends = np.cumsum(widths).tolist()
        return [
            _from_big_endian(matrix[:, end - width : end], data_type)
            for data_type, width, end in zip(self.types, widths, ends, strict=True)
        ]


def _side_by_side(matrices: list[Bytes]) -> pa.BinaryArray:
    whole = matrices[0] if len(matrices) == 1 else np.concatenate(matrices, axis=1)
    return ragged.from_fixed(whole)


def _to_big_endian(column: pa.Array) -> Bytes:
    """Return fixed-width values as rows of bytes that are ordered like the values."""
    records = to_records(column)
    width = records.dtype.itemsize
    words: npt.NDArray[Any]
    if width == 16:
        words = records.view("<u8").reshape(-1, 2)[:, ::-1].astype(">u8")
    else:
        words = records.astype(f">u{width}").reshape(-1, 1)
    matrix = words.view(np.uint8).reshape(len(records), width)
    if not arrow_types.is_boolean(column.type):
        matrix[:, 0] ^= 0x80
    return matrix


def _from_big_endian(matrix: Bytes, data_type: pa.DataType) -> pa.Array:
    matrix = np.array(matrix, order="C")
    width = matrix.shape[1]
    if not arrow_types.is_boolean(data_type):
        matrix[:, 0] ^= 0x80
    if width == 16:
        words = matrix.view(">u8")[:, ::-1].astype("<u8")
        records = np.ascontiguousarray(words).view("V16")[:, 0]
    else:
        records = matrix.view(f">u{width}")[:, 0].astype(f"<u{width}")
    return from_records(records, data_type, None)


def _encode_bytes(column: pa.Array, *, last: bool) -> list[pa.BinaryArray]:
    values = ragged.with_validity(column.view(pa.binary()), None)
    if last:
        return [values]
    if (ragged.data(values) == 0).any():
        values = pc.replace_substring(values, pattern=b"\x00", replacement=_ESCAPED_ZERO)
    return [values, ragged.from_fixed(np.zeros((len(values), len(_END)), np.uint8))]


def _decode_one(values: pa.BinaryArray, data_type: pa.DataType, width: int | None) -> pa.Array:
    if width is not None:
        return _from_big_endian(ragged.to_matrix(values, width), data_type)
    return values.cast(data_type)
