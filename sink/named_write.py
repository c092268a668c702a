"""A plain batch DataFrame, written exactly once by the name that it is given.

tb.write(frame, cluster.table("customers"), name="orders of 2026-11-17")

A write is a batch of an owner of its own, by that name, whose lock record says what it has
committed. Under the same name it happens once: what was committed is not written again, and what
was cut off half-way is undone before it is.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from foundation.errors import InvalidInput, RewoundBatch
from locks.column_locks.acquisition import NAMED_WRITE
from recovery.writer.replays import check_same
from server.client.cluster import PATIENCE_S, Cluster, Recipe
from server.client.remote_table import RemoteTable
from sink.aggregate_sink import AggregateSink
from sink.session import Identity


@dataclass(frozen=True, kw_only=True)
class WriteResult:
    """What a write did: rows read, keys after folding, bad rows that were set aside.

    `skipped`: a write of this name, and batch, was committed before, and nothing was done now.
    """

    name: str
    batch: int
    skipped: bool
    route: str = ""
    rows: int = 0
    keys: int = 0
    refused: int = 0


class _NamedSink(AggregateSink):
    """A sink whose batches are counted by the name, also inside of a streaming query."""

    def _check_owner(self) -> None:
        """It is one of those."""

    def _identify(self, frame: Any) -> Identity:  # noqa: ARG002
        return Identity(owner=str(self._options.owner_id), query_id=None, run_id=None)


def write(
    frame: Any,
    table: RemoteTable | str,
    *,
    name: str,
    batch: int = 0,
    columns: Sequence[str] | None = None,
    address: str | None = None,
    connection: Mapping[str, Any] | None = None,
    **settings: Any,
) -> WriteResult:
    """Write a batch DataFrame, exactly once under this name.

    The name is the identity of the write, not its rows: run again, with whatever frame, it does
    nothing if it was committed; RewoundBatch if it was, without one of the `columns` that are given
    now. Run again after a crash it undoes what the first attempt left, and
    writes. `batch` numbers the writes of a name that is used for many: each once, in rising order;
    a lower one than the last is RewoundBatch. `columns`: unless given, all value columns of the
    table that the frame has. The table is one of a `Cluster`, or a name with an `address` and a
    `connection` as for a sink. `settings` are a sink's, without `owner_id` and `handover`.

    The columns are locked meanwhile: LockHeld while a job writes them. That job goes on afterwards
    as if nothing had been.
    """
    _check(frame, name, settings)
    recipe, table_name = _where(table, address, connection)
    owner = NAMED_WRITE + name
    with recipe.connect(patience_s=PATIENCE_S) as cluster:
        if _is_done(cluster, table_name, owner, batch, columns or ()):
            return WriteResult(name=name, batch=batch, skipped=True)
        written = _columns(cluster.table(table_name), frame, columns, settings.get("renamed") or {})
    sink = _NamedSink(
        recipe,
        table_name,
        columns=written,
        **{**settings, "owner_id": owner, "handover": True, "check": False},
    )
    try:
        sink(frame, batch)
    finally:
        sink.close()
    last = sink.status()["last"]
    counts = {key: last[key] for key in ("skipped", "route", "rows", "keys", "refused")}
    return WriteResult(name=name, batch=batch, **counts)


def _check(frame: Any, name: str, settings: Mapping[str, Any]) -> None:
    if not name:
        raise InvalidInput("a write has a name, by which it is recognised when it is run again")
    if frame.isStreaming:
        raise InvalidInput(
            "tb.write is for batch DataFrames; a stream is written by "
            "stream.writeStream.foreachBatch(tb.AggregateSink(...))"
        )
    for setting in ("owner_id", "handover"):
        if setting in settings:
            raise InvalidInput(f"tb.write has no setting '{setting}': the name says who writes")


def _where(
    table: RemoteTable | str, address: str | None, connection: Mapping[str, Any] | None
) -> tuple[Recipe, str]:
    if isinstance(table, str):
        if address is None:
            raise InvalidInput(
                f"which cluster has table {table}? Pass cluster.table({table!r}), or an address"
            )
        return Recipe.of(address, **(connection or {})), table
    if address is not None or connection is not None:
        raise InvalidInput(f"table {table.name} knows its cluster: leave address and connection")
    cluster = table._cluster
    assert isinstance(cluster, Cluster)
    return cluster.recipe, table.name


def _is_done(cluster: Cluster, table: str, owner: str, batch: int, columns: Sequence[str]) -> bool:
    """Whether this batch is committed: that can be told without a lock, whoever has it now.

    RewoundBatch if it is, and did not have all of these columns.
    """
    found = cluster.table(table)
    record = cluster.coordinator.locks.record(found.definition.table, owner)
    if record is None:
        return False
    if record.batch > batch:
        raise RewoundBatch(
            f"`{owner.removeprefix(NAMED_WRITE)}` has written batch {record.batch} of table "
            f"{table}, and batch {batch} may be one that it wrote before: give it a higher number, "
            "or a name of its own"
        )
    if record.batch < batch:
        return False
    names = {column.id: column.name for column in found.schema.value_columns}
    asked = tuple(number for number, name in names.items() if name in columns)
    check_same(owner, batch, "", replace(record, columns=asked), names)
    return True


def _columns(
    table: RemoteTable, frame: Any, columns: Sequence[str] | None, renamed: Mapping[str, str]
) -> Sequence[str]:
    if columns is not None:
        return columns
    values = [column.name for column in table.schema.value_columns]
    found = [name for name in values if renamed.get(name, name) in frame.columns]
    if not found:
        raise InvalidInput(
            f"the frame has none of the value columns of table {table.name}, which are "
            + ", ".join(f"'{name}'" for name in values)
        )
    return found
