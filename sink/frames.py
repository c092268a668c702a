"""Columns of a Spark frame, under the table's names: for tasks, or collected in the driver."""

from collections.abc import Iterator, Mapping
from contextlib import closing
from contextvars import ContextVar
from typing import Any

import pyarrow as pa

from sink.connect import is_connect

# What Spark says of a plan whose size it does not know.
_UNKNOWN_BYTES = 2**63 - 1
_limit: ContextVar["_Limit | None"] = ContextVar("limit", default=None)


class TooLarge(Exception):
    """The frame has more bytes than the driver takes, or than Spark lets it have."""


class _Limit:
    """How many bytes a collect may have, and whether it had more."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self.exceeded = False


def known_bytes(frame: Any) -> int | None:
    """Return how large Spark thinks that the frame's source is; None if it has no idea.

    Of files it is their size, in which what they hold is compressed.
    """
    size = int(str(frame._jdf.queryExecution().optimizedPlan().stats().sizeInBytes()))
    return None if size >= _UNKNOWN_BYTES else size


def renamed(frame: Any, names: Mapping[str, str]) -> Any:
    """Return the frame with these columns only, under the table's names."""
    col = _functions(frame).col
    return frame.select([col(quoted(of_input)).alias(name) for name, of_input in names.items()])


def quoted(name: str) -> str:
    """Return a column's name as Spark reads it as one name, whatever is in it."""
    doubled = name.replace("`", "``")
    return f"`{doubled}`"


def collected(frame: Any, names: Mapping[str, str], most_bytes: int) -> pa.Table:
    """Return these columns of the frame in the driver, under the table's names.

    TooLarge, as soon as that shows, if it has more bytes than this; memory is not needed for more.
    """
    if not is_connect(frame):
        _bound_collects()
    limit = _Limit(most_bytes)
    token = _limit.set(limit)
    try:
        return _collected(frame, names)
    except Exception as exc:
        # What Spark says of a collect that was broken off is of no interest.
        if limit.exceeded or "spark.driver.maxResultSize" in str(exc):
            raise TooLarge(f"more than {most_bytes:,} bytes") from exc
        raise
    finally:
        _limit.reset(token)


def _bound_collects() -> None:
    """Let PySpark count the bytes of what it collects, where a limit is set: see `collected`.

    It has no setting for that: it reads all that comes. Where it is made otherwise than we know,
    there is no limit but `spark.driver.maxResultSize`.
    """
    from pyspark.sql.pandas import conversion, serializers  # noqa: PLC0415

    known = getattr(conversion, "ArrowCollectSerializer", None)
    if known is None or hasattr(known, "counts_bytes"):
        return

    class Counting(serializers.ArrowStreamSerializer):  # type: ignore[misc]
        def load_stream(self, stream: Any) -> Iterator[pa.RecordBatch]:
            limit, size = _limit.get(), 0
            for batch in super().load_stream(stream):
                size += batch.nbytes
                if limit is not None and size > limit.most_bytes:
                    limit.exceeded = True
                    raise TooLarge(f"more than {limit.most_bytes:,} bytes")
                yield batch

    class Collecting(known, Counting):  # type: ignore[misc, valid-type]
        counts_bytes = True

        def __init__(self) -> None:
            super().__init__()
            if hasattr(self, "serializer"):  # Spark 3.5 reads by one that it has, and is none.
                self.serializer = Counting()

    conversion.ArrowCollectSerializer = Collecting


def _collected(frame: Any, names: Mapping[str, str]) -> pa.Table:
    if sorted(frame.columns) != sorted(set(names.values())):
        return to_arrow(_with_nullable_fields(renamed(frame, names)))
    # Nothing to leave out: naming the columns here saves Spark planning a projection.
    table = to_arrow(_with_nullable_fields(frame))
    return pa.table({name: table.column(of_input) for name, of_input in names.items()})


def to_arrow(frame: Any) -> pa.Table:
    """Collect the frame; Spark 3.5 has no `toArrow`, but does that for `toPandas`."""
    if is_connect(frame):
        return _fetched(frame)
    if hasattr(frame, "toArrow"):
        return frame.toArrow()
    from pyspark.sql.pandas.types import to_arrow_schema  # noqa: PLC0415

    batches = frame._collect_as_arrow()
    return pa.Table.from_batches(batches, None if batches else to_arrow_schema(frame.schema))


def _fetched(frame: Any) -> pa.Table:
    """Collect a frame of Spark Connect piece by piece: its `toArrow` has no limit."""
    client, plan = frame.sparkSession.client, frame._plan
    with closing(client.to_table_as_iterator(plan.to_proto(client), plan.observations)) as pieces:
        limit, size, fetched = _limit.get(), 0, []
        for piece in pieces:
            if not isinstance(piece, pa.Table):  # The schema, in Spark's words.
                continue
            size += piece.nbytes
            if limit is not None and size > limit.most_bytes:
                limit.exceeded = True
                raise TooLarge(f"more than {limit.most_bytes:,} bytes")
            fetched.append(piece)
    return pa.concat_tables(fetched)


def _with_nullable_fields(frame: Any) -> Any:
    """Return the frame with structs whose fields may be null.

    PySpark cannot collect a null struct whose fields are declared NOT NULL: Arrow has a null in
    each of them then. What a column takes is for the table to say.
    """
    changed = {
        field.name: kind
        for field in frame.schema.fields
        if (kind := _nullable(field.dataType)) != field.dataType
    }
    if not changed:
        return frame
    col = _functions(frame).col
    return frame.withColumns({name: col(quoted(name)).cast(to) for name, to in changed.items()})


def _functions(frame: Any) -> Any:
    """Return PySpark's functions for this kind of frame."""
    if is_connect(frame):
        from pyspark.sql.connect import functions as of_connect  # noqa: PLC0415

        return of_connect
    from pyspark.sql import functions  # noqa: PLC0415

    return functions


def _nullable(kind: Any) -> Any:
    from pyspark.sql import types as spark  # noqa: PLC0415

    if isinstance(kind, spark.StructType):
        fields = [(field.name, _nullable(field.dataType)) for field in kind.fields]
        return spark.StructType([spark.StructField(name, inner) for name, inner in fields])
    if isinstance(kind, spark.ArrayType):
        return spark.ArrayType(_nullable(kind.elementType), kind.containsNull)
    if isinstance(kind, spark.MapType):
        key, value = _nullable(kind.keyType), _nullable(kind.valueType)
        return spark.MapType(key, value, kind.valueContainsNull)
    return kind
