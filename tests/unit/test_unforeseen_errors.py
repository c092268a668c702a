"""What nobody foresaw is told and counted, and costs a server neither a thread nor its leads."""

import ast
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from foundation import background
from foundation.background import surviving
from foundation.deadlines import deadline_in
from foundation.errors import SessionLost, StorageUnavailable, Unavailable
from foundation.failpoints import arm
from foundation.gatherer import Gatherer
from foundation.ids import BucketId, LeadKey
from locks.cluster.heartbeat import Heartbeat
from merge_engine.bucket.bucket import Bucket
from server.launch.logs import _log_thread_error
from server.tablet.hosting import Hosting
from server.tablet.limits import ScannerLimits
from server.tablet.openings import Openings
from server.tablet.scanners import Scanners
from tests.conftest import rows_of
from tests.support.leading import DEADLINE_S, Crowd, LeadingServer, crowd_of
from tests.support.snapshot_world import MemoryStorage
from tests.support.zookeeper_server import wait_until
from tests.unit.test_architecture import ROOT, SOURCES
from tests.unit.test_hand_over import BUCKETS, create_table, drop, leaders, put

UNFORESEEN = RuntimeError("nobody foresaw this")


@pytest.fixture
def crowd(tmp_path: Path) -> Iterator[Crowd]:
    with crowd_of(MemoryStorage(), tmp_path) as made:
        yield made


@pytest.fixture
def server(crowd: Crowd) -> LeadingServer:
    """The only server, which leads all buckets."""
    server = crowd.join(1)
    create_table(server)
    server.look()
    assert len(server.led()) == BUCKETS
    return server


@pytest.fixture
def running(server: LeadingServer) -> Iterator[LeadingServer]:
    """The server, looking by itself as long as its session lasts."""
    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(server.leadership.run)
        yield server
        server.leadership.close()
        server.leadership.look_again()
        run.result(DEADLINE_S)


def raising(error: BaseException) -> Any:
    def call(*_: object, **__: object) -> None:
        raise error

    return call


# --- Leads ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [UNFORESEEN, Unavailable("ZooKeeper is slow")], ids=repr)
def test_a_look_that_fails_costs_no_lead_and_is_taken_up_again(
    error: Exception, running: LeadingServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that left the cluster for any error lost all of its leads with it."""
    key = LeadKey(1, BucketId(0, 0))
    with monkeypatch.context() as patched:
        patched.setattr(running.leadership._picture, "look", raising(error))
        running.leadership.look_again()
        wait_until(lambda: bool(running.complaints.all()), "nothing was said")
        assert len(running.led()) == BUCKETS
        put(running, key, 1)
    create_table(running, "more")
    wait_until(lambda: len(running.led()) == 2 * BUCKETS, "it did not go on")
    wait_until(lambda: not running.complaints.all(), "it is still said")


def test_only_a_lost_session_ends_it(
    server: LeadingServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server.leadership._picture, "look", raising(SessionLost("gone")))
    with pytest.raises(SessionLost):
        server.leadership.run()


def test_a_bucket_that_does_not_close_costs_no_other_one(
    server: LeadingServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error escaped, and the server left the cluster with all its leads."""
    second = create_table(server, "second")
    server.look()
    assert len(server.led()) == 2 * BUCKETS
    before = background.failures().get("closing a bucket", 0)
    stuck = LeadKey(1, BucketId(0, 0))
    close = Bucket.close

    def close_others(bucket: Bucket) -> None:
        if bucket is led.bucket:
            raise UNFORESEEN
        close(bucket)

    led = server.hosting.get(stuck)
    with monkeypatch.context() as patched:
        patched.setattr(Bucket, "close", close_others)
        drop(server)
        server.look()
        assert {key.table_id for key in server.led()} == {second.table_id}
        assert {key.table_id for key in leaders(server)} == {second.table_id}
        assert f"bucket {stuck} does not close" in server.complaints.all()
        assert background.failures()["closing a bucket"] == before + 1
    led.bucket.close()


def test_a_bucket_that_did_not_close_is_closed_before_it_is_opened_again(
    server: LeadingServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = LeadKey(1, BucketId(0, 0))
    put(server, key, 1)
    with monkeypatch.context() as patched:
        patched.setattr(Bucket, "close", raising(UNFORESEEN))
        with pytest.raises(RuntimeError):
            server.hosting.close(key)
    assert key not in server.led()
    server.look()
    assert rows_of(server.hosting.get(key).bucket) == {1: (1, None)}


def test_views_that_cannot_be_deleted_keep_nothing_from_being_led(
    server: LeadingServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A directory of somebody else's among the views was enough: nothing was led any more."""
    foreign = server.hosting.checkpoints.parent / f"other-{'0' * 32}"
    (foreign / "not a partition").mkdir(parents=True)
    monkeypatch.setattr(Hosting, "sweep", raising(ValueError("invalid literal for int()")))
    create_table(server, "more")
    server.look()
    assert len(server.led()) == 2 * BUCKETS
    assert "views of what was dropped are not deleted" in server.complaints.all()


def test_who_opens_buckets_goes_on_after_any_error(
    server: LeadingServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = threading.Event()
    attempt = Openings._try

    def once(openings: Openings, key: LeadKey, work: Any) -> None:
        if not tried.is_set():
            tried.set()
            raise UNFORESEEN
        attempt(openings, key, work)

    monkeypatch.setattr(Openings, "_try", once)
    create_table(server, "more")
    server.leadership.reconcile()
    wait_until(lambda: len(server.led()) == 2 * BUCKETS, "a bucket was not opened")
    assert tried.is_set()


def test_a_hand_over_whose_end_fails_gives_the_bucket_up(
    crowd: Crowd, server: LeadingServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    second = crowd.join(2)
    end, failed = Hosting.end, threading.Event()

    def fail_once(hosting: Hosting, key: LeadKey, *, at_once: bool = False) -> None:
        if not failed.is_set():
            failed.set()
            raise UNFORESEEN
        end(hosting, key, at_once=at_once)

    monkeypatch.setattr(Hosting, "end", fail_once)
    second.look()
    assert failed.is_set()
    assert second.led()
    assert set(second.led()).isdisjoint(server.led())


# --- Threads --------------------------------------------------------------------------------------


class Flaky:
    """A ZooKeeper session that raises something nobody foresaw, once."""

    session_timeout_s = 0.5

    def __init__(self) -> None:
        self.answered = 0
        self.fails = threading.Event()

    def sync(self) -> None:
        if self.fails.is_set():
            self.fails.clear()
            raise UNFORESEEN
        self.answered += 1

    def now_ms(self) -> int:
        return 0


def test_the_heart_goes_on_beating() -> None:
    """Else the server would refuse every call for ever, and still be in the cluster."""
    store = Flaky()
    heartbeat = Heartbeat(store).start()
    store.fails.set()
    wait_until(lambda: not store.fails.is_set(), "it did not ask")
    answered = store.answered
    wait_until(lambda: store.answered > answered and heartbeat.alive, "it beats no more")
    heartbeat.stop()


def test_scanners_are_reaped_after_one_that_does_not_close(monkeypatch: pytest.MonkeyPatch) -> None:
    reaped = threading.Event()
    calls = 0

    def reap(_: Scanners) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise UNFORESEEN
        reaped.set()

    monkeypatch.setattr(Scanners, "reap", reap)
    scanners = Scanners(ScannerLimits(ttl_s=0.01, max_per_bucket=1, max_per_server=1))
    assert reaped.wait(DEADLINE_S)
    scanners.shutdown()


def test_an_answer_that_cannot_be_told_keeps_nobody_from_the_next() -> None:
    gatherer: Gatherer[int, int] = Gatherer(
        lambda items: [one * 2 for one in items], name="test", most=9
    )
    told: list[int | None] = []
    done = threading.Event()

    def tell(result: int | None, _: Exception | None) -> None:
        told.append(result)
        done.set()

    gatherer.submit(1, raising(UNFORESEEN))
    gatherer.submit(2, tell)
    assert done.wait(DEADLINE_S)
    assert told == [4]
    assert gatherer.ask(3, deadline_in(DEADLINE_S)) == 6


def test_a_panic_of_a_library_is_survived_and_the_end_of_the_process_is_not() -> None:
    panic = type("PanicException", (BaseException,), {})
    before = background.failures().get("a test", 0)
    with surviving("a test"):
        raise panic("of Rust")
    assert background.failures()["a test"] == before + 1
    for ending in (KeyboardInterrupt(), SystemExit()):
        with pytest.raises(type(ending)), surviving("a test"):
            raise ending


def test_a_thread_that_dies_all_the_same_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "excepthook", _log_thread_error)  # As `configure` does.
    thread = threading.Thread(target=raising(UNFORESEEN), name="one that dies")
    thread.start()
    thread.join(DEADLINE_S)
    assert background.failures()["one that dies"] == 1


# Whose end is waited for, or told: a thread that tries once, or ends with what it serves.
_ONCE = {
    *("child_guardian.py", "http_endpoint.py", "log_store.py", "on_spark.py", "watcher.py"),
    "zookeeper.py",
}


def test_every_thread_of_a_server_survives_what_nobody_foresaw() -> None:
    """Whoever starts a thread says in the same module what becomes of its errors."""
    for path in SOURCES:
        text = path.read_text()
        threads = [
            node
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "threading.Thread"
        ]
        if not threads or path.relative_to(ROOT).parts[0] in ("sink", "tallybook"):
            continue
        assert path.name in _ONCE or "surviving(" in text or "_complaining(" in text, path


def test_a_store_that_fails_oddly_is_tried_again(server: LeadingServer) -> None:
    """The bucket is opened when it passes; nobody else would have it."""
    key = LeadKey(1, BucketId(0, 0))
    server.hosting.close(key)
    failing = iter([UNFORESEEN, StorageUnavailable("away")])

    def fail() -> None:
        error = next(failing, None)
        if error is not None:
            raise error

    with arm("view.before_write", fail):
        server.leadership.reconcile()
        for _ in range(20):
            server.crowd.now_s += 20
            server.leadership.reconcile()
            assert server.leadership.wait(DEADLINE_S)
            if key in server.led():
                break
    server.look()
    assert key in server.led()
