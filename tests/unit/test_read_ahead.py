"""Objects of a remote store are read ahead: several at a time, in order, and no more than fit."""

import threading
from pathlib import Path

import pytest
from obstore.store import MemoryStore

from foundation.errors import MissingObject
from merge_engine.bucket.log import Log
from merge_engine.bucket.log_names import LogNames
from merge_engine.bucket.segment import Segment, SegmentKind, segment_name
from merge_engine.storage import read_ahead
from merge_engine.storage.objects import LocalStorage, RemoteStorage
from merge_engine.storage.read_ahead import AT_ONCE, GENTLY, reading_ahead
from tests.support.rolling import all_bytes, roll_up, several_leaders
from tests.support.zookeeper_server import wait_until

NAMES = [f"{number:03d}" for number in range(40)]


class Watched(RemoteStorage):
    """A store that knows what it was asked for, and answers while its gate is open."""

    def __init__(self) -> None:
        super().__init__(MemoryStore())
        self.asked: list[str] = []
        self.answered: list[str] = []
        self.gate = threading.Event()
        self.gate.set()

    def read(self, name: str) -> bytes:
        self.asked.append(name)
        assert self.gate.wait(10)
        data = super().read(name)
        self.answered.append(name)
        return data


@pytest.fixture
def storage() -> Watched:
    watched = Watched()
    for name in NAMES:
        watched.create(name, name.encode() * 10)
    return watched


@pytest.mark.parametrize("at_once", [AT_ONCE, GENTLY])
def test_several_are_under_way_at_a_time_and_come_in_order(storage: Watched, at_once: int) -> None:
    with reading_ahead(storage, NAMES, at_once=at_once) as read:
        assert [read(name) for name in NAMES[:5]] == [name.encode() * 10 for name in NAMES[:5]]
        wait_until(lambda: NAMES[5] in storage.answered, "the next is there already")
        storage.gate.clear()
        # With it, as many are begun as may be, and nobody answers.
        assert read(NAMES[5]) == b"005" * 10
        wait_until(lambda: len(storage.asked) == 5 + at_once, "all of them have asked")
        storage.gate.set()
        assert [read(name) for name in NAMES[6:]] == [name.encode() * 10 for name in NAMES[6:]]
    assert sorted(storage.asked) == NAMES, "each of them once"


def test_what_was_not_announced_is_read_and_what_is_not_there_raises_in_its_turn(
    storage: Watched,
) -> None:
    storage.delete([NAMES[2]])
    with reading_ahead(storage, NAMES[:5]) as read:
        assert read(NAMES[0]) == b"000" * 10
        assert read(NAMES[30]) == b"030" * 10
        assert read(NAMES[1]) == b"001" * 10
        with pytest.raises(MissingObject):
            read(NAMES[2])
        assert read(NAMES[4]) == b"004" * 10


def test_whoever_stops_early_leaves_nothing_under_way(storage: Watched) -> None:
    with reading_ahead(storage, NAMES) as read:
        read(NAMES[0])
        read(NAMES[1])
    assert len(storage.asked) <= 3, "who reads little asks for little in vain"
    assert not [one for one in threading.enumerate() if one.name.startswith("tallybook-ahead")]


def test_large_objects_wait_until_there_is_room(
    storage: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_ahead, "_MOST_BYTES", 1)
    with reading_ahead(storage, NAMES) as read:
        assert [read(name) for name in NAMES] == [name.encode() * 10 for name in NAMES]


def test_a_local_disk_is_read_as_ever(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    storage.create("a", b"1")
    storage.create("b", b"2")
    with reading_ahead(storage, ["a", "b"]) as read:
        assert (read("a"), read("b")) == (b"1", b"2")
    assert read == storage.read


def test_a_log_is_replayed_from_segments_that_were_read_ahead() -> None:
    storage = Watched()
    log = Log(storage)
    log.lead()
    for _ in range(20):
        header = log._header(SegmentKind.LEADER, log.check_leading())
        log.append(Segment(header, {}, {}))
    again = Log(storage)
    storage.asked.clear()
    bases = [segment.header.base_offset for segment in again.segments(0)]
    assert bases == list(range(21))
    assert len(storage.asked) == 21
    assert [one.header.base_offset for one in again.read([3, 4, 8])] == [3, 4, 8]


def test_a_log_that_is_rolled_up_is_read_ahead_object_by_object() -> None:
    storage = Watched()
    log = several_leaders(storage, leaders=3, writes=9)
    before = all_bytes(log)
    stale = Log(storage)
    roll_up(log, storage, segments=5)
    again = Log(storage)
    storage.asked.clear()
    assert all_bytes(again) == before
    names = LogNames.of(storage.names())
    expected = [one.name for one in names.rolled]
    expected += [segment_name(base) for base in names.bases if base >= names.rolled[-1].end]
    assert sorted(storage.asked) == sorted(expected), "each once"
    # Who has looked before finds segments gone that were asked for ahead, and goes on.
    assert all_bytes(stale) == before
