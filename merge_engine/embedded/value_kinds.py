"""The kinds of Python's values: which of them can stand in one column without being bent.

Arrow guesses a column's type by its first value. After a date, a time stamp loses its time; beside
one with a time zone, one without is taken for UTC; text beside bytes becomes bytes. So a column
has values of one kind: numbers (whole ones, floats and decimals, which Arrow does not round to each
other), booleans, text, bytes, dates, time stamps with a time zone or without, and so on.
"""

from collections.abc import Iterable, Mapping
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any

import numpy as np

# What pandas has for a value that is not there; by name, as it may not be installed.
_MISSING = ("NaTType", "NAType")
_KINDS: tuple[tuple[tuple[type[Any], ...], str], ...] = (
    ((bool, np.bool_), "booleans"),
    ((int, float, Decimal, np.integer, np.floating), "numbers"),
    ((str,), "text"),
    ((bytes, bytearray, memoryview), "bytes"),
    ((datetime,), "time stamps"),
    ((date,), "dates"),
    ((time,), "times of day"),
    ((timedelta,), "durations"),
    ((Mapping,), "dictionaries"),
    ((list, tuple, np.ndarray), "lists"),
)


def without_missing(values: list[Any]) -> list[Any]:
    """Return the values with None for pandas' own NaT and NA."""
    missing = {kind for kind in set(map(type, values)) if kind.__name__ in _MISSING}
    return [None if type(value) in missing else value for value in values] if missing else values


def check_one_kind(values: Any) -> None:
    """Raise TypeError if these are objects of several kinds, or one that Arrow would cut.

    Arrays of NumPy and series of pandas that have a type of their own are of one kind.
    """
    dtype = getattr(values, "dtype", None)
    if dtype is not None:
        if str(dtype) != "object":
            return
        values = values[values.notna()] if hasattr(values, "notna") else values
        values = values.ravel().tolist() if isinstance(values, np.ndarray) else values.tolist()
    elif not isinstance(values, list):
        return
    found = {_kind(of) for of in set(map(type, values)) - {type(None)}}
    if "time stamps" in found:
        stamps = [value for value in values if isinstance(value, datetime)]
        found.remove("time stamps")
        found |= set(map(_zone, stamps))
        _check_nanoseconds(stamps)
    if len(found) > 1:
        listed = ", ".join(sorted(found))
        raise TypeError(f"values of several kinds ({listed}); make them of one kind")
    if np.float16 in map(type, values):
        raise TypeError("numbers of NumPy's float16 in a list; give an array of them, or floats")


def check_objects(frame: Any) -> None:
    """Check the columns of a data frame of pandas that have no type; another one is not looked at.

    TypeError, which names the column.
    """
    if not (hasattr(frame, "iloc") and hasattr(frame, "columns")):
        return
    for position, name in enumerate(frame.columns):
        try:
            check_one_kind(frame.iloc[:, position])
        except TypeError as error:
            raise TypeError(f"column {name!r}: {error}") from error


def _kind(of: type[Any]) -> str:
    for types, kind in _KINDS:
        if issubclass(of, types):
            return kind
    return of.__name__


def _zone(stamp: datetime) -> str:
    aware = stamp.utcoffset() is not None
    return "time stamps with a time zone" if aware else "time stamps without a time zone"


def _check_nanoseconds(stamps: Iterable[Any]) -> None:
    for stamp in stamps:
        if getattr(stamp, "nanosecond", 0):
            raise TypeError(f"{stamp!r} has digits below a microsecond; round it")
