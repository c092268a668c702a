"""Backfills: batches that are larger than a segment, each adding one to every key of a table."""

import random
from itertools import count

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from recovery.writer.rows import Rows
from server.client.cluster import Cluster
from tests.conftest import schema_of
from tests.multihost.clients import SteadyWriter
from tests.multihost.operators import created
from tests.multihost.sharing import PAUSE_S, Shared

FILLED_TABLE = "filled"
ROWS = 60_000
_BUCKETS = 4
_PAUSE_S = 10.0
_LOOKED_UP = 300
_LOOKUPS_PER_SCAN = 10


def backfill(shared: Shared, cluster: Cluster) -> None:
    """Write a batch of all keys now and then."""
    table = created(cluster, FILLED_TABLE, schema_of(a=(pa.int64(), "sum")), buckets=_BUCKETS)
    writer = SteadyWriter(table, FILLED_TABLE, ["a"])
    number = writer.next_batch()
    shared.begun[FILLED_TABLE] = shared.acknowledged[FILLED_TABLE] = number
    rows = pa.table({"k": np.arange(ROWS), "a": np.ones(ROWS, np.int64)})

    def one() -> None:
        writer.write(number, Rows(data=rows))

    while True:
        shared.begun[FILLED_TABLE] = number + 1
        if shared.until_it_works("backfills", number, one):
            number = shared.acknowledged[FILLED_TABLE] = number + 1
        if shared.stopping.wait(_PAUSE_S):
            break
    writer.close()


def read(shared: Shared, cluster: Cluster) -> None:
    """Read some keys, now and then all of them: each has the same, and never less than before."""
    table = created(cluster, FILLED_TABLE, schema_of(a=(pa.int64(), "sum")), buckets=_BUCKETS)
    chance = random.Random(shared.settings["seed"])
    before = 0

    def one() -> None:
        nonlocal before
        least = max(before, shared.acknowledged[FILLED_TABLE])
        if number % _LOOKUPS_PER_SCAN:
            keys = chance.sample(range(ROWS), _LOOKED_UP)
            values = table.lookup({"k": keys}, isolation="committed")["a"]
            expected = _LOOKED_UP
        else:
            values, expected = table.scan().to_arrow()["a"], ROWS
        wrong = wrong_counts(values, expected, least, shared.begun[FILLED_TABLE])
        if wrong is not None:
            shared.say_wrong(f"filled: {wrong}")
        else:
            before = max(before, pc.max(values).as_py() or 0)

    shared.wait_for_writer(FILLED_TABLE)
    for number in count():
        shared.until_it_works("filled", number, one)
        if shared.stopping.wait(3 * PAUSE_S):
            return


def wrong_counts(values: pa.ChunkedArray, expected: int, least: int, most: int) -> str | None:
    """Say what is wrong with the counts of keys, of whole batches between two numbers."""
    if not pc.count(values).as_py():
        return None if least == 0 else f"nothing is there, after {least} batches"
    low, high = (pc.min_max(values)[name].as_py() for name in ("min", "max"))
    if pc.count(values).as_py() != expected:
        return f"{pc.count(values)} of {expected} keys are there, with {low} to {high} batches"
    if low != high:
        return f"some keys have {low} batches, others {high}"
    if not least <= low <= most:
        return f"keys have {low} batches; {least} were acknowledged, and {most} begun"
    return None
