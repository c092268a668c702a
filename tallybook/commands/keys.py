"""Values of columns as somebody types them: `customer_id=7`, `day=2026-11-18`."""

from collections.abc import Iterable, Sequence

import pyarrow as pa

from foundation.errors import InvalidInput
from foundation.suggestions import did_you_mean
from merge_engine.schema.schema import Column
from merge_engine.schema.types import type_name


def read_values(
    columns: Sequence[Column], texts: Iterable[str], table: str
) -> dict[str, pa.Scalar]:
    """Return a value for each of the columns, of its type; InvalidInput says which is missing."""
    known = {column.name: column for column in columns}
    found: dict[str, pa.Scalar] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals and len(known) == 1:
            [name], value = known, text
        elif not equals:
            raise InvalidInput(f"{text!r}: write NAME=VALUE, for {', '.join(known)}")
        if name not in known:
            raise InvalidInput(
                f"give a value for {', '.join(known)} of table {table}, not for {name!r}"
                + did_you_mean(name, known)
            )
        if name in found:
            raise InvalidInput(f"{name} has a value already, and {text!r} is one too many")
        found[name] = read_value(known[name], value)
    missing = [name for name in known if name not in found]
    if missing:
        raise InvalidInput(f"table {table} needs a value for {', '.join(missing)}, too")
    return found


def read_value(column: Column, text: str) -> pa.Scalar:
    """Return the value that a text means; InvalidInput if it is none of the column's type."""
    try:
        return pa.array([text]).cast(column.type)[0]
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as exc:
        raise InvalidInput(f"{column.name} is a {type_name(column.type)}, not {text!r}") from exc
