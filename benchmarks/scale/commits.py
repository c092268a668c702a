"""Owners that commit once a second, to tables of few and of many buckets."""

import os
import time
from collections.abc import Iterator, Sequence

import numpy as np

from benchmarks.scale.ensemble import Ensemble
from benchmarks.scale.owners import (
    Acquire,
    AcquireAgain,
    Commit,
    Committed,
    OwnerProcess,
    Ready,
    owner_of,
)
from benchmarks.scale.servers import ask
from foundation.ids import BucketId
from locks.catalog.definitions import CatalogTable
from locks.column_locks.record_codec import encode_record
from locks.coordinator import Coordinator
from locks.store.zookeeper import ZooKeeperStore
from recovery.leader.fenced_writers import Writer
from recovery.reader.cut import Cut

_CUTS = 5
_FENCED = 3
# So many at once are enough to see how many commits there can be.
_AT_ONCE = 16
_TOGETHER = (20, 100, 500)


class Commits:
    """Owners of one table after the other."""

    def __init__(self, ensemble: Ensemble, processes: Sequence[OwnerProcess]) -> None:
        self._ensemble = ensemble
        self._processes = processes
        self._coordinator = Coordinator(ZooKeeperStore(ensemble.address))

    def measure(self, table: CatalogTable, seconds: float) -> Iterator[str]:
        """Say what acquiring, fencing, committing and cuts take."""
        yield f"{table.definition.buckets:,} buckets:"
        acquired = [one for process in self._processes for one in self._all(process, table)]
        last = acquired[-10:]
        yield f"  to acquire, the last of {len(acquired)}: {_median_ms(last)}"
        leaders = self._leaders(table)
        sessions = sorted(leaders)
        for process in self._processes:
            process.send(Ready(sessions=sessions))
        took = [one for process in self._processes for one in _listed(process.receive())]
        yield f"  to get ready, {len(sessions)} sessions checked: {_median_ms(took)}"
        size = len(encode_record(self._coordinator.locks.read(table).records[owner_of(0)]))
        yield f"  a record: {size:,} bytes"
        yield from self._fence(table, leaders)
        yield from self._cuts(table, "nobody commits")
        yield from self._commit(len(acquired), seconds, every_s=1.0)
        yield from self._commit(min(_AT_ONCE, len(acquired)), seconds, every_s=0.0)
        for together in _TOGETHER:
            if together <= len(acquired):
                yield from self._acquire_again(together)

    def _all(self, process: OwnerProcess, table: CatalogTable) -> list[float]:
        process.send(Acquire(table=table))
        return _listed(process.receive())

    def _leaders(self, table: CatalogTable) -> dict[str, list[BucketId]]:
        """Return the buckets of a table by the session names of their leaders."""
        found: dict[str, list[BucketId]] = {}
        for key, name in self._coordinator.leaders.all().items():
            if key.table_id == table.table_id:
                found.setdefault(name, []).append(key.bucket)
        return found

    def _fence(self, table: CatalogTable, leaders: dict[str, list[BucketId]]) -> Iterator[str]:
        """Let some owners be fenced by all servers, one server after the other."""
        addresses = {one.name: one.address for one in self._coordinator.servers.all()}
        took = []
        for number in range(_FENCED):
            owner = owner_of(number)
            record = self._coordinator.locks.record(table, owner)
            assert record is not None
            writer = Writer(owner, record.epoch)
            for name, keys in leaders.items():
                began = time.monotonic()
                ask(addresses[name], "fence", table.table_id, writer, record.columns, keys)
                took.append(time.monotonic() - began)
        yield f"  to be fenced by one server, of {len(leaders)}: {_median_ms(took)}"

    def _acquire_again(self, owners: int) -> Iterator[str]:
        """Let some owners start over at once, as all do when a bucket has another leader."""
        share = min(owners // len(self._processes), len(self._processes[0].numbers))
        for process in self._processes:
            process.send(AcquireAgain(owners=share))
        took = [one for process in self._processes for one in _listed(process.receive())]
        yield f"  {len(took)} owners acquire again at once: the last after {max(took):.1f} s"

    def _cuts(self, table: CatalogTable, when: str) -> Iterator[str]:
        took = []
        for _ in range(_CUTS):
            began = time.monotonic()
            Cut.of_locks("measured", self._coordinator.locks.read(table))
            took.append(time.monotonic() - began)
        yield f"  a cut, while {when}: {_median_ms(took)}"

    def _commit(self, owners: int, seconds: float, *, every_s: float) -> Iterator[str]:
        share = -(-owners // len(self._processes))
        written, began = self._ensemble.log_bytes(), time.monotonic()
        for process in self._processes:
            process.send(Commit(seconds=seconds, every_s=every_s, owners=share))
        answers = [process.receive() for process in self._processes]
        elapsed_s = time.monotonic() - began
        written = self._ensemble.log_bytes() - written
        found = [one for one in answers if isinstance(one, Committed)]
        took = np.array([one for committed in found for one in committed.seconds])
        failed = [one for committed in found for one in committed.failed]
        cpu_s = sum(committed.cpu_s for committed in found)
        pace = f"every {every_s:g} s" if every_s else "at once"
        p50, p99 = np.percentile(took, [50, 99]) * 1000
        yield (
            f"  {owners} owners, {pace}: {len(took) / elapsed_s:,.0f} commits/s, p50 {p50:,.0f} "
            f"ms, p99 {p99:,.0f} ms; {written / elapsed_s / 2**20:.2f} MiB/s into the log, "
            f"{written / len(took):,.0f} bytes each; owners used {cpu_s / elapsed_s:.2f} of "
            f"{_cores()} cores; {len(failed)} failed{': ' + failed[0] if failed else ''}"
        )


def _listed(answer: Committed | list[float]) -> list[float]:
    assert isinstance(answer, list)
    return answer


def _median_ms(seconds: Sequence[float]) -> str:
    p50, most = np.median(seconds) * 1000, max(seconds) * 1000
    return f"{p50:,.1f} ms in the middle, {most:,.1f} ms at most"


def _cores() -> int:
    return os.cpu_count() or 1
