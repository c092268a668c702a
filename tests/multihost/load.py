"""The clients of a bed that never stop, a program: `python -m tests.multihost.load '<settings>'`.

The settings, JSON, name the clients. Each is a thread with a connection of its own (`sharing`).
"""

import json
import signal
import sys
import threading
from typing import Any

import pyarrow as pa

from foundation.errors import TableExists
from merge_engine.schema.schema import Schema
from tests.conftest import schema_of
from tests.multihost import backfills, clients, operators, rivals
from tests.multihost.batches import COLUMNS
from tests.multihost.sharing import ATTEMPT_S, BUCKETS, PATIENT_S, TABLE, Shared

CLIENTS = {
    "plain": clients.write,
    "committed": clients.read_committed,
    "latest": clients.read_latest,
    "changes": clients.read_changes,
    "observer": clients.observe,
    "alters": operators.alter,
    "snapshots": operators.take_snapshots,
    "leases": operators.lease,
    "partitions": operators.add_and_drop_partitions,
    "backfills": backfills.backfill,
    "filled": backfills.read,
    "rivals": rivals.run,
}
ALWAYS = ("plain", "committed", "latest", "changes", "observer")
"""Who is there in every test."""
BETWEEN = ("alters", "snapshots", "leases", "partitions", "backfills", "filled", "rivals")
"""Who is there in a campaign, too."""
_PATIENT = ("snapshots", "leases")


def table_schema() -> Schema:
    """Return a column for each writer."""
    return schema_of(**dict.fromkeys(COLUMNS, (pa.int64(), "sum")))


def prepare(shared: Shared) -> None:
    """Create the table, unless it is there."""
    with shared.connected() as cluster:
        try:
            cluster.create_table(TABLE, table_schema(), buckets=BUCKETS)
        except TableExists:
            return


def _run(shared: Shared, kind: str) -> None:
    try:
        with shared.connected(PATIENT_S if kind in _PATIENT else ATTEMPT_S) as cluster:
            CLIENTS[kind](shared, cluster)
    except BaseException as exc:
        shared.say_wrong(f"{kind} has ended: {type(exc).__name__}: {exc}")
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
