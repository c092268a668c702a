"""Tables in Spark: `tb.spark.register(spark)`, then `spark.read.format("tallybook")`.

Spark itself is imported when it is used.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from foundation.errors import InvalidInput
from sink.lost_hosts import SETTINGS as LOST_HOSTS

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from server.client.cluster import Cluster

__all__ = ["LOST_HOSTS", "read", "register"]

_FILTERS = "spark.sql.python.filterPushdown.enabled"


def _check_version() -> None:
    import pyspark  # noqa: PLC0415

    if pyspark.__version__.startswith(("3.", "4.0.", "4.1.")):
        raise InvalidInput(
            f"reading with Spark takes Spark 4.2 or newer, and this is {pyspark.__version__}: "
            "its data sources in Python lack what is needed, or are not there at all. "
            "The sink works here; table.scan and table.lookup do, too"
        )


def register(spark: "SparkSession", *, push_filters: bool = True) -> None:
    """Make the format `tallybook` known to a session, for `spark.read`, `readStream` and SQL.

    On a Spark of this machine alone (`local[...]`) tasks run this Python from now on, unless
    PYSPARK_PYTHON says otherwise. Spark finds the format by itself, too, if its Python is the one
    that Tallybook is installed in. A frame or a view has the rows of when it was loaded or
    created, however often it is used: for later ones, do that again.
    `push_filters`: let Spark offer filters to data sources in Python; a setting of the session,
    which is off by default. Frames with the option `pushFilters` take them: one by key is a look-up
    then. Use such a frame with one filter only: Spark 4.3 plans it once for all of its uses, and
    without that filter rows would be missing.
    """
    _check_version()
    from sink.source.data_source import TallybookSource  # noqa: PLC0415
    from sink.task_python import use_this_python  # noqa: PLC0415

    use_this_python(spark)
    spark.dataSource.register(TallybookSource)
    if push_filters:
        spark.conf.set(_FILTERS, "true")


def read(
    spark: "SparkSession",
    table: str,
    columns: Sequence[str] | None = None,
    *,
    keys: Mapping[str, Iterable[Any]] | None = None,
    cluster: "Cluster | None" = None,
    **options: str,
) -> "DataFrame":
    """Return rows of a table with these columns only, of the key and others, in this order.

    For wide tables: `spark.read` has no way to tell a source in Python which columns are needed.
    `keys`: by column, all of the key or those of partitions, the only values that are wanted; they
    are looked up. `options` are those of the data source: `zookeeper`, `at`, `isolation`, `lease`.
    `cluster`: an open connection, in the place of `zookeeper` and the options that go with it. The
    cut is taken now: the frame has the same rows however often it is used.
    """
    _check_version()
    from sink.source.options import keys_text  # noqa: PLC0415
    from sink.source.wide_read import read_columns  # noqa: PLC0415

    given: dict[str, Any] = {"table": table, **options}
    if keys is not None:
        given["keys"] = keys_text(keys)
    return read_columns(spark, given, columns, cluster)
