"""Servers that lead no longer and do not know it: what they answer counts for nothing.

A server that is stopped with SIGSTOP past its session wakes up as a zombie: it has its buckets
open, and its ZooKeeper client still says that it is connected. `TALLYBOOK_EXAMPLES` makes a longer
run; a failure prints its seed.
"""

import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any, cast

import pytest

from foundation.errors import (
    Deposed,
    Fenced,
    Retryable,
    StaleLeaders,
    StartOver,
    TooLate,
    UnknownOutcome,
)
from foundation.ids import LeadKey, Token
from locks.store.base import Delete
from locks.store.paths import leader_path, server_path
from merge_engine.bucket.options import BucketOptions
from merge_engine.storage.objects import open_storage
from recovery.leader.led_bucket import LedBucket
from server.client.cluster import Cluster
from server.client.remote_table import RemoteTable
from server.launch.local_cluster import LocalCluster, LocalServer
from server.tablet.config import ServerConfig
from server.tablet.hosting import Hosting
from server.tablet.tablet_server import TabletServer
from tests.fault.cluster_load import (
    BUCKETS,
    DEADLINE_S,
    KEYS,
    SCHEMA,
    SESSION_TIMEOUT_S,
    Batch,
    Ledger,
    Load,
    another_server,
    bucket_of_keys,
    check_exact,
    client_of,
    keys_led_by,
    leaders,
    logs_of,
    noted,
    paused,
    rounds,
    sessions_at,
    table_at,
    wait_until_led,
)
from tests.fault.fenced_writer import FencedWriter
from tests.support.zookeeper_proxy import Proxy
from tests.support.zookeeper_server import wait_until

REFUSED = (StartOver, Fenced, TooLate)
DIRECT = 100  # The number of the first writer that sends to the zombie itself.
_numbers = count()


def create(client: Cluster, cluster: LocalCluster, *, column_locks: bool = False) -> RemoteTable:
    """Create a table that nobody else writes to, led by both servers."""
    table = client.create_table(
        f"sums_{next(_numbers)}", SCHEMA, buckets=BUCKETS, column_locks=column_locks
    )
    wait_until_led(client, table, cluster.servers)
    return table


def wait_until_not_led_by(client: Cluster, table: RemoteTable, server: LocalServer) -> None:
    def moved() -> bool:
        found = leaders(client, table)
        return len(found) == table.buckets and server.address not in found.values()

    wait_until(moved, f"server {server.number} leads nothing", DEADLINE_S)


class Direct:
    """Puts to one server itself, sent while it sleeps: the first thing that it does when awake."""

    def __init__(self, table: RemoteTable, seed: int, keys: list[int], writers: int = 6) -> None:
        batches = [Batch.of(seed, DIRECT + each, 0).only(keys) for each in range(writers)]
        self._batches = [batch for batch in batches if batch.amounts]
        self._pool = ThreadPoolExecutor(len(self._batches))
        self._sent = [self._pool.submit(batch.send, table) for batch in self._batches]
        self.refused: list[Exception] = []

    def settle(self, ledger: Ledger, *, in_part: bool = False) -> None:
        """Note what became of each: acknowledged, in doubt, or refused, which is as if not sent.

        `in_part`: a server that is awake may have been refused between two buckets of a put.
        """
        for batch, sent in zip(self._batches, self._sent, strict=True):
            self._settle(batch, sent, ledger, in_part)
        self._pool.shutdown()

    def _settle(self, batch: Batch, sent: "Future[Any]", ledger: Ledger, in_part: bool) -> None:
        try:
            sent.result(DEADLINE_S)
            ledger.acknowledged.append(batch)
        except UnknownOutcome:
            ledger.doubtful.append(batch)
        except (*REFUSED, Retryable) as exc:
            self.refused.append(exc)
            ledger.doubtful += [batch] if in_part else []


@pytest.mark.parametrize("seed", range(rounds(1)))
def test_a_server_that_slept_past_its_session_writes_nothing(
    seed: int, cluster: LocalCluster, client: Cluster
) -> None:
    chance = random.Random(seed)
    table = create(client, cluster)
    with noted(seed) as note, Load(client, table.name, seed) as load:
        load.go_on(chance.randrange(5, 30))
        zombie = chance.choice(cluster.servers)
        keys = keys_led_by(client, table, zombie)
        note(f"pauses server {zombie.number} after {len(load.ledger.acknowledged)} batches")
        with table_at(client, table, zombie.address) as there, paused(zombie.pid) as wake:
            direct = Direct(there, seed, keys)
            wait_until_not_led_by(client, table, zombie)
            load.go_on(20, "at the new leader")
            wake()
            direct.settle(load.ledger)
        assert direct.refused
        load.go_on(20, "after the zombie is awake")
        wait_until_led(client, table, cluster.servers)
        load.go_on(20, "when the zombie has joined again")
    check_exact(table, load.ledger)


def test_a_server_that_slept_past_its_session_answers_no_look_up_while_zookeeper_says_nothing(
    cluster: LocalCluster, client: Cluster, tmp_path: Path
) -> None:
    """Packets are lost, and nobody tells it so: as far as its connection knows, all is well."""
    with (
        Proxy(cluster.zookeeper) as proxy,
        another_server(cluster, tmp_path, proxy.address) as zombie,
        noted(11),
    ):
        zombie.start()
        table = client.create_table(f"sums_{next(_numbers)}", SCHEMA, buckets=6, column_locks=False)
        wait_until(lambda: zombie.address in leaders(client, table).values(), "it leads", 30)
        wait_until_led(client, table)
        keys = {"k": keys_led_by(client, table, zombie)}
        ones = {"k": keys["k"], "total": [1] * len(keys["k"])}
        table.put(ones, owner="w", token=Token(1, 0))
        with table_at(client, table, zombie.address, attempt_s=5.0) as there:
            assert there.lookup(keys).column("total").to_pylist() == [1] * len(keys["k"])
            with paused(zombie.pid) as wake:
                proxy.hold()
                wait_until_not_led_by(client, table, zombie)
                table.put(ones, owner="w", token=Token(1, 1))
                wake()
                refused, until = 0, time.monotonic() + 2 * SESSION_TIMEOUT_S
                while time.monotonic() < until:
                    with pytest.raises((*REFUSED, Retryable)):
                        there.lookup(keys)
                    refused += 1
                assert refused
            proxy.pass_on()
        wait_until(lambda: zombie.address in leaders(client, table).values(), "it leads again", 30)
        assert table.lookup(keys).column("total").to_pylist() == [2] * len(keys["k"])
        client.drop_table(table.name)


def test_nor_does_it_after_the_log_was_cleaned_up_to_its_end(
    cluster: LocalCluster, client: Cluster, tmp_path: Path
) -> None:
    """The new leader is in this process: there is no call over the network that cleans a log."""
    zombie, other = cluster.servers
    other.stop()
    config = ServerConfig(
        zookeeper=cluster.address,
        logs=str(logs_of(cluster)),
        views=tmp_path / "views",
        session_timeout_s=SESSION_TIMEOUT_S,
    )
    with TabletServer(config) as successor:
        table = client.create_table(
            f"sums_{next(_numbers)}", SCHEMA, buckets=BUCKETS, column_locks=False
        )
        wait_until(
            lambda: set(leaders(client, table).values()) == {zombie.address, successor.address},
            "both lead",
            DEADLINE_S,
        )
        table.end_offsets()
        with noted(1), Load(client, table.name, 1) as load:
            load.go_on()
            keys = keys_led_by(client, table, zombie)
            with table_at(client, table, zombie.address) as there, paused(zombie.pid) as wake:
                direct = Direct(there, 1, keys)
                wait_until_not_led_by(client, table, zombie)
                load.go_on(20, "at the new leader")
                for key, led in successor.hosting.led().items():
                    if key.table_id == table.table_id:
                        assert led.bucket.clean(led.bucket.end_offset) > led.term
                load.go_on(5, "after the log was cleaned")
                wake()
                direct.settle(load.ledger)
            assert direct.refused
            # Its own view ends where the log no longer begins: only a snapshot could help it.
            zombie.kill()
            load.go_on(20, "at the new leader again")
        check_exact(table, load.ledger, replay=False)
        client.drop_table(table.name)
    other.start()


def test_a_server_that_slept_for_less_than_its_session_counts_late_puts_once(
    cluster: LocalCluster, client: Cluster
) -> None:
    """Each batch is sent again and again while its leader sleeps, and it wakes up to all that."""
    table = create(client, cluster)
    with client_of(cluster, attempt_s=0.15) as hasty, noted(2), Load(hasty, table.name, 2) as load:
        for number in range(rounds(3)):
            load.go_on(20)
            sleeper = cluster.servers[number % 2]
            sent = CountedPuts(hasty, sleeper.address)
            with paused(sleeper.pid):
                wait_until(lambda sent=sent: sent.begun >= 6, "two attempts of each writer")  # type: ignore[misc]
            sent.end()
            load.go_on(20, "at the server that woke up")
    check_exact(table, load.ledger)


class CountedPuts:
    """How many puts a client has begun at a server."""

    def __init__(self, client: Cluster, address: str | None) -> None:
        self.begun = 0
        self._connections = cast(Any, client.calls.connections)
        real = self._connections.put

        def put(at: str, *arguments: Any, **how: Any) -> Any:
            if at == address:
                self.begun += 1
            return real(at, *arguments, **how)

        self._connections.put = put

    def end(self) -> None:
        del self._connections.put


# --- Writers with a column lock -----------------------------------------------------------------


def check_committed(writer: FencedWriter, ledger: Ledger) -> None:
    """Committed = what a committed look-up shows; and after recovery, all that there is."""
    rows = writer.table.lookup({"k": list(range(KEYS))}, isolation="committed").to_pylist()
    found = {(row["k"], name): row[name] for row in rows for name in ("total", "rows")}
    assert {cell: value for cell, value in found.items() if value is not None} == ledger.sums()
    writer.recover()
    check_exact(writer.table, ledger)


def test_a_commit_with_the_answers_of_a_server_that_slept_past_its_session_is_refused(
    cluster: LocalCluster, client: Cluster
) -> None:
    table = create(client, cluster, column_locks=True)
    writer, ledger = FencedWriter(client, table), Ledger()
    batches = [Batch.of(3, 0, number) for number in range(4)]
    for batch in batches[:2]:
        writer.write(batch)
        ledger.acknowledged.append(batch)
    zombie = cluster.servers[0]
    [session] = sessions_at(client, zombie.address)
    answered = writer.put(batches[2])
    sealed = writer.seal(batches[2])
    assert session in sealed.sessions
    assert answered <= sealed.sessions
    with noted(3), paused(zombie.pid) as wake:
        wait_until(lambda: session not in _all_sessions(client), "its session is over", DEADLINE_S)
        assert writer.lock is not None
        with pytest.raises(StaleLeaders):
            writer.lock.commit(2, sealed.results, sealed.sessions)
        wake()
    check_committed(writer, ledger)
    for batch in batches[2:]:
        writer.write(batch)
        ledger.acknowledged.append(batch)
    check_committed(writer, ledger)


def test_what_a_zombie_answers_to_a_fenced_writer_cannot_be_committed(
    cluster: LocalCluster, client: Cluster
) -> None:
    """The seal is the first thing that it does when awake: it has the writer fenced, and answers.

    Unless it has found out by then: both are right.
    """
    table = create(client, cluster, column_locks=True)
    writer, ledger = FencedWriter(client, table), Ledger()
    zombie = cluster.servers[1]
    keys = keys_led_by(client, table, zombie)
    mine = {k for k, at in leaders(client, table).items() if at == zombie.address}
    writer.write(Batch.of(4, 0, 0))
    ledger.acknowledged.append(Batch.of(4, 0, 0))
    batch = Batch.of(4, 0, 1).only(keys)
    writer.put(batch)
    terms = writer.terms
    writer.terms = {key: term for key, term in terms.items() if key in mine}
    with (
        noted(4),
        table_at(client, table, zombie.address) as there,
        ThreadPoolExecutor(1) as pool,
        paused(zombie.pid) as wake,
    ):
        sealing = pool.submit(writer.seal, batch, there)
        wait_until_not_led_by(client, table, zombie)
        wake()
        assert writer.lock is not None
        try:
            sealed = sealing.result(DEADLINE_S)
        except (*REFUSED, Retryable):
            pass
        else:
            with pytest.raises(StaleLeaders):
                writer.lock.commit(1, {**terms, **sealed.results}, sealed.sessions)
    check_committed(writer, ledger)


@pytest.mark.parametrize("seed", range(rounds(1)))
def test_a_fenced_writer_commits_each_batch_once_whatever_becomes_of_the_servers(
    seed: int, cluster: LocalCluster, client: Cluster
) -> None:
    chance = random.Random(seed)
    table = create(client, cluster, column_locks=True)
    writer, ledger = FencedWriter(client, table), Ledger()
    stopping = threading.Event()

    def write() -> None:
        for number in count():
            if stopping.is_set():
                return
            batch = Batch.of(seed, 0, number)
            writer.write(batch)
            ledger.acknowledged.append(batch)

    def go_on(batches: int) -> None:
        wanted = len(ledger.acknowledged) + batches
        wait_until(
            lambda: writing.done() or len(ledger.acknowledged) >= wanted,
            f"{batches} batches more",
            DEADLINE_S,
        )
        assert not writing.done(), writing.exception()

    with noted(seed) as note, ThreadPoolExecutor(1) as pool:
        writing = pool.submit(write)
        try:
            for fault in chance.sample(["kill", "pause", "kill", "short pause"], 3):
                go_on(chance.randrange(3, 12))
                server = chance.choice(cluster.servers)
                note(f"{fault} of {server.number} after {len(ledger.acknowledged)} batches")
                if fault == "kill":
                    server.kill()
                    go_on(3)
                    server.start()
                    cluster.wait_until_joined()
                    continue
                with paused(server.pid):
                    if fault == "pause":
                        wait_until_not_led_by(client, table, server)
                        go_on(3)
                go_on(3)
        finally:
            stopping.set()
        writing.result(2 * DEADLINE_S)
    check_committed(writer, ledger)


def _all_sessions(client: Cluster) -> set[str]:
    return {server.name for server in client.coordinator.servers.all()}


# --- Two leaders --------------------------------------------------------------------------------


def test_of_two_leaders_of_one_bucket_only_the_last_one_writes(
    cluster: LocalCluster, client: Cluster, tmp_path: Path
) -> None:
    """A usurper opens a bucket behind everybody's back, writes until it is deposed, and again."""
    table = create(client, cluster)
    key = LeadKey(table.table_id, table.bucket_ids()[0])
    keys = [each for each, bucket in bucket_of_keys(table).items() if bucket == key.bucket.number]
    storage = open_storage(str(logs_of(cluster)))
    usurper = Hosting(storage, tmp_path / "views", BucketOptions())
    usurper.set_table(table.definition)
    batches = (Batch.of(5, DIRECT, number).only(keys) for number in count())
    with noted(5), Load(client, table.name, 5) as load:
        for _ in range(5):
            load.go_on(10)
            usurper.open(key)
            with pytest.raises(Deposed):
                write_on(usurper.get(key), batches, load.ledger)
            usurper.close(key)
        load.go_on(20, "when the usurper is gone")
    check_exact(table, load.ledger)


def write_on(led: LedBucket, batches: Iterator[Batch], ledger: Ledger) -> None:
    """Put batches to one bucket, in this process."""
    for batch in batches:
        if batch.amounts:
            led.bucket.put(batch.to_arrow(), owner=batch.owner, token=batch.token)
            ledger.acknowledged.append(batch)


def test_a_server_whose_nodes_were_deleted_behind_its_back_is_refused_and_joins_again(
    cluster: LocalCluster, client: Cluster
) -> None:
    table = create(client, cluster)
    deposed = cluster.servers[0]
    keys = keys_led_by(client, table, deposed)
    [session] = sessions_at(client, deposed.address)
    with noted(6), Load(client, table.name, 6) as load:
        load.go_on()
        with table_at(client, table, deposed.address) as there:
            _delete_nodes(client, session)
            direct = Direct(there, 6, keys)
            direct.settle(load.ledger, in_part=True)
        load.go_on(20, "at the other server")
        wait_until(
            lambda: bool(sessions_at(client, deposed.address)), "it has joined again", DEADLINE_S
        )
        wait_until_led(client, table, cluster.servers)
        load.go_on(20, "at both servers")
    check_exact(table, load.ledger)


def _delete_nodes(client: Cluster, session: str) -> None:
    led = [key for key, name in client.coordinator.leaders.all().items() if name == session]
    paths = [server_path(session), *(leader_path(key.node_name) for key in led)]
    client.coordinator.store.transact([Delete(path) for path in paths])
