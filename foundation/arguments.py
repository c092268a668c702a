"""What callers hand over, checked where it comes in: a wrong type is our error, with what to do.

Each returns what was given, in our type; `what` says in a few words what it is.
"""

from collections.abc import Iterable, Mapping
from math import isfinite
from numbers import Integral, Real
from typing import Any

from foundation.errors import InvalidInput
from foundation.ids import BucketId

_LONGEST_S = 1e9
"""Some thirty years: what is longer overflows the clocks of some platforms."""


def text_of(value: Any, what: str) -> str:
    """Return a text that UTF-8 can write."""
    if not isinstance(value, str):
        raise InvalidInput(f"{what} is a text, not {value!r}")
    try:
        value.encode()
    except UnicodeEncodeError as exc:
        raise InvalidInput(f"{what} is no text that UTF-8 can write: {value!r}") from exc
    return value


def names_of(value: Any, what: str = "columns") -> tuple[str, ...]:
    """Return names of columns, each of them once."""
    names = () if isinstance(value, str | bytes) else _items(value)
    if names is None or isinstance(value, str | bytes):
        raise InvalidInput(f"{what} must be a list of column names, not {value!r}")
    for name in names:
        if not isinstance(name, str):
            raise InvalidInput(f"{what} must be a list of column names, and has {name!r}")
    return tuple(dict.fromkeys(names))


def whole_of(value: Any, what: str, *, least: int | None = None) -> int:
    """Return a whole number, at least so large."""
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise InvalidInput(f"{what} is a whole number, not {value!r}")
    if least is not None and value < least:
        raise InvalidInput(f"{what} is {least} or more, not {value}")
    return int(value)


def seconds_of(value: Any, what: str) -> float:
    """Return a number of seconds, not negative."""
    if not isinstance(value, Real) or isinstance(value, bool):
        raise InvalidInput(f"{what} is a number of seconds, not {value!r}")
    if not isfinite(value) or not 0 <= float(value) <= _LONGEST_S:
        raise InvalidInput(f"{what} is from 0 to {_LONGEST_S:g} seconds, not {value}")
    return float(value)


def bucket_of(value: Any) -> BucketId:
    """Return a bucket."""
    items = None if isinstance(value, str | bytes | Mapping) else _items(value)
    if items is None or len(items) != 2:
        raise InvalidInput(f"a bucket is (partition, number), as of `bucket_ids()`, not {value!r}")
    return BucketId(*(whole_of(item, "of a bucket, each part") for item in items))


def buckets_of(value: Any) -> list[BucketId]:
    """Return buckets, each of them once."""
    items = None if isinstance(value, str | bytes) else _items(value)
    if items is None:
        raise InvalidInput(f"buckets are a list of some of `bucket_ids()`, not {value!r}")
    return list(dict.fromkeys(map(bucket_of, items)))


def offsets_of(value: Any, what: str) -> dict[BucketId, int]:
    """Return offsets by bucket."""
    if not isinstance(value, Mapping):
        raise InvalidInput(f"{what} are a dictionary of offsets by bucket, not {value!r}")
    return {
        bucket_of(key): whole_of(offset, f"the offset of bucket {key}", least=0)
        for key, offset in value.items()
    }


def _items(value: Any) -> list[Any] | None:
    return list(value) if isinstance(value, Iterable) else None
