"""Committed reads when the log store does not answer: ZooKeeper says whether we lead."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from foundation.errors import Closed, Deposed, NotLeader, StorageUnavailable
from foundation.ids import BucketId, LeadKey
from locks.coordinator import Coordinator
from recovery.leader.led_bucket import LedBucket
from recovery.reader.bucket_scan import open_scan
from recovery.reader.committed_lookup import Asked, committed_lookup
from server.protocol.definitions import define
from server.tablet.confirming import Confirming
from tests.conftest import SUMS
from tests.support.buckets import add
from tests.support.cuts import cut_at
from tests.support.leading import Crowd, LeadingServer, crowd_of
from tests.support.snapshot_world import MemoryStorage

KEY = LeadKey(1, BucketId(0, 0))


class Session:
    """A server's own words about its session, which may be over."""

    def __init__(self, server: LeadingServer) -> None:
        self._server = server

    @property
    def name(self) -> str:
        return self._server.server.name

    @property
    def coordinator(self) -> Coordinator:
        return self._server.coordinator


@pytest.fixture
def crowd(tmp_path: Path) -> Iterator[Crowd]:
    with crowd_of(MemoryStorage(), tmp_path) as made:
        yield made


def leading(crowd: Crowd, *, locked: bool = True) -> LeadingServer:
    """Return the only server of a table with one bucket, which it leads."""
    server = crowd.join(1)
    definition = define(SUMS, 1, column_locks=locked, options={})
    server.coordinator.tables.create("sums", definition)
    server.look()
    assert server.led() == [KEY]
    return server


def confirm_of(
    server: LeadingServer, led: LedBucket | None = None, *, silent: bool = False
) -> Callable[[], None]:
    confirming = Confirming(Session(server), lambda: 1.0 if silent else 0.9)
    bucket = server.hosting.get(KEY) if led is None else led
    return lambda: confirming.confirm(KEY, bucket)


def values(led: LedBucket, confirm: Callable[[], None]) -> list[int | None]:
    """Return column `a` of the keys 1 and 2, looked up and scanned as committed."""
    cut = cut_at(KEY.bucket, {})
    asked = Asked(led.bucket, cut, [pa.array([1, 2], pa.int64())], confirm)
    [found] = committed_lookup([asked], [SUMS.column("a")])
    scan = open_scan(led.bucket, cut, confirm=confirm)
    scan.close()
    return list(found.column("a").to_pylist())


def test_what_is_committed_can_be_read_while_the_store_is_away(crowd: Crowd) -> None:
    server = leading(crowd)
    led = server.hosting.get(KEY)
    assert values(led, confirm_of(server)) == [None, None]
    server.storage.cut_off[0] = True
    with pytest.raises(StorageUnavailable):
        led.bucket.confirm()
    assert values(led, confirm_of(server)) == [None, None]


def test_a_store_that_says_nothing_is_not_asked(crowd: Crowd) -> None:
    """A put that hangs in the store has the bucket to itself."""
    server = leading(crowd)
    led, done = server.hosting.get(KEY), threading.Event()

    def read() -> None:
        asked = Asked(
            led.bucket,
            cut_at(KEY.bucket, {}),
            [pa.array([1], pa.int64())],
            confirm_of(server, silent=True),
        )
        committed_lookup([asked], [SUMS.column("a")])
        done.set()

    with led.bucket.exclusive():
        thread = threading.Thread(target=read)
        thread.start()
        assert done.wait(180)
    thread.join()


@pytest.mark.parametrize("silent", [False, True])
def test_a_leader_that_another_has_followed_refuses_whether_it_knows_or_not(
    crowd: Crowd, silent: bool
) -> None:
    server = leading(crowd)
    led, confirm = server.hosting.get(KEY), confirm_of(server, silent=silent)
    # As one whose session is over and who has not heard of it yet: the other leads, and has more.
    server.coordinator.leaders.give_up(server.server, [KEY])
    other = crowd.join(2)
    del crowd.servers[server.address]
    server.coordinator.servers.stand_aside(server.server, "paused")
    other.look()
    add(other.hosting.get(KEY).bucket, [1], [5])
    server.storage.cut_off[0] = not silent
    with pytest.raises(NotLeader, match="any more"):
        values(led, confirm)
    server.leadership.close()
    server.hosting.close_all()


def test_a_bucket_that_went_away_and_came_back_is_another_one(crowd: Crowd) -> None:
    """The node is ours again, and whoever has the former bucket in hand has old rows."""
    server = leading(crowd)
    led, confirm = server.hosting.get(KEY), confirm_of(server, silent=True)
    confirm()
    server.hosting.close(KEY)
    server.coordinator.leaders.give_up(server.server, [KEY])
    server.look()
    assert server.hosting.get(KEY) is not led
    assert server.coordinator.leaders.leader_now(KEY) == server.server.name
    with pytest.raises(Closed):
        confirm()


def test_without_column_locks_only_the_log_says_who_leads(crowd: Crowd) -> None:
    """A put counts when it is in the log, also that of one whose session is over."""
    server = leading(crowd, locked=False)
    confirm = confirm_of(server, silent=True)
    confirm()
    server.storage.cut_off[0] = True
    with pytest.raises(StorageUnavailable):
        confirm()


def test_a_leader_that_the_log_has_deposed_is_not_confirmed_by_its_node(crowd: Crowd) -> None:
    """One that opened the bucket late, after its session: readers are sent to whoever leads."""
    server = leading(crowd)
    other = crowd.join(2)
    other.hosting.set_table(server.hosting.table(KEY.table_id))
    other.hosting.open(KEY)
    confirm = confirm_of(server)
    with pytest.raises(Deposed):
        confirm()
    with pytest.raises(Deposed):
        confirm_of(server, silent=True)()
