"""Arrays of byte strings, joined and cut by whole columns.

An Arrow binary array is one buffer of bytes and n + 1 offsets into it: value i is the bytes from
offset i to offset i + 1. So the values of an array without nulls lie one after the other, and
cutting each of them into k pieces is making n * k + 1 offsets over the same buffer. The functions
here rest on that. All of them take sliced arrays, and none goes through the rows in Python.

Offsets are 32 bits wide, as in `pa.binary()`. A result that would need more raises
`ColumnTooLarge`; it never wraps.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from foundation.errors import ColumnTooLarge

Bytes = npt.NDArray[np.uint8]
Flags = npt.NDArray[np.bool_]
Integers = npt.NDArray[np.int64]

_LARGEST_OFFSET = 2**31 - 1
_FEW = 64
_FEWER = "send fewer rows, or ask for fewer keys, at a time"


def offsets(values: pa.BinaryArray) -> npt.NDArray[np.int32]:
    """Return the n + 1 offsets of the values, zero-copy, as they stand in the data buffer."""
    if len(values) == 0:
        return np.zeros(1, np.int32)
    return np.frombuffer(values.buffers()[1], np.int32, len(values) + 1, values.offset * 4)


def lengths(values: pa.BinaryArray) -> npt.NDArray[np.int32]:
    """Return the length of each value in bytes; that of a null is whatever its slot holds."""
    return np.diff(offsets(values))


def data(values: pa.BinaryArray) -> Bytes:
    """Return the bytes of all values one after the other, zero-copy."""
    bounds = offsets(values)
    buffer = values.buffers()[2]
    size = int(bounds[-1] - bounds[0])
    if buffer is None or size == 0:
        return np.zeros(0, np.uint8)
    return np.frombuffer(buffer, np.uint8, size, int(bounds[0]))


def words(values: pa.BinaryArray) -> npt.NDArray[np.uint64]:
    """Return the 8 bytes, little-endian, that begin at each byte of `data`; zeros come after it."""
    padded = np.concatenate([data(values), np.zeros(8, np.uint8)])
    return np.ndarray(len(padded) - 7, "<u8", padded, strides=(1,))


def validity(array: pa.Array) -> Flags | None:
    """Return which values are not null, or None if all are."""
    if array.null_count == 0:
        return None
    first_byte, skipped_bits = divmod(array.offset, 8)
    bits = np.frombuffer(array.buffers()[0], np.uint8, offset=first_byte)
    count = skipped_bits + len(array)
    return np.unpackbits(bits, count=count, bitorder="little")[skipped_bits:].view(np.bool_)


def all_set(flags: Flags) -> bool:
    """Tell whether all flags are set; of a few, sooner than NumPy would."""
    return False not in flags.ravel().tolist() if flags.size <= _FEW else bool(flags.all())


def only_where(flags: Flags, array: pa.Array) -> pa.Array:
    """Return the array, of any type, with nulls where the flag is not set."""
    if all_set(flags):
        return array
    valid = validity(array)
    if valid is not None and not (valid > flags).any():
        return array
    return array.take(pa.array(np.arange(len(array)), mask=~flags))


def bitmap(valid: Flags | None) -> pa.Buffer | None:
    """Return the flags as an Arrow validity buffer."""
    return None if valid is None else pa.py_buffer(np.packbits(valid, bitorder="little"))


def offsets_of(sizes: npt.NDArray[np.integer], first: int = 0) -> npt.NDArray[np.int32]:
    """Return the offsets of values of these sizes, the first of which begins at `first`."""
    bounds = np.empty(sizes.size + 1, np.int64)
    bounds[0] = 0
    np.cumsum(sizes, out=bounds[1:])
    bounds += first
    if bounds[-1] > _LARGEST_OFFSET:
        raise _too_large(bounds[-1])
    return bounds.astype(np.int32)


def over(
    bounds: npt.NDArray[np.int32], buffer: pa.Buffer | Bytes, valid: Flags | None = None
) -> pa.BinaryArray:
    """Return the values between consecutive bounds of a buffer, zero-copy."""
    if not isinstance(buffer, pa.Buffer):
        buffer = pa.py_buffer(buffer)
    return pa.BinaryArray.from_buffers(
        pa.binary(), len(bounds) - 1, [bitmap(valid), pa.py_buffer(bounds), buffer]
    )


def with_validity(values: pa.BinaryArray, valid: Flags | None) -> pa.BinaryArray:
    """Return the same values, zero-copy, with nulls where `valid` is false (None: nowhere)."""
    return over(offsets(values), values.buffers()[2] or np.zeros(0, np.uint8), valid)


def without_nulls(values: pa.BinaryArray) -> pa.BinaryArray:
    """Return the values with every null as the empty string."""
    valid = validity(values)
    if valid is not None and (lengths(values) * ~valid).any():
        return pc.fill_null(values, b"")
    return with_validity(values, None)


def spread(values: pa.BinaryArray, valid: Flags) -> pa.BinaryArray:
    """Put the values, in order, where `valid` is true, and empty ones elsewhere, zero-copy."""
    sizes = np.zeros(len(valid), np.int32)
    sizes[valid] = lengths(values)
    first = int(offsets(values)[0])
    return over(offsets_of(sizes, first), values.buffers()[2] or np.zeros(0, np.uint8))


def join(pieces: Sequence[pa.Array]) -> pa.BinaryArray:
    """Concatenate the pieces element by element. A null counts as empty."""
    pieces = [without_nulls(piece) if piece.null_count else piece for piece in pieces]
    if len(pieces) == 1:
        return pieces[0]
    size = sum(int(bounds[-1]) - int(bounds[0]) for bounds in map(offsets, pieces))
    if size > _LARGEST_OFFSET:
        raise _too_large(size)
    return pc.binary_join_element_wise(*pieces, b"")


def split(values: pa.BinaryArray, piece_lengths: npt.NDArray[np.integer]) -> list[pa.BinaryArray]:
    """Cut value i into consecutive pieces of `piece_lengths[i]`; return one array per piece.

    The values have no nulls. The lengths of a row must add up to that of its value, else
    `ValueError`. Each returned array has its bytes in a buffer of its own, starting at 0.
    """
    count = piece_lengths.shape[1]
    cuts = cut(values, piece_lengths)
    return [piece(cuts, index, count) for index in range(count)]


def cut(values: pa.BinaryArray, piece_lengths: npt.NDArray[np.integer]) -> pa.BinaryArray:
    """Cut like `split`, but return the n * k pieces as one array, zero-copy, row by row."""
    count, pieces = piece_lengths.shape
    if count != len(values):
        raise ValueError(f"{count} rows of lengths for {len(values)} values")
    ends = offsets(values)
    bounds = np.empty(count * pieces + 1, np.int64)
    bounds[0] = 0
    np.cumsum(piece_lengths.reshape(-1), out=bounds[1:])
    bounds += ends[0]
    # Every row ends where its value ends: so no row's lengths can reach into the next value.
    if count and (piece_lengths.min() < 0 or not np.array_equal(bounds[::pieces], ends)):
        raise ValueError("the lengths of the pieces do not add up to the length of the value")
    return over(bounds.astype(np.int32), values.buffers()[2] or np.zeros(0, np.uint8))


def piece(cuts: pa.BinaryArray, index: int, count: int) -> pa.BinaryArray:
    """Return piece `index` of every row of the `count` that `cut` made, in its own buffer."""
    return cuts.take(pa.array(np.arange(index, len(cuts), count, dtype=np.int64)))


def from_fixed(matrix: Bytes) -> pa.BinaryArray:
    """Return each row of the matrix as one value, zero-copy if the matrix is contiguous."""
    count, width = matrix.shape
    if count * width > _LARGEST_OFFSET:
        raise _too_large(count * width)
    bounds = np.arange(count + 1, dtype=np.int32)
    bounds *= width
    return over(bounds, np.ascontiguousarray(matrix).reshape(-1))


def to_matrix(values: pa.BinaryArray, width: int) -> Bytes:
    """Return values that are all `width` bytes long as the rows of a matrix, zero-copy.

    The matrix is read-only. A value of another length is a `ValueError`.
    """
    if (lengths(values) != width).any():
        raise ValueError(f"not every value is {width} bytes long")
    return data(values).reshape(len(values), width)


def to_pybytes_list(values: pa.BinaryArray) -> list[bytes]:
    """Return the values as Python bytes, for RocksDB.

    Arrow makes 100,000 of them in about 5 ms; slicing one large bytes object takes three times as
    long, for every slice object is made in Python.
    """
    result: list[bytes] = values.to_pylist()
    return result


def from_pybytes_list(values: Sequence[bytes | None]) -> pa.BinaryArray:
    """Return Python bytes as an array. None becomes null."""
    array = pa.array(values, pa.binary())
    if isinstance(array, pa.ChunkedArray) or (
        len(array) > _FEW and array.nbytes > _LARGEST_OFFSET  # What was lowered for a test.
    ):
        raise _too_large(array.nbytes)
    return array


@contextmanager
def told_if_too_large() -> Iterator[None]:
    """What Arrow raises of more bytes than its offsets count is told as ours."""
    try:
        yield
    except pa.ArrowCapacityError as exc:
        raise ColumnTooLarge(f"{exc}; {_FEWER}") from exc
    except pa.ArrowInvalid as exc:
        if "offset overflow" in str(exc):
            raise ColumnTooLarge(f"{exc}; {_FEWER}") from exc
        raise


def _too_large(size: int) -> ColumnTooLarge:
    return ColumnTooLarge(f"{size:,} bytes in one column; {_FEWER}")


def ranges(starts: npt.NDArray[np.integer], counts: npt.NDArray[np.integer]) -> Integers:
    """Return `start, start + 1, ...` of each start, as many as its count, one after the other."""
    ends = np.cumsum(counts, dtype=np.int64)
    total = int(ends[-1]) if ends.size else 0
    return np.arange(total, dtype=np.int64) + np.repeat(starts - (ends - counts), counts)
