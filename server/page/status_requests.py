"""Asks the servers of a cluster for their status, side by side, and waits only so long for each.

A server whose answer is late is not asked again before it has come, or timed out. Until then its
last answer stands in, if that is young; else the server is told of as one that does not answer.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

WAIT_S = 2.0
KEPT_S = 15.0
_MOST_AT_ONCE = 64

Status = Mapping[str, Any]


class StatusRequests:
    """For one thread at a time. `ask`: for the status of the server at an address."""

    def __init__(
        self,
        ask: Callable[[str], Status],
        *,
        wait_s: float = WAIT_S,
        kept_s: float = KEPT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ask = ask
        self._wait_s = wait_s
        self._kept_s = kept_s
        self._clock = clock
        self._pool = ThreadPoolExecutor(_MOST_AT_ONCE, thread_name_prefix="tallybook-status")
        # By address: what is under way, and since when; what was answered last, and when.
        self._pending: dict[str, tuple[float, Future[Status]]] = {}
        self._answers: dict[str, tuple[float, Status]] = {}

    def of(self, addresses: Sequence[str]) -> list[Status]:
        """Return the status of each server, or an `error`; what `ask` raises is raised."""
        for address in addresses:
            if address not in self._pending:
                self._pending[address] = self._clock(), self._pool.submit(self._ask, address)
        wait([self._pending[address][1] for address in addresses], self._wait_s)
        self._answers = {one: self._answers[one] for one in addresses if one in self._answers}
        return [self._status(address) for address in addresses]

    def _status(self, address: str) -> Status:
        asked_at, pending = self._pending[address]
        now = self._clock()
        if not pending.done():
            answered_at, last = self._answers.get(address, (now - self._kept_s - 1, {}))
            if now - answered_at <= self._kept_s:
                return last
            return {"address": address, "error": f"no answer within {now - asked_at:.0f} s"}
        del self._pending[address]
        status = pending.result()
        if "error" in status:
            self._answers.pop(address, None)
        else:
            self._answers[address] = now, status
        return status

    def close(self) -> None:
        """Ask no more; what is under way ends by itself."""
        self._pool.shutdown(wait=False, cancel_futures=True)
