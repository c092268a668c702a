"""Spark's `xxhash64`, so that every process finds the bucket that Spark finds.

The hash of a row starts from 42 and goes through its columns; the hash of a column is XXH64 of the
value's bytes with the hash so far as its seed, and a null leaves that as it is. The bytes are

    bool, int8, int16, int32, date32                  the value as int32, little-endian
    int64, timestamp, decimal of up to 18 digits      the (unscaled) value as int64, little-endian
    string, binary                                    the bytes
    decimal of more digits                            the unscaled value, big-endian, two's
                                                        complement, as few bytes as hold it

Inputs of 4 and of 8 bytes take a short path in XXH64 that is a dozen NumPy operations. Longer ones
go through the `xxhash` library value by value: its loop over 32-byte stripes ends at another place
for every length, and making the bytes objects costs as much as hashing them.
"""

from collections.abc import Iterable, Sequence
from itertools import repeat

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash
from pyarrow import types as arrow_types

from foundation.errors import SchemaError
from merge_engine.encoding import ragged
from merge_engine.encoding.codec import to_records

Hashes = npt.NDArray[np.uint64]

_SEED = 42
_PRIME_1 = np.uint64(0x9E3779B185EBCA87)
_PRIME_2 = np.uint64(0xC2B2AE3D27D4EB4F)
_PRIME_3 = np.uint64(0x165667B19E3779F9)
_PRIME_4 = np.uint64(0x85EBCA77C2B2AE63)
_PRIME_5 = np.uint64(0x27D4EB2F165667C5)
_LONG_DECIMAL_DIGITS = 18
_FEW = 64


def spark_xxhash64(columns: Sequence[pa.Array]) -> npt.NDArray[np.int64]:
    """Return what `xxhash64(columns...)` returns in Spark, row by row."""
    hashes: Hashes | None = None  # None: all still at the seed
    for column in columns:
        hashed = _hash_column(column, hashes)
        valid = ragged.validity(column)
        if valid is not None:
            hashed = np.where(valid, hashed, np.uint64(_SEED) if hashes is None else hashes)
        hashes = hashed
    if hashes is None:
        raise ValueError("no column to hash")
    return hashes.view(np.int64)


def bucket_of(columns: Sequence[pa.Array], buckets: int) -> npt.NDArray[np.int32]:
    """Return the bucket of each row: `pmod(xxhash64(columns...), buckets)`."""
    if buckets < 1:
        raise ValueError(f"a table has at least one bucket, not {buckets}")
    # NumPy's remainder has the sign of the divisor, as pmod has.
    return np.mod(spark_xxhash64(columns), np.int64(buckets)).astype(np.int32)


def bucket_of_few(columns: Sequence[Sequence[int | str]], buckets: int) -> list[int]:
    """Return the same for a few keys of 64-bit numbers and of texts, as Python has them."""
    found = []
    for key in zip(*columns, strict=True):
        seed = _SEED
        for value in key:
            if isinstance(value, str):
                seed = xxhash.xxh64_intdigest(value.encode(), seed)
            else:
                seed = xxhash.xxh64_intdigest(value.to_bytes(8, "little", signed=True), seed)
        # A remainder of the number with its sign, which is negative from half of the range on.
        found.append((seed - (seed >> 63 << 64)) % buckets)
    return found


def _hash_column(column: pa.Array, seeds: Hashes | None) -> Hashes:
    data_type = column.type
    if data_type in (pa.string(), pa.binary()):
        return _hash_bytes(ragged.without_nulls(column.view(pa.binary())), seeds)
    if arrow_types.is_decimal128(data_type):
        words = to_records(column).view("<u8").reshape(-1, 2)
        if data_type.precision <= _LONG_DECIMAL_DIGITS:
            return _hash_longs(words[:, 0], seeds)
        return _hash_bytes(_shortest_big_endian(words), seeds)
    records = to_records(column)
    width = records.dtype.itemsize
    if arrow_types.is_signed_integer(data_type) and width < 8:
        return _hash_integers(records.view(f"<i{width}").astype(np.int32), seeds)
    if data_type in (pa.bool_(), pa.date32()):
        return _hash_integers(records.astype(np.uint32), seeds)
    if data_type == pa.int64() or arrow_types.is_timestamp(data_type):
        return _hash_longs(records, seeds)
    raise SchemaError(f"type {data_type} cannot be hashed")


def _hash_longs(values: npt.NDArray[np.uint64], seeds: Hashes | None) -> Hashes:
    if len(values) <= _FEW:
        return _hash_few(values, seeds)
    lanes = values * _PRIME_2
    lanes = _rotate(lanes, 31)
    lanes *= _PRIME_1
    lanes ^= _start(seeds, 8)
    hashes = _rotate(lanes, 27)
    hashes *= _PRIME_1
    hashes += _PRIME_4
    return _avalanche(hashes)


def _hash_integers(values: npt.NDArray[np.int32 | np.uint32], seeds: Hashes | None) -> Hashes:
    if len(values) <= _FEW:
        return _hash_few(values, seeds)
    lanes = values.view(np.uint32).astype(np.uint64)
    lanes *= _PRIME_1
    lanes ^= _start(seeds, 4)
    hashes = _rotate(lanes, 23)
    hashes *= _PRIME_2
    hashes += _PRIME_3
    return _avalanche(hashes)


def _hash_few(values: npt.NDArray[np.generic], seeds: Hashes | None) -> Hashes:
    """The same value by value: for a few, a dozen NumPy operations are many."""
    data, width = values.tobytes(), values.itemsize
    each: Iterable[int] = repeat(_SEED) if seeds is None else seeds.tolist()
    parts = [data[at : at + width] for at in range(0, len(data), width)]
    return np.array(list(map(xxhash.xxh64_intdigest, parts, each)), np.uint64)


def _start(seeds: Hashes | None, size: int) -> Hashes:
    first = np.full(1, _SEED, np.uint64) if seeds is None else seeds
    return first + _PRIME_5 + np.uint64(size)


def _rotate(values: Hashes, bits: int) -> Hashes:
    return (values << np.uint64(bits)) | (values >> np.uint64(64 - bits))


def _avalanche(hashes: Hashes) -> Hashes:
    hashes ^= hashes >> np.uint64(33)
    hashes *= _PRIME_2
    hashes ^= hashes >> np.uint64(29)
    hashes *= _PRIME_3
    hashes ^= hashes >> np.uint64(32)
    return hashes


def _hash_bytes(values: pa.BinaryArray, seeds: Hashes | None) -> Hashes:
    each: Iterable[int] = repeat(_SEED) if seeds is None else seeds.tolist()
    digests = map(xxhash.xxh64_intdigest, ragged.to_pybytes_list(values), each)
    return np.fromiter(digests, np.uint64, len(values))


def _shortest_big_endian(words: npt.NDArray[np.uint64]) -> pa.BinaryArray:
    """Return 128-bit numbers as Java's `BigInteger.toByteArray` writes them."""
    matrix = np.ascontiguousarray(words[:, ::-1]).astype(">u8").view(np.uint8)
    sign = np.where(matrix[:, :1] & 0x80, np.uint8(0xFF), np.uint8(0))
    # A leading byte can go if it only repeats the sign, and so does the top bit of the next one.
    differs = matrix != sign
    leading = np.where(differs.any(axis=1), differs.argmax(axis=1), 16)
    rows = np.arange(len(matrix))
    next_byte = matrix[rows, np.minimum(leading, 15)]
    keep_one = (leading == 16) | ((next_byte ^ sign[:, 0]) & 0x80 != 0)
    skipped = leading - keep_one
    return ragged.split(ragged.from_fixed(matrix), np.stack([skipped, 16 - skipped], axis=1))[1]
