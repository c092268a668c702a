"""Arrays that are not what their types say, in every type that has texts somewhere."""

from collections.abc import Sequence
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa

NO_TEXT = b"\xff\xfeA"
TEXTS = (pa.string(), pa.large_string(), pa.string_view())


def texts(values: Sequence[bytes | None], kind: pa.DataType | None = None) -> pa.Array:
    """Return bytes as an array of texts, as Spark's `cast(binary as string)` does."""
    kind = kind or pa.string()
    same = {pa.string(): pa.binary(), pa.large_string(): pa.large_binary()}
    return pa.array(values, pa.binary()).cast(same.get(kind, pa.binary_view())).view(kind)


def nested() -> dict[str, pa.Array]:
    """Return arrays of two values, of which the second has text that is not UTF-8 in it."""
    both = texts([b"good", NO_TEXT])
    arrays = {str(kind): texts([b"good", NO_TEXT], kind) for kind in TEXTS}
    arrays["long views"] = texts([b"good" * 9, NO_TEXT * 9], pa.string_view())
    return arrays | {
        "dictionary": pa.DictionaryArray.from_arrays(pa.array([0, 1]), both),
        "list": pa.ListArray.from_arrays([0, 1, 2], both),
        "list view": pa.ListViewArray.from_arrays([0, 1], [1, 1], both),
        "fixed-size list": pa.FixedSizeListArray.from_arrays(both, 1),
        "struct": pa.StructArray.from_arrays([pa.array([1, 2]), both], ["n", "text"]),
        "map keys": pa.MapArray.from_arrays([0, 1, 2], both, pa.array([1, 2])),
        "map values": pa.MapArray.from_arrays([0, 1, 2], pa.array(["a", "b"]), both),
        "list of structs": pa.ListArray.from_arrays(
            [0, 1, 2], pa.StructArray.from_arrays([both], ["text"])
        ),
    }


def hidden() -> dict[str, pa.Array]:
    """Return arrays with text that is not UTF-8 where nobody can see it."""
    both = texts([b"good", NO_TEXT])
    second_is_null = pa.array([True, False]).buffers()[1]
    lists = pa.ListArray.from_arrays([0, 1, 2], both)
    null = pa.array([False, True])
    return {
        "behind a null": pa.Array.from_buffers(
            pa.string(), 2, [second_is_null, *both.buffers()[1:]]
        ),
        "behind a null list": pa.ListArray.from_arrays([0, 1, 2], both, mask=null),
        "behind a null struct": pa.StructArray.from_arrays([both], ["text"], mask=null),
        "in an entry that no index points to": pa.DictionaryArray.from_arrays([0, 0], both),
        "in a list that a slice leaves out": lists.slice(0, 1),
    }


def decimals() -> pa.Array:
    """Return two values of DECIMAL(3,0), of which the second has six digits."""
    wide = pa.array([Decimal(1), Decimal(123456)], pa.decimal128(38, 0))
    return pa.Array.from_buffers(pa.decimal128(3, 0), 2, wide.buffers())


def damaged(*offsets: int, data: bytes = b"abcdef") -> pa.Array:
    """Return texts with these offsets, wherever they lead."""
    buffers: list[Any] = [None, pa.py_buffer(np.array(offsets, np.int32)), pa.py_buffer(data)]
    return pa.Array.from_buffers(pa.string(), len(offsets) - 1, buffers)
