"""The row of a key, as the page shows it: looked up as any other client does, as text."""

import json
from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from foundation.errors import InvalidInput
from merge_engine.encoding.soundness import readable_rows
from merge_engine.schema.types import type_name
from recovery.reader.isolation import Isolation
from server.client.cluster import Cluster

_MOST_CHARACTERS = 2_000


def row_of(cluster: Cluster, asked: Mapping[str, str]) -> dict[str, Any]:
    """Return the committed row of a key. `asked`: `table`, and the key's columns as `key.NAME`.

    InvalidInput if the key is not one of this table.
    """
    table = cluster.table(asked.get("table", ""))
    key = {}
    for column in table.schema.key_columns:
        text = asked.get(f"key.{column.name}")
        if text is None:
            raise InvalidInput(f"a key of table {table.name} has a value for {column.name}, too")
        try:
            key[column.name] = pa.array([text]).cast(column.type)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as exc:
            raise InvalidInput(
                f"{column.name} is a {type_name(column.type)}, not {text!r}"
            ) from exc
    found = table.lookup(pa.table(key), isolation=Isolation.COMMITTED)
    [row] = readable_rows(found)
    return {"row": {name: _shown(value) for name, value in row.items()}}


def _shown(value: Any) -> str | None:
    if value is None:
        return None
    text = value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]} ..."
