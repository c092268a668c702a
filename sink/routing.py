"""Which way a batch goes when nobody has said: by the driver, or by the executors.

The driver collects a batch, folds it and puts it: one read of the source and no shuffle, but all of
it in one process. The executors do it side by side, for the price of two Spark stages. So the
driver takes less the more executors there are.

A batch that Spark knows to be large does not come here. One that turns out to be, while the driver
collects it, is left to the executors.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

_RECENT_BATCHES = 3
# So few rows are put by the driver before the tasks of a stage have started.
_ALWAYS_FEW = 10_000
_COUNT_AGAIN_S = 30.0
# Rows take about so many times what they take in a file.
_UNPACKED = 3


def is_too_large(known_bytes: int | None, driver_max_bytes: int) -> bool:
    """Return whether a source of so many bytes in files is known to be too much for the driver."""
    return known_bytes is not None and known_bytes * _UNPACKED > driver_max_bytes


def goes_by_driver(recent_rows: Sequence[int], driver_max_rows: int, executors: int) -> bool:
    """Return whether the next batch goes by the driver, if it is as large as the recent ones are.

    The median of these counts: one odd batch does not change the way. `driver_max_rows` is what the
    driver takes if there is one executor, or none, as in local mode; n of them leave it an n-th.
    """
    limit = max(driver_max_rows // max(executors, 1), min(driver_max_rows, _ALWAYS_FEW))
    return not recent_rows or median(recent_rows) <= limit


def count_executors(context: Any) -> int:
    """Return how many executors the application has now; in local mode, none."""
    master = str(context.master)
    if master == "local" or master.startswith("local["):
        return 0
    # The driver is among them.
    return max(0, int(context._jsc.sc().getExecutorMemoryStatus().size()) - 1)


class RecentBatches:
    """The sizes of the last batches, and the number of executors, which is asked for rarely."""

    def __init__(
        self,
        driver_max_rows: int,
        *,
        count: Callable[[Any], int] = count_executors,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._driver_max_rows = driver_max_rows
        self._count = count
        self._clock = clock
        self._rows: deque[int] = deque(maxlen=_RECENT_BATCHES)
        self._executors = 0
        self._counted_at: float | None = None

    def add(self, rows: int) -> None:
        """Remember the size of a batch."""
        self._rows.append(rows)

    def go_by_driver(self, context: Any) -> bool:
        """Decide for the next batch; `context` is Spark's."""
        now = self._clock()
        if self._counted_at is None or now - self._counted_at >= _COUNT_AGAIN_S:
            self._executors, self._counted_at = self._count(context), now
        return goes_by_driver(self._rows, self._driver_max_rows, self._executors)
