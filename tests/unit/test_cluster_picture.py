"""What a server knows of its cluster: read where it changed, and never less than there is."""

from collections.abc import Callable

import pytest

from foundation.errors import SessionLost, Unavailable
from locks.cluster.picture import READ_ALL_AGAIN_S, ClusterPicture
from locks.coordinator import Coordinator
from locks.store.memory import MemoryCoordination, MemoryStore
from tests.support.coordinators import DEFINITION


class Scene:
    """A coordinator that acts, and a picture of what it does, in another session."""

    def __init__(self) -> None:
        memory = self.memory = MemoryCoordination()
        self.acting = Coordinator(memory.connect())
        self.looking = Coordinator(memory.connect())
        self.now_s = 0.0
        self.picture = ClusterPicture(
            self.looking.store, self.looking.servers, lambda: None, clock_s=lambda: self.now_s
        )

    @property
    def watches(self) -> int:
        """How many there are."""
        return len(self.memory.watches)


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_while_nothing_changes_nothing_is_read(scene: Scene) -> None:
    scene.acting.tables.create("a", DEFINITION)
    assert scene.picture.look()
    assert not scene.picture.look()
    scene.acting.servers.register("127.0.0.1:1")
    assert scene.picture.look()
    assert not scene.picture.look()


def test_tables_that_come_and_go_leave_no_watches(scene: Scene) -> None:
    scene.picture.look()
    before = scene.watches
    for number in range(5):
        scene.acting.drop_table(scene.acting.tables.create(f"t{number}", DEFINITION))
        scene.picture.look()
    kept = scene.acting.tables.create("kept", DEFINITION)
    scene.picture.look()
    assert scene.watches == before + 2
    scene.acting.drop_table(kept)
    assert scene.picture.look()
    assert scene.watches == before


def test_a_session_that_is_gone_is_noticed_where_there_is_nothing_to_read(scene: Scene) -> None:
    scene.picture.look()
    store = scene.looking.store
    assert isinstance(store, MemoryStore)
    store._shared.watches.clear()
    store._shared.expire(store.session)
    with pytest.raises(SessionLost):
        scene.picture.look()


def test_a_table_that_comes_while_tables_are_listed_is_not_missed(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.picture.look()
    scene.acting.tables.create("a", DEFINITION)
    store = scene.looking.store
    children = store.children

    def late(path: str) -> list[str]:
        found = children(path)
        if "b" not in scene.acting.tables.names():
            scene.acting.tables.create("b", DEFINITION)
        return found

    monkeypatch.setattr(store, "children", late)
    scene.picture.look()
    scene.picture.look()
    assert sorted(table.name for table in scene.picture.tables.values()) == ["a", "b"]


def test_all_is_read_again_after_a_while_whatever_watches_said(scene: Scene) -> None:
    scene.picture.look()
    scene.looking.store._shared.watches.clear()  # type: ignore[attr-defined]
    table = scene.acting.tables.create("a", DEFINITION)
    server = scene.acting.servers.register("127.0.0.1:1")
    scene.now_s = READ_ALL_AGAIN_S - 0.1
    assert not scene.picture.look()
    scene.now_s = READ_ALL_AGAIN_S
    assert scene.picture.look()
    assert scene.picture.tables == {table.table_id: table}
    assert scene.picture.members.live == [server]


@pytest.mark.parametrize("fails", ["sync", "children", "read_many"])
def test_what_could_not_be_read_is_read_the_next_time(
    scene: Scene, fails: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.picture.look()
    table = scene.acting.tables.create("a", DEFINITION)
    partition = scene.acting.partitions.create(table, b"x")
    server = scene.acting.servers.register("127.0.0.1:1")
    calls = 0
    while True:  # Let the first such call fail, then the second, and so on.
        with monkeypatch.context() as patched:
            patched.setattr(scene.looking.store, fails, failing(scene, fails, calls))
            calls += 1
            try:
                scene.picture.look()
                break
            except Unavailable:
                continue
    assert calls > 1
    assert scene.picture.tables == {table.table_id: table}
    assert scene.picture.partitions == {table.table_id: frozenset({partition})}
    assert scene.picture.members.live == [server]


def failing(scene: Scene, name: str, succeed: int) -> Callable[..., object]:
    """Return a call of the store that succeeds so many times, and then fails."""
    real: Callable[..., object] = getattr(scene.looking.store, name)
    left = succeed

    def call(*arguments: object) -> object:
        nonlocal left
        if not left:
            raise Unavailable("ZooKeeper is away")
        left -= 1
        return real(*arguments)

    return call


def test_a_dropped_table_is_no_longer_in_it_and_one_of_its_name_is_another(scene: Scene) -> None:
    table = scene.acting.tables.create("a", DEFINITION)
    scene.picture.look()
    scene.acting.drop_table(table)
    scene.picture.look()
    assert scene.picture.tables == {}
    assert scene.picture.partitions == {}
    again = scene.acting.tables.create("a", DEFINITION)
    scene.picture.look()
    assert list(scene.picture.tables) == [again.table_id] != [table.table_id]
