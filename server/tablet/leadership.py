"""A server's leads: takes those that should be its, and hands over those that are asked for.

Nothing rests on being early: a bucket that is led by two is settled by its log. What this sees to
is that a bucket leaves a live session only by that session's own hand-over, in this order: stop
serving, give the node up, close. And that is done only when the server that should have the bucket
has warmed up and asks for it, or when there is nobody to wait for: until then it is served here.
"""

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from foundation.background import failed, surviving
from foundation.errors import SessionLost, TallybookError
from foundation.failpoints import hit
from foundation.ids import BucketId, LeadKey
from locks.catalog.definitions import CatalogTable
from locks.cluster.leaders import AT_ONCE
from locks.cluster.picture import ClusterPicture
from locks.cluster.placement import place
from locks.cluster.servers import Members, Server
from locks.coordinator import Coordinator
from server.protocol.definitions import ClusterTable
from server.tablet.complaints import Complaints
from server.tablet.config import HandOverConfig
from server.tablet.hosting import Hosting
from server.tablet.leads import Leads
from server.tablet.openings import Held, Openings
from server.tablet.peers import Peers
from server.tablet.standing_aside import StandingAside

logger = logging.getLogger(__name__)

# Watches say when to look again; this is for what they cannot tell, such as a disk with room again,
# or a lead that its server gave up. ZooKeeper is asked then only for what is missing here.
_LOOK_AGAIN_S = 1.0
_CLOSE_DEADLINE_S = 5.0
_WAIT_S = 0.1
_LOOKING = "it cannot look who should lead what"
_ASIDE = "it cannot say whether it stands aside"
_SWEEPING = "views of what was dropped are not deleted"


@dataclass(frozen=True)
class _Placed:
    """How many buckets there are, by table and partition; and those that a server should have."""

    buckets: Mapping[tuple[int, int], int]
    ours: frozenset[LeadKey]

    def exists(self, key: LeadKey) -> bool:
        """Whether there is such a bucket."""
        return key.bucket.number < self.buckets.get((key.table_id, key.bucket.partition), 0)


class Leadership:
    """Keeps what is hosted in line with who should lead, for one session of one server."""

    def __init__(
        self,
        coordinator: Coordinator,
        server: Server,
        hosting: Hosting,
        *,
        peers: Peers,
        aside: StandingAside,
        config: HandOverConfig,
        complaints: Complaints,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._coordinator = coordinator
        self._server = server
        self._hosting = hosting
        self._aside = aside
        self._complaints = complaints
        self._settle_s = config.settle_s
        self._clock_s = clock_s
        self._leads = Leads(coordinator.leaders, server)
        self._openings = Openings(
            coordinator, self._leads, hosting, peers, complaints, clock_s=clock_s
        )
        self._members = Members(live=())
        self._members_since_s = clock_s()
        self._tables: dict[int, ClusterTable] = {}
        # As it was at the last look; None: something has changed since.
        self._placed: _Placed | None = None
        # Whether views may be left on this disk of what there is no more.
        self._unswept = True
        # Being handed over; and ended here, while their nodes are still ours: ZooKeeper was away.
        self._handing: set[LeadKey] = set()
        self._owed: set[LeadKey] = set()
        self._worth_looking = threading.Event()
        self._stopping = threading.Event()
        # One look at a time; whoever drains waits for what it finds.
        self._reconciling = threading.RLock()
        self._changed = threading.Condition()
        self._closing: list[threading.Thread] = []
        self._picture = ClusterPicture(
            coordinator.store, coordinator.servers, self._worth_looking.set, clock_s=clock_s
        )

    # --- From the first look to the last ----------------------------------------------------------

    def run(self) -> None:
        """Keep in line until stopped, or until the session is lost: then SessionLost."""
        while not self._stopping.is_set():
            self._worth_looking.clear()  # Before looking: a change from here on sets it again.
            if self._looked():
                self._worth_looking.wait(self._until_next_look_s())
            else:
                self._stopping.wait(_LOOK_AGAIN_S)

    def _looked(self) -> bool:
        """Look; whether that went well. What it leads is served, whatever went wrong with it.

        Only with its session a server leaves the cluster: else one error would cost all its leads.
        """
        with self._complaining(_LOOKING):
            self.reconcile()
            return True
        return False

    @contextmanager
    def _complaining(self, about: str, counted: str = "leading") -> Iterator[None]:
        """Go on after what fails here, which is tried again with the next look; but SessionLost.

        `counted`: one of few names, for what nobody foresaw.
        """
        try:
            yield
        except SessionLost:
            raise
        except TallybookError as exc:
            self._complaints.complain(about, str(exc))
        except Exception as exc:
            self._complaints.complain(about, repr(exc), exc)
            failed(counted, exc, log=False)
        else:
            self._complaints.over(about)

    def look_again(self) -> None:
        """Say that something may have changed."""
        self._worth_looking.set()

    def drain(self, deadline: float) -> None:
        """Have others take all buckets over while they are served here; or until the deadline.

        It ends at once where there are no others. What is left then is for `stop`. The deadline is
        by the monotonic clock, as all of this is about real time.
        """
        if len(self._coordinator.servers.all()) <= 1:
            return
        self._aside.leave()
        self._looked()
        with self._changed:
            while (
                (self._hosting.led() or self._handing)
                and self._others()
                and time.monotonic() < deadline
            ):
                self._changed.wait(min(_LOOK_AGAIN_S, max(0.0, deadline - time.monotonic())))

    def stop(self) -> None:
        """Give everything up, as far as ZooKeeper still answers."""
        with self._reconciling:  # Whoever ends the session waits for it.
            self._stopping.set()
            self._openings.stop()
            self._hosting.close_all()
            try:
                self._leads.give_up(self._leads.possible())
            except TallybookError as exc:
                logger.warning("leads are left to the session's end: %s", exc)
        self._worth_looking.set()
        self.close()

    def close(self) -> None:
        """End the threads of a session that is over; not before a hand-over has ended."""
        with self._reconciling:
            self._stopping.set()
        self._openings.stop()
        for thread in self._closing:
            thread.join(_CLOSE_DEADLINE_S)

    def wait(self, deadline_s: float) -> bool:
        """Return whether all that was found to be done was done, as soon as it is: for tests."""
        return self._openings.wait(deadline_s)

    # --- A look -----------------------------------------------------------------------------------

    def reconcile(self) -> None:
        """Look who should lead what, and act on it; what takes time goes on in the background."""
        with self._reconciling:
            if self._stopping.is_set():
                return
            if self._picture.look():
                self._placed = None
            members = self._picture.members
            if self._server not in members.live:  # Nobody would ever give it a bucket again.
                raise SessionLost(f"the node of session {self._server.name} is gone; join again")
            self._note(members)
            with self._complaining(_ASIDE):
                self._aside.look(members)
            placed = self._placed
            if placed is None:
                placed = self._placed = self._place(members)
                self._unswept = True
            self._let_go(placed)
            self._forget(self._picture.tables)
            with self._complaining(_SWEEPING):
                self._sweep(placed)
            self._want(sorted(placed.ours.difference(self._hosting.led(), self._handing)))
        with self._changed:
            self._changed.notify_all()

    def _forget(self, existing: Collection[int]) -> None:
        """Let go of the definitions of all other tables, but for those that are still ending."""
        kept = {*existing, *(key.table_id for key in self._leads.possible())}
        self._tables = {number: one for number, one in self._tables.items() if number in kept}
        self._hosting.forget_tables(kept)

    def _sweep(self, placed: _Placed) -> None:
        """Delete the views of what was dropped, also while it was led elsewhere, or we were away.

        Not before all who were at such a bucket have ended.
        """
        at_work = {*self._openings.busy(), *self._leads.possible()}
        if self._unswept and all(map(placed.exists, at_work)):
            self._hosting.sweep(placed.exists)
            self._unswept = False

    def _note(self, members: Members) -> None:
        """Remember who is there, and since when nobody has come or gone."""
        if members != self._members:
            self._members, self._members_since_s = members, self._clock_s()

    def _others(self) -> bool:
        """Whether there is another server that could take something over."""
        return any(one.address != self._server.address for one in self._members.able)

    def _unsettled_s(self) -> float:
        """Return how long it takes until the servers have settled; 0 if they have."""
        return max(0.0, self._members_since_s + self._settle_s - self._clock_s())

    def _until_next_look_s(self) -> float:
        return min(_LOOK_AGAIN_S, self._unsettled_s() or _LOOK_AGAIN_S)

    def _place(self, members: Members) -> _Placed:
        """Return all buckets of all tables, and which of them this server should have."""
        buckets, addresses = {}, _addresses(members)
        ours: set[LeadKey] = set()
        for defined in self._picture.tables.values():
            table = self._known(defined)
            partitions: Collection[int] = (0,)
            if table.schema.partition_by:
                partitions = self._picture.partitions[table.table_id]
            for partition in partitions:
                buckets[table.table_id, partition] = table.buckets
                placed = place(table.table_id, partition, table.buckets, addresses)
                ours.update(
                    LeadKey(table.table_id, BucketId(partition, number))
                    for number, address in enumerate(placed)
                    if address == self._server.address
                )
        return _Placed(buckets, frozenset(ours))

    def _known(self, defined: CatalogTable) -> ClusterTable:
        """Return a table that was read, and let all its buckets know of it."""
        table = self._tables.get(defined.table_id)
        if table is None or table.table is not defined:
            table = ClusterTable(defined)
            self._hosting.set_table(table)
            self._tables[defined.table_id] = table
        return table

    def _let_go(self, placed: _Placed) -> None:
        """End what was dropped, and what another leader is known to have taken.

        Nothing else: that another server should have a bucket is for that one to say.
        """
        gone = self._owed - self._handing
        led = self._hosting.led()
        # Those that were never opened, as well: nobody else would let go of them.
        dropped = {key for key in {*led, *self._leads.possible()} if not placed.exists(key)}
        deposed = {key for key, one in led.items() if one.bucket.deposed}
        for key in sorted(dropped | deposed):
            if not self._openings.claim(key):
                continue
            end = self._hosting.drop if key in dropped else self._hosting.close
            # One that does not close is not served, and its node is free, as that of any other.
            try:
                with self._complaining(f"bucket {key} does not close", "closing a bucket"):
                    end(key)
            finally:
                self._openings.release(key)
            gone.add(key)
        if gone:
            self._owed |= gone
            self._leads.give_up(gone)
            self._owed -= gone

    def _want(self, missing: Sequence[LeadKey]) -> None:
        """Take what nobody leads, and open it; warm up for what another live server leads."""
        # Those that wait to be opened are ours, as far as we know, and not asked for every time.
        taken = sorted(set(missing).intersection(self._openings.waiting()))
        unknown = sorted(set(missing).difference(taken))
        holders = self._leads.holders(unknown) if unknown else {}
        taken += [key for key in unknown if holders.get(key) == self._server.name]
        free = [key for key in unknown if key not in holders]
        for first in range(0, len(free), AT_ONCE):
            taken += self._leads.take(free[first : first + AT_ONCE])
            hit("leadership.taken")
            if self._worth_looking.is_set():  # Others have come, perhaps, and the rest is theirs.
                break
        settled = self._unsettled_s() == 0
        held = {}
        for key, name in holders.items():
            leader = self._members.named(name)
            # A former self, or one that is gone by now: its session's end frees the bucket.
            if leader is None or leader.address == self._server.address:
                continue
            why = self._members.aside.get(name)
            if settled or why is not None:
                check = self._aside.check_for(why)
                held[key] = Held(leader=leader, urgent=why is not None, check=check)
        self._openings.want(taken, held)

    # --- What others ask for ----------------------------------------------------------------------

    def hand_over(self, key: LeadKey, session: str) -> str | None:
        """Give a bucket up to the server of this session, if it is the one that should have it.

        Return why not; None if nobody leads it from here any more. On return what was under way
        has ended, unless it cannot: this server does not reach the log store.
        """
        refused = self._why_not(key, session)
        if refused is not None:
            return refused
        if not self._openings.claim(key):
            return "it is being opened or handed over"
        self._handing.add(key)
        try:
            self._end(key)
            hit("leadership.closed")
            self._owed.add(key)
            self._leads.give_up([key])
            self._owed.discard(key)
            hit("handover.given_up")
            logger.info("handed bucket %s over to session %s", key, session)
        finally:
            self._handing.discard(key)
            thread = threading.Thread(
                target=self._close, args=(key,), name="tallybook-close", daemon=True
            )
            thread.start()
            self._closing = [*(one for one in self._closing if one.is_alive()), thread]
            with self._changed:
                self._changed.notify_all()
        return None

    def _end(self, key: LeadKey) -> None:
        """Stop serving a bucket, after what is under way; but for what hangs in the log store."""

        def end() -> None:
            with surviving("ending a bucket"):
                self._hosting.end(key)
                ended.set()

        ended = threading.Event()
        ending = threading.Thread(target=end, name="tallybook-end", daemon=True)
        ending.start()
        while ending.is_alive() and not self._aside.is_unable:
            ending.join(_WAIT_S)
        if not ended.is_set():
            self._hosting.end(key, at_once=True)

    def _why_not(self, key: LeadKey, session: str) -> str | None:
        members = self._coordinator.servers.members()
        asking = members.named(session)
        if asking is None:
            return f"{session} is no session of a live server"
        table, (partition, number) = self._hosting.table(key.table_id), key.bucket
        placed = place(table.table_id, partition, table.buckets, _addresses(members))
        if not 0 <= number < len(placed) or placed[number] != asking.address:
            return f"it is not for {asking.address} to lead, by the servers that are there now"
        return None

    def _close(self, key: LeadKey) -> None:
        """Close a bucket that is led elsewhere by now; its view stays for when it comes back."""
        try:
            with self._complaining(f"bucket {key} does not close", "closing a bucket"):
                self._hosting.close(key)
        finally:
            self._openings.release(key)


def _addresses(members: Members) -> list[str]:
    return [server.address for server in members.candidates]
