"""Writers of a cluster that know what was acknowledged, and the comparison with what is stored.

A batch is a function of seed, writer and number. A writer sends its batches in order, each until it
is acknowledged, under an owner of its own and with a token; so what must be there is known exactly.
A batch that nobody waits for any more is in doubt: of each bucket it has all its rows or none.

As a process it is a client to be killed: `python -m tests.fault.cluster_load <address> <table>
<seed> <writer>` prints the number of each batch that was acknowledged; with `--half` it stops
before the closing message of its first put and prints "half", once per server.
"""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import combinations, count
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
from kazoo.client import KazooClient

from foundation.errors import Retryable, UnknownOutcome
from foundation.ids import BucketId, LeadKey, Token
from locks.coordinator import Coordinator
from locks.store.zookeeper import ZooKeeperStore
from merge_engine.merging.batch import read_keys
from merge_engine.merging.routing import route
from server.client.cluster import Cluster, connect
from server.client.connections import Connections, ServerCredentials
from server.client.leader_calls import LeaderCalls
from server.client.leader_directory import LeaderDirectory
from server.client.remote_table import RemoteTable
from server.launch.local_cluster import LocalCluster, LocalServer
from server.protocol import wire
from tests.conftest import schema_of
from tests.support.processes import pause
from tests.support.zookeeper_server import needs_java, wait_until

SESSION_TIMEOUT_S = 2.0
ATTEMPT_S = 1.5
DEADLINE_S = 60.0
BUCKETS = 4
KEYS = 60
ROWS = 12
REPOSITORY = Path(__file__).parents[2]
LONGER = int(os.environ.get("TALLYBOOK_EXAMPLES", "0"))

# Doubled, lost and torn batches all show: `total` is of random numbers, `rows` counts.
SCHEMA = schema_of(total=(pa.int64(), "sum"), rows=(pa.int64(), "sum"))

Sums = dict[int, tuple[int, int]]


def rounds(short: int, per_round: int = 50) -> int:
    """Return how often to repeat: `short`, and more of it in a long run (TALLYBOOK_EXAMPLES)."""
    return short + LONGER // per_round


@contextmanager
def local_cluster(directory: Path, servers: int = 2, **arguments: Any) -> Iterator[LocalCluster]:
    """Run a cluster whose servers are missed soon."""
    needs_java()
    arguments.setdefault("session_timeout_s", SESSION_TIMEOUT_S)
    with LocalCluster(directory, servers=servers, **arguments) as cluster:
        try:
            yield cluster
        finally:
            for server in cluster.servers:  # One that sleeps could not be stopped.
                if server.alive:
                    os.kill(server.pid, signal.SIGCONT)


@contextmanager
def client_of(cluster: LocalCluster, **arguments: Any) -> Iterator[Cluster]:
    """Connect a client that gives an answer up soon, and a call late."""
    settings: dict[str, Any] = {"deadline_s": DEADLINE_S, "attempt_s": ATTEMPT_S, **arguments}
    with connect(cluster.address, **settings) as client:
        yield client


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Rows of one put: distinct keys, and a number for each."""

    writer: int
    number: int
    amounts: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, seed: int, writer: int, number: int) -> "Batch":
        """Return the writer's batch of this number."""
        chance = random.Random(f"{seed} {writer} {number}")
        keys = sorted(chance.sample(range(KEYS), ROWS))
        amounts = tuple((key, chance.randrange(1, 1 << 40)) for key in keys)
        return cls(writer=writer, number=number, amounts=amounts)

    @property
    def owner(self) -> str:
        """Tokens are remembered per owner, the last one only: a writer has its own."""
        return f"writer-{self.writer}"

    @property
    def token(self) -> Token:
        """The token: never the same twice."""
        return Token(1, self.number)

    def to_arrow(self) -> pa.Table:
        """Return the rows as the table takes them."""
        keys, totals = zip(*self.amounts, strict=True)
        return pa.table({"k": keys, "total": totals, "rows": [1] * len(keys)})

    def only(self, keys: Iterable[int]) -> "Batch":
        """Return the part of it that is about these keys."""
        wanted = set(keys)
        return replace(self, amounts=tuple(row for row in self.amounts if row[0] in wanted))

    def send(self, table: RemoteTable) -> Any:
        """Put it, with owner and token."""
        return table.put(self.to_arrow(), owner=self.owner, token=self.token)


@dataclass
class Ledger:
    """What was acknowledged, and what is in doubt. Safe for threads."""

    acknowledged: list[Batch] = field(default_factory=list)
    doubtful: list[Batch] = field(default_factory=list)

    def sums(self) -> Counter[tuple[int, str]]:
        """Return what must be there."""
        return _sums(list(self.acknowledged))


class Load:
    """Threads that put one batch after the other until they are stopped."""

    def __init__(
        self,
        client: Cluster,
        name: str,
        seed: int,
        *,
        writers: int = 3,
        tokens: bool = True,
        ledger: Ledger | None = None,
    ) -> None:
        self.ledger = Ledger() if ledger is None else ledger
        self._client, self._name, self._seed, self._tokens = client, name, seed, tokens
        self._stopping = threading.Event()
        self.errors: list[BaseException] = []
        self.longest_s = 0.0
        self.retries: list[Exception] = []
        self._threads = [
            threading.Thread(target=self._run, args=(number,), name=f"writer-{number}")
            for number in range(writers)
        ]

    def __enter__(self) -> "Load":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join(3 * DEADLINE_S)
            assert not thread.is_alive(), f"{thread.name} hangs"
        if self.errors:
            raise self.errors[0]

    def go_on(self, batches: int = 20, what: str = "the load goes on") -> None:
        """Wait until so many more batches were acknowledged."""
        wanted = len(self.ledger.acknowledged) + batches
        wait_until(
            lambda: bool(self.errors) or len(self.ledger.acknowledged) >= wanted,
            f"{what}: {batches} batches more",
            DEADLINE_S,
        )
        if self.errors:
            raise self.errors[0]

    def _run(self, writer: int) -> None:
        try:
            table = self._client.table(self._name)
            for number in count():
                if self._stopping.is_set():
                    return
                self._send(table, Batch.of(self._seed, writer, number))
        except BaseException as exc:
            self.errors.append(exc)

    def _send(self, table: RemoteTable, batch: Batch) -> None:
        began = time.monotonic()
        while True:
            try:
                if self._tokens:
                    batch.send(table)
                else:
                    table.put(batch.to_arrow())
                break
            except UnknownOutcome as exc:
                self.retries.append(exc)
                if not self._tokens:
                    self.ledger.doubtful.append(batch)
                    return
            except Retryable as exc:
                self.retries.append(exc)
            if time.monotonic() > began + 2 * DEADLINE_S:
                raise self.retries[-1]
        self.longest_s = max(self.longest_s, time.monotonic() - began)
        self.ledger.acknowledged.append(batch)


def _sums(batches: Iterable[Batch]) -> Counter[tuple[int, str]]:
    sums: Counter[tuple[int, str]] = Counter()
    for batch in batches:
        for key, amount in batch.amounts:
            sums[key, "total"] += amount
            sums[key, "rows"] += 1
    return sums


def looked_up(table: RemoteTable) -> Counter[tuple[int, str]]:
    """Return what a look-up of all keys shows."""
    rows = table.lookup({"k": list(range(KEYS))}).to_pylist()
    return Counter(
        {
            (row["k"], name): row[name]
            for row in rows
            for name in ("total", "rows")
            if row[name] is not None
        }
    )


def replayed(table: RemoteTable) -> Counter[tuple[int, str]]:
    """Return what the changelog leads to, record by record, each from where the last one ended."""
    found: Counter[tuple[int, str]] = Counter()
    for bucket in table.bucket_ids():
        last_offset = -1
        for part in table.changelog(bucket, isolation="latest"):
            for row in part.to_pylist():
                kind, offset = row["_change_type"], row["_log_offset"]
                before = (found.get((row["k"], "total")), found.get((row["k"], "rows")))
                values = (row["total"], row["rows"])
                if kind == "update_preimage":
                    assert before == values, f"key {row['k']} at {offset}: {before}, not {values}"
                    assert offset > last_offset
                    continue
                last_offset = offset
                if kind == "delete":
                    assert before == values, f"key {row['k']} at {offset}: {before}, not {values}"
                    del found[row["k"], "total"], found[row["k"], "rows"]
                    continue
                assert kind != "insert" or before == (None, None)
                found[row["k"], "total"], found[row["k"], "rows"] = values
    return found


def check_exact(table: RemoteTable, ledger: Ledger, *, replay: bool = True) -> None:
    """Acknowledged = stored, by look-up and by replay; of each doubtful batch, whole buckets."""
    found = looked_up(table)
    if replay:
        assert replayed(table) == found, "the changelog leads elsewhere than the look-up"
    buckets = bucket_of_keys(table)
    expected = ledger.sums()
    for number in range(table.buckets):
        mine = [key for key, bucket in buckets.items() if bucket == number]
        _check_bucket(number, _only(found, mine), _only(expected, mine), ledger.doubtful, mine)


def _check_bucket(
    number: int,
    found: Counter[tuple[int, str]],
    expected: Counter[tuple[int, str]],
    doubtful: list[Batch],
    keys: list[int],
) -> None:
    assert len(doubtful) <= 16, "too many batches in doubt to try all their combinations"
    for size in range(len(doubtful) + 1):
        for some in combinations(doubtful, size):
            if found == expected + _only(_sums(some), keys):
                return
    wrong = {
        cell: (found[cell], expected[cell])
        for cell in sorted(found | expected)
        if found[cell] != expected[cell]
    }
    raise AssertionError(
        f"bucket {number}: stored and acknowledged differ, with {len(doubtful)} batches in doubt: "
        f"{wrong}"
    )


def _only(sums: Mapping[tuple[int, str], int], keys: Iterable[int]) -> Counter[tuple[int, str]]:
    wanted = set(keys)
    return Counter({cell: value for cell, value in sums.items() if cell[0] in wanted})


def bucket_of_keys(table: RemoteTable) -> dict[int, int]:
    """Return the bucket of every key of the load."""
    data = pa.table({"k": list(range(KEYS))})
    routes = route(table.schema, read_keys(data, table.schema), table.buckets)
    return {int(key): target.bucket for target in routes for key in target.positions}


# --- A client that is a process -----------------------------------------------------------------


@contextmanager
def client_process(
    cluster: LocalCluster, table: RemoteTable, seed: int, writer: int, *options: str
) -> Iterator["subprocess.Popen[str]"]:
    """Start a client; it has been killed on exit."""
    arguments = [cluster.address, table.name, str(seed), str(writer), *options]
    with child_process("tests.fault.cluster_load", *arguments) as child:
        yield child


@contextmanager
def child_process(module: str, *arguments: str) -> Iterator["subprocess.Popen[str]"]:
    """Run a module as a process, whose output is read; it has been killed on exit."""
    with subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        try:
            yield child
        finally:
            child.kill()


def main(address: str, name: str, seed: int, writer: int, *options: str) -> None:
    """Put batches until killed."""
    if "--half" in options:
        wire.Checksum.closing = _stop_before_the_end  # type: ignore[method-assign, assignment]
    with connect(address) as client:
        table = client.table(name)
        for number in count():
            Batch.of(seed, writer, number).send(table)
            print(number, flush=True)


def _stop_before_the_end(_: wire.Checksum) -> bytes:
    os.write(sys.stdout.fileno(), b"half\n")  # At once: another thread does the same.
    threading.Event().wait()
    raise AssertionError("nobody wakes us")


# --- A client that asks one server only ---------------------------------------------------------


class _Forced(LeaderDirectory):
    """Says of every bucket that it is there."""

    def __init__(self, client: Cluster, address: str) -> None:
        super().__init__(lambda: client.coordinator)
        self._address = address

    def address_of(self, key: LeadKey, buckets: int) -> str:  # noqa: ARG002
        return self._address


class _CallsTo(LeaderCalls):
    """Calls to one server, whoever leads, and each only once."""

    def __init__(self, client: Cluster, address: str, attempt_s: float) -> None:
        super().__init__(
            lambda: client.coordinator,
            Connections(ServerCredentials()),
            deadline_s=attempt_s,
            attempt_s=attempt_s,
        )
        self.directory = _Forced(client, address)

    def scatter(self, *arguments: Any, **settings: Any) -> Any:
        return super().scatter(*arguments, **{**settings, "patient": False})


class _AccessTo:
    """As much of a cluster as a table needs to write and read."""

    def __init__(self, client: Cluster, calls: LeaderCalls) -> None:
        self._client, self.calls = client, calls

    @property
    def coordinator(self) -> Coordinator:
        return self._client.coordinator


@contextmanager
def table_at(
    client: Cluster, table: RemoteTable, address: str | None, attempt_s: float = 20.0
) -> Iterator[RemoteTable]:
    """Return the table as this server has it, whether it should or not."""
    assert address is not None
    calls = _CallsTo(client, address, attempt_s)
    try:
        yield RemoteTable(cast(Any, _AccessTo(client, calls)), table.definition)
    finally:
        calls.close()


# --- Who leads, and faults --------------------------------------------------------------------


def leaders(client: Cluster, table: RemoteTable) -> dict[BucketId, str]:
    """Return the addresses of the buckets' leaders, of those that have one."""
    servers = {server.name: server.address for server in client.coordinator.servers.all()}
    return {
        key: servers[name]
        for key in table.bucket_ids()
        for name in [client.coordinator.leaders.leader_of(LeadKey(table.table_id, key))]
        if name in servers
    }


def wait_until_led(client: Cluster, table: RemoteTable, by: Iterable[LocalServer] = ()) -> None:
    """Wait until each bucket answers, and, if given, exactly these servers lead."""
    servers = list(by)

    def all_led() -> bool:
        found = leaders(client, table)
        wanted = {server.address for server in servers} or set(found.values())
        return len(found) == table.buckets and set(found.values()) == wanted

    numbers = [server.number for server in servers]
    wait_until(all_led, f"all buckets are led by {numbers or 'some server'}", DEADLINE_S)
    table.end_offsets()


def keys_led_by(client: Cluster, table: RemoteTable, server: LocalServer) -> list[int]:
    """Return the keys of the load whose buckets this server leads."""
    led = {key.number for key, at in leaders(client, table).items() if at == server.address}
    return [key for key, bucket in bucket_of_keys(table).items() if bucket in led]


def sessions_at(client: Cluster, address: str | None) -> set[str]:
    """Return the names of the sessions that a server has, or had until just now."""
    return {each.name for each in client.coordinator.servers.all() if each.address == address}


def end_session(cluster: LocalCluster, client: Cluster) -> None:
    """End the client's session as its expiry would: a twin of the client closes it."""
    store = client.coordinator.store
    assert isinstance(store, ZooKeeperStore)
    twin = KazooClient(cluster.address, client_id=store._client.client_id)
    twin.start()
    twin.stop()
    twin.close()
    wait_until(lambda: not store.connected, "the session is lost")


@contextmanager
def paused(pid: int) -> Iterator[Callable[[], None]]:
    """Stop a process for the duration of the block, or until the yielded function is called."""
    pause(pid)
    awake = False

    def wake() -> None:
        nonlocal awake
        if not awake:
            awake = True
            os.kill(pid, signal.SIGCONT)

    try:
        yield wake
    finally:
        wake()


@contextmanager
def noted(seed: int) -> Iterator[Callable[[str], None]]:
    """Say with a failure how to repeat it; the yielded function notes what was done."""
    notes: list[str] = []
    try:
        yield notes.append
    except BaseException as error:
        error.add_note(f"seed {seed}: " + "; ".join(notes))
        raise


@contextmanager
def another_server(
    cluster: LocalCluster, directory: Path, zookeeper: str | None = None
) -> Iterator[LocalServer]:
    """Return one more server for the cluster, to be started; it has ended on exit.

    `zookeeper`: by which address it reaches ZooKeeper, if not by its own.
    """
    directory.mkdir(parents=True, exist_ok=True)
    command = [
        *(sys.executable, "-m", "server"),
        *("--zookeeper", zookeeper or cluster.address),
        *("--logs", str(logs_of(cluster))),
        *("--session-timeout", str(SESSION_TIMEOUT_S)),
    ]
    server = LocalServer(directory, 9, command)
    try:
        yield server
    finally:
        server.kill()


def logs_of(cluster: LocalCluster) -> Path:
    """Return where the logs are: beside those that the servers write for people."""
    return cluster.servers[0].log_path.parent / "logs"


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), *sys.argv[5:])
