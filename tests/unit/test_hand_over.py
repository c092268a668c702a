"""A bucket moves from one live server to another in the time of its last changes.

Servers are in one process and their coordination in memory; `tests/fault/test_hand_over.py` has
real ones, and kills them at each step.
"""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from foundation.errors import NotLeader, ServerUnavailable, Unavailable
from foundation.failpoints import arm
from foundation.ids import BucketId, LeadKey
from locks.catalog.definitions import CatalogTable
from locks.cluster.placement import place
from locks.coordinator import Coordinator
from server.protocol.definitions import define
from server.tablet.openings import Openings
from server.tablet.standing_aside import UNABLE
from tests.conftest import SUMS, rows_of
from tests.support.buckets import add
from tests.support.leading import DEADLINE_S, UNABLE_AFTER_S, Crowd, LeadingServer, crowd_of
from tests.support.snapshot_world import MemoryStorage

BUCKETS = 4


@pytest.fixture
def crowd(tmp_path: Path) -> Iterator[Crowd]:
    with crowd_of(MemoryStorage(), tmp_path) as made:
        yield made


@pytest.fixture
def first(crowd: Crowd) -> LeadingServer:
    """The only server yet, which leads all buckets."""
    server = crowd.join(1)
    create_table(server)
    server.look()
    assert len(server.led()) == BUCKETS
    return server


def create_table(server: LeadingServer, name: str = "sums") -> CatalogTable:
    definition = define(SUMS, BUCKETS, column_locks=False, options={})
    return server.coordinator.tables.create(name, definition)


def keys_of(crowd: Crowd, server: LeadingServer) -> list[LeadKey]:
    """Return the buckets of the first table that should be this server's, if all stay."""
    placed = place(1, 0, BUCKETS, list(crowd.servers))
    return [
        LeadKey(1, BucketId(0, number))
        for number, address in enumerate(placed)
        if address == server.address
    ]


def put(server: LeadingServer, key: LeadKey, number: int) -> None:
    add(server.hosting.get(key).bucket, [number], [1])


def leaders(server: LeadingServer) -> dict[LeadKey, str]:
    return server.coordinator.leaders.all()


# --- A planned move -------------------------------------------------------------------------------


@pytest.mark.parametrize("history", [5, 200])
def test_only_the_last_changes_are_replayed_while_nobody_leads_however_long_the_history(
    crowd: Crowd, first: LeadingServer, history: int
) -> None:
    second = crowd.join(2)
    [key, *_] = keys_of(crowd, second)
    for number in range(history):
        put(first, key, number)
    read_before: list[int] = []

    def at_the_last_moment(asked: LeadKey) -> None:
        if asked == key:
            put(first, key, history)  # It is served until it is asked for, and then as well.
            read_before.append(second.storage.segments_read[0])

    crowd.meanwhile = at_the_last_moment
    second.look()
    assert second.led() == keys_of(crowd, second)
    assert first.led() == keys_of(crowd, first)
    assert read_before[0] >= history
    # What was put at the last moment; and the other buckets, which have no history.
    assert second.storage.segments_read[0] - read_before[0] <= 2 + 2 * BUCKETS
    assert len(rows_of(second.hosting.get(key).bucket)) == history + 1
    assert set(leaders(first).values()) == {first.server.name, second.server.name}


def test_a_bucket_stays_where_it_is_until_the_servers_have_settled(tmp_path: Path) -> None:
    with crowd_of(MemoryStorage(), tmp_path, settle_s=5.0) as crowd:
        first = crowd.join(1)
        create_table(first)
        first.look()
        assert len(first.led()) == BUCKETS, "what nobody leads is taken at once"
        second = crowd.join(2)
        crowd.look()
        crowd.now_s = 4.9
        crowd.look()
        assert len(first.led()) == BUCKETS
        assert not crowd.asked
        third = crowd.join(3)
        crowd.look()
        crowd.now_s = 9.8  # The third has come since.
        crowd.look()
        assert not crowd.asked
        crowd.now_s = 9.91
        crowd.look()
        assert sorted([*first.led(), *second.led(), *third.led()]) == [
            LeadKey(1, BucketId(0, number)) for number in range(BUCKETS)
        ]
        assert first.led() == keys_of(crowd, first)


def test_an_old_leader_never_gives_up_by_itself_what_another_one_should_have(
    crowd: Crowd, first: LeadingServer
) -> None:
    crowd.join(2)  # It should have some, and does nothing.
    for _ in range(3):
        first.look()
    assert len(first.led()) == BUCKETS


def test_a_view_that_is_warm_is_in_nobody_s_way(crowd: Crowd, first: LeadingServer) -> None:
    """It has no term and writes nothing: the leader goes on where it was."""
    second = crowd.join(2)
    [key, *_] = keys_of(crowd, second)
    crowd.meanwhile = refuse
    names = sorted(crowd.logs.objects.now)
    second.look()
    assert sorted(crowd.logs.objects.now) == names
    put(first, key, 1)
    assert not second.led()
    assert leaders(first)[key] == first.server.name


def refuse(_: LeadKey) -> None:
    raise ServerUnavailable("it does not answer")


# --- Who asks -------------------------------------------------------------------------------------


def test_who_should_not_have_a_bucket_does_not_get_it(crowd: Crowd, first: LeadingServer) -> None:
    second = crowd.join(2)
    [key, *_] = keys_of(crowd, first)
    refused = first.leadership.hand_over(key, second.server.name)
    assert refused is not None
    assert "not for 127.0.0.1:2 to lead" in refused
    assert "no session of a live server" in str(first.leadership.hand_over(key, "zombie"))
    nowhere = LeadKey(1, BucketId(0, BUCKETS))
    assert first.leadership.hand_over(nowhere, second.server.name) is not None
    with pytest.raises(NotLeader):
        first.leadership.hand_over(LeadKey(7, BucketId(0, 0)), second.server.name)
    put(first, key, 1)
    assert leaders(first)[key] == first.server.name


def test_a_server_whose_session_is_over_gets_nothing(crowd: Crowd, first: LeadingServer) -> None:
    second = crowd.join(2)
    [key, *_] = keys_of(crowd, second)
    second.die()
    assert "no session of a live server" in str(first.leadership.hand_over(key, second.server.name))
    put(first, key, 1)


def test_to_ask_twice_changes_nothing(crowd: Crowd, first: LeadingServer) -> None:
    second = crowd.join(2)
    [key, *_] = keys_of(crowd, second)
    assert first.leadership.hand_over(key, second.server.name) is None
    again = first.leadership.hand_over(key, second.server.name)
    assert again in (None, "it is being opened or handed over")
    assert key not in leaders(first)
    with pytest.raises(NotLeader):
        first.hosting.get(key)
    second.look()
    assert key in second.led()


def test_an_answer_that_is_lost_costs_nothing(crowd: Crowd, first: LeadingServer) -> None:
    second = crowd.join(2)

    def answered_in_vain(key: LeadKey) -> None:
        assert first.leadership.hand_over(key, second.server.name) is None
        raise ServerUnavailable("the answer was lost")

    crowd.meanwhile = answered_in_vain
    second.look()
    assert second.led() == keys_of(crowd, second)


# --- Who dies, and when ---------------------------------------------------------------------------


def test_a_leader_that_dies_while_another_warms_up_is_followed_at_once(
    crowd: Crowd, first: LeadingServer
) -> None:
    second = crowd.join(2)
    [key, *_] = keys_of(crowd, second)
    put(first, key, 1)

    def dies(_: LeadKey) -> None:
        if first.address in crowd.servers:
            first.die()

    crowd.meanwhile = dies
    second.look()
    second.look()
    assert len(second.led()) == BUCKETS
    assert rows_of(second.hosting.get(key).bucket) == {1: (1, None)}


def test_what_was_given_up_to_one_that_died_is_taken_by_the_next(
    crowd: Crowd, first: LeadingServer
) -> None:
    second = crowd.join(2)
    [key, *_] = keys_of(crowd, second)
    put(first, key, 1)
    assert first.leadership.hand_over(key, second.server.name) is None
    first.look()
    assert key not in first.led(), "it is the other one's, which lives"
    second.die()
    first.look()
    assert rows_of(first.hosting.get(key).bucket) == {1: (1, None)}


def test_a_node_that_could_not_be_given_up_is_given_up_later(
    crowd: Crowd, first: LeadingServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    second = crowd.join(2)
    [key, *_] = keys_of(crowd, second)

    def away(*_: object) -> None:
        raise Unavailable("ZooKeeper is away")

    with monkeypatch.context() as patched:
        patched.setattr(first.coordinator.leaders, "give_up", away)
        with pytest.raises(Unavailable):
            first.leadership.hand_over(key, second.server.name)
    assert leaders(first)[key] == first.server.name
    with pytest.raises(NotLeader):
        first.hosting.get(key)
    first.look()
    assert key not in leaders(first)
    second.look()
    assert key in second.led()


def test_a_bucket_that_was_handed_over_before_it_was_opened_is_not_opened(
    crowd: Crowd, first: LeadingServer
) -> None:
    second = crowd.join(2)
    [key, *_] = keys_of(crowd, second)
    first.hosting.close(key)
    first.coordinator.leaders.give_up(first.server, [key])
    answers: list[str | None] = []

    def asked_for() -> None:
        """Between the look, which found it free and took it, and the opening."""
        answers.append(first.leadership.hand_over(key, second.server.name))

    with arm("leadership.taken", asked_for):
        first.leadership._want([key])  # By what it knew, it was still its own.
        assert first.leadership.wait(DEADLINE_S)
    assert answers == [None]
    assert key not in first.led()
    assert key not in leaders(first)


# --- What is dropped before it is led -------------------------------------------------------------


def drop(server: LeadingServer, name: str = "sums") -> None:
    server.coordinator.drop_table(server.coordinator.tables.get(name), force=True)


def look_until_nothing_is_led(server: LeadingServer) -> None:
    """Look as often as a server does in a few seconds; each look ends what it began."""
    for _ in range(3):
        server.look()
    assert not server.led()
    ours = [key for key, name in leaders(server).items() if name == server.server.name]
    assert not ours, "nobody else can give these nodes up"
    assert not views_of(server)


def views_of(server: LeadingServer) -> list[str]:
    return [path.name for path in server.hosting.checkpoints.parent.glob("sums-*/*/*")]


def test_a_bucket_that_is_dropped_before_it_is_opened_is_given_up(crowd: Crowd) -> None:
    server = crowd.join(1)
    create_table(server)
    with arm("leadership.taken", lambda: drop(server)):
        server.leadership.reconcile()
    assert leaders(server)
    look_until_nothing_is_led(server)


def test_a_bucket_that_is_dropped_while_it_is_taken_over_is_given_up(
    crowd: Crowd, first: LeadingServer
) -> None:
    second, dropped = crowd.join(2), threading.Event()

    def drop_once() -> None:
        if not dropped.is_set():
            dropped.set()
            drop(first)

    with arm("handover.taken", drop_once):
        second.look()
    assert dropped.is_set()
    for server in (first, second):
        look_until_nothing_is_led(server)


def test_a_bucket_that_is_dropped_when_nobody_knew_whether_it_was_taken_is_given_up(
    crowd: Crowd, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = crowd.join(1)
    create_table(server)
    taken = server.coordinator.leaders.take

    def unanswered(*call: Any) -> None:
        taken(*call)
        raise Unavailable("the answer is lost")

    with monkeypatch.context() as patched:
        patched.setattr(server.coordinator.leaders, "take", unanswered)
        with pytest.raises(Unavailable):
            server.leadership.reconcile()
    drop(server)
    assert leaders(server)
    look_until_nothing_is_led(server)


def test_views_of_what_was_dropped_while_another_server_led_it_are_deleted(
    crowd: Crowd, first: LeadingServer
) -> None:
    second = crowd.join(2)
    second.look()
    assert len(first.led()) < BUCKETS
    assert len(views_of(first)) == BUCKETS, "a view stays for when its bucket comes back"
    others = first.hosting.checkpoints.parent / "not-ours"
    others.mkdir()
    drop(first)
    for server in (first, second):
        look_until_nothing_is_led(server)
    assert others.exists()


def test_views_of_what_was_dropped_while_a_server_was_away_are_deleted(
    crowd: Crowd, first: LeadingServer
) -> None:
    create_table(first, "kept")
    first.look()
    first.die()
    coordinator = Coordinator(crowd.memory.connect())
    coordinator.drop_table(coordinator.tables.get("sums"), force=True)
    again = crowd.join(1)
    assert len(views_of(again)) == BUCKETS
    again.look()
    assert not views_of(again)
    assert len(again.led()) == BUCKETS


# --- In the background ----------------------------------------------------------------------------


def test_a_look_does_not_wait_for_what_it_opens_and_what_is_asked_for_comes_first(
    crowd: Crowd, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = crowd.join(1)
    monkeypatch.setattr("server.tablet.openings.OPEN_AT_ONCE", 1)
    go_on, opened = threading.Event(), list[LeadKey]()
    real = Openings._open

    def one_after_the_other(openings: Openings, key: LeadKey) -> None:
        opened.append(key)
        assert go_on.wait(DEADLINE_S)
        real(openings, key)

    monkeypatch.setattr(Openings, "_open", one_after_the_other)
    create_table(server)
    server.leadership.reconcile()
    assert not server.led()
    last = LeadKey(1, BucketId(0, BUCKETS - 1))
    with pytest.raises(NotLeader, match="is being opened here"):
        server.hosting.get(last)
    wait_for(lambda: opened)
    go_on.set()
    assert server.leadership.wait(DEADLINE_S)
    assert len(server.led()) == BUCKETS
    assert opened[1] == last or opened[0] == last


def wait_for(what: Callable[[], object]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.001)


# --- Leaving --------------------------------------------------------------------------------------


def test_a_server_that_leaves_serves_until_others_have_all_it_had(
    crowd: Crowd, first: LeadingServer
) -> None:
    second = crowd.join(2)
    second.look()
    kept = first.led()
    assert kept
    draining = threading.Thread(target=drain, args=(first,))
    draining.start()
    wait_for(lambda: first.coordinator.servers.members().aside)
    for key in kept:
        put(first, key, 1)
    second.look()
    draining.join(DEADLINE_S)
    assert not draining.is_alive()
    assert not first.led()
    assert len(second.led()) == BUCKETS
    first.look()
    assert not first.led(), "it takes nothing any more"


def drain(server: LeadingServer) -> None:
    server.leadership.drain(time.monotonic() + 10 * DEADLINE_S)


def test_a_server_that_is_alone_or_among_those_that_all_leave_waits_for_nobody(
    crowd: Crowd, first: LeadingServer
) -> None:
    drain(first)
    assert len(first.led()) == BUCKETS
    second = crowd.join(2)
    second.look()
    draining = [threading.Thread(target=drain, args=(one,)) for one in (first, second)]
    for thread in draining:
        thread.start()
    wait_for(lambda: len(first.coordinator.servers.members().aside) == 2)
    first.look()
    second.look()
    for thread in draining:
        thread.join(DEADLINE_S)
        assert not thread.is_alive()
    assert len([*first.led(), *second.led()]) == BUCKETS, "all have kept what they had"


def test_a_server_that_leaves_does_not_wait_for_ever(crowd: Crowd, first: LeadingServer) -> None:
    crowd.join(2)  # It never asks.
    first.leadership.drain(time.monotonic())
    assert len(first.led()) == BUCKETS


# --- Out of reach of the log store ----------------------------------------------------------------


def cut_off(server: LeadingServer) -> None:
    """Let a server fail to write for as long as it is borne."""
    server.storage.cut_off[0] = True
    for _ in range(2):
        with pytest.raises(Exception, match="out of reach"):
            put(server, server.led()[0], 1)
        server.crowd.now_s += UNABLE_AFTER_S


def test_a_server_that_cannot_write_gives_its_buckets_to_one_that_can_and_comes_back(
    crowd: Crowd, first: LeadingServer
) -> None:
    second = crowd.join(2)
    second.look()
    put(first, first.led()[0], 1)
    cut_off(first)
    first.look()
    assert UNABLE in first.complaints.all()
    second.look()
    assert len(second.led()) == BUCKETS
    assert not first.led()
    first.storage.cut_off[0] = False
    since_s = crowd.now_s
    crowd.now_s += 1.0
    first.look()  # It tries the store beside its looks, since it writes nothing.
    wait_for(lambda: first.health.answered_since(since_s))
    first.look()
    assert not first.complaints.all()
    crowd.look()
    assert first.led() == keys_of(crowd, first)


def test_what_hangs_in_the_store_does_not_keep_a_bucket(crowd: Crowd, first: LeadingServer) -> None:
    second = crowd.join(2)
    [key, *_] = keys_of(crowd, second)
    answers: list[str | None] = []

    def ask() -> None:
        answers.append(first.leadership.hand_over(key, second.server.name))

    asking = threading.Thread(target=ask)
    with first.hosting.get(key).bucket.exclusive(), first.health.creating():
        asking.start()
        wait_for(lambda: key not in first.led())
        assert leaders(first)[key] == first.server.name, "what is under way ends first"
        crowd.now_s += UNABLE_AFTER_S
        first.leadership.reconcile()
        asking.join(DEADLINE_S)
        assert answers == [None]
        second.look()
        put(second, key, 1)
    assert rows_of(second.hosting.get(key).bucket) == {1: (1, None)}


def test_a_server_that_cannot_write_keeps_its_buckets_where_nobody_can(
    crowd: Crowd, first: LeadingServer
) -> None:
    second = crowd.join(2)
    second.look()
    kept, others = first.led(), second.led()
    cut_off(first)
    second.storage.cut_off[0] = True  # It does not know yet: nobody writes there.
    crowd.look()
    crowd.look()
    assert first.led() == kept
    assert second.led() == others
    assert UNABLE in first.complaints.all()


def test_one_that_can_read_the_store_and_not_write_it_does_not_ask(
    crowd: Crowd, first: LeadingServer
) -> None:
    second = crowd.join(2)
    second.look()
    kept = first.led()
    cut_off(first)
    second.storage.read_only = True
    crowd.look()
    assert first.led() == kept
    second.storage.read_only = False
    crowd.now_s += 10.0
    crowd.look()
    assert len(second.led()) == BUCKETS
