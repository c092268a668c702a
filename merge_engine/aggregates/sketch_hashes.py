"""What sketches hash, and how: MurmurHash3 of 128 bits, as every DataSketches library computes it.

Whole numbers, floats and strings are hashed as the libraries hash them, so the bytes of sketches
can be merged elsewhere. Other values are hashed to a whole number first. All values of a column at
once: a call of the library for each would take longer than everything else that a put does.
"""

from decimal import Context, Decimal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from xxhash import xxh64_intdigest

from merge_engine.encoding import ragged

Hashes = npt.NDArray[np.uint64]

_TEXTS = (pa.string(), pa.large_string(), pa.string_view())
_BYTES = (pa.binary(), pa.large_binary(), pa.binary_view())
_EXACT = Context(prec=76)
_LEAST, _MOST = -(2**63), 2**63 - 1
_MICROSECONDS = {"s": 1_000_000, "ms": 1_000}

_SEED = np.uint64(9001)
_C1 = np.uint64(0x87C37B91114253D5)
_C2 = np.uint64(0x4CF5AD432745937F)
_MIX = (np.uint64(0xFF51AFD7ED558CCD), np.uint64(0xC4CEB9FE1A85EC53))
_ADDED = (np.uint64(0x52DCE729), np.uint64(0x38495AB5))
_BLOCK, _WORD = 16, 8


def is_text(kind: pa.DataType) -> bool:
    """Whether values of this type are strings."""
    return kind in _TEXTS


def is_bytes(kind: pa.DataType) -> bool:
    """Whether values of this type are strings of bytes."""
    return kind in _BYTES or bool(pa.types.is_fixed_size_binary(kind))


def hash_values(values: pa.Array) -> tuple[Hashes, Hashes]:
    """Return the two halves of the hash of each value; none of them is null."""
    kind = values.type
    if is_text(kind):
        texts = values.cast(pa.string()).view(pa.binary())
        first, second = _murmur_bytes(texts)
        empty = ragged.lengths(texts) == 0
        if empty.any():  # The libraries skip them, so they count as a number.
            number = _murmur_words(np.array([_hash(b"")], np.int64).view(np.uint64))
            first[empty], second[empty] = number
        return first, second
    return _murmur_words(_numbers(values).view(np.uint64))


def _numbers(values: pa.Array) -> npt.NDArray[np.int64] | npt.NDArray[np.float64]:
    """Return values as the whole numbers or floats that are hashed."""
    kind = values.type
    if pa.types.is_decimal(kind):
        return _hash_all([_digits(number) for number in values.to_pylist()])
    if is_bytes(kind):
        return _hash_all(values.to_pylist())
    if pa.types.is_timestamp(kind):
        return _instants(values.view(pa.int64()).to_numpy(), kind.unit)
    if pa.types.is_date32(kind):
        values = values.view(pa.int32())
    numbers: npt.NDArray[np.generic] = values.to_numpy(zero_copy_only=False)
    if numbers.dtype.kind == "f":
        floats = numbers.astype(np.float64) + 0.0  # -0.0 is 0.0.
        floats[np.isnan(floats)] = np.nan
        return floats
    return numbers.astype(np.int64)


def _instants(numbers: npt.NDArray[np.int64], unit: str) -> npt.NDArray[np.int64]:
    """Return instants in microseconds; a hash for those that are not so many, or beyond 64 bits."""
    if unit == "us":
        return numbers
    if unit == "ns":
        whole, rest = np.divmod(numbers, 1_000)
        for row in np.flatnonzero(rest).tolist():
            whole[row] = _hash(b"%d.%03d" % (whole[row], rest[row]))
        return whole
    factor = _MICROSECONDS[unit]
    microseconds = numbers * factor
    beyond = (numbers > _MOST // factor) | (numbers < -(-_LEAST // factor))
    for row in np.flatnonzero(beyond).tolist():
        microseconds[row] = _hash(b"%d" % (int(numbers[row]) * factor))
    return microseconds


def _digits(number: Decimal) -> bytes:
    """Return the same bytes for 1.5 and 1.50, as the scale may differ between batches."""
    return f"{number.normalize(_EXACT):f}".encode()


def _hash_all(contents: list[bytes]) -> npt.NDArray[np.int64]:
    return np.fromiter(map(_hash, contents), np.int64, len(contents))


def _hash(content: bytes) -> int:
    """Return a hash in the range of BIGINT."""
    return xxh64_intdigest(content) - (1 << 63)


def _murmur_words(words: Hashes) -> tuple[Hashes, Hashes]:
    """Hash values of 8 bytes each."""
    first = np.full(len(words), _SEED)
    first ^= _mix_first(words)
    return _finish(first, np.full(len(words), _SEED), np.full(len(words), _WORD, np.uint64))


def _murmur_bytes(values: pa.BinaryArray) -> tuple[Hashes, Hashes]:
    """Hash values of any length: in as many passes as the longest has blocks."""
    bounds = ragged.offsets(values).astype(np.int64)
    starts, sizes = bounds[:-1] - bounds[0], np.diff(bounds)
    words = ragged.words(values)
    first, second = np.full(len(values), _SEED), np.full(len(values), _SEED)
    blocks = sizes // _BLOCK
    for number in range(int(blocks.max(initial=0))):
        rows = np.flatnonzero(blocks > number)
        at = starts[rows] + number * _BLOCK
        one, other = first[rows] ^ _mix_first(words[at]), second[rows]
        one = (_rotate(one, 27) + other) * np.uint64(5) + _ADDED[0]
        other ^= _mix_second(words[at + _WORD])
        first[rows] = one
        second[rows] = (_rotate(other, 31) + one) * np.uint64(5) + _ADDED[1]
    # What is left of a block: up to 8 bytes, and up to 7 more.
    rest, at = sizes % _BLOCK, starts + blocks * _BLOCK
    rows = np.flatnonzero(rest)
    first[rows] ^= _mix_first(_lowest(words[at[rows]], rest[rows]))
    rows = np.flatnonzero(rest > _WORD)
    second[rows] ^= _mix_second(_lowest(words[at[rows] + _WORD], rest[rows] - _WORD))
    return _finish(first, second, sizes.astype(np.uint64))


def _lowest(words: Hashes, count: npt.NDArray[np.int64]) -> Hashes:
    """Return the words with all but their lowest `count` bytes, one at least, set to zero."""
    unused = (_WORD - np.minimum(count, _WORD)).astype(np.uint64) * np.uint64(8)
    lowest: Hashes = (words << unused) >> unused
    return lowest


def _mix_first(words: Hashes) -> Hashes:
    return _rotate(words * _C1, 31) * _C2


def _mix_second(words: Hashes) -> Hashes:
    return _rotate(words * _C2, 33) * _C1


def _finish(first: Hashes, second: Hashes, sizes: Hashes) -> tuple[Hashes, Hashes]:
    first ^= sizes
    second ^= sizes
    first += second
    second += first
    _avalanche(first)
    _avalanche(second)
    first += second
    second += first
    return first, second


def _avalanche(hashes: Hashes) -> None:
    for factor in _MIX:
        hashes ^= hashes >> np.uint64(33)
        hashes *= factor
    hashes ^= hashes >> np.uint64(33)


def _rotate(values: Hashes, bits: int) -> Hashes:
    return (values << np.uint64(bits)) | (values >> np.uint64(64 - bits))
