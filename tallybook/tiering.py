"""Copies of tables in a lake: `tb.tiering.run(spark, "customers", to="lake/customers", ...)`.

Spark itself is imported when it is used.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from foundation.errors import InvalidInput
from foundation.suggestions import did_you_mean
from recovery.reader.cut import Cut
from server.client.cluster import Cluster, connect
from sink.lake.fields import lake_fields
from sink.lake.files import conformed, read_rows
from sink.lake.opening import Lake, Place, find_lake, load_unaltered
from sink.lake.state import LakeState
from sink.tiering.job import TieringJob
from sink.tiering.options import TieringOptions
from sink.tiering.progress import Lag, Round, RoundKind, Summary, Underway, counted

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = [
    "Lag",
    "LakeCopy",
    "Round",
    "RoundKind",
    "Summary",
    "TieringJob",
    "TieringOptions",
    "Underway",
    "find",
    "run",
]


def run(
    spark: "SparkSession",
    table: str,
    to: str,
    *,
    zookeeper: str | None = None,
    cluster: Cluster | None = None,
    report: Callable[[Round | Underway], None] | None = None,
    **options: Any,
) -> Summary:
    """Keep a copy of a table in a lake, or bring it up to date `once`; return what was done.

    `zookeeper`: the cluster's address; or an open connection, `cluster`, which stays open.
    `options`: see `TieringOptions`. `report`: is told of each round, and every few seconds how far
    a long one is. Without `once=True` it goes on until it fails, or is interrupted; a `TieringJob`
    can be stopped from another thread.
    """
    if (zookeeper is None) == (cluster is None):
        raise InvalidInput("of which cluster? Give its address as `zookeeper`, or `cluster`")
    known = [one.name for one in fields(TieringOptions)]
    for name in options:
        if name not in known:
            raise InvalidInput(f"tiering has no option '{name}'{did_you_mean(name, known)}")
    wanted = TieringOptions(table=table, to=to, **options)
    connection: AbstractContextManager[Cluster]
    connection = connect(zookeeper or "") if cluster is None else nullcontext(cluster)
    with connection as there:
        return TieringJob(spark, there, wanted, report).run()


def find(
    to: str, version: int | None = None, storage_settings: Mapping[str, Any] | None = None
) -> "LakeCopy":
    """Return the copy that is at a path: as it is, or at a version of the lake's own."""
    lake = find_lake(Place.of(to, storage_settings))
    state = load_unaltered(lake, version)
    assert state is not None, "a lake that was found has versions"
    return LakeCopy(lake, state)


@dataclass(frozen=True)
class LakeCopy:
    """A copy of a table at one version of a lake. Made by `find`; no server is asked."""

    _lake: Lake
    _state: LakeState

    def __repr__(self) -> str:
        where = f"{self._lake.place.location!r}, version {self.version}"
        return f"LakeCopy({where}: {counted(self.rows, 'row')} of table {self.table})"

    @property
    def version(self) -> int:
        """The version, of the lake's own."""
        return self._state.version

    @property
    def table(self) -> str:
        """The name of the table."""
        return self._state.mark.name

    @property
    def cut(self) -> Cut:
        """Where the table stood: `table.changes(since=copy.cut)` goes on from here."""
        return self._state.mark.cut

    @property
    def columns(self) -> list[str]:
        """Its columns. Files of plain Parquet may have others, too, that were dropped since."""
        mark = self._state.mark
        names: list[str] = lake_fields(mark.schema, states=mark.states).arrow.names
        return names

    @property
    def rows(self) -> int:
        """How many rows it has."""
        return self._state.rows

    @property
    def files(self) -> list[str]:
        """The Parquet files: with the layout "rewrite", all rows in them are rows of the copy.

        With deletion vectors they are not, and are read by what knows these.
        """
        location = self._lake.place.location
        return [f"{location}/{name}" for name in self._state.files]

    def to_arrow(self) -> pa.Table:
        """Return all rows as one table."""
        mark, storage = self._state.mark, self._lake.storage
        schema = lake_fields(mark.schema, states=mark.states).arrow
        files = self._state.files.values()
        parts = [conformed(read_rows(storage, file, schema.names), schema) for file in files]
        return pa.concat_tables([schema.empty_table(), *parts]).combine_chunks()
