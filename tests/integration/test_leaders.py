"""Who leads which bucket, on both stores: one server each, for as long as its session lasts."""

import random
import threading
from collections.abc import Sequence

import pytest

from foundation.errors import CorruptRecord, SessionLost
from foundation.ids import BucketId, LeadKey
from locks.catalog.definitions import CatalogTable
from locks.cluster.leaders import AT_ONCE
from locks.cluster.servers import Server
from locks.coordinator import Coordinator
from locks.store.base import Create, Delete, Operation
from locks.store.memory import MemoryCoordination
from locks.store.paths import LEADERS
from tests.integration.coordination.conftest import cluster, coordinator, table, zookeeper
from tests.support.coordinators import Cluster, just_before_the_next_transaction, ready
from tests.support.lossy import LOSSES, Lossy, LossyStore, lossy

__all__ = ["cluster", "coordinator", "lossy", "table", "zookeeper"]  # Fixtures, used by name.

KEYS = [LeadKey(1, BucketId(0, number)) for number in range(200)]
FEW = [LeadKey(1, BucketId(0, 0)), LeadKey(1, BucketId(12, 3)), LeadKey(2, BucketId(0, 0))]


class Racer:
    """A server with a session of its own."""

    def __init__(self, cluster: Cluster, port: int) -> None:
        self.coordinator = cluster.coordinator()
        self.server = self.coordinator.servers.register(f"127.0.0.1:{port}")

    @property
    def name(self) -> str:
        return self.server.name

    def take(self, keys: Sequence[LeadKey]) -> list[LeadKey]:
        return self.coordinator.leaders.take(self.server, keys)

    def give_up(self, keys: Sequence[LeadKey]) -> None:
        self.coordinator.leaders.give_up(self.server, keys)


@pytest.fixture
def first(cluster: Cluster) -> Racer:
    return Racer(cluster, 1)


@pytest.fixture
def second(cluster: Cluster) -> Racer:
    return Racer(cluster, 2)


def test_a_lead_is_the_server_s_that_took_it_until_it_gives_it_up(
    coordinator: Coordinator, first: Racer, second: Racer
) -> None:
    assert coordinator.leaders.all() == {}
    assert first.take(FEW[:2]) == FEW[:2]
    assert second.take(FEW) == FEW[2:]
    assert coordinator.leaders.all() == {
        FEW[0]: first.name,
        FEW[1]: first.name,
        FEW[2]: second.name,
    }
    coordinator.store.sync()
    assert [coordinator.leaders.leader_of(key) for key in FEW] == [
        first.name,
        first.name,
        second.name,
    ]
    second.give_up(FEW)
    first.give_up(FEW[:1])
    assert coordinator.leaders.all() == {FEW[1]: first.name}
    first.give_up(FEW)
    first.give_up(FEW)
    assert coordinator.leaders.all() == {}
    coordinator.store.sync()
    assert coordinator.leaders.leader_of(FEW[0]) is None
    assert second.take(FEW) == FEW


def test_to_take_again_is_to_have_and_a_key_twice_is_one(first: Racer, second: Racer) -> None:
    assert first.take([]) == []
    assert first.take(FEW[:1]) == FEW[:1]
    second.take(FEW[1:2])
    assert first.take([*FEW, *FEW]) == [FEW[0], FEW[2]]
    assert first.take(FEW) == [FEW[0], FEW[2]]
    first.give_up([*FEW, *FEW])
    assert first.coordinator.leaders.all() == {FEW[1]: second.name}


def test_many_leads_are_taken_in_transactions_of_bounded_size(
    coordinator: Coordinator, first: Racer, second: Racer, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = [LeadKey(7, BucketId(partition, 0)) for partition in range(2 * AT_ONCE + 50)]
    second.take(keys[::100])
    sizes = []
    real = first.coordinator.store.transact

    def transact(operations: Sequence[Operation]) -> None:
        sizes.append(sum(isinstance(operation, Create | Delete) for operation in operations))
        real(operations)

    monkeypatch.setattr(first.coordinator.store, "transact", transact)
    ours = [key for key in keys if key not in keys[::100]]
    assert first.take(keys) == ours
    # Each of the three meets a lead of another, looks, and goes on with the others at once.
    assert sizes == [200, 198, 200, 198, 50, 49]
    assert len(coordinator.leaders.all()) == len(keys)
    first.give_up(keys)
    assert sizes[6:] == [198, 198, 49]
    assert set(coordinator.leaders.all()) == set(keys[::100])


def test_a_session_that_ends_frees_its_leads(first: Racer, second: Racer) -> None:
    first.take(KEYS)
    assert second.take(KEYS) == []
    first.coordinator.store.close()
    assert second.coordinator.leaders.all() == {}
    assert second.take(KEYS) == KEYS
    with pytest.raises(SessionLost):
        first.take(KEYS)
    with pytest.raises(SessionLost):
        first.give_up(KEYS)
    assert set(second.coordinator.leaders.all().values()) == {second.name}


def test_a_server_of_a_session_that_is_gone_leads_nothing(
    coordinator: Coordinator, first: Racer
) -> None:
    first.coordinator.store.close()
    for server in (first.server, Server(name="nobody", address="127.0.0.1:9")):
        with pytest.raises(SessionLost, match=r"not registered, or its session .* is gone"):
            coordinator.leaders.take(server, FEW)
    assert coordinator.leaders.all() == {}


def test_what_is_sent_in_the_session_after_the_lost_one_changes_nothing(
    cluster: Cluster, first: Racer, second: Racer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """kazoo opens another session by itself, and may send there what was waiting to be sent."""
    first.take(FEW[:2])
    store, next_session = first.coordinator.store, cluster.connect()

    def transact(operations: Sequence[Operation]) -> None:
        store.close()
        assert second.take(FEW[:2]) == FEW[:2]
        next_session.transact(operations)

    monkeypatch.setattr(store, "transact", transact)
    with pytest.raises(SessionLost):
        first.give_up(FEW)
    assert second.coordinator.leaders.all() == dict.fromkeys(FEW[:2], second.name)
    monkeypatch.setattr(store, "transact", next_session.transact)
    with pytest.raises(SessionLost, match="connect and register again"):
        first.take(FEW[2:])
    assert second.coordinator.leaders.all() == dict.fromkeys(FEW[:2], second.name)


def test_a_lead_that_is_freed_after_it_was_in_the_way_is_taken(
    first: Racer, second: Racer, monkeypatch: pytest.MonkeyPatch
) -> None:
    first.take(FEW)
    real = second.coordinator.store.read_many

    def read_many(paths: Sequence[str]) -> object:
        monkeypatch.undo()
        first.give_up(FEW[:1])
        second.coordinator.store.sync()
        return real(paths)

    monkeypatch.setattr(second.coordinator.store, "read_many", read_many)
    assert second.take(FEW) == FEW[:1]


def test_a_table_is_dropped_while_its_buckets_are_led(
    coordinator: Coordinator, table: CatalogTable, first: Racer, second: Racer
) -> None:
    keys = [LeadKey(table.table_id, BucketId(0, number)) for number in range(4)]
    first.take(keys)
    ready(coordinator, table, "etl-1", "orders").release()
    coordinator.partitions.create(table, b"a")
    coordinator.drop_table(table)
    assert coordinator.tables.all() == []
    assert coordinator.leaders.all() == dict.fromkeys(keys, first.name)
    first.give_up(keys)
    assert coordinator.leaders.all() == {}


def test_a_node_that_is_no_bucket_s_is_an_error(coordinator: Coordinator) -> None:
    coordinator.store.transact([Create(f"{LEADERS}/1-2", b"")])
    with pytest.raises(CorruptRecord, match="/leaders/1-2 is the leader of no bucket"):
        coordinator.leaders.all()


# Races


@pytest.mark.parametrize("at_once", [7, 200])
def test_of_two_servers_that_race_for_200_leads_each_has_its_own(
    coordinator: Coordinator, first: Racer, second: Racer, at_once: int
) -> None:
    taken: dict[str, list[LeadKey]] = {first.name: [], second.name: []}
    start = threading.Barrier(2)

    def race(racer: Racer, keys: list[LeadKey]) -> None:
        start.wait()
        for begin in range(0, len(keys), at_once):
            taken[racer.name] += racer.take(keys[begin : begin + at_once])

    run_together(
        threading.Thread(target=race, args=(first, KEYS)),
        threading.Thread(target=race, args=(second, KEYS[::-1])),
    )
    assert sorted(taken[first.name] + taken[second.name]) == KEYS
    assert coordinator.leaders.all() == {key: name for name, keys in taken.items() for key in keys}


def test_nobody_has_a_lead_that_another_has_however_often_they_change_hands(
    coordinator: Coordinator, first: Racer, second: Racer
) -> None:
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    keys, held, wrong = KEYS[:12], dict[LeadKey, str](), list[str]()
    mutex = threading.Lock()

    def race(racer: Racer, rng: random.Random) -> None:
        for _ in range(40):
            taken = racer.take(rng.sample(keys, 6))
            with mutex:
                wrong.extend(str(key) for key in taken if held.get(key, racer.name) != racer.name)
                held.update(dict.fromkeys(taken, racer.name))
            given = rng.sample(keys, 8)
            with mutex:
                for key in given:
                    if held.get(key) == racer.name:
                        del held[key]
            racer.give_up(given)

    run_together(
        threading.Thread(target=race, args=(first, random.Random(seed))),
        threading.Thread(target=race, args=(second, random.Random(seed + 1))),
    )
    assert wrong == [], f"seed {seed}"
    assert coordinator.leaders.all() == held, f"seed {seed}"


def run_together(*threads: threading.Thread) -> None:
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


# Answers that are lost


@pytest.mark.parametrize("losses", LOSSES, ids=" then ".join)
def test_leads_are_taken_and_given_up_once_whatever_is_lost(
    lossy: Lossy, losses: list[str]
) -> None:
    ours, other = lossy.coordinator, lossy.other
    server, rival = ours.servers.register("127.0.0.1:1"), other.servers.register("127.0.0.1:2")
    taken: list[LeadKey] = []
    lossy.without_answers(losses, lambda: taken.extend(ours.leaders.take(server, FEW)))
    assert taken == FEW
    assert other.leaders.all() == dict.fromkeys(FEW, server.name)
    assert other.leaders.take(rival, FEW) == []
    lossy.without_answers(losses, lambda: ours.leaders.give_up(server, FEW[:2]))
    assert other.leaders.all() == {FEW[2]: server.name}
    assert other.leaders.take(rival, FEW) == FEW[:2]
    assert ours.leaders.take(server, FEW) == FEW[2:]


class Losing:
    """A server that loses answers, and one beside it, in memory."""

    def __init__(self) -> None:
        memory = MemoryCoordination()
        self.store = LossyStore(memory)
        self.ours, self.other = Coordinator(self.store), Coordinator(memory.connect())
        self.server = self.ours.servers.register("127.0.0.1:1")
        self.rival = self.other.servers.register("127.0.0.1:2")


def test_a_lead_that_was_taken_by_another_instead_is_not_ours() -> None:
    losing = Losing()
    losing.store.lose("request")
    losing.store.after_a_loss = lambda: losing.other.leaders.take(losing.rival, FEW[:1])
    assert losing.ours.leaders.take(losing.server, FEW) == FEW[1:]
    assert losing.other.leaders.all()[FEW[0]] == losing.rival.name


def test_late_transactions_are_found_to_have_taken_effect() -> None:
    losing = Losing()
    losing.store.lose("late")
    assert losing.ours.leaders.take(losing.server, FEW) == FEW
    assert losing.store.lost == ["late"]
    losing.store.lose("late")
    losing.ours.leaders.give_up(losing.server, FEW)
    assert losing.other.leaders.all() == {}


def test_a_lead_that_was_given_up_without_an_answer_is_not_taken_from_the_next() -> None:
    losing = Losing()
    losing.ours.leaders.take(losing.server, FEW)
    losing.store.lose("answer")
    losing.store.after_a_loss = lambda: losing.other.leaders.take(losing.rival, FEW)
    losing.ours.leaders.give_up(losing.server, FEW)
    assert losing.other.leaders.all() == dict.fromkeys(FEW, losing.rival.name)


def test_a_session_that_ends_in_between_ends_the_attempt(
    first: Racer, second: Racer, monkeypatch: pytest.MonkeyPatch
) -> None:
    just_before_the_next_transaction(first.coordinator, first.coordinator.store.close, monkeypatch)
    with pytest.raises(SessionLost):
        first.take(FEW)
    assert second.take(FEW) == FEW
