"""Calls to many buckets at once: one per server, in parallel, repeated where leaders moved."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from foundation.deadlines import deadline_in, remaining, within
from foundation.errors import (
    NotLeader,
    Overloaded,
    ServerUnavailable,
    TallybookError,
    Unavailable,
    UnknownOutcome,
)
from foundation.ids import LeadKey
from locks.coordinator import Coordinator
from server.client.connections import Broken, Connections
from server.client.leader_directory import LeaderDirectory
from server.client.lookup_lanes import LookupLanes

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.01, 0.25
_PAUSE_PER_LOOK = 3


@dataclass
class _Outcome(Generic[Result]):
    """What became of the call to one server."""

    keys: Sequence[LeadKey]
    results: Mapping[LeadKey, Result] = field(default_factory=dict)
    moved: Exception | None = None
    error: Exception | None = None


class LeaderCalls:
    """Sends calls to the leaders of buckets. Safe for threads."""

    def __init__(
        self,
        coordinator: Callable[[], Coordinator],
        connections: Connections,
        *,
        deadline_s: float,
        attempt_s: float,
    ) -> None:
        self.connections = connections
        self.directory = LeaderDirectory(coordinator)
        self.lanes = LookupLanes(connections, lambda: self.directory, attempt_s=attempt_s)
        self._deadline_s = deadline_s
        self._attempt_s = attempt_s
        self._pool = ThreadPoolExecutor(16, thread_name_prefix="tallybook-client")

    def scatter(
        self,
        keys: Sequence[LeadKey],
        buckets: int,
        call: Callable[[str, Sequence[LeadKey], float], Mapping[LeadKey, Result]],
        *,
        repeatable: bool = True,
        patient: bool = True,
        changes: bool = False,
        check_moved: Callable[[Sequence[LeadKey]], None],
    ) -> dict[LeadKey, Result]:
        """Call each server once for all its buckets; return the results of all buckets.

        `call` gets an address, the buckets there, and its time-out. Where a leader has moved or a
        server died it is called again, until the deadline. `repeatable=False`: a call that may have
        been carried out is not repeated, but UnknownOutcome. `patient=False`: not even a moved
        leader is waited for; its NotLeader is the caller's. `changes`: a call that may have been
        carried out and is given up is an UnknownOutcome, too. `check_moved` is called with the
        buckets whose leaders moved, and raises if there are no such buckets any more.
        """
        results: dict[LeadKey, Result] = {}
        doubtful: set[LeadKey] = set()
        waiting, pause_s = list(keys), _FIRST_PAUSE_S
        told: Exception | None = None
        with within(self._deadline_s) as deadline:
            while True:
                outcomes = self._attempt(waiting, buckets, call, deadline, repeatable=repeatable)
                for outcome in outcomes:
                    results.update(outcome.results)
                errors = [outcome.error for outcome in outcomes if outcome.error is not None]
                if errors:
                    raise _with_note(errors[0], results)
                moved = [outcome for outcome in outcomes if outcome.moved is not None]
                waiting = [key for outcome in moved for key in outcome.keys]
                if not waiting:
                    return results
                for outcome in moved:
                    if changes and isinstance(outcome.moved, Broken) and outcome.moved.sent:
                        doubtful.update(outcome.keys)
                reason = moved[0].moved
                assert reason is not None
                in_doubt = not doubtful.isdisjoint(waiting)
                # What a server said is worth more than that our time was over before the next word.
                told = reason if told is None or not isinstance(reason, Broken) else told
                if not patient:
                    self.directory.doubt(waiting)
                    if in_doubt or isinstance(reason, Broken):
                        raise _with_note(_given_up(str(reason), in_doubt=in_doubt), results)
                    if not isinstance(reason, Overloaded):
                        raise reason
                if time.monotonic() + pause_s > deadline:
                    what = (
                        f"bucket {waiting[0]}{_others(waiting)}: no leader took the call within "
                        f"{self._deadline_s:g} s; the last word was: {told}"
                    )
                    raise _with_note(_given_up(what, in_doubt=in_doubt), results)
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
                if not all(isinstance(outcome.moved, Overloaded) for outcome in moved):
                    began_s = time.monotonic()
                    self._look_again(waiting, check_moved)
                    # To look for very many leaders takes long, for ZooKeeper, too.
                    pause_s = max(pause_s, _PAUSE_PER_LOOK * (time.monotonic() - began_s))

    def _look_again(
        self, keys: Sequence[LeadKey], check_moved: Callable[[Sequence[LeadKey]], None]
    ) -> None:
        try:
            self.directory.refresh(keys)
            check_moved(keys)
        except Unavailable as exc:  # Nobody can say who leads by now. Who led may still do so.
            logger.info("whoever led is asked again: %s", exc)

    @property
    def attempt_s(self) -> float:
        """How long to wait for one answer."""
        return self._attempt_s

    @property
    def deadline_s(self) -> float:
        """How long a call looks for a leader that answers."""
        return self._deadline_s

    def deadline(self) -> float:
        """Return when a call that begins now has to be given up, by the monotonic clock."""
        return deadline_in(self._deadline_s)

    def _attempt(
        self,
        keys: Sequence[LeadKey],
        buckets: int,
        call: Callable[[str, Sequence[LeadKey], float], Mapping[LeadKey, Result]],
        deadline: float,
        *,
        repeatable: bool,
    ) -> list[_Outcome[Result]]:
        """Call every server once, and say what became of each."""
        try:
            by_address: dict[str, list[LeadKey]] = {}
            for key in keys:
                by_address.setdefault(self.directory.address_of(key, buckets), []).append(key)
        except (ServerUnavailable, Unavailable) as exc:
            # None is running, and one may come; or ZooKeeper, which knows, does not answer.
            return [_Outcome(keys, moved=exc)]

        def one(address: str) -> _Outcome[Result]:
            there = by_address[address]
            timeout_s = min(self._attempt_s, remaining(deadline))
            try:
                return _Outcome(there, results=call(address, there, timeout_s))
            except (NotLeader, Overloaded) as exc:
                return _Outcome(there, moved=exc)
            except Broken as exc:
                if exc.sent and not repeatable:
                    unknown = UnknownOutcome(
                        f"{exc}; whether the rows were written is not known: look at the table, or "
                        "write with an owner and a token, which can be sent again"
                    )
                    return _Outcome(there, error=unknown)
                return _Outcome(there, moved=exc)
            except Exception as exc:
                return _Outcome(there, error=exc)

        if len(by_address) == 1:
            return [one(address) for address in by_address]
        return list(self._pool.map(one, by_address))

    def close(self) -> None:
        """End the threads and the connections."""
        self.lanes.close()
        self._pool.shutdown()
        self.connections.close()


def _others(keys: Sequence[LeadKey]) -> str:
    return f" and {len(keys) - 1} more" if len(keys) > 1 else ""


def _given_up(what: str, *, in_doubt: bool) -> Exception:
    """Return the error of a call that is not repeated any more: nothing was changed, or who knows.

    A server that broke off may have carried the call out, whatever others said afterwards.
    """
    if not in_doubt:
        return ServerUnavailable(what)
    return UnknownOutcome(
        f"{what}; whether the rows were written is not known: send the same with the same token"
    )


def _with_note(error: Exception, results: Mapping[LeadKey, object]) -> Exception:
    """Say which buckets had their part before another server's failed."""
    if results and isinstance(error, TallybookError):
        written = ", ".join(map(str, sorted(results)))
        error.add_note(f"Buckets on other servers have carried out their part: {written}.")
    return error
