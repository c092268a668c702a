"""The verdict on a bed whose load has ended: tables are what was acknowledged; nothing leaked.

    python -m tests.multihost.verdict '<settings as JSON>'

The settings say how many batches of each column were acknowledged, at least. Prints all that is
wrong, as JSON.
"""

import json
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

from foundation.errors import UnknownTable
from server.client.cluster import Cluster
from server.client.remote_table import RemoteTable
from tests.multihost.backfills import FILLED_TABLE, ROWS, wrong_counts
from tests.multihost.batches import ALL_KEYS, COLUMNS, Prefixes, column_of, wrong_prefix
from tests.multihost.bed import Bed
from tests.multihost.clients import apply_changes
from tests.multihost.hosts import Host
from tests.multihost.leaks import leaked
from tests.multihost.parts import python_part
from tests.multihost.sharing import TABLE, connect_to
from tests.multihost.tiering_job import KIND, wrong_copy
from tests.support.zookeeper_server import wait_until

_DEADLINE_S = 300.0
# Spark's processes end after those that have started them.
_ENDING_S = 20.0


def pass_verdict(bed: Bed) -> None:
    """End the load of a bed, and raise unless all is as it has to be."""
    done = bed.end_load()
    settings = {**bed.settings, "acknowledged": done, "with_tiering": bed.with_tiering}
    part = python_part(bed.load.host, "verdict", "tests.multihost.verdict", settings)
    part.start()
    wait_until(lambda: not part.alive, "the verdict is passed", _DEADLINE_S)
    said = part.program.last_words(1)
    assert said.startswith("["), f"there was no verdict: {part.program.last_words(30)}"
    wrong = [*bed.history.wrong, *json.loads(said)]
    if bed.with_tiering and not bed.history.of(KIND, 0):
        wrong.append("the tiering job has not done a round")
    for host in bed.lab.hosts.values():
        wrong += _left_on(bed, host)
    assert not wrong, "; ".join(wrong)


def _left_on(bed: Bed, host: Host) -> Iterator[str]:
    """Say what is on a host that nobody needs: processes, and batches that were promised."""
    deadline = time.monotonic() + _ENDING_S
    while left := set(host.processes()) - bed.expected_on(host):
        if time.monotonic() > deadline:
            break
        time.sleep(0.2)
    if left:
        yield f"processes {sorted(left)} are left on {host.name}"
    promised = [path.name for path in (host.disk / "redo").rglob("*") if path.is_file()]
    if promised:
        yield f"{len(promised)} files are left in the redo log: {promised[:4]}"


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


def wrong_filled(cluster: Cluster, settings: Mapping[str, Any]) -> list[str]:
    """Return what is wrong with what backfills have left."""
    try:
        table = cluster.table(FILLED_TABLE)
    except UnknownTable:
        return []
    least = settings["acknowledged"]["backfills"]
    wrong = wrong_counts(table.scan().to_arrow()["a"], ROWS, least, least + 1)
    return [] if wrong is None else [f"filled: {wrong}"]


def main(settings: dict[str, Any]) -> None:
    """Print what is wrong."""
    with connect_to(settings) as cluster:
        table = cluster.table(TABLE)
        wrong = [*wrong_rows(table, settings), *wrong_filled(cluster, settings)]
        if settings["with_tiering"]:
            wrong += [f"{KIND}: {each}" for each in wrong_copy(table, settings["seed"])]
        print(json.dumps([*wrong, *leaked(cluster)]), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
