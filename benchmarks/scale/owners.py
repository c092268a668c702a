"""Processes of owners: a session and a column lock each, and commits at a pace."""

import multiprocessing
import os
import random
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TypeVar

import numpy as np

from benchmarks.scale.ensemble import resident_mib
from foundation.errors import TallybookError, Unavailable
from foundation.ids import BucketId
from locks.catalog.definitions import CatalogTable
from locks.column_locks.column_lock import ColumnLock
from locks.coordinator import Coordinator
from locks.encoding.offsets import Offsets
from locks.store.zookeeper import ZooKeeperStore

Item = TypeVar("Item")
_VARIANTS = 4
_SPAWN = multiprocessing.get_context("spawn")


@dataclass(frozen=True, kw_only=True)
class Acquire:
    """Acquire a lock for each owner, on a column of its own, one after the other."""

    table: CatalogTable


@dataclass(frozen=True, kw_only=True)
class AcquireAgain:
    """Let so many owners acquire again, all at once: as all do when a leader has moved."""

    owners: int


@dataclass(frozen=True, kw_only=True)
class Ready:
    """Say that all locks are ready, as far as the servers of these sessions are there."""

    sessions: Sequence[str]


@dataclass(frozen=True, kw_only=True)
class Commit:
    """Let every owner commit, `every_s` seconds from one to its next (0: at once)."""

    seconds: float
    every_s: float
    owners: int


@dataclass(frozen=True, kw_only=True)
class Committed:
    """How long each commit took, and what the process used of the processors meanwhile."""

    seconds: Sequence[float]
    cpu_s: float
    failed: Sequence[str]


class OwnerProcess:
    """Owners with these numbers, in a process of their own."""

    def __init__(self, zookeeper: str, numbers: range) -> None:
        self.numbers = numbers
        self._control, theirs = _SPAWN.Pipe()
        self._process = _SPAWN.Process(target=_own, args=(theirs, zookeeper, numbers), daemon=True)
        self._process.start()
        theirs.close()
        self.memory_mib: float = self._control.recv()

    def send(self, what: Acquire | AcquireAgain | Ready | Commit) -> None:
        """Have all its owners do something."""
        self._control.send(what)

    def receive(self) -> Committed | list[float]:
        """Return how long each took, once they are done."""
        answer: Committed | list[float] = self._control.recv()
        return answer

    def end(self) -> None:
        """End it; the sessions expire."""
        self._process.kill()
        self._process.join()


def _own(control: Connection, zookeeper: str, numbers: range) -> None:
    before_mib = resident_mib()
    coordinators = [Coordinator(ZooKeeperStore(zookeeper)) for _ in numbers]
    control.send((resident_mib() - before_mib) / len(numbers))
    owners = _Owners(coordinators, numbers)
    with suppress(EOFError):
        while True:
            what = control.recv()
            if isinstance(what, Acquire):
                control.send(owners.acquire(what.table))
            elif isinstance(what, AcquireAgain):
                control.send(owners.acquire_again(what.owners))
            elif isinstance(what, Ready):
                control.send(owners.ready(what.sessions))
            else:
                control.send(owners.commit(what))
    os._exit(0)


class _Owners:
    """The owners of a process."""

    def __init__(self, coordinators: Sequence[Coordinator], numbers: range) -> None:
        self._coordinators = coordinators
        self._numbers = numbers
        self._table: CatalogTable
        self._locks: list[ColumnLock] = []
        self._ends: list[Offsets] = []
        self._sessions: Sequence[str] = ()

    def acquire(self, table: CatalogTable) -> list[float]:
        """Return how long each acquisition took."""
        self._table, self._locks, took = table, [], []
        for coordinator, number in zip(self._coordinators, self._numbers, strict=True):
            began = time.monotonic()
            lock = coordinator.locks.acquire(table, owner_of(number), [column_of(number)])
            took.append(time.monotonic() - began)
            self._locks.append(lock)
        self._ends = [_ends(table.definition.buckets, seed) for seed in range(_VARIANTS)]
        return took

    def acquire_again(self, count: int) -> list[float]:
        """Return how long each took until its lock was its again."""
        took: list[float] = []
        began = time.monotonic()

        def run(number: int) -> None:
            coordinator, lock = self._coordinators[number], self._locks[number]
            while True:
                try:
                    self._locks[number] = coordinator.locks.acquire(
                        self._table, lock.owner, lock.columns, only_epoch=lock.epoch
                    )
                except Unavailable:  # Others were faster, for half a minute.
                    continue
                took.append(time.monotonic() - began)
                return

        _run_all(run, range(count))
        return took

    def ready(self, sessions: Sequence[str]) -> list[float]:
        """Return how long it took each to get ready."""
        self._sessions, took = sessions, []
        for lock in self._locks:
            began = time.monotonic()
            lock.ready(self._ends[0], sessions)
            took.append(time.monotonic() - began)
        return took

    def commit(self, wanted: Commit) -> Committed:
        """Return how long each commit took, of all owners together."""
        took: list[float] = []
        failed: list[str] = []
        cpu_s, ending_s = time.process_time(), time.monotonic() + wanted.seconds

        def run(lock: ColumnLock) -> None:
            due_s = time.monotonic() + random.uniform(0, wanted.every_s)
            while due_s < ending_s:
                time.sleep(max(0.0, due_s - time.monotonic()))
                began = time.monotonic()
                batch = lock.batch + 1
                try:
                    lock.commit(batch, self._ends[batch % _VARIANTS], self._sessions)
                except TallybookError as exc:
                    failed.append(repr(exc))
                    return
                took.append(time.monotonic() - began)
                due_s = max(due_s + wanted.every_s, time.monotonic())

        _run_all(run, self._locks[: wanted.owners])
        return Committed(seconds=took, cpu_s=time.process_time() - cpu_s, failed=failed)


def _run_all(run: Callable[[Item], None], items: Sequence[Item]) -> None:
    """Run it for all items at once, a thread for each."""
    threads = [threading.Thread(target=run, args=(item,)) for item in items]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def owner_of(number: int) -> str:
    """Return the id of an owner."""
    return f"owner-{number:04d}"


def column_of(number: int) -> str:
    """Return the name of its column."""
    return f"column_{number:04d}"


def _ends(buckets: int, seed: int) -> Offsets:
    ends = np.random.default_rng(seed).integers(1_000_000, 2_000_000, buckets).tolist()
    return Offsets({BucketId(0, number): end for number, end in enumerate(ends)})
