"""Readers of parameter values: from Python, or as text from connector options."""

from collections.abc import Callable
from typing import Any

import pyarrow as pa

from foundation.errors import SchemaError
from merge_engine.encoding.soundness import is_text
from merge_engine.schema.types import parse_type


def read_text(value: Any) -> str:
    """Return a text as it is."""
    if not is_text(value):
        raise ValueError(f"{value!r} is not a text")
    return value


def read_name(value: Any) -> str:
    """Return the name of a column."""
    if not is_text(value) or not value.strip():
        raise ValueError(f"{value!r} is not the name of a column")
    return value


def read_type(value: Any) -> pa.DataType:
    """Return an Arrow type, given as such or by its Spark name."""
    try:
        return parse_type(value)
    except SchemaError as error:
        raise ValueError(str(error)) from error


def read_whole_number(lowest: int, highest: int | None = None) -> Callable[[Any], int]:
    """Return a reader of whole numbers within these bounds, both included."""
    bounds = f"from {lowest} on" if highest is None else f"from {lowest} to {highest}"

    def read(value: Any) -> int:
        is_digits = isinstance(value, str) and value.strip().isascii() and value.strip().isdigit()
        is_whole = isinstance(value, int) and not isinstance(value, bool)
        if not (is_digits or is_whole):
            raise ValueError(f"{value!r} is not a whole number")
        number = int(value)
        if number < lowest or (highest is not None and number > highest):
            raise ValueError(f"{number} is not a whole number {bounds}")
        return number

    return read
