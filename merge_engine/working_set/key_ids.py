"""Keys as 64-bit numbers, for the index.

A key of 8 bytes is its own number. Any other is hashed; two keys may then have the same number, and
whoever finds one compares the keys.
"""

import numpy as np
import pyarrow as pa

from merge_engine.encoding import ragged
from merge_engine.encoding.key_hashes import Hashes, key_hashes

Ids = Hashes

EXACT_WIDTH = 8


def key_ids(keys: pa.BinaryArray, *, exact: bool) -> Ids:
    """Return a number for each key. `exact`: all keys are 8 bytes long."""
    if exact:
        return ragged.data(keys).view(">u8").astype(np.uint64)
    return key_hashes(keys)


def keys_of(ids: Ids) -> pa.BinaryArray:
    """Return the keys that are their own numbers."""
    return ragged.from_fixed(ids.astype(">u8").view(np.uint8).reshape(-1, EXACT_WIDTH))
