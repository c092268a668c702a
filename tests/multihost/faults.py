"""What goes wrong on a bed, each fault a context: it is there for as long as the block lasts.

A fault that is an act, as a restart, is over when the block begins. The victim is chosen by chance.
"""

import os
import random
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

from tests.multihost.bed import Bed
from tests.multihost.parts import SESSION_S, TabletServer, is_leading
from tests.multihost.spark import executors_of
from tests.support.zookeeper_server import wait_until

Fault = Callable[[Bed, random.Random], AbstractContextManager[None]]


@contextmanager
def rolling_restart(bed: Bed, chance: random.Random) -> Iterator[None]:
    """Restart the servers one after the other, each when the one before it leads again."""
    for server in chance.sample(bed.servers, len(bed.servers)):
        bed.history.note(f"{server.host.name} is stopped")
        server.stop()
        bed.history.note(f"{server.host.name} has stopped, and is started")
        _start(bed, server)
    yield


@contextmanager
def far_rolling_restart(bed: Bed, chance: random.Random) -> Iterator[None]:
    """The same with the object store 40 ms away, there and back: reading the log takes time."""
    with bed.network.long_cable(bed.s3.host, round_trip_ms=40), rolling_restart(bed, chance):
        yield


@contextmanager
def planned_move(bed: Bed, chance: random.Random) -> Iterator[None]:
    """Have three other servers take over: they join, and then those that were there are stopped."""
    for server in bed.spares:
        server.start()
    for server in bed.spares:
        server.wait_until_joined()
    bed.history.note("new servers have joined")
    bed.servers, bed.spares = bed.spares, bed.servers
    for server in bed.spares:
        server.stop()
        bed.history.note(f"{server.host.name} has stopped")
    yield


@contextmanager
def server_without_s3(bed: Bed, chance: random.Random) -> Iterator[None]:
    """Cut a server off from the object store."""
    with bed.network.apart([_victim(bed, chance).host], [bed.s3.host]):
        yield


@contextmanager
def server_without_zookeeper(bed: Bed, chance: random.Random) -> Iterator[None]:
    """Cut a server off from ZooKeeper; it reaches the store, and clients reach it."""
    hosts = [each.host for each in bed.zookeepers]
    with bed.network.apart([_victim(bed, chance).host], hosts):
        yield


@contextmanager
def zookeeper_two_to_one(bed: Bed, chance: random.Random) -> Iterator[None]:
    """Part the ensemble, with one of the servers on the side that has no majority."""
    alone, *others = [part.host for part in chance.sample(bed.zookeepers, len(bed.zookeepers))]
    victim = _victim(bed, chance).host
    bed.history.note(f"{alone.name} and {victim.name} are without {[each.name for each in others]}")
    with bed.network.apart([alone, victim], others):
        yield


@contextmanager
def cable_pulled(bed: Bed, chance: random.Random) -> Iterator[None]:
    """Pull a server's cable."""
    with bed.network.pulled(_victim(bed, chance).host):
        yield


@contextmanager
def host_paused(bed: Bed, chance: random.Random) -> Iterator[None]:
    """Suspend a server's host."""
    host = _victim(bed, chance).host
    host.pause()
    try:
        yield
    finally:
        host.resume()


@contextmanager
def paused_and_cut(bed: Bed, chance: random.Random) -> Iterator[None]:
    """Suspend a server's host until others lead, and let it come back without ZooKeeper.

    It believes that it leads, has clients and the store, and nobody who tells it otherwise.
    """
    victim = _victim(bed, chance)
    hosts = [each.host for each in bed.zookeepers]
    with bed.network.apart([victim.host], hosts):
        victim.host.pause()
        try:
            _wait_until_others_lead(bed, victim)
        finally:
            victim.host.resume()
            bed.history.note(f"{victim.host.name} is awake")
        yield


@contextmanager
def server_killed(bed: Bed, chance: random.Random) -> Iterator[None]:
    """Kill a server; it is started again at the end."""
    with bed.down(_victim(bed, chance)):
        yield


@contextmanager
def server_deaf(bed: Bed, chance: random.Random) -> Iterator[None]:
    """Lose all that ZooKeeper and the store send to a server; what it sends arrives."""
    victim = _victim(bed, chance).host
    with ExitStack() as stack:
        for host in (bed.s3.host, *(each.host for each in bed.zookeepers)):
            stack.enter_context(bed.network.lost(host, victim))
        yield


@contextmanager
def zookeeper_killed(bed: Bed, chance: random.Random) -> Iterator[None]:
    """Kill the leader of the ensemble, or any if it has none; it is started again at the end."""
    alive = [each for each in bed.zookeepers if each.alive]
    leader = next(filter(is_leading, alive), chance.choice(alive))
    bed.history.note(f"the victim is {leader.host.name}")
    with bed.down(leader):
        yield


@contextmanager
def s3_away(bed: Bed, chance: random.Random) -> Iterator[None]:
    """Pull the object store's cable."""
    with bed.network.pulled(bed.s3.host):
        yield


@contextmanager
def s3_slow(bed: Bed, chance: random.Random) -> Iterator[None]:
    """Move the object store far away: 100 ms there and back."""
    with bed.network.long_cable(bed.s3.host, round_trip_ms=100):
        yield


@contextmanager
def clock_moved(bed: Bed, chance: random.Random) -> Iterator[None]:
    """Move a server's wall clock by an hour, ahead or back, and back at the end."""
    victim, seconds = _victim(bed, chance), chance.choice([-3600, 3600])
    bed.history.note(f"by {seconds} s")
    victim.move_clock(seconds)
    try:
        yield
    finally:
        victim.move_clock(0)


@contextmanager
def slow_network(bed: Bed, chance: random.Random) -> Iterator[None]:
    """Move the clients far away: 100 ms there and back."""
    with bed.network.long_cable(bed.load.host, round_trip_ms=100):
        yield


@contextmanager
def bad_network(bed: Bed, chance: random.Random) -> Iterator[None]:
    """Move the clients farther, behind a bad line: 200 ms there and back, and two of 100 lost."""
    with bed.network.long_cable(bed.load.host, round_trip_ms=200, loss_percent=2):
        yield


@contextmanager
def executor_killed(bed: Bed, chance: random.Random) -> Iterator[None]:
    """Kill one of Spark's executors; Spark starts another."""
    host = chance.choice([worker.host for worker in bed.workers])
    bed.history.note(f"the executor of {host.name} is killed")
    for pid in executors_of(host):
        os.kill(pid, signal.SIGKILL)
    yield


FAULTS: dict[str, Fault] = {
    "rolling restart": rolling_restart,
    "rolling restart, S3 far away": far_rolling_restart,
    "planned move": planned_move,
    "server without S3": server_without_s3,
    "server without ZooKeeper": server_without_zookeeper,
    "ZooKeeper two to one": zookeeper_two_to_one,
    "cable pulled": cable_pulled,
    "host paused": host_paused,
    "paused, and back without ZooKeeper": paused_and_cut,
    "server killed": server_killed,
    "server hears nothing": server_deaf,
    "leader of ZooKeeper killed": zookeeper_killed,
    "S3 away": s3_away,
    "S3 slow": s3_slow,
    "clock moved": clock_moved,
    "100 ms": slow_network,
    "200 ms, 2 % lost": bad_network,
    "executor killed": executor_killed,
}
SHORT = (
    "ZooKeeper two to one",
    "server without S3",
    "paused, and back without ZooKeeper",
    "100 ms",
    "rolling restart",
)
"""What is tried first: a selection of a few minutes."""
OF_SPARK = ("executor killed",)
"""What only a bed with Spark has."""
WITH_SPARK = (
    *OF_SPARK,
    "server killed",
    "cable pulled",
    "host paused",
    "server without S3",
    "200 ms, 2 % lost",
    "rolling restart",
)
"""What is tried with sinks, too."""


def _victim(bed: Bed, chance: random.Random) -> TabletServer:
    victim = chance.choice(bed.servers)
    bed.history.note(f"the victim is {victim.host.name}")
    return victim


def _start(bed: Bed, server: TabletServer) -> None:
    server.start()
    server.wait_until_joined()
    bed.history.note(f"{server.host.name} has joined")
    wait_until(
        lambda: server.address in bed.leaders().values(),
        f"{server.host.name} leads again",
        60,
        every_s=0.1,
    )


def _wait_until_others_lead(bed: Bed, victim: TabletServer) -> None:
    wait_until(
        lambda: victim.address not in bed.leaders().values(),
        f"others lead what {victim.host.name} led",
        60 + SESSION_S,
        every_s=0.1,
    )
