"""Partitions by day or time: which of them are older than a moment.

A partition of a DATE is older than a moment if all of its day (in UTC) was before it; one of a
TIMESTAMP, whose length nobody knows, if it begins before it. Moments are microseconds since 1970,
UTC; a date is its first moment, and a time without a zone is UTC.
"""

from collections.abc import Callable, Iterable
from datetime import UTC, date, datetime, timedelta
from typing import TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from foundation.durations import microseconds, read_duration
from foundation.errors import InvalidInput
from merge_engine.merging.routing import partition_rows
from merge_engine.schema.schema import Column, Schema
from merge_engine.schema.types import type_name

OlderThan: TypeAlias = date | datetime | timedelta | str
"""A moment, as a date or a time; or an age, as a duration. Texts are read as either."""
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_DAY = microseconds(timedelta(days=1))


def dated_column(schema: Schema) -> Column:
    """Return the partition column by which partitions have an age; InvalidInput if none."""
    dated = [
        column
        for column in schema.partition_columns
        if pa.types.is_date32(column.type) or pa.types.is_timestamp(column.type)
    ]
    if len(dated) != 1:
        columns = schema.partition_columns
        shown = ", ".join(f"{column.name} {type_name(column.type)}" for column in columns)
        raise InvalidInput(
            "partitions have an age where exactly one partition column is a DATE or a TIMESTAMP; "
            f"this table is partitioned by {shown or 'nothing'}"
        )
    return dated[0]


def moment_of(older_than: OlderThan, now_ms: Callable[[], int]) -> int:
    """Return the moment that is meant, in microseconds; an age is counted back from now."""
    if isinstance(older_than, str):
        older_than = _parsed(older_than)
    if isinstance(older_than, timedelta):
        return now_ms() * 1000 - microseconds(read_duration(older_than))
    if isinstance(older_than, datetime):
        zoned = older_than if older_than.tzinfo is not None else older_than.replace(tzinfo=UTC)
        return microseconds(zoned - _EPOCH)
    if isinstance(older_than, date):
        return (older_than - _EPOCH.date()).days * _DAY
    raise InvalidInput(
        f"older_than is a date, a datetime, a timedelta or a text of one, not {older_than!r}"
    )


def older_partitions(schema: Schema, keys: Iterable[bytes], before: int) -> list[bytes]:
    """Return the keys of the partitions that are older than this moment, sorted."""
    column = dated_column(schema)
    listed = sorted(keys)
    values = partition_rows(schema, listed).column(column.name).combine_chunks()
    if pa.types.is_date32(column.type):
        ends = pc.add(pc.cast(values.view(pa.int32()), pa.int64()), 1).to_numpy()
        old = ends <= before // _DAY
    else:
        old = values.view(pa.int64()).to_numpy() < before
    return [listed[position] for position in np.flatnonzero(old)]


def _parsed(text: str) -> date | datetime | timedelta:
    for read in (date.fromisoformat, datetime.fromisoformat):
        try:
            return read(text)
        except ValueError:
            continue
    try:
        return read_duration(text)
    except InvalidInput as exc:
        raise InvalidInput(
            f"{text!r} is neither a date or time, such as '2026-01-31' or '2026-01-31T12:00', nor "
            "an age, such as '30 days'"
        ) from exc
