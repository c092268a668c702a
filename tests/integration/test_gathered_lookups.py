"""Look-ups of many threads and of event loops: they go together, and each gets its own rows."""

import asyncio
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pyarrow as pa
import pytest

import tallybook as tb
from foundation.errors import BadRequest, InvalidKey, ServerUnavailable, UnknownColumn, WrongType
from server.client.cluster import Cluster
from server.client.connections import Broken, Connections, Exchange
from server.client.remote_table import RemoteTable
from server.launch.local_cluster import LocalCluster
from tests.conftest import SUMS
from tests.support.stream_scene import leave_uncommitted
from tests.support.zookeeper_server import wait_until

KEYS = 2_000
DEADLINE_S = 60.0


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster(tmp_path_factory.mktemp("cluster"), servers=2) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def cluster(local: LocalCluster) -> Iterator[Cluster]:
    with local.connect() as client:
        yield client


@pytest.fixture(scope="module")
def table(cluster: Cluster) -> RemoteTable:
    table = cluster.create_table("filled", SUMS, buckets=4, column_locks=False)
    table.put({"k": list(range(KEYS)), "a": [3 * key for key in range(KEYS)]})
    return table


def messages(cluster: Cluster) -> float:
    """Return how many look-ups all servers have answered, each for whoever went together."""
    name = 'tallybook_call_seconds_count{call="lookup"}'
    return float(sum(server["metrics"].get(name, 0) for server in cluster.status()))


def look_up(table: RemoteTable, key: int, **arguments: Any) -> list[Any]:
    found = table.lookup({"k": [key]}, ["a"], **arguments)
    assert found["k"].to_pylist() == [key]
    return list(found["a"].to_pylist())


def test_many_threads_get_their_own_rows_and_go_together(
    cluster: Cluster, table: RemoteTable
) -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    before = messages(cluster)

    def ask(number: int) -> None:
        chance = random.Random(seed + number)
        mine = cluster.table(table.name) if number % 2 else table  # The same to the cluster.
        for _ in range(60):
            keys = [chance.randrange(KEYS + 100) for _ in range(chance.choice((1, 1, 1, 2, 7)))]
            found = mine.lookup({"k": keys}, ["a"])
            assert found.schema.names == ["k", "a"]
            assert found["k"].to_pylist() == keys
            expected = [3 * key if key < KEYS else None for key in keys]
            assert found["a"].to_pylist() == expected

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(ask, range(16)))
    assert messages(cluster) - before < 16 * 60


@pytest.mark.parametrize("isolation", ["latest", "committed"])
def test_one_after_the_other_they_are_answered_over_one_exchange(
    cluster: Cluster, table: RemoteTable, isolation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[str] = []
    begin = Connections.exchange

    def count(self: Connections, address: str, *arguments: Any) -> Exchange:
        begun.append(address)
        return begin(self, address, *arguments)

    monkeypatch.setattr(Connections, "exchange", count)
    asked, end = 0, time.monotonic() + DEADLINE_S
    while not begun or asked < 50:
        assert look_up(table, asked, isolation=isolation) == [3 * asked]
        asked += 1
        assert time.monotonic() < end
    assert len(begun) <= asked / 2


def test_whatever_kind_of_keys_is_given_is_looked_up(table: RemoteTable) -> None:
    def ask(number: int) -> list[Any]:
        kinds = (
            {"k": [number]},
            [{"k": number}],
            pa.table({"k": [number]}),
            pa.record_batch({"k": pa.array([number], pa.int32())}),
            {"k": pa.array([number])},
            {"k": [number], "another": ["x"]},
        )
        found = [table.lookup(keys, ["a"]) for keys in kinds]
        assert all(one.equals(found[0]) for one in found)
        return list(found[0]["a"].to_pylist())

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, range(40))) == [[3 * key] for key in range(40)]


@pytest.mark.parametrize(
    ("keys", "kind"),
    [
        ({"k": ["x"]}, WrongType),
        ({"k": [None]}, InvalidKey),
        ({"k": [1.5]}, WrongType),
        ({"k": [True]}, WrongType),
        ({"k": [1 << 63]}, tb.TallybookError),
        ({"k": [1, "x"]}, tb.TallybookError),
        ({"k": "x"}, tb.TallybookError),
    ],
)
def test_a_bad_key_is_its_own_callers_and_the_others_get_their_rows(
    table: RemoteTable, keys: Any, kind: type[Exception]
) -> None:
    def ask(number: int) -> list[Any] | None:
        if number % 4:
            return look_up(table, number)
        with pytest.raises(kind):
            table.lookup(keys)
        return None

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(ask, range(40)))
    assert found == [[3 * key] if key % 4 else None for key in range(40)]


def test_texts_and_several_columns_make_keys_too(cluster: Cluster) -> None:
    schema = (
        tb.SchemaBuilder()
        .column("city", "STRING")
        .column("id", "BIGINT")
        .agg_column("a", "BIGINT", "sum")
        .primary_key("city", "id")
        .partitioned_by("city")
        .build()
    )
    table = cluster.create_table("cities", schema, buckets=2, column_locks=False)
    cities = ["Köln", "Paris", "", "x\0y"]
    rows = [{"city": city, "id": at, "a": at + len(city)} for city in cities for at in range(20)]
    table.put(rows)

    def ask(number: int) -> None:
        city, at = [*cities, "nowhere"][number % 5], number % 20
        [row] = table.lookup({"city": [city], "id": [at]}).to_pylist()
        expected = None if city == "nowhere" else at + len(city)
        assert row == {"city": city, "id": at, "a": expected}
        both = table.lookup({"city": ["nowhere", city], "id": [at, at]})["a"].to_pylist()
        assert both == [None, expected]

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(ask, range(200)))
    with pytest.raises(tb.TallybookError):
        table.lookup({"city": ["half \ud800"], "id": [1]})


def test_a_column_that_is_renamed_or_dropped_meanwhile_is_found_or_told(cluster: Cluster) -> None:
    table = cluster.create_table("renamed", SUMS, column_locks=False)
    table.put({"k": [1, 2], "a": [10, 20], "b": [5, 6]})
    before = cluster.table("renamed")
    assert [look_up(before, 1) for _ in range(10)] == [[10]] * 10
    table.rename_column("k", "key")
    table.rename_column("a", "amount")
    assert [look_up(before, 1) for _ in range(10)] == [[10]] * 10
    assert table.lookup({"key": [2]}, ["amount"]).to_pylist() == [{"key": 2, "amount": 20}]
    table.drop_column("amount")
    assert table.lookup({"key": [1]}, ["b"])["b"].to_pylist() == [5]  # The server knows by now.
    for _ in range(10):
        with pytest.raises(UnknownColumn, match=r"dropped|no column"):
            look_up(before, 1)
    before.refresh()
    assert before.lookup({"key": [2]}, ["b"]).to_pylist() == [{"key": 2, "b": 6}]


# --- Committed rows -----------------------------------------------------------------------------


def test_a_committed_look_up_sees_what_was_committed_before_it_began(cluster: Cluster) -> None:
    """Also while others look up all the time, whose cuts may be older."""
    table = cluster.create_table("committed", SUMS, buckets=4)
    stop = threading.Event()
    seen: list[list[int]] = []

    def watch() -> None:
        mine = [0]
        while not stop.is_set():
            [value] = look_up(table, 1, isolation="committed")
            mine.append(value or 0)
        seen.append(mine)

    with ThreadPoolExecutor(12) as pool:
        watching = [pool.submit(watch) for _ in range(4)]
        with table.writer(owner_id="me", columns=["a"]) as writer:
            for batch in range(20):
                writer.write(batch, tb.Rows(data={"k": [1, 2, 3], "a": [1, 1, 1]}))
                futures = [
                    pool.submit(look_up, table, 1 + number % 3, isolation="committed")
                    for number in range(6)
                ]
                assert [one.result(DEADLINE_S) for one in futures] == [[batch + 1]] * 6
        stop.set()
        for one in watching:
            one.result(DEADLINE_S)
    for mine in seen:
        assert mine == sorted(mine)
    assert max(map(max, seen)) == 20


def test_a_committed_look_up_never_sees_what_is_not_committed(cluster: Cluster) -> None:
    table = cluster.create_table("uncommitted", SUMS, buckets=2)
    writer = table.writer(owner_id="me", columns=["a"]).start()
    writer.write(0, tb.Rows(data={"k": [1, 2], "a": [1, 1]}))

    def both() -> set[tuple[str, int]]:
        with ThreadPoolExecutor(8) as pool:
            asked = [
                (isolation, pool.submit(look_up, table, 1, isolation=isolation))
                for isolation in ("committed", "latest") * 20
            ]
            return {(isolation, one.result(DEADLINE_S)[0]) for isolation, one in asked}

    assert both() == {("committed", 1), ("latest", 1)}
    leave_uncommitted(writer, a=7)
    assert both() == {("committed", 1), ("latest", 8)}
    with table.writer(owner_id="me", columns=["a"]) as successor:
        assert both() == {("committed", 1), ("latest", 1)}
        successor.write(1, tb.Rows(data={"k": [1], "a": [2]}))
        assert both() == {("committed", 3), ("latest", 3)}


def test_several_committed_keys_are_seen_at_one_cut(cluster: Cluster) -> None:
    table = cluster.create_table("transfers", SUMS, buckets=4)
    keys = list(range(8))
    stop = threading.Event()

    def watch() -> int:
        rounds = 0
        while not stop.is_set():
            found = table.lookup({"k": keys}, ["a"], isolation="committed")
            assert sum(found["a"].to_pylist()) == 800
            rounds += 1
        return rounds

    with table.writer(owner_id="me", columns=["a"]) as writer, ThreadPoolExecutor(4) as pool:
        writer.write(0, tb.Rows(data={"k": keys, "a": [100] * 8}))
        watching = [pool.submit(watch) for _ in range(4)]
        for batch in range(1, 20):
            amounts = [batch if key % 2 else -batch for key in keys]
            writer.write(batch, tb.Rows(data={"k": keys, "a": amounts}))
        stop.set()
        assert all(one.result(DEADLINE_S) for one in watching)


# --- What can go wrong --------------------------------------------------------------------------


def test_a_leader_that_moves_is_found_while_many_look_up(
    local: LocalCluster, table: RemoteTable
) -> None:
    stop = threading.Event()

    def ask(number: int) -> int:
        rounds = 0
        while not stop.is_set():
            key = (number * 97 + rounds) % KEYS
            isolation = ("latest", "committed")[number % 2]
            assert look_up(table, key, isolation=isolation) == [3 * key]
            rounds += 1
        return rounds

    with ThreadPoolExecutor(8) as pool:
        asking = [pool.submit(ask, number) for number in range(8)]
        try:
            local.servers[0].stop()
            assert look_up(table, 1) == [3]
            local.servers[0].start()
            local.servers[1].kill()
            assert [look_up(table, key) for key in range(8)] == [[3 * key] for key in range(8)]
        finally:
            if not local.servers[1].alive:
                local.servers[1].start()
            local.wait_until_joined()
            stop.set()
        assert all(one.result(DEADLINE_S) for one in asking)


def test_a_server_that_has_no_exchanges_is_asked_by_calls(
    table: RemoteTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise BadRequest("there is no call do_exchange")

    monkeypatch.setattr(Connections, "exchange", refuse)
    with ThreadPoolExecutor(8) as pool:
        found = pool.map(lambda key: look_up(table, key), range(200))
        assert list(found) == [[3 * key] for key in range(200)]


def test_an_exchange_that_breaks_off_costs_nobody_its_answer(
    table: RemoteTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    receive, chance, broken = Exchange.receive, random.Random(7), []

    def break_off(self: Exchange) -> pa.RecordBatch:
        if chance.random() < 0.3:
            broken.append(self)
            raise Broken("here", pa.flight.FlightError("it is gone"))
        return receive(self)

    monkeypatch.setattr("server.client.lookup_lanes._TROUBLED_S", 0.0)
    monkeypatch.setattr(Exchange, "receive", break_off)

    def ask(key: int) -> list[Any]:
        return look_up(table, key)

    with ThreadPoolExecutor(8) as pool:
        end = time.monotonic() + DEADLINE_S
        while len(broken) < 5:
            assert list(pool.map(ask, range(100))) == [[3 * key] for key in range(100)]
            assert time.monotonic() < end


def test_closing_the_client_wakes_who_waits(local: LocalCluster, table: RemoteTable) -> None:
    client = local.connect()
    mine = client.table(table.name)
    outcomes: list[str] = []

    def ask(number: int) -> None:
        try:
            while True:
                look_up(mine, number)
        except (ServerUnavailable, tb.errors.SessionLost) as exc:
            outcomes.append(str(exc))

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    wait_until(lambda: bool(client.calls.lanes._lanes), "they look up")
    client.close()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert len(outcomes) == 8
    assert all("closed" in outcome or "gone" in outcome for outcome in outcomes)


# --- Event loops --------------------------------------------------------------------------------


def test_an_event_loop_looks_up_any_number_at_a_time(cluster: Cluster, table: RemoteTable) -> None:
    async def ask(key: int) -> list[Any]:
        isolation = ("latest", "committed")[key % 2]
        found = await table.lookup_async({"k": [key]}, ["a"], isolation=isolation)
        return list(found["a"].to_pylist())

    async def main() -> list[list[Any]]:
        return await asyncio.gather(*map(ask, range(KEYS)))

    def messages_sent() -> float:
        before = messages(cluster)
        assert asyncio.run(main()) == [[3 * key] for key in range(KEYS)]
        return messages(cluster) - before

    # An exchange that a busy machine cuts short has them go by themselves, for a second.
    assert any(messages_sent() < KEYS / 4 for _ in range(5))


def test_an_event_loop_gets_the_errors_of_its_own_look_ups(table: RemoteTable) -> None:
    async def main() -> list[Any]:
        asked = [
            table.lookup_async({"k": [1]}, ["a"]),
            table.lookup_async({"k": ["x"]}, ["a"]),
            table.lookup_async({"k": [2]}, ["nothing"]),
            table.lookup_async({"k": list(range(1000))}, ["a"]),
            table.lookup_async({"k": [1, 2]}, ["a"], isolation="committed"),
            table.lookup_async({"k": [2]}, ["a"], at=table.cut()),
            table.lookup_async({"k": []}, ["a"]),
        ]
        return await asyncio.gather(*asked, return_exceptions=True)

    first, wrong, unknown, many, committed, at, none = asyncio.run(main())
    assert first.to_pylist() == [{"k": 1, "a": 3}]
    assert isinstance(wrong, WrongType)
    assert isinstance(unknown, UnknownColumn)
    assert many["a"].to_pylist() == [3 * key for key in range(1000)]
    assert committed["a"].to_pylist() == [3, 6]
    assert at.to_pylist() == [{"k": 2, "a": 6}]
    assert none.num_rows == 0


def test_a_look_up_that_is_cancelled_harms_no_other(table: RemoteTable) -> None:
    async def main() -> list[Any]:
        tasks = [asyncio.create_task(table.lookup_async({"k": [key]}, ["a"])) for key in range(100)]
        await asyncio.sleep(0)
        for task in tasks[::3]:
            task.cancel()
        return await asyncio.gather(*tasks, return_exceptions=True)

    for key, found in enumerate(asyncio.run(main())):
        if key % 3:
            assert found.to_pylist() == [{"k": key, "a": 3 * key}]
        else:
            assert isinstance(found, asyncio.CancelledError)


def test_an_event_loop_waits_for_a_leader_that_moves(
    local: LocalCluster, table: RemoteTable
) -> None:
    async def main() -> None:
        stop = threading.Event()

        async def ask(number: int) -> int:
            rounds = 0
            while not stop.is_set():
                key = (number * 97 + rounds) % KEYS
                found = await table.lookup_async({"k": [key]}, ["a"])
                assert found["a"].to_pylist() == [3 * key]
                rounds += 1
            return rounds

        asking = [asyncio.create_task(ask(number)) for number in range(20)]
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(None, local.servers[1].stop)
        await table.lookup_async({"k": [1]})
        local.servers[1].start()
        await loop.run_in_executor(None, local.wait_until_joined)
        stop.set()
        assert all(await asyncio.gather(*asking))

    asyncio.run(main())
