"""The log of a copy as a Delta table: what the real `deltalake` makes of it, and of others."""

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import deltalake
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from foundation.errors import CorruptLake, LakeRefused
from merge_engine.schema.schema import Schema
from merge_engine.storage.objects import LocalStorage
from sink.lake.delta_log import DeltaLog
from sink.lake.log import version_name
from sink.lake.opening import Lake, Place, load_unaltered
from sink.lake.state import LakeFile, LakeState, Layout, objects_of
from tests.conftest import SUMS, schema_of
from tests.support.lakes import a_file, commit, sums, with_dead, write_rows

NTZ = schema_of(a=(pa.int64(), "sum"), b=(pa.int64(), "sum"), at=(pa.timestamp("us"), "max"))
PLAIN, WITH_VECTORS = (1, 2), (3, 7)


class Scene:
    """A copy in a directory, with real files."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.storage = LocalStorage(directory)
        self.log = DeltaLog(self.storage, str(directory), {})
        self.state: LakeState | None = None
        # Delta-rs goes by the clock, and forgets what was removed long ago.
        self.now_ms = time.time_ns() // 1_000_000

    def commit(self, **given: Any) -> LakeState:
        self.now_ms += 1000
        self.state = commit(self.log, self.state, **{"time_ms": self.now_ms, **given})
        return self.state

    def write(self, *keys: int, schema: Schema = SUMS) -> LakeFile:
        step = 0 if self.state is None else self.state.next_step
        [file] = write_rows(self.storage, sums(keys), step=step, schema=schema)
        return file

    def actions(self, version: int) -> list[dict[str, Any]]:
        path = self.directory / "_delta_log" / version_name(version)
        return [json.loads(line) for line in path.read_bytes().splitlines()]

    def only(self, version: int, kind: str) -> list[dict[str, Any]]:
        return [action[kind] for action in self.actions(version) if kind in action]

    def by_others(self, *actions: Mapping[str, Any]) -> int:
        """Commit something as somebody else would; return its version."""
        version = len(list((self.directory / "_delta_log").glob("*.json")))
        data = "".join(json.dumps(action) + "\n" for action in actions).encode()
        self.storage.child("_delta_log").create(version_name(version), data)
        return version

    def forget_commits(self, until: int) -> None:
        self.storage.child("_delta_log").delete([version_name(one) for one in range(until + 1)])


def delta_rows(directory: Path, version: int | None = None) -> list[dict[str, Any]]:
    """Return what delta-rs sees."""
    there = deltalake.DeltaTable(str(directory), version=version)
    query = deltalake.QueryBuilder().register("copy", there)
    rows = pa.table(query.execute("select * from copy order by k").read_all())
    return list(rows.to_pylist())


def keys_of(rows: list[dict[str, Any]]) -> list[int]:
    return [row["k"] for row in rows]


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path / "lake")


def test_delta_rs_sees_the_schema_the_rows_the_step_and_the_history(scene: Scene) -> None:
    first = scene.write(1, 2, 3, 4)
    scene.commit(added=[first], operation="COPY")
    second = scene.write(2, 7)
    now = scene.commit(added=[with_dead(first, 1), second], removed=[first])
    merged = scene.write(1, 3, 4, 2, 7)
    third = scene.commit(
        added=[merged], removed=list(now.files.values()), operation="OPTIMIZE", changes_rows=False
    )
    assert third.rows == 5
    there = deltalake.DeltaTable(str(scene.directory))
    assert there.version() == 2
    assert [(one.name, str(one.type.type), one.nullable) for one in there.schema().fields] == [
        ("k", "long", False),
        ("a", "long", True),
        ("b", "long", True),
    ]
    assert there.metadata().id == third.mark.lake
    assert there.metadata().name == "orders"
    assert there.transaction_version("tallybook") == third.mark.step == 2
    told = [(one["version"], one["operation"], one["engineInfo"]) for one in there.history()]
    assert told == [
        (2, "OPTIMIZE", "tallybook"),
        (1, "ROUND", "tallybook"),
        (0, "COPY", "tallybook"),
    ]
    assert [keys_of(delta_rows(scene.directory, version)) for version in range(3)] == [
        [1, 2, 3, 4],
        [1, 2, 3, 4, 7],
        [1, 2, 3, 4, 7],
    ]
    assert delta_rows(scene.directory, 1)[1] == {"k": 2, "a": 2, "b": None}
    assert [one["dataChange"] for one in scene.only(2, "add") + scene.only(2, "remove")] == [
        False
    ] * 3


def test_rows_die_one_round_after_another_and_each_version_keeps_its_own(scene: Scene) -> None:
    file = scene.write(*range(10))
    scene.commit(added=[file])
    for row in range(9):
        assert scene.state is not None
        before = scene.state.files[file.name]
        scene.commit(added=[with_dead(before, row)], removed=[before])
    for version in range(10):
        loaded = scene.log.load(version)
        assert loaded is not None
        assert set(loaded.files[file.name].dead) == set(range(version))
        assert keys_of(delta_rows(scene.directory, version)) == [*range(version, 10)]


def test_what_is_removed_is_told_to_the_letter_as_it_was_added(scene: Scene) -> None:
    """A file is told by its path and its vector: readers would see it twice otherwise."""
    file, other = scene.write(*range(5)), scene.write(*range(5, 9))
    scene.commit(added=[with_dead(file, 0), with_dead(other, 1)])
    again = scene.log.load()
    assert again is not None
    scene.commit(added=[with_dead(again.files[file.name], 1)], removed=list(again.files.values()))
    added = {one["path"]: one["deletionVector"] for one in scene.only(0, "add")}
    removed = {one["path"]: one["deletionVector"] for one in scene.only(1, "remove")}
    assert removed == added
    assert added[file.name]["pathOrInlineDv"] == added[other.name]["pathOrInlineDv"]
    assert keys_of(delta_rows(scene.directory)) == [2, 3, 4]


@pytest.mark.parametrize("until", [3, 4, 5])
def test_a_copy_is_loaded_from_a_checkpoint_of_delta_rs_alone(scene: Scene, until: int) -> None:
    files = [scene.write(*range(10 * n, 10 * n + 10)) for n in range(3)]
    scene.commit(added=[*files[:2], with_dead(files[2], 3)])
    assert scene.state is not None
    third = scene.state.files[files[2].name]
    scene.commit(added=[with_dead(files[0], 1, 2)], removed=[files[0]])
    marked = scene.state.files[files[0].name]
    scene.commit(added=[with_dead(marked, 3), with_dead(third, 5)], removed=[marked, third])
    scene.commit(removed=[files[1]])
    deltalake.DeltaTable(str(scene.directory)).create_checkpoint()
    before = scene.state
    scene.forget_commits(3)
    for _ in range(3, until):
        before = scene.commit()
    loaded = DeltaLog(scene.storage, str(scene.directory), {}).load()
    assert loaded is not None
    assert loaded == before
    assert loaded.files[files[0].name].dead == with_dead(files[0], 1, 2, 3).dead
    # What earlier versions need can be deleted when its time has come, and no earlier.
    assert set(loaded.removed) >= {
        files[1].name,
        *objects_of([marked]),
        *objects_of([third]),
    } - set(loaded.files)
    dead = loaded.files[files[0].name]
    scene.commit(added=[with_dead(dead, 9)], removed=[dead])
    assert keys_of(delta_rows(scene.directory)) == [
        0,
        4,
        5,
        6,
        7,
        8,
        20,
        21,
        22,
        24,
        26,
        27,
        28,
        29,
    ]


def test_the_order_of_actions_within_a_commit_does_not_matter(scene: Scene) -> None:
    file = scene.write(*range(5))
    scene.commit(added=[file])
    scene.commit(added=[with_dead(file, 1), scene.write(8)], removed=[file])
    expected = scene.log.load()
    path = scene.directory / "_delta_log" / version_name(1)
    lines = path.read_text().splitlines()
    for order in (reversed(lines), lines[3:] + lines[:3], sorted(lines)):
        path.write_text("\n\n".join(order) + "\n")
        assert scene.log.load() == expected


# --- Others ---------------------------------------------------------------------------------------

VACUUM = {"commitInfo": {"timestamp": 1, "operation": "VACUUM END", "engineInfo": "Spark/4"}}
OTHER_ADD = {
    "add": {
        "path": "part-0.parquet",
        "partitionValues": {},
        "size": 7,
        "modificationTime": 1,
        "dataChange": True,
    }
}
WRITE = {"commitInfo": {"operation": "WRITE", "engineInfo": "delta-rs:0.99"}}


def test_who_only_says_that_the_table_was_looked_after_is_stepped_over(scene: Scene) -> None:
    first = scene.commit(added=[scene.write(1)])
    for _ in range(3):
        scene.by_others(VACUUM)
    loaded = scene.log.load()
    assert loaded is not None
    assert (loaded.version, loaded.mark.version, loaded.altered) == (3, 0, None)
    second = scene.commit(added=[scene.write(2)])
    assert (second.version, second.mark.version) == (4, 4)
    assert second.mark.step > first.mark.step
    assert keys_of(delta_rows(scene.directory)) == [1, 2]
    assert scene.log.load() == second


def test_a_checkpoint_after_such_a_commit_does_not_make_it_look_altered(scene: Scene) -> None:
    scene.commit(added=[scene.write(1)])
    scene.by_others(VACUUM)
    deltalake.DeltaTable(str(scene.directory)).create_checkpoint()
    loaded = scene.log.load()
    assert loaded is not None
    assert loaded.altered is None
    scene.by_others(WRITE, OTHER_ADD)
    deltalake.DeltaTable(str(scene.directory)).create_checkpoint()
    loaded = scene.log.load()
    assert loaded is not None
    assert loaded.altered == "version 2: WRITE by delta-rs:0.99"
    scene.forget_commits(2)  # Then nobody knows.
    loaded = scene.log.load()
    assert loaded is not None
    assert loaded.altered is not None
    assert "by somebody who has not said more" in loaded.altered


@pytest.mark.parametrize(
    ("actions", "who"),
    [
        ([WRITE, OTHER_ADD], "WRITE by delta-rs:0.99"),
        ([OTHER_ADD], "by somebody who has not said more"),
        ([{"txn": {"appId": "x", "version": 1}}], "by somebody who has not said more"),
        ([{"commitInfo": {"operation": "MERGE", "clientVersion": "v"}}, OTHER_ADD], "MERGE by v"),
        ([{"commitInfo": {}}, OTHER_ADD], "a commit by somebody"),
    ],
)
def test_who_changes_the_table_in_between_is_told_of_by_name(
    scene: Scene, actions: list[Mapping[str, Any]], who: str
) -> None:
    scene.commit(added=[scene.write(1)])
    scene.by_others(VACUUM)
    scene.by_others(*actions)
    with pytest.raises(LakeRefused, match=rf"altered by somebody else .*: {who}"):
        scene.commit(added=[scene.write(2)])
    lake = Lake(Place.of(str(scene.directory)), scene.storage, scene.log)
    with pytest.raises(
        LakeRefused, match=rf"altered by somebody else .*\(version 0\): version 2: {who}"
    ):
        load_unaltered(lake)
    assert load_unaltered(lake, 1) is not None  # It was not, then.


@pytest.mark.parametrize(
    "alter",
    [
        lambda there: there.delete("k = 1"),
        lambda there: there.alter.set_table_properties({"delta.appendOnly": "false"}),
        lambda there: there.restore(0),
        lambda there: deltalake.write_deltalake(
            there, pa.table({"k": [9], "a": [9], "b": [9]}), mode="append"
        ),
    ],
)
def test_what_delta_rs_does_to_a_copy_without_vectors_is_told(
    scene: Scene, alter: Callable[[deltalake.DeltaTable], object]
) -> None:
    for key in (1, 2):
        scene.commit(added=[scene.write(key)], layout=Layout.REWRITE)
    alter(deltalake.DeltaTable(str(scene.directory)))
    loaded = scene.log.load()
    assert loaded is not None
    assert loaded.altered is not None
    assert "version 2: " in loaded.altered
    assert loaded.next_step == 3  # Also if it was restored to a version of before, with its mark.
    # And it can be replaced as a whole: nothing of it stays.
    scene.state = loaded
    scene.commit(added=[scene.write(5)], removed=list(loaded.files.values()), layout=Layout.REWRITE)
    assert keys_of(delta_rows(scene.directory)) == [5]
    again = scene.log.load()
    assert again is not None
    assert again.altered is None


def test_a_delta_table_of_somebody_else_is_refused(tmp_path: Path) -> None:
    deltalake.write_deltalake(str(tmp_path), pa.table({"k": [1]}))
    with pytest.raises(LakeRefused, match="has a Delta table that no tiering job has made"):
        DeltaLog(LocalStorage(tmp_path), str(tmp_path), {}).load()


# --- What readers must know -----------------------------------------------------------------------


def protocol(scene: Scene) -> tuple[tuple[int, int], set[str]]:
    found = deltalake.DeltaTable(str(scene.directory)).protocol()
    version = found.min_reader_version, found.min_writer_version
    return version, set(found.reader_features or ())


def test_a_copy_without_vectors_is_for_every_reader(scene: Scene) -> None:
    file = scene.write(1, 2)
    scene.commit(added=[file], layout=Layout.REWRITE)
    assert protocol(scene) == (PLAIN, set())
    there = deltalake.DeltaTable(str(scene.directory))
    assert there.to_pyarrow_table().column("k").to_pylist() == [1, 2]
    assert "delta.enableDeletionVectors" not in there.metadata().configuration


def test_readers_are_told_of_vectors_once(scene: Scene) -> None:
    scene.commit(added=[scene.write(1)])
    scene.commit(added=[scene.write(2)])
    assert protocol(scene) == (WITH_VECTORS, {"deletionVectors"})
    assert len(scene.only(0, "protocol")) == 1
    assert scene.only(1, "protocol") == []


@pytest.mark.parametrize("layout", list(Layout))
def test_a_timestamp_without_a_zone_is_told_when_it_comes_and_stays(
    scene: Scene, layout: Layout
) -> None:
    vectors = {"deletionVectors"} if layout is Layout.VECTORS else set()
    scene.commit(added=[scene.write(1)], layout=layout)
    scene.commit(added=[scene.write(2, schema=NTZ)], layout=layout, schema=NTZ)
    assert protocol(scene) == (WITH_VECTORS, vectors | {"timestampNtz"})
    scene.commit(added=[scene.write(3)], layout=layout)  # The column was dropped.
    assert protocol(scene) == (WITH_VECTORS, vectors | {"timestampNtz"})
    scene.commit(layout=layout, schema=NTZ)  # And one came again.
    assert protocol(scene) == (WITH_VECTORS, vectors | {"timestampNtz"})
    assert keys_of(delta_rows(scene.directory)) == [1, 2, 3]


def test_a_column_that_is_called_like_a_type_does_not_need_it(scene: Scene) -> None:
    schema = schema_of(timestamp_ntz=(pa.int64(), "sum"))
    scene.commit(layout=Layout.REWRITE, schema=schema)
    assert protocol(scene) == (PLAIN, set())


# --- Damage ---------------------------------------------------------------------------------------


def test_an_object_with_vectors_that_is_gone_is_told_with_what_may_have_done_it(
    scene: Scene,
) -> None:
    file = scene.write(1, 2, 3)
    state = scene.commit(added=[with_dead(file, 1)])
    scene.storage.delete([name for name in objects_of(state.files.values()) if "vector" in name])
    with pytest.raises(CorruptLake, match=r"deletion_vector_.* is gone. Has something vacuumed"):
        scene.log.load()


def test_a_checkpoint_that_is_damaged_is_corrupt(scene: Scene) -> None:
    scene.commit(added=[scene.write(1)])
    deltalake.DeltaTable(str(scene.directory)).create_checkpoint()
    scene.forget_commits(0)
    [path] = (scene.directory / "_delta_log").glob("*.checkpoint.parquet")
    data = path.read_bytes()
    for damaged in (b"", data[:100], data[:-4], bytes(len(data))):
        path.write_bytes(damaged)
        with pytest.raises(CorruptLake, match=r"version 0 of .* cannot be read"):
            scene.log.load()


# --- Looking after it -----------------------------------------------------------------------------


def checkpoints(scene: Scene) -> list[int]:
    found = (scene.directory / "_delta_log").glob("*.checkpoint.parquet")
    return sorted(int(path.name[:20]) for path in found)


@pytest.mark.parametrize("first", [0, 1])
def test_there_is_a_checkpoint_after_ten_versions_also_if_rounds_make_two(
    scene: Scene, first: int
) -> None:
    for _ in range(first):
        scene.commit()
    for _ in range(16):
        scene.commit()
        state = scene.commit()
        scene.log.tidy(state, 0)
    found = checkpoints(scene)
    assert len(found) == 3
    assert all(one <= 11 for one in map(int.__sub__, found[1:], found[:-1]))
    loaded = DeltaLog(scene.storage, str(scene.directory), {}).load()
    assert loaded == state


def test_a_checkpoint_that_cannot_be_written_is_no_harm(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError("the disk\nis full")

    monkeypatch.setattr(deltalake.DeltaTable, "create_checkpoint", fail)
    for _ in range(12):
        scene.log.tidy(scene.commit(), 0)
    assert checkpoints(scene) == []
    assert [one.getMessage() for one in caplog.records] == [
        f"no checkpoint of {scene.directory}: the disk"
    ]


def test_a_checkpoint_remembers_what_was_removed_for_as_long_as_it_is_kept(
    tmp_path: Path,
) -> None:
    """Delta-rs forgets after a week, unless the table says something else."""
    scene = Scene(tmp_path / "lake")
    month_s = 30 * 24 * 3600.0
    scene.log = DeltaLog(scene.storage, str(scene.directory), {}, retention_s=month_s)
    scene.now_ms -= int(1000 * month_s * 2 / 3)
    file, gone = scene.write(1, 2), scene.write(3)
    scene.commit(added=[with_dead(file, 0), gone])
    assert scene.state is not None
    scene.commit(
        added=[with_dead(scene.state.files[file.name], 1)], removed=[*scene.state.files.values()]
    )
    removed = scene.state.removed
    assert len(removed) == 2
    for _ in range(20):
        scene.log.tidy(scene.commit(), 0)
    assert checkpoints(scene)
    loaded = scene.log.load()
    assert loaded is not None
    assert removed.items() <= loaded.removed.items()


# --- A model --------------------------------------------------------------------------------------

OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["add", "kill", "kill", "remove", "merge", "others", "checkpoint"]),
        st.integers(0, 10**6),
    ),
    min_size=1,
    max_size=14,
)


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(operations=OPERATIONS)
def test_any_history_of_commits_is_what_a_dict_says(
    tmp_path_factory: pytest.TempPathFactory, operations: list[tuple[str, int]]
) -> None:
    scene = Scene(tmp_path_factory.mktemp("lakes") / "lake")
    model: dict[str, tuple[int, frozenset[int]]] = {}
    versions: dict[int, dict[str, tuple[int, frozenset[int]]]] = {}
    next_key = 0
    scene.commit()
    versions[0] = {}
    for what, number in operations:
        assert scene.state is not None
        files = [scene.state.files[name] for name in sorted(scene.state.files)]
        some = files[number % len(files)] if files else None
        if what == "others":
            versions[scene.by_others(VACUUM)] = dict(model)
            loaded = scene.log.load()
            assert loaded is not None
            scene.state = loaded
            continue
        if what == "checkpoint":
            deltalake.DeltaTable(str(scene.directory)).create_checkpoint()
            continue
        added: list[LakeFile] = []
        removed: list[LakeFile] = []
        if what == "kill" and some is not None:
            now = with_dead(some, number % some.rows, number // 7 % some.rows)
            added, removed = ([now] if now.live else []), [some]
        elif what == "remove" and some is not None:
            removed = [some]
        elif what == "merge" and files:
            removed = files
            added = [scene.write(*range(next_key, next_key + 3))]
            next_key += 3
        elif what == "add":
            count = 1 + number % 6
            added = [scene.write(*range(next_key, next_key + count))]
            next_key += count
        for file in removed:
            del model[file.name]
        for file in added:
            model[file.name] = file.rows, frozenset(file.dead)
        state = scene.commit(added=added, removed=removed)
        versions[state.version] = dict(model)
        assert _seen(state) == model
        assert _seen(scene.log.load()) == model
        earlier = number % (state.version + 1)
        assert _seen(scene.log.load(earlier)) == versions[earlier]
        loaded = scene.log.load()
        assert loaded is not None
        needed = set(objects_of(loaded.files.values()))
        assert needed.isdisjoint(set(state.removed))
        assert set(loaded.removed) - needed == set(state.removed) - needed
        assert loaded.mark == state.mark
    for version in {max(versions), *(number % (max(versions) + 1) for _, number in operations[:2])}:
        expected = sum(rows - len(dead) for rows, dead in versions[version].values())
        assert len(delta_rows(scene.directory, version)) == expected


def _seen(state: LakeState | None) -> dict[str, tuple[int, frozenset[int]]]:
    assert state is not None
    assert state.altered is None
    return {name: (one.rows, frozenset(one.dead)) for name, one in state.files.items()}


def test_files_that_only_the_log_knows_of_do_not_have_to_be_there(scene: Scene) -> None:
    """Nothing of a file is read to load a copy."""
    state = scene.commit(added=[a_file(10, dead=[1])])
    assert scene.log.load() == state


@pytest.mark.parametrize("retention_s", [0.0, 0.5])
def test_a_log_that_is_not_kept_at_all_still_has_the_last_version(
    tmp_path: Path, retention_s: float
) -> None:
    scene = Scene(tmp_path / "lake")
    scene.log = DeltaLog(scene.storage, str(scene.directory), {}, retention_s=retention_s)
    scene.now_ms -= 10**6
    for key in range(25):
        file = scene.write(key)
        scene.log.tidy(scene.commit(added=[file]), 0)
    state = scene.log.load()
    assert state is not None
    assert state.version == 24
    assert len(state.files) == 25
    assert keys_of(delta_rows(scene.directory)) == [*range(25)]
