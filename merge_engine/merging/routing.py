"""Which rows go to which bucket of which partition."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import date, datetime
from decimal import Decimal
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from foundation.errors import InvalidInput
from merge_engine.encoding.keys import KeyCodec
from merge_engine.encoding.ragged import told_if_too_large
from merge_engine.encoding.soundness import readable_values
from merge_engine.merging.grouping import Positions
from merge_engine.merging.hashing import bucket_of, bucket_of_few
from merge_engine.schema.schema import Column, Schema
from merge_engine.schema.types import type_name


class Route(NamedTuple):
    """Rows of a batch that belong to one bucket: `positions` in the batch, in its order."""

    partition_key: bytes
    bucket: int
    positions: Positions


def route(schema: Schema, keys: Sequence[pa.Array], buckets: int) -> list[Route]:
    """Split rows, given their key columns, by partition and bucket.

    The bucket is `pmod(xxhash64(key columns), buckets)`, as Spark computes it. The partition key is
    the partition columns in the order-preserving encoding; empty for an unpartitioned table.
    """
    size = len(keys[0])
    if size == 0:
        return []
    number = bucket_of(keys, buckets).astype(np.int64) if buckets > 1 else np.zeros(size, np.int64)
    partitions, partition = [b""], np.zeros(size, np.int64)
    if schema.partition_by:
        encoded = _partition_keys(schema, keys).dictionary_encode()
        partitions = encoded.dictionary.to_pylist()
        partition = encoded.indices.to_numpy().astype(np.int64)
    if size == 1:
        return [Route(partitions[0], int(number[0]), np.zeros(1, np.int64))]
    target = partition * buckets + number
    order = np.argsort(target, kind="stable")
    ordered = target[order]
    starts = [0, *(np.flatnonzero(ordered[1:] != ordered[:-1]) + 1).tolist()]
    return [
        Route(partitions[which // buckets], which % buckets, order[start:end])
        for start, end, which in zip(
            starts, [*starts[1:], size], ordered[starts].tolist(), strict=True
        )
    ]


def route_one(key: Sequence[int | str], buckets: int) -> list[Route]:
    """Return the same for one key of a table without partitions, of numbers and texts."""
    [bucket] = bucket_of_few([[value] for value in key], buckets)
    return [Route(b"", bucket, np.zeros(1, np.int64))]


def gather(
    size: int,
    routes: Sequence[Route],
    found: Sequence[pa.RecordBatch],
    columns: pa.Schema,
) -> list[pa.Array]:
    """Return the columns of what was found, in the order of the batch of `size` rows.

    Rows of no route are null.
    """
    if len(routes) == 1 and len(routes[0].positions) == size:  # All of one bucket, in order.
        return [found[0].column(column.name) for column in columns]
    place = np.full(size, -1, np.int64)
    if routes:
        positions = np.concatenate([target.positions for target in routes])
        place[positions] = np.arange(len(positions))
    index = pa.array(place, mask=place < 0)
    with told_if_too_large():
        return [
            pa.chunked_array([batch.column(column.name) for batch in found], column.type)
            .combine_chunks()
            .take(index)
            for column in columns
        ]


def partition_key(schema: Schema, values: Mapping[str, Any]) -> bytes:
    """Return the key of the partition with these values of the partition columns."""
    columns = schema.partition_columns
    if set(values) != {column.name for column in columns}:
        names = ", ".join(column.name for column in columns) or "none"
        given = ", ".join(map(str, values)) or "nothing"
        raise InvalidInput(f"give a value for each partition column ({names}), not for {given}")
    codec = KeyCodec([column.type for column in columns])
    arrays = [_partition_value(column, values[column.name]) for column in columns]
    return bytes(codec.encode(arrays)[0].as_py())


def _partition_value(column: Column, value: Any) -> pa.Array:
    """Return the value as an array of one; it is not bent to fit, as a time to a day would be."""
    if isinstance(value, np.generic):
        value = value.item()
    elif isinstance(value, pa.Scalar) and value.type == column.type and value.is_valid:
        return pa.repeat(value, 1)  # Also dates that Python does not have.
    elif isinstance(value, pa.Scalar):
        [value] = readable_values(pa.repeat(value, 1))
    fits = any(check(column.type) and isinstance(value, types) for check, types in _TAKEN)
    fits = fits and (type(value) is not bool or pa.types.is_boolean(column.type))
    fits = fits and (not isinstance(value, datetime) or pa.types.is_timestamp(column.type))
    problem: Exception | None = None
    if fits:
        try:
            return pa.array([value], column.type)
        except (pa.ArrowException, TypeError, ValueError, OverflowError) as exc:
            problem = exc
    raise InvalidInput(
        f"{value!r} is no value of partition column '{column.name}', which is of type "
        f"{type_name(column.type)}"
    ) from problem


_TAKEN: list[tuple[Callable[[pa.DataType], bool], tuple[type, ...]]] = [
    (pa.types.is_boolean, (bool,)),
    (pa.types.is_integer, (int,)),
    (pa.types.is_decimal, (int, Decimal)),
    (pa.types.is_string, (str,)),
    (pa.types.is_binary, (bytes,)),
    (pa.types.is_date, (date,)),
    (pa.types.is_timestamp, (datetime,)),
]
"""What may be handed over for a partition column, by its type."""


def partition_rows(schema: Schema, keys: Iterable[bytes]) -> pa.Table:
    """Return the values of the partition columns, one row per key, sorted."""
    columns = schema.partition_columns
    fields = pa.schema([(column.name, column.type) for column in columns])
    if not columns:
        return fields.empty_table()
    codec = KeyCodec([column.type for column in columns])
    return pa.Table.from_arrays(codec.decode(pa.array(sorted(keys), pa.binary())), schema=fields)


def _partition_keys(schema: Schema, keys: Sequence[pa.Array]) -> pa.BinaryArray:
    of_key = {column.id: array for column, array in zip(schema.key_columns, keys, strict=True)}
    columns = schema.partition_columns
    codec = KeyCodec([column.type for column in columns])
    return codec.encode([of_key[column.id] for column in columns])
