"""The clients that are always there: a writer, readers that check all they see, and an observer."""

import time
from collections.abc import Iterator
from itertools import count
from typing import Any

from foundation.errors import TallybookError
from recovery.reader.cut import Cut
from recovery.writer.rows import Rows
from recovery.writer.table_writer import TableWriter
from server.client.cluster import Cluster
from tests.fault.cluster_load import leaders
from tests.multihost.batches import (
    ALL_KEYS,
    COLUMNS,
    Prefixes,
    State,
    batch_of,
    column_of,
    wrong_prefix,
    wrong_values,
)
from tests.multihost.sharing import DEADLINE_S, PAUSE_S, TABLE, Shared

OWN = "plain"


class SteadyWriter:
    """Writes batches one after the other, each exactly once, under one owner id.

    A writer that has failed is replaced by another one, which finds out what was committed.
    """

    def __init__(self, table: Any, owner: str, columns: list[str]) -> None:
        self._table, self._owner, self._columns = table, owner, columns
        self._writer: TableWriter | None = None

    def next_batch(self) -> int:
        """Return the number after the last committed one."""
        return self._started().next_batch()

    def write(self, number: int, rows: Rows) -> None:
        """Write a batch, unless an attempt that failed had committed it."""
        try:
            writer = self._started()
            if writer.batch < number:
                writer.write(number, rows)
        except TallybookError:
            self.close()
            raise

    def close(self) -> None:
        """Release the columns, or leave them to the next."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()

    def _started(self) -> TableWriter:
        if self._writer is None:
            new = self._table.writer(
                owner_id=self._owner, columns=self._columns, deadline_s=DEADLINE_S
            )
            self._writer = new.start()
        return self._writer


def write(shared: Shared, cluster: Cluster) -> None:
    """Write batch after batch, each exactly once; go on where a former process was."""
    writer, seed = SteadyWriter(cluster.table(TABLE), OWN, [OWN]), shared.settings["seed"]
    number = writer.next_batch()
    shared.begun[OWN] = shared.acknowledged[OWN] = number

    def one() -> None:
        writer.write(number, Rows(data=batch_of(OWN, seed, number)))

    while not shared.stopping.wait(PAUSE_S):
        shared.begun[OWN] = number + 1
        if shared.until_it_works(OWN, number, one):
            number = shared.acknowledged[OWN] = number + 1
    writer.close()


def read_committed(shared: Shared, cluster: Cluster) -> None:
    """Read the whole table, by look-up and by scan in turn: whole batches only, never fewer."""
    table, prefixes = cluster.table(TABLE), all_prefixes(shared)

    def one() -> None:
        least = shared.acknowledged[OWN]
        if number % 2:
            found = table.lookup(ALL_KEYS, COLUMNS, isolation="committed")
        else:
            found = table.scan(COLUMNS).to_arrow()
        check_prefixes(shared, "committed", prefixes, found.to_pylist(), least)

    shared.wait_for_writer(OWN)
    for number in count():
        shared.until_it_works("committed", number, one)
        if shared.stopping.wait(PAUSE_S):
            return


def read_latest(shared: Shared, cluster: Cluster) -> None:
    """Look all keys up: each has a value that it had since the read began."""
    table, prefixes = cluster.table(TABLE), Prefixes(OWN, shared.settings["seed"])

    def one() -> None:
        least = shared.acknowledged[OWN]
        seen = column_of(table.lookup(ALL_KEYS, [OWN]).to_pylist(), OWN)
        wrong = wrong_values(prefixes, seen, least, shared.begun[OWN])
        if wrong is not None:
            shared.say_wrong(f"latest: {wrong}")

    shared.wait_for_writer(OWN)
    for number in count():
        shared.until_it_works("latest", number, one)
        if shared.stopping.wait(PAUSE_S):
            return


def read_changes(shared: Shared, cluster: Cluster) -> None:
    """Follow the changes from cut to cut: each leads to whole batches, and from what was before.

    It begins with the rows at a cut, as who is started again after hours does: to read all changes
    up to then may take longer than anybody waits. The verdict reads them all.
    """
    table, prefixes = cluster.table(TABLE), all_prefixes(shared)
    rows: dict[int, dict[str, Any]] = {}
    reached: Cut | None = None

    def one() -> None:
        nonlocal reached
        least = shared.acknowledged[OWN]
        until = table.cut()
        changed = {key: dict(row) for key, row in rows.items()}
        if reached is None:
            found = table.scan(COLUMNS, at=until).to_arrow().to_pylist()
            changed = {row["k"]: row for row in found}
        else:
            records = table.changes(reached, until).to_arrow().to_pylist()
            for wrong in apply_changes(changed, records):
                shared.say_wrong(f"changes: {wrong}")
        check_prefixes(shared, "changes", prefixes, changed.values(), least)
        rows.update(changed)
        reached = until

    shared.wait_for_writer(OWN)
    for number in count():
        shared.until_it_works("changes", number, one)
        if shared.stopping.wait(PAUSE_S):
            return


def observe(shared: Shared, cluster: Cluster) -> None:
    """Say who leads, again and again."""
    table = cluster.table(TABLE)
    while not shared.stopping.wait(PAUSE_S):
        try:
            led = {str(bucket): at for bucket, at in leaders(cluster, table).items()}
        except TallybookError:
            continue
        shared.say(led=led, at=time.monotonic())


def apply_changes(
    rows: dict[int, dict[str, Any]],
    records: list[dict[str, Any]],
    columns: tuple[str, ...] = COLUMNS,
) -> Iterator[str]:
    """Apply change records of these columns to rows; yield what does not begin where they are."""
    for record in records:
        row = rows.setdefault(record["k"], {"k": record["k"], **dict.fromkeys(columns)})
        names = [name for name in record["_changed_columns"] if name in columns]
        kind = record["_change_type"]
        after = {name: record[name] for name in names}
        before = {name: row[name] for name in names}
        if kind == "insert" and any(value is not None for value in before.values()):
            yield f"key {record['k']} is inserted over {before}"
        if kind in ("update_preimage", "delete") and before != after:
            yield f"key {record['k']} was {before}, and the change begins at {after}"
        if kind != "update_preimage":
            row.update(dict.fromkeys(names) if kind == "delete" else after)


def all_prefixes(shared: Shared) -> list[Prefixes]:
    """Return what each column has to be, as far as it was read."""
    return [Prefixes(column, shared.settings["seed"]) for column in COLUMNS]


def check_prefixes(
    shared: Shared, kind: str, prefixes: list[Prefixes], rows: Any, least: int
) -> None:
    """Say what is wrong; how far other processes' writers are is not known here."""
    for one in prefixes:
        seen: State = column_of(rows, one.column)
        bounds = (least, shared.begun[OWN]) if one.column == OWN else (0, None)
        wrong = wrong_prefix(one, seen, *bounds)
        if wrong is not None:
            shared.say_wrong(f"{kind}: {wrong}")
