"""One fault, tried on a bed under load: all that was read is right, and nobody waited too long."""

import random
import time

import pytest

from tests.multihost.bed import Bed
from tests.multihost.budgets import BUDGETS, BudgetExceeded, check_budget
from tests.multihost.faults import FAULTS
from tests.support.zookeeper_server import wait_until


def try_fault(bed: Bed, name: str, *, seed: int = 0, lasts_s: float | None = None) -> float:
    """Have the fault for so long, heal it, and wait until all is as before; return when it began.

    The bed has settled before that. `lasts_s`: as long as its budget says. AssertionError, with the
    history, if a client saw what it should not have, or did not go on in the end.
    """
    chance = random.Random(f"{seed} {name}")
    began = bed.history.note(f"{name} begins")
    over = began + (BUDGETS[name].lasts_s if lasts_s is None else lasts_s)
    with FAULTS[name](bed, chance):
        wait_until(lambda: time.monotonic() >= over, f"{name} lasts", 60, every_s=0.1)
        bed.history.note(f"{name} ends")
    bed.history.note("healed")
    bed.settle()
    assert not bed.history.wrong, f"{name}: {bed.history.wrong}\n{bed.history.told(began)}"
    print(f"{name}, slowest: {bed.history.slowest(began)}")
    return began


def try_in_time(bed: Bed, name: str, late: str | None) -> None:
    """The same in a test, within the budget: for a machine that has nothing else to do.

    `late`: why it is expected to take longer, if it is.
    """
    began = try_fault(bed, name)
    try:
        check_budget(name, bed.history, began)
    except BudgetExceeded as exc:
        if late is None:
            raise
        pytest.xfail(f"{late}: {exc}")
