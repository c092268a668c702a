"""What filters of a query say of keys: which rows alone can pass them.

Spark gives all filters that it could push down, and gets all of them back: whatever is left out
here is only work that is saved. Only keys count: what is aggregated is known when it is merged.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import date
from decimal import Decimal
from itertools import product
from typing import Any, NamedTuple

import pyarrow as pa

from foundation.errors import InvalidInput
from foundation.suggestions import did_you_mean
from merge_engine.merging.routing import partition_key
from merge_engine.schema.schema import Column, Schema
from merge_engine.schema.types import type_name

# More keys are not looked up one by one, and not put together from parts.
MOST_KEYS = 10_000

Allowed = Mapping[str, Sequence[Any]]
"""By column, the values that can pass."""


class Pruned(NamedTuple):
    """`keys`: the only ones that can pass; `partitions`: the only ones that can have such keys."""

    keys: pa.Table | None = None
    partitions: frozenset[bytes] | None = None


def allowed_values(filters: Iterable[Any]) -> dict[str, list[Any]]:
    """Return the values that filters of the forms `column = value` and `column in (...)` let pass.

    All of them hold: where several are about one column, what passes all of them does.
    """
    from pyspark.sql.datasource import EqualNullSafe, EqualTo, In  # noqa: PLC0415

    allowed: dict[str, list[Any]] = {}
    for one in filters:
        if isinstance(one, EqualTo | EqualNullSafe):
            values = [one.value]
        elif isinstance(one, In):
            values = list(one.value)
        else:
            continue
        if len(one.attribute) == 1:
            [name] = one.attribute
            before = allowed.get(name)
            allowed[name] = [v for v in values if before is None or v in before]
    return allowed


def wanted_values(schema: Schema, keys: Allowed) -> dict[str, list[Any]]:
    """Return the values of key columns that a query names by itself, as JSON has them.

    All columns of the key, or all that partition the table: InvalidInput for anything else, for
    what is named is all that may come.
    """
    columns = {column.name: column for column in schema.key_columns}
    for name in keys:
        if name not in columns:
            near = did_you_mean(name, columns)
            raise InvalidInput(f"`keys` names '{name}', which is no column of the key{near}")
    choices = [list(columns), [column.name for column in schema.partition_columns]]
    if not keys or set(keys) not in map(set, choices):
        known = " or of ".join(", ".join(names) for names in choices if names)
        raise InvalidInput(f"`keys` has values of {known}, not of {', '.join(keys) or 'nothing'}")
    allowed = {name: [_from_json(columns[name], one) for one in keys[name]] for name in keys}
    pruned = prune(schema, allowed)
    if pruned.keys is None and (pruned.partitions is None or set(keys) == set(columns)):
        raise InvalidInput(f"`keys` has more than {MOST_KEYS:,} combinations; read all rows")
    return allowed


def both(one: Allowed, other: Allowed) -> dict[str, Sequence[Any]]:
    """Return the values that can pass one and the other."""
    return {**one, **other, **{n: [v for v in one[n] if v in other[n]] for n in one.keys() & other}}


def _from_json(column: Column, value: Any) -> Any:
    """Return a value as Python has it; InvalidInput if it is of another type than the column."""
    kind = _kind(column)
    try:
        if kind is date:
            return date.fromisoformat(value)
        if kind is Decimal:
            return _checked(column, Decimal(str(value)))
    except (ValueError, TypeError, ArithmeticError):
        pass
    else:
        if kind in (bool, int, str) and type(value) is kind:
            return _checked(column, value)
    raise InvalidInput(
        f"`keys` has {value!r} for '{column.name}', which is {type_name(column.type)}; keys of "
        "times and bytes are looked up by table.lookup"
    )


def _checked(column: Column, value: Any) -> Any:
    """Return a value of the column's kind; InvalidInput if the column cannot have it."""
    try:
        pa.array([value], column.type)
    except (pa.ArrowException, OverflowError, UnicodeError) as exc:
        raise InvalidInput(
            f"`keys` has {value!r} for '{column.name}', which is {type_name(column.type)} and has "
            f"no such value ({exc})"
        ) from exc
    return value


def prune(schema: Schema, allowed: Allowed) -> Pruned:
    """Return what the values that can pass say of keys and partitions."""
    if _contradictory(schema, allowed):
        return Pruned(
            keys=pa.table({one.name: pa.array([], one.type) for one in schema.key_columns})
        )
    keys = _combinations(schema.key_columns, allowed)
    if keys is not None:
        return Pruned(keys=keys)
    partitions = _combinations(schema.partition_columns, allowed)
    if partitions is None or not schema.partition_by:
        return Pruned()
    return Pruned(
        partitions=frozenset(partition_key(schema, values) for values in partitions.to_pylist())
    )


def _contradictory(schema: Schema, allowed: Allowed) -> bool:
    """Whether some column of the key cannot have any value."""
    columns = (column for column in schema.key_columns if column.name in allowed)
    return any(_of_type(column, allowed[column.name]) == [] for column in columns)


def _combinations(columns: Sequence[Column], allowed: Allowed) -> pa.Table | None:
    """Return all combinations of the values of these columns; None if they are not known."""
    values = []
    for column in columns:
        known = _of_type(column, allowed[column.name]) if column.name in allowed else None
        if known is None:
            return None
        values.append(known)
    count = 1
    for known in values:
        count *= len(known)
    if count > MOST_KEYS:
        return None
    rows = list(product(*values))
    try:
        return pa.table(
            {
                column.name: pa.array([row[at] for row in rows], column.type)
                for at, column in enumerate(columns)
            }
        )
    except (pa.ArrowException, TypeError, OverflowError, UnicodeError):  # Spark decides then.
        return None


_EXACT: tuple[tuple[Callable[[pa.DataType], bool], type], ...] = (
    (pa.types.is_boolean, bool),
    (pa.types.is_integer, int),
    (pa.types.is_string, str),
    (pa.types.is_binary, bytes),
    (pa.types.is_date, date),
    (pa.types.is_decimal, Decimal),
)


def _kind(column: Column) -> type | None:
    return next((kind for matches, kind in _EXACT if matches(column.type)), None)


def _of_type(column: Column, values: Sequence[Any]) -> list[Any] | None:
    """Return the distinct values, without nulls, which no key is; None if one is of another type.

    Times are left to Spark: a value says nothing of its time zone.
    """
    kind = _kind(column)
    there = [value for value in values if value is not None]
    if kind is None or any(type(value) is not kind for value in there):
        return None
    return list(dict.fromkeys(there))
