"""Processes of simulated servers, a session each; and how these reach one another."""

import multiprocessing
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

from benchmarks.scale.counting import Counts
from benchmarks.scale.ensemble import resident_mib
from benchmarks.scale.simulated import SimulatedServer
from foundation.errors import ServerUnavailable, TallybookError
from foundation.ids import LeadKey
from locks.cluster.heartbeat import Heartbeat
from locks.store.zookeeper import ZooKeeperStore

_JOIN_AT_ONCE = 8
_SPAWN = multiprocessing.get_context("spawn")


@dataclass(frozen=True, kw_only=True)
class ProcessStatus:
    """How a process of servers is getting on; `led`: how many buckets of each table it serves.

    `cpu_s`: what it has used of the processors.
    """

    led: Counter[int]
    counts: Counts
    memory_mib: float
    cpu_s: float


class ServerProcess:
    """So many simulated servers in a process of their own."""

    def __init__(self, zookeeper: str, count: int) -> None:
        """Start the process, and have its servers join; they lead nothing before `lead`."""
        self.count = count
        self._control, theirs = _SPAWN.Pipe()
        self._process = _SPAWN.Process(target=_serve, args=(theirs, zookeeper, count), daemon=True)
        self._process.start()
        theirs.close()
        self.memory_before_mib: float = 0.0

    def joined(self) -> "ServerProcess":
        """Wait until all its servers have joined."""
        self.memory_before_mib = self._control.recv()
        return self

    def lead(self) -> None:
        """Let all its servers look what is to be led."""
        self._control.send("lead")

    def status(self) -> ProcessStatus:
        """Return how it is getting on."""
        self._control.send("status")
        status: ProcessStatus = self._control.recv()
        return status

    def kill(self) -> None:
        """End it as a crash would: the sessions of all its servers expire."""
        self._process.kill()
        self._process.join()


def ask(address: str, method: str, *arguments: object, timeout_s: float = 30.0) -> Any:
    """Call a simulated server; ServerUnavailable if it does not answer."""
    host, port, number = address.split(":")
    try:
        with Client((host, int(port))) as connection:
            connection.send((int(number), method, arguments))
            if not connection.poll(timeout_s):
                raise ServerUnavailable(f"{address} did not answer within {timeout_s:g} s")
            answer = connection.recv()
    except (OSError, EOFError) as exc:
        raise ServerUnavailable(f"{address} does not answer: {exc!r}") from exc
    if isinstance(answer, Exception):
        raise answer
    return answer


class SocketPeers:
    """The other simulated servers, whatever process they are in; a `Peers`."""

    def ask(self, address: str, key: LeadKey, session: str, timeout_s: float) -> str | None:
        refused: str | None = ask(address, "hand_over", key, session, timeout_s=timeout_s)
        return refused


def total(statuses: Sequence[ProcessStatus]) -> ProcessStatus:
    """Return all processes as one."""
    return ProcessStatus(
        led=sum((one.led for one in statuses), Counter()),
        counts=sum((one.counts for one in statuses), Counts()),
        memory_mib=sum(one.memory_mib for one in statuses),
        cpu_s=sum(one.cpu_s for one in statuses),
    )


def _serve(control: Connection, zookeeper: str, count: int) -> None:
    """Run servers until whoever started this is gone."""
    before_mib = resident_mib()
    with Listener(("127.0.0.1", 0), backlog=512) as listener:
        port = listener.address[1]
        servers: list[SimulatedServer] = []

        def join(number: int) -> SimulatedServer:
            store = ZooKeeperStore(zookeeper)
            return SimulatedServer(
                store, f"127.0.0.1:{port}:{number}", SocketPeers(), heartbeat=Heartbeat(store)
            )

        threading.Thread(target=_listen, args=(listener, servers), daemon=True).start()
        with ThreadPoolExecutor(_JOIN_AT_ONCE) as pool:
            servers.extend(pool.map(join, range(count)))
        control.send(before_mib)
        with suppress(EOFError):
            while True:
                if control.recv() == "status":
                    control.send(_status(servers))
                    continue
                for server in servers:
                    server.start()
    os._exit(0)  # Hundreds of threads: there is nothing to wait for.


def _status(servers: Sequence[SimulatedServer]) -> ProcessStatus:
    return ProcessStatus(
        led=Counter(key.table_id for server in servers for key in server.hosting.led()),
        counts=sum((server.store.counts for server in servers), Counts()),
        memory_mib=resident_mib(),
        cpu_s=time.process_time(),
    )


def _listen(listener: Listener, servers: Sequence[SimulatedServer]) -> None:
    while True:
        with suppress(OSError, EOFError):
            connection = listener.accept()
            threading.Thread(target=_answer, args=(connection, servers), daemon=True).start()


def _answer(connection: Connection, servers: Sequence[SimulatedServer]) -> None:
    with suppress(OSError, EOFError), connection:
        number, method, arguments = connection.recv()
        server = servers[number]
        methods: dict[str, Callable[..., object]] = {
            "fence": server.fence,
            "hand_over": server.leadership.hand_over,
        }
        try:
            connection.send(methods[method](*arguments))
        except TallybookError as exc:
            connection.send(exc)
