"""Keys of any length as 64-bit numbers: a hash of their bytes, of all keys of a batch at once.

A word of 8 bytes at a time: as many passes as the longest key has words. Nothing that is stored
depends on it. Two keys may have the same number, and whoever relies on it compares the keys.
"""

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from merge_engine.encoding import ragged

Hashes = npt.NDArray[np.uint64]

_WORD = 8
# Longer keys are rare, and would make many passes over the batch.
_LONG = 32 * _WORD
_PRIME = np.uint64(0x9E3779B185EBCA87)
_SHIFT = np.uint64(29)


def key_hashes(keys: pa.BinaryArray) -> Hashes:
    """Return a number for each key."""
    bounds = ragged.offsets(keys).astype(np.int64)
    starts, sizes = bounds[:-1] - bounds[0], np.diff(bounds)
    words = ragged.words(keys)
    hashes = sizes.astype(np.uint64)
    rows, left = np.arange(len(keys)), sizes
    for at in range(0, _LONG, _WORD):
        more = left > 0
        if not more.all():
            rows, left = rows[more], left[more]
        if len(rows) == 0:
            break
        word = words[starts[rows] + at]
        unused = (_WORD - np.minimum(left, _WORD)).astype(np.uint64) * np.uint64(8)
        mixed = (hashes[rows] ^ (word << unused)) * _PRIME
        hashes[rows] = mixed ^ (mixed >> _SHIFT)
        left = left - _WORD
    for row in np.flatnonzero(sizes > _LONG).tolist():
        hashes[row] = xxhash.xxh64_intdigest(keys[row].as_py())
    return hashes
