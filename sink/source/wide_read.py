"""Reads of a few columns of a wide table, without the data source, which cannot be told them."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from foundation.errors import InvalidInput
from server.client.cluster import PATIENCE_S, Cluster
from sink.source.options import ReaderOptions
from sink.source.planning import RowsPlan, plan_rows
from sink.source.schemas import caster, row_fields, to_spark
from sink.source.tasks import ReadKeys
from sink.task_python import use_this_python

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def read_columns(
    spark: "SparkSession",
    options: Mapping[str, str],
    columns: Sequence[str] | None,
    cluster: Cluster | None = None,
) -> "DataFrame":
    """Return a frame whose partitions read the buckets, all at a cut that is taken now.

    `cluster`: a connection that is open already, which says where and how, and stays open.
    """
    if cluster is not None:
        options = {"zookeeper": cluster.address, **options}
    if any(name.casefold() == "lakeversion" for name in options):
        raise InvalidInput(
            "a version of a copy (`lakeVersion`) is read without the cluster: "
            'spark.read.format("tallybook").options(lake=..., lakeVersion=...).load()'
        )
    given = ReaderOptions.of(options)
    if given.start is not None:
        raise InvalidInput("`start` is for streams: leave it, or use spark.readStream")
    recipe = given.recipe if cluster is None else cluster.recipe
    connection: AbstractContextManager[Cluster]
    connection = recipe.connect(patience_s=PATIENCE_S) if cluster is None else nullcontext(cluster)
    with connection as there:
        table = there.table(given.table)
        fields = row_fields(table.schema, given.columns if columns is None else columns)
        tasks = plan_rows(table, recipe, RowsPlan.of(given, fields.names))
        schema = to_spark(fields)
        # A few keys are here before Spark has begun to look for them.
        keys = [task for task in tasks if isinstance(task, ReadKeys)]
        found = [batch for task in keys for batch in task.look_up(table)]
    if len(keys) == len(tasks):
        rows = list(map(caster(schema), found))
        return spark.createDataFrame(pa.Table.from_batches(rows) if rows else [], schema)
    use_this_python(spark)
    timezone = spark.conf.get("spark.sql.session.timeZone")

    def read(batches: Iterator[pa.RecordBatch]) -> Iterator[Any]:
        cast = caster(schema, timezone)
        for batch in batches:
            for number in batch.column(0).to_pylist():
                yield from map(cast, tasks[number].batches())

    return spark.range(0, len(tasks), 1, max(1, len(tasks))).mapInArrow(read, schema)
