"""What operators do while others work: alters, snapshots, leases, partitions added and dropped.

Each is a client of a load, and checks what it has done: after every step, what is read is exactly
what was written.
"""

from contextlib import suppress
from itertools import count
from typing import Any

import pyarrow as pa

from foundation.errors import (
    Corrupt,
    CutTooOld,
    MissingObject,
    MissingSnapshot,
    OffsetOutOfRange,
    TableExists,
    TallybookError,
)
from merge_engine.schema.schema import Schema
from recovery.reader.table_scan import ScanSource
from recovery.writer.rows import Rows
from server.client.cluster import Cluster
from server.client.remote_table import RemoteTable
from server.client.snapshot_lease import SnapshotLease
from tests.multihost.batches import COLUMNS, column_of, wrong_prefix
from tests.multihost.clients import SteadyWriter, all_prefixes
from tests.multihost.sharing import TABLE, Shared
from tests.support.day_tables import DAYS

DAYS_TABLE = "days"
_EXTRA = "extra"
_EXTRA_KEYS = {"k": list(range(10))}
_PAUSE_S = 3.0
# Longer than it takes to read changes, which begins again when the table was altered meanwhile.
_ALTER_PAUSE_S = 20.0
_LEASE_S = 30.0
# In all, longer than it takes until two later snapshots of each bucket are there.
_LOOKS_AT_LEASE, _LOOK_AT_LEASE_S = 8, 5.0
_DAY_KEYS = 20
_DAY_BATCHES = 3
_DAYS_KEPT = 3
# What a file that vanished looks like to whoever reads it.
_VANISHED = (Corrupt, MissingObject, MissingSnapshot, OffsetOutOfRange, CutTooOld)


def alter(shared: Shared, cluster: Cluster) -> None:
    """Add a column to the table that all others use, fill it, read it, and drop it."""
    table = cluster.table(TABLE)

    def one() -> None:
        table.refresh()
        if _EXTRA in [column.name for column in table.schema.value_columns]:
            table.drop_column(_EXTRA, force=True)  # Who was killed with it holds it still.
        table.add_column(_EXTRA, pa.int64(), "sum")
        writer = SteadyWriter(table, _EXTRA, [_EXTRA])
        try:
            amounts = [number + 1] * len(_EXTRA_KEYS["k"])
            writer.write(writer.next_batch(), Rows(data={**_EXTRA_KEYS, _EXTRA: amounts}))
            found = table.lookup(_EXTRA_KEYS, [_EXTRA], isolation="committed")
        finally:
            writer.close()
        if found[_EXTRA].to_pylist() != amounts:
            shared.say_wrong(f"alters: a new column has {found[_EXTRA].to_pylist()}, not {amounts}")
        table.drop_column(_EXTRA, force=True)

    for number in count():
        shared.until_it_works("alters", number, one)
        if shared.stopping.wait(_ALTER_PAUSE_S):
            return


def take_snapshots(shared: Shared, cluster: Cluster) -> None:
    """Have one bucket after the other take a snapshot: earlier ones are retired, logs rolled up."""
    table = cluster.table(TABLE)
    buckets = table.bucket_ids()

    def one() -> None:
        table.snapshot([buckets[number % len(buckets)]])

    for number in count():
        shared.until_it_works("snapshots", number, one)
        if shared.stopping.wait(_PAUSE_S):
            return


# --- Leases ---------------------------------------------------------------------------------------


def lease(shared: Shared, cluster: Cluster) -> None:
    """Lease snapshots, and read them for as long as that takes others to retire them."""
    table = cluster.table(TABLE)

    def one() -> None:
        held = table.lease_latest(f"held-{shared.settings['seed']}", _LEASE_S)
        try:
            _look_at_lease(shared, table, held)
        finally:
            with suppress(TallybookError):  # It expires.
                held.drop()

    for number in count():
        shared.until_it_works("leases", number, one)
        if shared.stopping.wait(_PAUSE_S):
            return


def _look_at_lease(shared: Shared, table: RemoteTable, held: SnapshotLease) -> None:
    before: list[dict[str, Any]] | None = None
    for _ in range(_LOOKS_AT_LEASE):
        try:
            found = table.scan(list(COLUMNS), source=ScanSource.SNAPSHOT, lease=held).to_arrow()
        except _VANISHED as exc:
            held.check()  # Raises if it may have expired, by our clock: then files may be gone.
            shared.say_wrong(f"leases: what is leased is gone: {type(exc).__name__}: {exc}")
            return
        rows = sorted(found.to_pylist(), key=lambda row: int(row["k"]))
        if before is None:
            _check_whole(shared, rows)
        elif rows != before:
            shared.say_wrong("leases: what is leased reads otherwise than before")
        before = rows
        if shared.stopping.wait(_LOOK_AT_LEASE_S):
            return


def _check_whole(shared: Shared, rows: list[dict[str, Any]]) -> None:
    for prefixes in all_prefixes(shared):
        wrong = wrong_prefix(prefixes, column_of(rows, prefixes.column), 0, None)
        if wrong is not None:
            shared.say_wrong(f"leases: {wrong}")


# --- Partitions -----------------------------------------------------------------------------------


def add_and_drop_partitions(shared: Shared, cluster: Cluster) -> None:
    """Fill a day after the other, drop the oldest, and read all of them."""
    table = created(cluster, DAYS_TABLE, DAYS, buckets=2)
    writer = SteadyWriter(table, "days", ["a"])
    first = writer.next_batch()

    def one() -> None:
        writer.write(number, Rows(data=_day_rows(number)))
        oldest = number // _DAY_BATCHES - _DAYS_KEPT + 1
        for day in table.partitions()["day"].to_pylist():
            if int(day) < oldest:
                table.drop_partition(day=day)
        found = table.scan().to_arrow().to_pylist()
        seen = {(row["day"], row["k"]): row["a"] for row in found}
        expected = days_after(number)
        if seen != expected:
            wrong = {key for key in {*seen, *expected} if seen.get(key) != expected.get(key)}
            shared.say_wrong(f"partitions: after batch {number}, wrong are {sorted(wrong)[:4]}")

    for number in count(first):
        shared.until_it_works("partitions", number, one)
        if shared.stopping.wait(_PAUSE_S / 3):
            break
    writer.close()


def _day_rows(number: int) -> dict[str, list[Any]]:
    day = f"{number // _DAY_BATCHES:06}"
    keys = list(range(_DAY_KEYS))
    return {"day": [day] * _DAY_KEYS, "k": keys, "a": [number + 1] * _DAY_KEYS}


def days_after(number: int) -> dict[tuple[str, int], int]:
    """Return what the table of days has after a batch, once what is too old was dropped."""
    last = number // _DAY_BATCHES
    found: dict[tuple[str, int], int] = {}
    for batch in range(max(0, last - _DAYS_KEPT + 1) * _DAY_BATCHES, number + 1):
        rows = _day_rows(batch)
        for day, key, amount in zip(rows["day"], rows["k"], rows["a"], strict=True):
            found[day, key] = found.get((day, key), 0) + amount
    return found


def created(cluster: Cluster, name: str, schema: Schema, *, buckets: int) -> RemoteTable:
    """Return a table, which is created unless it is there."""
    try:
        return cluster.create_table(name, schema, buckets=buckets)
    except TableExists:
        return cluster.table(name)
