"""Snapshots and leases of a bucket whose leaders crash, change, and do not know that they did.

The owners are those of `test_isolation`. Leaders take snapshots, free them and clean the log, and
are interrupted in every step: they crash, are deposed and go on as zombies, or readers lease what
is just being retired. After every rule all that is listed or leased must be readable, with its log;
what the current leader has freed must leave no object behind; and each snapshot, with the committed
changes from its stable offset on, must be the committed table.
"""

import random
from contextlib import suppress

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from foundation.errors import (
    Closed,
    CutTooOld,
    Deposed,
    Superseded,
    UnknownLease,
    UnknownTable,
)
from foundation.ids import LeadKey
from locks.coordinator import Coordinator
from locks.snapshots.list_records import ListedSnapshot, SnapshotList
from locks.store.memory import MemoryCoordination
from merge_engine.bucket.bucket import Bucket
from merge_engine.bucket.log import Log
from merge_engine.bucket.segment import SUFFIX
from merge_engine.bucket.snapshot_manifest import content_of, manifest_name
from merge_engine.bucket.snapshot_storage import SnapshotStorage, restore_latest
from recovery.leader.snapshot_keeper import SnapshotKeeper
from recovery.reader.bucket_scan import open_snapshot_scan
from recovery.reader.cut import BucketCut
from recovery.reader.isolation import committed_changes
from recovery.reader.later import Sieve
from server.protocol.definitions import SNAPSHOTS, ClusterTable, define
from server.tablet.janitor import Janitor
from tests.conftest import rows_of
from tests.property.test_isolation import (
    EXAMPLES,
    HERE,
    IDS,
    SUMS,
    Action,
    Cells,
    IsolationMachine,
    TakenCut,
    actions,
    fold,
    replay,
)
from tests.property.test_scan_core import cells_of
from tests.support.snapshot_world import (
    FAILPOINTS,
    Crash,
    InMemorySession,
    Leader,
    MemoryStorage,
    interrupted,
)
from tests.support.strays import leave_stray

RETAINED = 2
LEASE_MS = 10_000
LEASES = ("tiering", "backup")
CALLS = ("roll up", "roll up", "take", "take", "take", "free", "clean")
ROLLING = ("roll_up.read", "roll_up.created", "roll_up.deleted")
# What comes between two steps of a leader.
INTRUSIONS = (
    *("crash", "lease", "lease", "expire", "commit", "zombie", "stray"),
    *("take over", "take over and take", "take over and take", "take over and free"),
)
REFUSED = (Superseded, Deposed, Closed)


class SnapshotMachine(IsolationMachine):
    """One bucket, its owners and leaders, and those who lease its snapshots."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = MemoryCoordination()
        self.coordinator = Coordinator(self.memory.connect())
        self.table = self.coordinator.tables.create(
            "t", define(SUMS, 1, column_locks=True, options={})
        )
        self.key = LeadKey(self.table.table_id, HERE)
        self.root = MemoryStorage()
        self.log_storage = self.root.child(ClusterTable(self.table).path(HERE))
        self.snapshot_storage = self.log_storage.child(SNAPSHOTS)
        self.leaders: list[Leader] = []
        self.known: dict[int, ListedSnapshot] = {}
        self.held: dict[str, tuple[int, int]] = {}  # By lease: snapshot, and when it expires.
        self.term = 0  # Of the leader that was seen to have the list.
        self.dropped = False
        self.directories = 0
        server = self.coordinator.servers.register("127.0.0.1:1")
        self.janitor = Janitor(self.root, InMemorySession(self.coordinator, server.name))

    # --- Leaders --------------------------------------------------------------------------------

    def open_bucket(self) -> Bucket:
        """Lead from an empty directory: the latest snapshot, and the log behind it."""
        self.directories += 1
        view = f"view-{self.directories}"
        listed = self.listed().listed
        restore_latest(
            SnapshotStorage(self.snapshot_storage),
            [(one.snapshot_id, one.term) for one in reversed(listed)],
            self.buckets.view_path(view=view),
        )
        bucket = self.buckets(SUMS, storage=self.log_storage, view=view, options=self.options)
        assert cells(bucket) == self.raw_at(bucket.end_offset)
        keeper = SnapshotKeeper(
            bucket,
            self.key,
            SnapshotStorage(self.snapshot_storage),
            lists=lambda: self.coordinator.snapshots,
            leases=lambda: self.coordinator.leases,
            read_records=lambda: dict(self.records),
            directory=self.directory / "checkpoints",
            retained=RETAINED,
            clock_ms=lambda: self.memory.clock_ms,
        )
        self.leaders.append(Leader(bucket, keeper, view))
        return bucket

    @property
    def leader(self) -> Leader:
        return self.leaders[-1]

    def take_over(self) -> None:
        """Lead from elsewhere; the leader so far does not notice."""
        self.bucket = self.open_bucket()

    @precondition(lambda self: not self.dropped)
    @rule()
    def reopen(self) -> None:
        """The zombies are found dead; somebody else leads."""
        for leader in self.leaders:
            leader.bucket.close()
        self.leaders = []
        self.take_over()

    @precondition(lambda self: not self.dropped)
    @rule(
        call=st.sampled_from(CALLS),
        back=st.sampled_from([0, 0, 0, 1, 2]),
        at=st.sampled_from([None, None, *FAILPOINTS]),
        visit=st.sampled_from([1, 1, 1, 2, 4]),
        intrusion=st.sampled_from(INTRUSIONS),
        which=st.integers(0, 3),
        news=st.integers(0, 4),
    )
    def lead(
        self,
        call: str,
        *,
        back: int = 0,
        at: str | None = None,
        visit: int = 1,
        intrusion: str = "crash",
        which: int = 0,
        news: int = 0,
    ) -> None:
        """A leader, or the one so many before it, does its work; something comes in between."""
        if news:
            self.make_news(news)
        leader = self.leaders[max(0, len(self.leaders) - 1 - back)]
        end = self.bucket.end_offset
        unswept = leader.keeper._unswept
        foreign = self.of_zombies(leader)
        before = self.listed()
        try:
            with interrupted(at, visit, lambda: self.intrude(intrusion, which)):
                self.call(leader, call)
        except Crash:
            return
        except REFUSED:
            assert leader is not self.leader, "the leader was refused"
            return
        if leader is not self.leader:
            return
        if call == "take":
            latest = self.listed().latest
            assert latest is not None
            assert latest.applied >= min(end, self.bucket.end_offset) or not self.changed(latest)
        taken = self.listed().next_id > before.next_id
        if call == "free" or taken:
            leases_changed = at is not None and intrusion in ("lease", "expire")
            self.check_no_orphans(
                frozenset() if unswept or taken else foreign, leases_changed=leases_changed
            )

    def make_news(self, number: int) -> None:
        """Let somebody write, and perhaps commit it."""
        for owner in sorted(self.records):
            self.do(("write", owner, 0, {number % 3: number}))
            if number > 1:
                self.do(("commit", owner, 0, {}))

    @precondition(lambda self: not self.dropped)
    @rule(count=st.integers(2, 4))
    def take_several(self, count: int) -> None:
        """So that what there was is retired."""
        for number in range(count):
            self.make_news(2 + number)
            self.lead("take")

    @precondition(lambda self: not self.dropped)
    @rule(at=st.sampled_from(FAILPOINTS), which=st.integers(0, 3))
    def depose(self, at: str, which: int) -> None:
        """The worst that can happen to a leader: its successor does the same before it goes on."""
        self.lead("take", at=at, intrusion="take over and take", which=which, news=2)

    @precondition(lambda self: not self.dropped)
    @rule(
        back=st.sampled_from([0, 0, 1]),
        at=st.sampled_from(ROLLING),
        visit=st.sampled_from([1, 1, 2]),
        intrusion=st.sampled_from(INTRUSIONS),
        which=st.integers(0, 3),
    )
    def roll_up(self, back: int, at: str, visit: int, intrusion: str, which: int) -> None:
        """The log is rolled up; something comes in between."""
        for number in range(3):
            self.make_news(2 + number)
        self.lead("roll up", back=back, at=at, visit=visit, intrusion=intrusion, which=which)

    @precondition(lambda self: not self.dropped)
    @rule(seed=st.integers(0, 999))
    def strays_come(self, seed: int) -> None:
        """To names of the log that were freed: they change nothing, whoever reads."""
        chance = random.Random(seed)
        for _ in range(1 + seed % 3):
            leave_stray(self.log_storage, chance)

    def call(self, leader: Leader, call: str) -> None:
        if call == "take":
            leader.keeper.take()
        elif call == "free":
            leader.keeper.free()
        elif call == "roll up":
            # Beyond what is stable, too: what is read is the same.
            leader.bucket.roll_up(leader.bucket.end_offset)
        else:
            leader.keeper.clean_log(older_than_ms=1 << 62)

    def intrude(self, what: str, which: int) -> None:
        if what == "crash":
            raise Crash
        if what == "lease":
            self.lease(LEASES[which % 2], which // 2)
        elif what == "expire":
            self.pass_time(LEASE_MS)
        elif what == "commit":
            for owner in sorted(self.records):
                self.do(("commit", owner, 0, {}))
        elif what == "stray":
            self.strays_come(which)
        elif what == "zombie":
            zombie = self.leaders[max(0, len(self.leaders) - 2)]
            if zombie is not self.leader:
                with suppress(*REFUSED):
                    self.call(zombie, CALLS[-1 - which % 3])
        else:
            self.take_over()
            if what == "take over and take":
                self.make_news(1 + which)
                self.leader.keeper.take()
            elif what == "take over and free":
                self.leader.keeper.free()
            self.listed()

    def changed(self, since: ListedSnapshot) -> bool:
        """Whether the log has changes behind a snapshot."""
        segments = self.bucket.read_log(since.applied)
        return any(segment.changes for segment in segments)

    # --- Leases ---------------------------------------------------------------------------------

    def lease(self, lease_id: str, age: int) -> None:
        """Ask for the latest snapshot, or one before it, which may be gone."""
        listed = self.listed()
        snapshot_id = max(1, listed.next_id - 1 - age)
        wanted = any(one.snapshot_id == snapshot_id for one in listed.listed)
        try:
            acquired = self.coordinator.leases.acquire(
                self.table.table_id, lease_id, {HERE: snapshot_id}, LEASE_MS
            )
        except UnknownTable:
            assert self.dropped
            return
        had = self.live().get(lease_id)
        assert (HERE in acquired.held) == (wanted or had == snapshot_id)
        if acquired.held:
            self.held[lease_id] = (snapshot_id, self.memory.clock_ms + LEASE_MS)

    @rule(lease_id=st.sampled_from(LEASES), age=st.integers(0, 2))
    def acquire_lease(self, lease_id: str, age: int) -> None:
        self.lease(lease_id, age)

    @rule(
        lease_id=st.sampled_from(LEASES),
        what=st.sampled_from(["renew", "renew", "release", "drop"]),
    )
    def change_lease(self, lease_id: str, what: str) -> None:
        leases, table_id = self.coordinator.leases, self.table.table_id
        if what == "renew":
            if lease_id in self.live():
                leases.renew(table_id, lease_id)
                self.held[lease_id] = (self.held[lease_id][0], self.memory.clock_ms + LEASE_MS)
            else:
                with pytest.raises(UnknownLease):
                    leases.renew(table_id, lease_id)
            return
        if what == "release":
            leases.release(table_id, lease_id, [HERE])
        else:
            leases.drop(table_id, lease_id)
        self.held.pop(lease_id, None)

    @rule(part=st.integers(1, 4))
    def let_time_pass(self, part: int) -> None:
        self.pass_time(part * LEASE_MS // 3)

    def pass_time(self, milliseconds: int) -> None:
        self.memory.advance(milliseconds)

    def live(self) -> dict[str, int]:
        """Return what is held, by lease, as the readers know it."""
        now_ms = self.memory.clock_ms
        return {name: one for name, (one, expires) in self.held.items() if now_ms < expires}

    # --- Readers --------------------------------------------------------------------------------

    @precondition(lambda self: not self.dropped)
    @rule()
    def scan_live(self) -> None:
        self.take_cut()
        self.check_cut(self.cuts[-1], by_keys=False)

    @precondition(lambda self: self.needed())
    @rule(which=st.integers(0, 9), older=st.none() | st.sampled_from([0, 0, 1, 2]))
    def scan_snapshot(self, which: int, older: int | None) -> None:
        """At a cut, mostly one that is taken now, or as it is."""
        self.take_cut()
        needed = self.needed()
        cut = None if older is None else self.cuts[-1 - older % len(self.cuts)]
        self.scan_one(needed[which % len(needed)], cut)

    def scan_one(self, snapshot: ListedSnapshot, taken: TakenCut | None) -> None:
        self.directories += 1
        directory = self.directory / f"scanned-{self.directories}"
        storage = SnapshotStorage(self.snapshot_storage)
        manifest = storage.manifest(snapshot.snapshot_id, snapshot.term)
        storage.restore(manifest, directory)
        try:
            scan = open_snapshot_scan(
                directory,
                None if taken is None else taken.cut,
                storage=self.log_storage,
                history=self.bucket.history,
            )
        except CutTooOld:
            assert taken is not None
            assert taken is not self.cuts[-1], "the log is kept that a cut of now needs"
            assert self.is_lost(taken.cut)
            return
        shown = cells_of(scan, 3, None)
        scan.close()
        assert scan.offset == snapshot.applied
        assert shown == (self.raw_at(scan.offset) if taken is None else taken.expected)

    def is_lost(self, cut: BucketCut) -> bool:
        start = Log(self.log_storage).start
        log = Log(self.log_storage.as_if_nothing_was_deleted(SUFFIX))
        sieve = Sieve(cut)
        changes = [header for header in log.headers(0) if header.is_change]
        return any(sieve.is_later(one) and one.base_offset < start for one in changes)

    def committed_at(self, offset: int) -> Cells:
        """Return the table of what was committed, for an offset that is stable."""
        return fold([part for part in self.work if part.committed], offset)

    def raw_at(self, offset: int) -> Cells:
        """Return all that was written and undone below an offset, by the log as it was once."""
        log = Log(self.log_storage.as_if_nothing_was_deleted(SUFFIX))
        return replay({}, log.segments(0, offset))

    # --- The end of the table -------------------------------------------------------------------

    @precondition(lambda self: self.held and not self.dropped)
    @rule(sure=st.integers(0, 7))
    def drop_table(self, sure: int) -> None:
        """Seldom, for nothing is written behind it."""
        if sure == 7:
            self.coordinator.drop_table(self.table, force=True)
            self.dropped = True

    @rule()
    def clean_up_what_was_dropped(self) -> None:
        self.janitor.look()
        if self.dropped and not self.coordinator.leases.all(self.table.table_id):
            assert not self.root.objects.now
            assert not self.coordinator.dropped.all()

    # --- What always holds ----------------------------------------------------------------------

    def listed(self) -> SnapshotList:
        found = self.coordinator.snapshots.read(self.key)
        new = [one for one in found.kept if one.snapshot_id not in self.known]
        assert all(one.term >= self.term for one in new), "one that was deposed has listed"
        self.term = found.term
        self.known |= {one.snapshot_id: one for one in found.kept}
        return found

    def needed(self) -> list[ListedSnapshot]:
        """Return what is listed, unless the table was dropped, and what is held."""
        ids = set(self.live().values())
        if not self.dropped:
            ids |= {one.snapshot_id for one in self.listed().listed}
        return [self.known[one] for one in sorted(ids)]

    def objects_of(self, snapshot: ListedSnapshot) -> set[str]:
        manifest = SnapshotStorage(self.snapshot_storage).manifest(
            snapshot.snapshot_id, snapshot.term
        )
        names = {file.object_name for file in manifest.files}
        return names | {manifest_name(snapshot.snapshot_id, snapshot.term)}

    def of_zombies(self, leader: Leader) -> frozenset[str]:
        """Return the objects of others that are there: they may have come after the last sweep."""
        own = f"-{leader.bucket.term}"
        names = self.snapshot_storage.names()
        return frozenset(n for n in names if not n.removesuffix(".manifest").endswith(own))

    def check_no_orphans(self, foreign: frozenset[str], *, leases_changed: bool = False) -> None:
        """Nothing is there that no snapshot needs, and of the retired only what is leased.

        What was leased until just now, when the leader had looked already, is for its next look.
        """
        found = self.listed()
        pinned = self.coordinator.leases.pinned(self.table.table_id).get(HERE, frozenset())
        if not {one.snapshot_id for one in found.retired} <= pinned:
            assert leases_changed
            assert self.leader.keeper.has_surplus
        needed = set[str]().union(*(self.objects_of(one) for one in found.kept))
        assert set(self.snapshot_storage.names()) - needed <= foreign

    @invariant()
    def all_that_is_needed_is_there(self) -> None:
        if not self.leaders:
            return
        needed = self.needed()
        for snapshot in needed:
            for name in self.objects_of(snapshot):
                data = self.snapshot_storage.read(name)
                assert name.endswith(".manifest") or name.startswith(content_of(data))
        if needed:
            log = Log(self.log_storage)
            start = min(one.stable for one in needed)
            assert log.start <= start <= log.end
            assert all(header.rows >= 0 for header in log.headers(start)), "and has no gap"

    # --- What the rules of the owners need to know ----------------------------------------------

    @precondition(lambda self: not self.dropped)
    @rule(keep=st.just(0))
    def clean(self, keep: int) -> None:
        """The log is cleaned by its leader; scans that are older cannot be followed."""
        del keep
        self.lead("clean")
        self.forget_scans()

    def forget_scans(self) -> None:
        start = Log(self.log_storage).start
        self.base = self.raw_at(start)
        self.scans = [one for one in self.scans if one[0] >= start]

    def do(self, action: Action) -> None:
        if not self.dropped:
            super().do(action)

    @precondition(lambda self: not self.dropped)
    @rule(several=st.lists(actions(), min_size=1, max_size=8))
    def go_on(self, several: list[Action]) -> None:
        for action in several:
            self.do(action)

    def scan(self, meanwhile: object = None) -> None:
        """No rule here: the log is not there from its start on."""

    @precondition(lambda self: self.scans and not self.dropped)
    @rule(which=st.integers(0, 9))
    def follow(self, which: int) -> None:
        """Go on from a scan with the committed changes: that is the committed table."""
        self.forget_scans()
        if self.scans:
            offset, shown = self.scans[which % len(self.scans)]
            changes = committed_changes(self.bucket, HERE, lambda: self.records, offset)
            assert replay(shown, changes) == self.committed_at(changes.end)

    def check_the_end(self) -> None:
        self.take_cut()
        for snapshot in self.needed():
            self.scan_one(snapshot, self.cuts[-1])
            self.scan_one(snapshot, None)
        if self.dropped:
            self.pass_time(LEASE_MS)
            self.clean_up_what_was_dropped()
            return
        self.forget_scans()
        super().check_the_end()
        self.pass_time(LEASE_MS)
        # What zombies uploaded behind their successor's last sweep is left to the next snapshot,
        # or the next leader.
        self.take_over()
        self.lead("take")
        self.lead("free")
        self.check_no_orphans(frozenset())
        assert len(self.listed().kept) <= RETAINED
        self.take_over()


def cells(bucket: Bucket) -> Cells:
    return {
        (key, name): value
        for key, row in rows_of(bucket).items()
        for name, value in zip(IDS, row, strict=True)
        if value is not None
    }


TestSnapshotMachine = SnapshotMachine.TestCase
TestSnapshotMachine.settings = settings(
    max_examples=max(EXAMPLES // 2, 1),
    stateful_step_count=30,
    deadline=None,
    print_blob=True,
    suppress_health_check=list(HealthCheck),
)
