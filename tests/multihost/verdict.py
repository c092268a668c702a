"""The verdict on a bed whose load has ended: the table is what was acknowledged; nothing leaked.

    python -m tests.multihost.verdict '<settings as JSON>'

The settings say how many batches of each column were acknowledged, at least. Prints all that is
wrong, as JSON.
"""

import json
import sys
import time
from collections.abc import Mapping
from typing import Any

from server.client.cluster import Cluster
from server.client.remote_table import RemoteTable
from tests.multihost.batches import ALL_KEYS, COLUMNS, Prefixes, column_of, wrong_prefix
from tests.multihost.bed import Bed
from tests.multihost.load import TABLE, apply_changes, connect_to
from tests.multihost.parts import python_part
from tests.support.zookeeper_server import wait_until

_LEFT = ("puts_in_flight", "bytes_in_flight", "scanners", "spooled_puts", "spooled_bytes")
# What a reader that was killed has left goes when its time is over.
_SCANNER_TTL_S = 60.0
_DEADLINE_S = 300.0


def pass_verdict(bed: Bed) -> None:
    """End the load of a bed, and raise unless all is as it has to be."""
    done = bed.end_load()
    settings = {**bed.settings, "acknowledged": done}
    part = python_part(bed.load.host, "verdict", "tests.multihost.verdict", settings)
    part.start()
    wait_until(lambda: not part.alive, "the verdict is passed", _DEADLINE_S)
    said = part.program.last_words(1)
    assert said.startswith("["), f"there was no verdict: {part.program.last_words(30)}"
    wrong = [*bed.history.wrong, *json.loads(said)]
    for server in bed.servers:
        left = set(server.host.processes()) - bed.expected_on(server.host)
        if left:
            wrong.append(f"processes {sorted(left)} are left on {server.host.name}")
    assert not wrong, "; ".join(wrong)


def wrong_rows(table: RemoteTable, settings: Mapping[str, Any]) -> list[str]:
    """Return in what look-ups, scan and changes differ from the batches that were acknowledged."""
    changed: dict[int, dict[str, Any]] = {}
    records = table.changes().to_arrow().to_pylist()
    wrong = [f"changes: {each}" for each in apply_changes(changed, records)]
    found = {
        "latest": table.lookup(ALL_KEYS).to_pylist(),
        "committed": table.lookup(ALL_KEYS, isolation="committed").to_pylist(),
        "scan": table.scan().to_arrow().to_pylist(),
        "changes": list(changed.values()),
    }
    for column in COLUMNS:
        counts = set()
        for kind, rows in found.items():
            prefixes = Prefixes(column, settings["seed"])
            least = settings["acknowledged"].get(column, 0)
            problem = wrong_prefix(prefixes, column_of(rows, column), least, None)
            wrong += [] if problem is None else [f"{kind}: {problem}"]
            counts.add(prefixes.count)
        if len(counts) > 1:
            wrong.append(f"{column} has {counts} batches, by who is asked")
    return wrong


def leaked(cluster: Cluster, table: RemoteTable) -> list[str]:
    """Return what servers still hold when nobody asks them for anything any more."""
    deadline = time.monotonic() + 1.5 * _SCANNER_TTL_S
    while True:
        left = [
            f"{status['address']} still has {name} {value:g}"
            for status in cluster.status()
            for name in _LEFT
            if (value := status["metrics"][f"tallybook_{name}"])
        ]
        if not left or time.monotonic() > deadline:
            leases = cluster.coordinator.leases.all(table.table_id)
            return left + [f"there is a lease still: {lease}" for lease in leases]
        time.sleep(0.2)


def main(settings: dict[str, Any]) -> None:
    """Print what is wrong."""
    with connect_to(settings) as cluster:
        table = cluster.table(TABLE)
        print(json.dumps([*wrong_rows(table, settings), *leaked(cluster, table)]), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
