"""What a change of the cluster costs each server, and how soon all buckets are led again.

Servers join, at first half of them. Then a server comes and goes that leads nothing, and a table is
altered: what is counted is what the others ask ZooKeeper for, and are told. In the end, servers are
killed.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace

import pyarrow as pa

from benchmarks.scale.counting import Counts
from benchmarks.scale.ensemble import Ensemble
from benchmarks.scale.owners import column_of
from benchmarks.scale.servers import ProcessStatus, ServerProcess, total
from locks.catalog.definitions import TableDefinition
from locks.coordinator import Coordinator
from locks.store.zookeeper import ZooKeeperStore
from merge_engine.schema.builder import SchemaBuilder
from server.protocol.definitions import define
from tallybook import AggFunction

_DEADLINE_S = 200.0
_POLL_S = 0.1
_QUIET_S = 3.0
_CHANGE_S = 1.5


class Leads:
    """Tables without data on simulated servers."""

    def __init__(self, ensemble: Ensemble, buckets: Sequence[int], owners: int = 1) -> None:
        """Create a table for each number of buckets, with a column for each owner."""
        self._ensemble = ensemble
        self._processes: list[ServerProcess] = []
        self._store = ZooKeeperStore(ensemble.address)
        self._coordinator = Coordinator(self._store)
        self._buckets = sum(buckets)
        self.tables = [
            self._coordinator.tables.create(f"with-{count}", _definition(count, owners))
            for count in buckets
        ]

    @property
    def servers(self) -> int:
        """How many servers there are."""
        return sum(process.count for process in self._processes)

    def close(self) -> None:
        """End all processes."""
        for process in self._processes:
            process.kill()
        self._store.close()

    def join(self, counts: Sequence[int], *, costs: bool = True) -> Iterator[str]:
        """Let processes of so many servers join; say what that took, and what changes cost then."""
        began = time.monotonic()
        joining = [ServerProcess(self._ensemble.address, count) for count in counts]
        self._processes += [process.joined() for process in joining]
        joined_s = time.monotonic() - began
        for process in joining:
            process.lead()
        self._wait_until_led()
        led_s = time.monotonic() - began
        self._wait_until_quiet()
        quiet_s = time.monotonic() - began - _QUIET_S
        memory_kib = self._memory_kib(max(self._processes, key=lambda process: process.count))
        yield (
            f"{self.servers} servers, {sum(counts)} of them new: joined within {joined_s:.1f} s, "
            f"all buckets led after {led_s:.1f} s, balanced after {quiet_s:.1f} s"
        )
        yield f"  memory per session: {memory_kib:,.0f} KiB"
        if costs:
            yield from self._costs()

    def go(self, count: int) -> Iterator[str]:
        """Kill the process with so many servers, and say how soon all is led again."""
        victim = next(process for process in self._processes if process.count == count)
        self._processes.remove(victim)
        before = self._status()
        lost = self._buckets - before.led.total()
        began = time.monotonic()
        victim.kill()
        while len(self._coordinator.servers.all()) > self.servers:
            time.sleep(_POLL_S)
        expired_s = time.monotonic() - began
        self._wait_until_led()
        led_s = time.monotonic() - began
        spent = self._status().counts - before.counts
        self._wait_until_quiet()
        quiet_s = time.monotonic() - began - _QUIET_S
        yield (
            f"{count} of {self.servers + count} servers go, with {lost:,} buckets: sessions gone "
            f"after {expired_s:.1f} s, all led {led_s - expired_s:.2f} s later, balanced after "
            f"{quiet_s - expired_s:.1f} s"
        )
        yield f"  until all were led, per server left: {_each(spent, self.servers)}"

    def _costs(self) -> Iterator[str]:
        idle = self._spent(lambda: None)
        yield f"  {_CHANGE_S:g} s without a change, per server: {_each(idle, self.servers)}"

        def come_and_go() -> None:
            with closing(ZooKeeperStore(self._ensemble.address)) as store:
                Coordinator(store).servers.register("127.0.0.1:1:0")

        spent = self._spent(come_and_go) - idle
        yield f"  a server comes and goes, per server: {_each(spent, self.servers)}"
        spent = self._spent(self._alter) - idle
        yield f"  the table is altered, per server: {_each(spent, self.servers)}"

    def _alter(self) -> None:
        table = self.tables[-1]
        self.tables[-1] = self._coordinator.alter_table(table, table.definition)

    def _spent(self, change: Callable[[], None]) -> Counts:
        before = self._status().counts
        change()
        time.sleep(_CHANGE_S)
        return self._status().counts - before

    def _status(self) -> ProcessStatus:
        return total([process.status() for process in self._processes])

    def _memory_kib(self, process: ServerProcess) -> float:
        memory_mib = process.status().memory_mib - process.memory_before_mib
        return memory_mib * 1024 / process.count

    def _wait_until_led(self) -> None:
        deadline = time.monotonic() + _DEADLINE_S
        while (led := self._status().led.total()) != self._buckets:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{led:,} of {self._buckets:,} buckets are led")
            time.sleep(_POLL_S)

    def _wait_until_quiet(self) -> None:
        """Wait until nobody has asked for anything in a while; all moves are over then."""
        deadline, seen = time.monotonic() + _DEADLINE_S, -1
        while (asked := self._status().counts.requests) != seen:
            if time.monotonic() > deadline:
                return
            seen = asked
            time.sleep(_QUIET_S)


def _definition(buckets: int, owners: int) -> TableDefinition:
    """Return the definition of a table; of its columns, only the locks know that they exist."""
    schema = (
        SchemaBuilder()
        .column("id", pa.int64())
        .agg_column(column_of(0), pa.int64(), AggFunction.SUM)
        .primary_key("id")
        .build()
    )
    columns = {column_of(number): 2 + number for number in range(owners)}
    definition = define(schema, buckets, column_locks=True, options={})
    return replace(definition, columns=columns)


def _each(counts: Counts, servers: int) -> str:
    per = 1 / servers
    return (
        f"{counts.events * per:.2f} events, {counts.reads * per:.1f} reads, "
        f"{counts.listings * per:.1f} listings, {counts.transactions * per:.1f} transactions, "
        f"{counts.bytes * per / 1024:.1f} KiB"
    )
