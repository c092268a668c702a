"""What a copy does not need any more: never what anybody needs, and in the end all the rest."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st
from obstore.store import MemoryStore

from merge_engine.storage.objects import RemoteStorage
from sink.lake.delta_log import DeltaLog
from sink.lake.opening import Lake, Place
from sink.lake.state import (
    LakeFile,
    LakeState,
    file_name,
    objects_of,
    step_of,
    vectors_id,
    vectors_name,
)
from sink.tiering import cleaning
from sink.tiering.cleaning import clean, garbage
from tests.support.lakes import BUCKET, STARTED_MS, a_file, commit, with_dead

FOREIGN = [
    "README.md",
    "part-00000-1e0c3a9f-0d4d-6f8c-2b7a-1e3d5f7a9b00.c000.snappy.parquet",
    "_SUCCESS",
    "1-2-3.parquet",
    "deletion_vector_x.bin",
]


@dataclass
class World:
    """A lake in memory: its states one after another, and all objects that were ever written."""

    storage: RemoteStorage = field(default_factory=lambda: RemoteStorage(MemoryStore()))
    states: list[LakeState] = field(default_factory=list)
    left: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.log = DeltaLog(self.storage, "/lake", {})
        for name in FOREIGN:
            self.storage.create(name, b"")

    @property
    def step(self) -> int:
        return self.states[-1].next_step if self.states else 0

    def commit(self, added: list[LakeFile], removed: list[LakeFile]) -> None:
        for file in added:
            if file.name not in self.storage.names():
                self.storage.create(file.name, b"")
        before = self.states[-1] if self.states else None
        self.states.append(commit(self.log, before, added=added, removed=removed))

    def leave(self, step: int) -> str:
        """Write what a job that was killed has written for a step."""
        name = file_name(BUCKET, step) if step % 2 else vectors_name(vectors_id(step))
        self.storage.create(name, b"")
        self.left.append(name)
        return name


STEPS = st.lists(
    st.tuples(st.sampled_from(["add", "kill", "replace", "remove", "fail"]), st.integers(0, 999)),
    min_size=1,
    max_size=12,
)


def play(steps: list[tuple[str, int]]) -> World:
    """Return what comes of commits and failures."""
    world = World()
    world.commit([a_file()], [])
    for what, number in steps:
        files = [*world.states[-1].files.values()]
        some = files[number % len(files)] if files else None
        if what == "fail":
            world.leave(world.step)
        elif what == "add":
            world.commit([a_file(step=world.step)], [])
        elif some is not None and what == "kill":
            world.commit([with_dead(some, number % 10)], [some])
        elif some is not None:
            world.commit([a_file(step=world.step)] if what == "replace" else [], [some])
    return world


def needed_by(states: list[LakeState]) -> set[str]:
    return {name for state in states for name in objects_of(state.files.values())}


@given(STEPS, st.integers(0, 20_000), st.booleans())
def test_what_any_reader_within_the_retention_needs_is_kept_and_the_rest_of_ours_goes(
    steps: list[tuple[str, int]], since_ms: int, loaded: bool
) -> None:
    world = play(steps)
    last = world.states[-1]
    ahead = {world.leave(world.step), world.leave(world.step + 1)}
    ahead |= {name for name in world.left if (step_of(name) or 0) > last.mark.step}
    names = world.storage.names()
    state = world.log.load() if loaded else last
    assert state is not None
    found = set(garbage(names, state, STARTED_MS + since_ms))
    assert found <= set(names)
    assert found.isdisjoint(FOREIGN)
    assert found.isdisjoint(ahead)
    # A version can be read until the next one is committed, and for as long as is kept after that.
    ends = [int(one.mark.cut.time_ms) for one in world.states[1:]]
    readable = [
        one
        for one, end in zip(world.states[:-1], ends, strict=True)
        if end >= STARTED_MS + since_ms
    ]
    needed = needed_by([*readable, last])
    assert found.isdisjoint(needed)
    ours = set(names) - set(FOREIGN) - ahead
    assert found == ours - needed


@given(STEPS, st.integers(0, 10), st.integers(0, 20_000))
def test_a_job_that_is_behind_deletes_nothing_that_a_later_version_needs(
    steps: list[tuple[str, int]], behind: int, since_ms: int
) -> None:
    world = play(steps)
    zombie = world.states[max(0, len(world.states) - 1 - behind)]
    found = garbage(world.storage.names(), zombie, STARTED_MS + since_ms)
    later = [one for one in world.states if one.version >= zombie.version]
    assert needed_by(later).isdisjoint(found)


@given(STEPS)
def test_what_is_forgotten_is_deleted_as_if_it_was_remembered(steps: list[tuple[str, int]]) -> None:
    world = play(steps)
    names, state, since_ms = world.storage.names(), world.states[-1], STARTED_MS + 4_000
    assert garbage(names, state.forget(since_ms), since_ms) == garbage(names, state, since_ms)


def test_so_many_are_deleted_at_once_and_the_rest_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cleaning, "_AT_ONCE", 3)
    world = World()
    world.commit([a_file()], [])
    for _ in range(8):
        world.leave(0)
    lake = Lake(Place.of("/lake"), world.storage, world.log)
    assert [clean(lake, world.states[-1], STARTED_MS) for _ in range(5)] == [3, 3, 2, 0, 0]
    kept = needed_by(world.states)
    assert set(world.storage.names()) == {*kept, *FOREIGN}
