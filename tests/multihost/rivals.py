"""Rivals: a table whose columns several owners take from each other, dropped and created anew.

For an era they acquire, write, die, sleep past their time, and come back; readers follow. Then all
is taken over by one, whoever sleeps wakes up, what is late arrives, and what is read in every way
has to be the same: each batch that was acknowledged, whole and once, and none that was given up.
"""

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import pyarrow as pa

from foundation.errors import TallybookError, UnknownTable
from server.client.cluster import Cluster
from server.client.remote_table import RemoteTable
from tests.conftest import schema_of
from tests.multihost.clients import apply_changes
from tests.multihost.rival_batches import (
    ALL_KEYS,
    COLUMNS,
    Ledger,
    State,
    scanned_state,
    state_of,
)
from tests.multihost.rival_readers import Cuts, Follower, Reader
from tests.multihost.rival_writer import Era, Rival, come_back, mortal_writers, take_all
from tests.multihost.sharing import Shared

RIVALS_TABLE = "rivals"
OWNERS = ("a", "b", "c")
BUCKETS = 6
_ERA_S = 25.0
_INSIST_S = 100.0

Result = TypeVar("Result")


def run(shared: Shared, cluster: Cluster) -> None:
    """Have one era after the other, each with a table of its own, all of one name."""
    with mortal_writers():
        if RIVALS_TABLE in _insist(cluster.list_tables):
            left = cluster.table(RIVALS_TABLE)  # By a process that was killed.
            ledger = Ledger(after=int(time.time()))  # It had numbers of its own.
            _end(Era(shared, left.table_id, ledger), cluster, left)
        number = 0
        while not shared.stopping.is_set():
            began = time.monotonic()
            _have_era(shared, cluster, number)
            shared.say(kind="eras", number=number, began=began, ended=time.monotonic(), errors=[])
            number += 1


def _have_era(shared: Shared, cluster: Cluster, number: int) -> None:
    schema = schema_of(**dict.fromkeys(COLUMNS, (pa.list_(pa.int64()), "array_agg")))
    table = _insist(lambda: _created_anew(cluster, schema))
    if _insist(lambda: table.scan().to_arrow()).num_rows:
        shared.say_wrong("rivals: a table that was created anew has rows")
    era, seed = Era(shared, table.table_id), f"{shared.settings['seed']} {number}"
    for owner in OWNERS:
        era.start(_rival(era, owner, f"{seed} {owner}"), f"rival {owner}")
    follower = Follower(era)
    for reader in (Reader(era), Cuts(era), follower):
        era.start(reader.run, reader.kind)
    shared.stopping.wait(_ERA_S)
    _end(era, cluster, table, follower)


def _rival(era: Era, owner: str, seed: str) -> Callable[[Cluster], None]:
    return lambda cluster: Rival(era, cluster, owner, seed).run()


def _created_anew(cluster: Cluster, schema: Any) -> RemoteTable:
    """Create the table; one of an attempt that was not answered has nothing in it yet."""
    with suppress(UnknownTable):
        cluster.drop_table(RIVALS_TABLE, force=True)
    return cluster.create_table(RIVALS_TABLE, schema, buckets=BUCKETS)


def _end(era: Era, cluster: Cluster, table: RemoteTable, follower: Follower | None = None) -> None:
    """Take all over, wake all up, judge what is there in every way, and drop the table."""
    era.over.set()
    closer = take_all(era.shared, table, era.ledger)
    era.awake.set()
    era.join()
    found = {
        "scan": lambda: scanned_state(table.scan().to_arrow().to_pylist()),
        "latest": lambda: state_of(table.lookup(ALL_KEYS).to_pylist()),
        "changes": lambda: _replayed(table.changes().to_arrow().to_pylist()),
    }
    if follower is not None:
        found["changelogs"] = lambda: follower.to_the_end(table)
    states: dict[str, State] = {name: _insist(read) for name, read in found.items()}
    for name, state in states.items():
        wrong = era.ledger.wrong(state, era.ledger.acknowledged)
        if not wrong and state != states["scan"]:
            cells = [cell for cell in state if state[cell] != states["scan"].get(cell)]
            wrong = f"other than by scan are {cells or sorted({*states['scan']} - {*state})}"
        if wrong:
            era.shared.say_wrong(f"rivals, in the end, by {name}: {wrong}")
    closer.close()
    for owner in OWNERS:
        _drop_promises(era, table, owner)
    _insist(lambda: _drop(cluster))


def _drop_promises(era: Era, table: RemoteTable, owner: str) -> None:
    """Have an owner come back: what it had written down and not promised yet, only it knows of."""
    _insist(lambda: come_back(era.shared, table, owner).start()).close()


def _drop(cluster: Cluster) -> None:
    with suppress(UnknownTable):
        cluster.drop_table(RIVALS_TABLE)


def _insist(call: Callable[[], Result]) -> Result:
    """Return what a call returns that may fail for a while, also when the process is to end."""
    deadline = time.monotonic() + _INSIST_S
    while True:
        try:
            return call()
        except TallybookError:
            if time.monotonic() > deadline:
                raise


def _replayed(records: list[dict[str, Any]]) -> State:
    rows: dict[int, dict[str, Any]] = {}
    wrong = list(apply_changes(rows, records, COLUMNS))
    assert not wrong, wrong
    return state_of(rows.values())
