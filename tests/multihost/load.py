"""The load of a bed, a program of a client's host: a writer and readers that check all they see.

    python -m tests.multihost.load '<settings as JSON>'

Each client is a thread with a connection of its own, and does one operation after the other, each
until it succeeds. Every operation is a line of JSON: who, which, when it began and ended, and what
failed meanwhile; so is everything that is wrong, and who leads, as often as it is asked.
"""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import pyarrow as pa

from foundation.errors import TableExists, TallybookError
from merge_engine.schema.schema import Schema
from recovery.writer.rows import Rows
from recovery.writer.table_writer import TableWriter
from server.client.cluster import Cluster, connect
from server.protocol.environment import TOKEN_VARIABLE, credentials_from
from tests.conftest import schema_of
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

TABLE = "moved"
BUCKETS = 6
ATTEMPT_S = 5.0
"""As the servers' session time-out, which it is by default, too."""
DEADLINE_S = 120.0
_PAUSE_S = 0.3
_OWN = "plain"
_EXTRA = "extra"
_OPERATOR_PAUSE_S = 3.0
_START_DEADLINE_S = 120.0


def table_schema() -> Schema:
    """Return a column for each writer."""
    return schema_of(**dict.fromkeys(COLUMNS, (pa.int64(), "sum")))


@dataclass
class Shared:
    """What the clients of this process share: settings, how far the writer is, and the output."""

    settings: dict[str, Any]
    begun: int = 0
    acknowledged: int = 0
    stopping: threading.Event = field(default_factory=threading.Event)
    _writing: threading.Lock = field(default_factory=threading.Lock)

    def say(self, **event: Any) -> None:
        """Write an event down."""
        with self._writing:
            print(json.dumps(event), flush=True)

    @contextmanager
    def connected(self) -> Iterator[Cluster]:
        """Connect; as long as ZooKeeper is not there yet, again."""
        deadline = time.monotonic() + _START_DEADLINE_S
        while True:
            try:
                cluster = connect_to(self.settings)
                break
            except TallybookError:
                if time.monotonic() > deadline:
                    raise
        with cluster:
            yield cluster

    def until_it_works(self, kind: str, number: int, call: Callable[[], None]) -> bool:
        """Do an operation, and again when it fails, until it has succeeded; write it down.

        Returns whether it has: it is given up when the process is to end.
        """
        began, errors = time.monotonic(), []
        while not self.stopping.is_set():
            try:
                call()
                break
            except TallybookError as exc:
                text = f"{type(exc).__name__}: {exc}"
                errors.append({"after_s": round(time.monotonic() - began, 3), "error": text})
        else:
            return False
        ended = time.monotonic()
        self.say(kind=kind, number=number, began=began, ended=ended, errors=errors)
        return True


def connect_to(settings: dict[str, Any]) -> Cluster:
    """Connect as the clients of a bed do: with token, credentials and TLS."""
    return connect(
        settings["zookeeper"],
        token=os.environ[TOKEN_VARIABLE],
        credentials=credentials_from(os.environ),
        tls_root=settings["tls_root"],
        deadline_s=DEADLINE_S,
        attempt_s=ATTEMPT_S,
    )


# --- The clients ----------------------------------------------------------------------------------


def write(shared: Shared, cluster: Cluster) -> None:
    """Write batch after batch, each exactly once; go on where a former process was."""
    table, seed = cluster.table(TABLE), shared.settings["seed"]
    writer: TableWriter | None = None

    def started() -> TableWriter:
        nonlocal writer
        if writer is None:
            new = table.writer(owner_id=_OWN, columns=[_OWN], deadline_s=DEADLINE_S)
            writer = new.start()
        return writer

    def one() -> None:
        nonlocal writer
        try:
            if started().batch < number:  # Else an attempt that failed had committed it.
                started().write(number, Rows(data=batch_of(_OWN, seed, number)))
        except TallybookError:
            failed, writer = writer, None
            if failed is not None:
                failed.close()
            raise

    number = shared.begun = shared.acknowledged = started().next_batch()
    while not shared.stopping.wait(_PAUSE_S):
        shared.begun = number + 1
        if shared.until_it_works(_OWN, number, one):
            number = shared.acknowledged = number + 1
    if writer is not None:
        writer.close()


def read_committed(shared: Shared, cluster: Cluster) -> None:
    """Read the whole table, by look-up and by scan in turn: whole batches only, never fewer."""
    table, prefixes = cluster.table(TABLE), _prefixes(shared)

    def one() -> None:
        least = shared.acknowledged
        if number % 2:
            found = table.lookup(ALL_KEYS, isolation="committed")
        else:
            found = table.scan().to_arrow()
        _check_prefixes(shared, "committed", prefixes, found.to_pylist(), least)

    for number in count():
        shared.until_it_works("committed", number, one)
        if shared.stopping.wait(_PAUSE_S):
            return


def read_latest(shared: Shared, cluster: Cluster) -> None:
    """Look all keys up: each has a value that it had since the read began."""
    table, prefixes = cluster.table(TABLE), Prefixes(_OWN, shared.settings["seed"])

    def one() -> None:
        least = shared.acknowledged
        found = table.lookup(ALL_KEYS, [_OWN])
        wrong = wrong_values(prefixes, column_of(found.to_pylist(), _OWN), least, shared.begun)
        if wrong is not None:
            shared.say(wrong=f"latest: {wrong}", at=time.monotonic())

    for number in count():
        shared.until_it_works("latest", number, one)
        if shared.stopping.wait(_PAUSE_S):
            return


def read_changes(shared: Shared, cluster: Cluster) -> None:
    """Follow the changes from cut to cut: each leads to whole batches, and from what was before."""
    table, prefixes = cluster.table(TABLE), _prefixes(shared)
    rows: dict[int, dict[str, Any]] = {}
    reached = None

    def one() -> None:
        nonlocal reached
        least = shared.acknowledged
        found = table.changes(reached, table.cut())
        changed = {key: dict(row) for key, row in rows.items()}
        for wrong in apply_changes(changed, found.to_arrow().to_pylist()):
            shared.say(wrong=f"changes: {wrong}", at=time.monotonic())
        _check_prefixes(shared, "changes", prefixes, changed.values(), least)
        rows.update(changed)
        reached = found.until

    for number in count():
        shared.until_it_works("changes", number, one)
        if shared.stopping.wait(_PAUSE_S):
            return


def observe(shared: Shared, cluster: Cluster) -> None:
    """Say who leads, again and again."""
    table = cluster.table(TABLE)
    while not shared.stopping.wait(_PAUSE_S):
        try:
            led = {str(bucket): at for bucket, at in leaders(cluster, table).items()}
        except TallybookError:
            continue
        shared.say(led=led, at=time.monotonic())


def operate(shared: Shared, cluster: Cluster) -> None:
    """Do what operators do while others work: add and drop columns, take snapshots."""
    table = cluster.table(TABLE)

    def one() -> None:
        table.refresh()
        names = [column.name for column in table.schema.value_columns if column.name == _EXTRA]
        if number % 2:
            table.snapshot()
        elif names:
            table.drop_column(_EXTRA)
        else:
            table.add_column(_EXTRA, pa.int64(), "sum")

    for number in count():
        shared.until_it_works("operator", number, one)
        if shared.stopping.wait(_OPERATOR_PAUSE_S):
            return


def apply_changes(rows: dict[int, dict[str, Any]], records: list[dict[str, Any]]) -> Iterator[str]:
    """Apply change records to rows; yield what does not begin where the rows are."""
    for record in records:
        row = rows.setdefault(record["k"], {"k": record["k"], **dict.fromkeys(COLUMNS)})
        names, kind = record["_changed_columns"], record["_change_type"]
        after = {name: record[name] for name in names}
        before = {name: row[name] for name in names}
        if kind == "insert" and any(value is not None for value in before.values()):
            yield f"key {record['k']} is inserted over {before}"
        if kind in ("update_preimage", "delete") and before != after:
            yield f"key {record['k']} was {before}, and the change begins at {after}"
        if kind != "update_preimage":
            row.update(dict.fromkeys(names) if kind == "delete" else after)


CLIENTS = {
    "plain": write,
    "committed": read_committed,
    "latest": read_latest,
    "changes": read_changes,
    "observer": observe,
    "operator": operate,
}
ALWAYS = ("plain", "committed", "latest", "changes", "observer")
"""Who is there in every test; an operator is one more in the campaign."""


def _prefixes(shared: Shared) -> list[Prefixes]:
    return [Prefixes(column, shared.settings["seed"]) for column in COLUMNS]


def _check_prefixes(
    shared: Shared, kind: str, prefixes: list[Prefixes], rows: Any, least: int
) -> None:
    """Say what is wrong; how far other processes' writers are is not known here."""
    for one in prefixes:
        seen: State = column_of(rows, one.column)
        bounds = (least, shared.begun) if one.column == _OWN else (0, None)
        wrong = wrong_prefix(one, seen, *bounds)
        if wrong is not None:
            shared.say(wrong=f"{kind}: {wrong}", at=time.monotonic())


# --- The process ----------------------------------------------------------------------------------


def prepare(shared: Shared) -> None:
    """Create the table, unless it is there."""
    with shared.connected() as cluster:
        try:
            cluster.create_table(TABLE, table_schema(), buckets=BUCKETS)
        except TableExists:
            return


def _run(shared: Shared, kind: str) -> None:
    try:
        with shared.connected() as cluster:
            CLIENTS[kind](shared, cluster)
    except BaseException as exc:
        shared.say(wrong=f"{kind} has ended: {type(exc).__name__}: {exc}", at=time.monotonic())
        raise


def main(settings: dict[str, Any]) -> None:
    """Run the clients that the settings name, until SIGTERM."""
    shared = Shared(settings)
    signal.signal(signal.SIGTERM, lambda *_: shared.stopping.set())
    prepare(shared)
    threads = [
        threading.Thread(target=_run, args=(shared, kind), name=kind) for kind in settings["kinds"]
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
