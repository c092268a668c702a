"""How long clients may wait for what goes wrong: the goals, in one table.

A fault has a name, how long it lasts, and the longest that one batch and one read may take from its
first attempt to its success; no client may wait long more than once for it.
"""

import os
from dataclasses import dataclass

from tests.multihost.history import History
from tests.multihost.parts import SESSION_S

WRITES = ("plain", "driver", "executors")
_WAIT_S = SESSION_S + 5
_LONGER_THAN_A_WAIT_S = _WAIT_S + 2
# How often a message goes there and back, for one operation: putting, sealing and committing a
# batch, each with a call before it that finds out; records, rows and changes of all servers.
_ROUND_TRIPS = 6


@dataclass(frozen=True, kw_only=True)
class Budget:
    """What a fault may cost. `lasts_s`: how long it is there, at least."""

    lasts_s: float = _LONGER_THAN_A_WAIT_S
    batch_s: float = _WAIT_S
    read_s: float = _WAIT_S
    long_waits: int | None = 1


def _slow(round_trip_s: float) -> Budget:
    """Return ten times what the round trips take."""
    longest_s = 10 * _ROUND_TRIPS * round_trip_s
    return Budget(lasts_s=10, batch_s=longest_s, read_s=longest_s, long_waits=None)


BUDGETS = {
    "rolling restart": Budget(lasts_s=0, batch_s=5, read_s=1, long_waits=None),
    "rolling restart, S3 far away": Budget(lasts_s=0, batch_s=5, read_s=1, long_waits=None),
    "planned move": Budget(lasts_s=0, batch_s=5, read_s=1, long_waits=None),
    "server without S3": Budget(),
    "cable pulled": Budget(),
    "ZooKeeper two to one": Budget(),
    "server without ZooKeeper": Budget(),
    "host paused": Budget(),
    "paused, and back without ZooKeeper": Budget(),
    "server killed": Budget(),
    "server hears nothing": Budget(),
    "leader of ZooKeeper killed": Budget(),
    # Nobody writes while there is no store, or reads what needs it; and all go on soon after. Some
    # reads succeed in between.
    "S3 away": Budget(
        batch_s=_LONGER_THAN_A_WAIT_S + 5, read_s=_LONGER_THAN_A_WAIT_S + 5, long_waits=None
    ),
    "S3 slow": Budget(long_waits=None),
    "clock moved": Budget(batch_s=5, read_s=5),
    "100 ms": _slow(0.1),
    "200 ms, 2 % lost": _slow(0.2),
    "executor killed": Budget(read_s=5),
}

EXPECTED = {
    "rolling restart, S3 far away": "a read took up to 1.4 s with 40 ms for each look at the store",
    "planned move": "a read took up to 1.7 s while six servers started and ended on two cores",
}
"""What is late for now, and why. When it is not any more, this becomes empty."""
_CORES_FOR_SPARK = 8


def expected_with_spark(name: str) -> str | None:
    """Return why a fault may take longer than its budget on a bed with Spark; None: it may not."""
    if (os.cpu_count() or 1) < _CORES_FOR_SPARK:
        return "Spark, its jobs and the cluster share so few cores that these are always busy"
    return EXPECTED.get(name)


class BudgetExceeded(AssertionError):
    """Somebody waited too long. All that was read was right."""


def check_budget(name: str, history: History, since: float) -> None:
    """Raise BudgetExceeded, with the history, if a client waited too long since the fault began."""
    budget = BUDGETS[name]
    exceeded = []
    for kind in sorted(history.kinds()):
        allowed_s = budget.batch_s if kind in WRITES else budget.read_s
        waits = [each for each in history.of(kind, since) if each.seconds > SESSION_S]
        if budget.long_waits is not None and len(waits) > budget.long_waits:
            exceeded.append(f"{kind} waited long {len(waits)} times, not {budget.long_waits}")
        slowest = max(history.of(kind, since), key=lambda each: each.seconds)
        if slowest.seconds > allowed_s:
            exceeded.append(
                f"{kind} {slowest.number} took {slowest.seconds:.1f} s, not {allowed_s:g}"
            )
    if exceeded:
        raise BudgetExceeded(f"{name}: {'; '.join(exceeded)}\n{history.told(since)}")
