"""What a server opens and warms up for, in the background: a few buckets at a time.

A bucket whose node is ours is opened, those first that somebody has asked for. For one that another
live server leads we warm up: open it read-only, follow its log until little is left, ask the leader
for it, take its node, and lead. Nothing rests on how far that got. If the asked one dies, or we do,
if the answer is lost, or comes when the bucket is somebody else's: the node decides who may lead,
and the log who does.
"""

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from foundation.background import failed, surviving
from foundation.errors import (
    Closed,
    CorruptRecord,
    Retryable,
    ServerUnavailable,
    TallybookError,
    UnknownTable,
)
from foundation.failpoints import hit
from foundation.ids import LeadKey
from locks.cluster.servers import Server
from locks.coordinator import Coordinator
from locks.snapshots.list_records import ListedSnapshot
from server.protocol.definitions import ClusterTable
from server.tablet.complaints import Complaints
from server.tablet.hosting import Hosting
from server.tablet.leads import Leads
from server.tablet.peers import Peers

logger = logging.getLogger(__name__)

OPEN_AT_ONCE = 4
WARM_AT_ONCE = 2
# A bucket is asked for when its follower is behind by no more than this many segments; one that
# does not get there is left to its leader for a while.
_NEARLY = 8
_ROUNDS = 50
# A leader ends what is under way before it answers. Who is asked again knows of it.
_ASK_S = 3.0
# What fails is tried again after a second, then two, then four.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 10.0


@dataclass(frozen=True)
class _Failure:
    """Why a bucket could not be opened, or taken over, and when to try again."""

    why: str
    pause_s: float
    again_s: float


@dataclass(frozen=True, kw_only=True)
class Held:
    """A bucket that should be ours: who leads it, and what has to hold before it is asked for.

    `urgent`: its leader wants to be rid of it.
    """

    leader: Server
    urgent: bool = False
    check: Callable[[], None] = field(default=lambda: None, compare=False)


class Openings:
    """Opens what is wanted, until it is stopped. Safe for threads."""

    def __init__(
        self,
        coordinator: Coordinator,
        leads: Leads,
        hosting: Hosting,
        peers: Peers,
        complaints: Complaints,
        *,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._coordinator = coordinator
        self._leads = leads
        self._hosting = hosting
        self._peers = peers
        self._complaints = complaints
        self._clock_s = clock_s
        self._changed = threading.Condition()
        self._taken: frozenset[LeadKey] = frozenset()
        self._held: dict[LeadKey, Held] = {}
        self._busy: set[LeadKey] = set()
        self._failures: dict[LeadKey, _Failure] = {}
        self._stopping = False
        self._threads: list[threading.Thread] = []

    def want(self, taken: Collection[LeadKey], held: Mapping[LeadKey, Held]) -> None:
        """Open the buckets that were taken, and warm up for those that others hold.

        What was wanted before, and is not any more, is given up.
        """
        with self._changed:
            self._taken, self._held = frozenset(taken), dict(held)
            for key in [key for key in self._failures if key not in taken and key not in held]:
                self._forget_failure(key)
            self._tell()
            if (taken or held) and not self._threads and not self._stopping:
                self._start()
            self._changed.notify_all()

    def busy(self) -> Collection[LeadKey]:
        """Return the buckets that are being opened, warmed up for or closed."""
        with self._changed:
            return frozenset(self._busy)

    def waiting(self) -> Collection[LeadKey]:
        """Return the buckets that were taken, and wait to be opened, or are being opened.

        Not those with which something was wrong: their nodes may not be ours any more.
        """
        with self._changed:
            return self._taken.difference(self._failures)

    def claim(self, key: LeadKey) -> bool:
        """Keep a bucket from being opened until it is wanted again; False if somebody is at it.

        Not before it is released, either.
        """
        with self._changed:
            if key in self._busy:
                return False
            self._busy.add(key)
            self._taken -= {key}
            self._held.pop(key, None)
            return True

    def release(self, key: LeadKey) -> None:
        """End what `claim` began."""
        with self._changed:
            self._busy.discard(key)
            self._changed.notify_all()

    def wait(self, deadline_s: float) -> bool:
        """Return whether all that can be done now was done, as soon as it is: for tests."""
        with self._changed:
            return self._changed.wait_for(
                lambda: not self._busy and self._pick_taken() is None and self._pick_held() is None,
                deadline_s,
            )

    def stop(self) -> None:
        """Give up what is under way, and wait until it has ended."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    # --- The threads ------------------------------------------------------------------------------

    def _start(self) -> None:
        works = [(self._pick_taken, self._open)] * OPEN_AT_ONCE
        works += [(self._pick_held, self._take_over)] * WARM_AT_ONCE
        for pick, work in works:
            thread = threading.Thread(
                target=self._run, args=(pick, work), name="tallybook-open", daemon=True
            )
            self._threads.append(thread)
            thread.start()

    def _run(self, pick: Callable[[], LeadKey | None], work: Callable[[LeadKey], None]) -> None:
        while not self._stopping:
            with surviving("opening buckets"):
                self._work_on_next(pick, work)
                continue
            with self._changed:
                self._changed.wait(_FIRST_PAUSE_S)

    def _work_on_next(
        self, pick: Callable[[], LeadKey | None], work: Callable[[LeadKey], None]
    ) -> None:
        with self._changed:
            key = None
            while not self._stopping and (key := pick()) is None:
                self._changed.wait(_FIRST_PAUSE_S)  # One that had to pause may be due.
            if key is None or self._stopping:
                return
            self._busy.add(key)
        try:
            self._try(key, work)
        finally:
            self.release(key)

    def _pick_taken(self) -> LeadKey | None:
        """Return the bucket to be opened next: one that was asked for, if there is one."""
        ready = self._ready(self._taken)
        asked = self._hosting.asked()
        return min(ready, key=lambda key: (key not in asked, key), default=None)

    def _pick_held(self) -> LeadKey | None:
        ready = self._ready(self._held)
        return min(ready, key=lambda key: (not self._held[key].urgent, key), default=None)

    def _ready(self, keys: Collection[LeadKey]) -> list[LeadKey]:
        if not keys:
            return []
        now_s, led = self._clock_s(), self._hosting.led()
        return [
            key
            for key in keys
            if key not in self._busy
            and key not in led
            and (key not in self._failures or self._failures[key].again_s <= now_s)
        ]

    def _try(self, key: LeadKey, work: Callable[[LeadKey], None]) -> None:
        try:
            work(key)
        except (Closed, UnknownTable) as exc:
            # Nobody wants it any more, or it was dropped since; the next look lets go of it.
            logger.info("bucket %s is not opened: %s", key, exc)
            self._pause(key, str(exc))
        except (TallybookError, OSError) as exc:
            # It is tried again. The node stays: nobody else could open it, either, if it is the
            # log that is damaged; and if it is this machine, its operator sees it in the status.
            self._fail(key, str(exc))
        except Exception as exc:
            failed("opening a bucket", exc)
            self._fail(key, repr(exc))

    # --- One bucket -------------------------------------------------------------------------------

    def _open(self, key: LeadKey) -> None:
        # Since it was taken, it may have been handed over; not from here on, while we have it.
        if not self._leads.has(key):
            raise Closed("its node is not ours any more")
        began = time.monotonic()
        self._hosting.open(key, *self._sources(key))
        with self._changed:
            self._taken -= {key}  # Whoever closes it does not want it opened again.
            self._forget_failure(key)
            self._tell()
        led = self._hosting.led().get(key)
        if led is not None:  # Nobody has ended it since.
            took_s = time.monotonic() - began
            logger.info("leading bucket %s at term %d, open after %.3f s", key, led.term, took_s)

    def _take_over(self, key: LeadKey) -> None:
        try:
            self._hosting.warm(key, *self._sources(key))
            hit("handover.warmed")
            self._come_near(key)
            refused = self._ask(key)
            # Whatever the answer was: a node that is there is nobody else's to take.
            if not self._is_ours(key) and not self._leads.take([key]):
                raise Retryable(refused or "another server has taken it meanwhile")
            hit("handover.taken")
            self._open(key)
        finally:
            self._hosting.cool(key)  # Unless it is led by now.

    def _is_ours(self, key: LeadKey) -> bool:
        """Whether the node is ours: its leader died while we warmed up, and it was free."""
        return key in self._taken

    def _come_near(self, key: LeadKey) -> None:
        """Follow until little is left, or the bucket is ours: then to lead is all that helps."""
        for _ in range(_ROUNDS):
            behind = self._hosting.follow(key)
            if behind <= _NEARLY or self._is_ours(key):
                return
        raise Retryable(f"its leader writes faster than it is followed: {behind} segments behind")

    def _ask(self, key: LeadKey) -> str | None:
        """Have the leader give the bucket up; return why it does not, if that is known."""
        held = self._held.get(key)
        if held is None or self._is_ours(key):
            return None
        held.check()
        try:
            refused = self._peers.ask(held.leader.address, key, self._leads.session, _ASK_S)
        except ServerUnavailable as exc:  # It may have; and if it is dead, its session's end will.
            return str(exc)
        return None if refused is None else f"server {held.leader.address} keeps it: {refused}"

    def _sources(
        self, key: LeadKey
    ) -> tuple[Callable[[], list[ListedSnapshot]], Callable[[], ClusterTable], Callable[[], bool]]:
        return (
            lambda: self._snapshots(key),
            lambda: ClusterTable(self._coordinator.tables.get_by_id(key.table_id)),
            lambda: not self._stopping and (key in self._taken or key in self._held),
        )

    def _snapshots(self, key: LeadKey) -> list[ListedSnapshot]:
        """Return what is listed of a bucket's snapshots, the latest first."""
        try:
            return list(reversed(self._coordinator.snapshots.read(key).listed))
        except CorruptRecord as exc:  # It must not keep the server from its other buckets.
            logger.warning("no snapshot of bucket %s can be found: %s", key, exc)
            return []

    # --- What is wrong ----------------------------------------------------------------------------

    def _fail(self, key: LeadKey, why: str) -> None:
        self._pause(key, why)
        self._complaints.complain(_about(key) if self._is_ours(key) else _about_move(key), why)

    def _pause(self, key: LeadKey, why: str) -> None:
        with self._changed:
            before = self._failures.get(key)
            pause_s = _FIRST_PAUSE_S
            if before is not None:
                pause_s = min(2 * before.pause_s, _LONGEST_PAUSE_S)
            self._failures[key] = _Failure(why, pause_s, self._clock_s() + pause_s)
            self._tell()

    def _forget_failure(self, key: LeadKey) -> None:
        self._failures.pop(key, None)
        self._complaints.over(_about(key))
        self._complaints.over(_about_move(key))

    def _tell(self) -> None:
        """Have whoever asks for a bucket told what is the matter with it."""
        self._hosting.set_awaited(self._taken)
        self._hosting.set_unopened(
            {key: one.why for key, one in self._failures.items() if key in self._taken}
        )


def _about(key: LeadKey) -> str:
    return f"bucket {key} cannot be opened"


def _about_move(key: LeadKey) -> str:
    return f"bucket {key} should move here"
