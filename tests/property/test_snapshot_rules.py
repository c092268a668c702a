"""Each rule that keeps snapshots, switched off: a fixed history of the machine must show it."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

import recovery.leader.snapshot_keeper
from foundation.errors import (
    CorruptSnapshot,
    LogGap,
    MissingObject,
    MissingSnapshot,
    OffsetOutOfRange,
)
from foundation.ids import LeadKey
from locks.snapshots.leases import Leases
from locks.snapshots.list_records import SnapshotList, encode_list
from locks.snapshots.lists import SnapshotLists
from locks.store.base import Write
from locks.store.paths import snapshot_list_path
from merge_engine.bucket.bucket import Bucket
from merge_engine.bucket.snapshot_storage import SnapshotStorage
from recovery.leader.snapshot_keeper import SnapshotKeeper
from tests.property.test_snapshot_machine import SnapshotMachine

History = Callable[[SnapshotMachine], None]
Break = Callable[[pytest.MonkeyPatch], None]

SHOWN = (
    AssertionError,
    CorruptSnapshot,
    LogGap,
    MissingObject,
    MissingSnapshot,
    OffsetOutOfRange,
)


def write(machine: SnapshotMachine, *, commit: bool = True, key: int = 0) -> None:
    machine.do(("write", "x", 0, {key: 1}))
    if commit:
        machine.do(("commit", "x", 0, {}))


def take(machine: SnapshotMachine, count: int = 1, **settings: Any) -> None:
    for _ in range(count):
        write(machine)
        machine.lead("take", **settings)


# --- The rules ----------------------------------------------------------------------------------


def without_claim(patch: pytest.MonkeyPatch) -> None:
    """Whoever was deposed may still change the list."""

    real = SnapshotLists.claim

    def claim(self: SnapshotLists, key: LeadKey, term: int) -> SnapshotList:
        found = self.read(key)
        if found.version is None or found.term < term:
            return real(self, key, term)
        return replace(found, term=term)

    def update(self: SnapshotLists, listed: SnapshotList, change: Any, *_: object) -> SnapshotList:
        found = self.read(listed.key)
        changed: SnapshotList = change(found)
        changed = replace(changed, term=max(found.term, listed.term))
        assert found.version is not None
        path = snapshot_list_path(found.key.table_id, *found.key.bucket)
        self._store.transact([Write(path, encode_list(changed), found.version)])
        return replace(changed, term=listed.term, version=found.version + 1)

    patch.setattr(SnapshotLists, "claim", claim)
    patch.setattr(SnapshotLists, "_update", update)


def without_order(patch: pytest.MonkeyPatch) -> None:
    """The leases are read before anything is retired."""
    real_take, real_pinned = SnapshotKeeper.take, Leases.pinned

    def take(self: SnapshotKeeper) -> Any:
        found = real_pinned(self._leases(), self._key.table_id)
        with patch.context() as inner:
            inner.setattr(Leases, "pinned", lambda *_: found)
            return real_take(self)

    patch.setattr(SnapshotKeeper, "take", take)


def without_leases(patch: pytest.MonkeyPatch) -> None:
    """The sweep does not keep what is leased."""
    patch.setattr(Leases, "pinned", lambda *_: {})


def without_bound(patch: pytest.MonkeyPatch) -> None:
    """The log is cleaned up to the latest snapshot, not to the oldest that is kept."""

    def latest(self: SnapshotList) -> int | None:
        return max((one.stable for one in self.kept), default=None)

    patch.setattr(SnapshotList, "oldest_stable", property(latest))


def without_stable(patch: pytest.MonkeyPatch) -> None:
    """A snapshot stands where it was taken, whatever is uncommitted."""

    def applied(_bucket: Bucket, _key: object, _read: object, pinned: int) -> int:
        return pinned

    patch.setattr(recovery.leader.snapshot_keeper, "last_stable_offset", applied)


def _without_term(real: Any) -> Any:
    def sweep(self: SnapshotStorage, keep: Any, *, term: int | None = None) -> Any:
        del term
        return real(self, keep)

    return sweep


def without_term(patch: pytest.MonkeyPatch) -> None:
    """The sweep of a leader that was deposed deletes what its successor uploads."""
    patch.setattr(SnapshotStorage, "sweep", _without_term(SnapshotStorage.sweep))


# --- Histories that show it ---------------------------------------------------------------------


def a_zombie_takes(machine: SnapshotMachine) -> None:
    """It has uploaded when its successor claims the list."""
    take(machine, 2)
    write(machine)
    machine.lead("take", at="snapshot.manifest_created", intrusion="take over and free")


def leased_while_a_new_one_is_uploaded(machine: SnapshotMachine) -> None:
    take(machine, 2)
    write(machine)
    machine.lead("take", at="snapshot.files_uploaded", intrusion="lease", which=2)


def retired_under_a_lease(machine: SnapshotMachine) -> None:
    take(machine)
    machine.lease("tiering", 0)
    take(machine, 2)


def cleaned_under_a_lease(machine: SnapshotMachine) -> None:
    retired_under_a_lease(machine)
    machine.clean(keep=0)


def taken_in_the_middle_of_a_batch(machine: SnapshotMachine) -> None:
    write(machine)
    write(machine, commit=False, key=1)
    machine.lead("take")
    machine.clean(keep=0)


def taken_over_while_it_sweeps(machine: SnapshotMachine) -> None:
    take(machine, 2)
    write(machine)
    machine.lead("take", at="snapshot.listed", intrusion="take over and take")


HISTORIES: list[tuple[Break, History]] = [
    (without_claim, a_zombie_takes),
    (without_order, leased_while_a_new_one_is_uploaded),
    (without_leases, retired_under_a_lease),
    (without_bound, cleaned_under_a_lease),
    (without_stable, taken_in_the_middle_of_a_batch),
    (without_term, taken_over_while_it_sweeps),
]


def run(history: History) -> None:
    machine = SnapshotMachine()
    try:
        machine.open(undo_max_bytes=1 << 20, undo_looks=1_000)
        history(machine)
        machine.all_that_is_needed_is_there()
        machine.take_cut()
        for snapshot in machine.needed():
            machine.scan_one(snapshot, machine.cuts[-1])
    except BaseException:
        machine.leaders = []
        machine.buckets.close()
        raise
    machine.teardown()


@pytest.mark.parametrize(("off", "history"), HISTORIES, ids=lambda one: one.__name__)
def test_a_rule_that_is_switched_off_shows(
    off: Break, history: History, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(history)
    off(monkeypatch)
    with pytest.raises(SHOWN):
        run(history)
