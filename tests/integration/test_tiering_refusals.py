"""What a tiering job refuses, and with which words; leases, S3, and the command."""

import json
import os
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, Field, write_deltalake
from deltalake.schema import PrimitiveType

import tallybook as tb
from foundation.errors import (
    InvalidInput,
    LakeRefused,
    SchemaError,
    StorageUnavailable,
    TallybookError,
    UnknownTable,
)
from foundation.failpoints import arm
from server.client.remote_table import RemoteTable
from sink.tiering.progress import Round
from tests.conftest import schema_of
from tests.support.moto_server import s3_server
from tests.support.tiering import (
    KINDS,
    TieringScene,
    check_copy,
    objects,
    shown,
    tiering_scene,
    write,
)
from tests.support.zookeeper_server import wait_until

pytestmark = pytest.mark.spark
ROOT = Path(__file__).parents[2]
NUMBERS = {"k": [1, 2, 3], "a": [1, 2, 3], "b": [1, 2, 3]}


@pytest.fixture(scope="module")
def module_scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TieringScene]:
    with tiering_scene(tmp_path_factory.mktemp("tiering")) as scene:
        yield scene


@pytest.fixture
def scene(module_scene: TieringScene) -> Iterator[TieringScene]:
    yield module_scene
    module_scene.close()


def filled(scene: TieringScene, **how: Any) -> RemoteTable:
    """Return a table with three rows."""
    table = scene.table(**how)
    with table.writer(owner_id="w", columns=["a", "b"]) as writer:
        write(writer, NUMBERS)
    return table


def everything(lake: str) -> dict[str, bytes]:
    return {str(one): one.read_bytes() for one in Path(lake).rglob("*") if one.is_file()}


@contextmanager
def refused(lake: str, words: str, kind: type[TallybookError] = LakeRefused) -> Iterator[None]:
    """Check that a job ends with one error of these words, and that it changes nothing."""
    before = everything(lake)
    with pytest.raises(kind) as error:
        yield
    assert words in str(error.value)
    assert everything(lake) == before


# --- Names ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "states", "words"),
    [
        ("a b", False, "column 'a b': 'a b' has ' ' in it, which no name in a lake may have"),
        ("a,b", False, "',' in it"),
        ("mean_state", True, "the states of 'mean' would be called 'mean_state', as another"),
        ("Mean_State", True, "'Mean_State' and 'mean_state' differ in upper and lower case only"),
    ],
)
def test_names_that_a_lake_cannot_have_are_refused_before_the_first_round(
    scene: TieringScene, name: str, states: bool, words: str
) -> None:
    schema = schema_of(**{"mean": (pa.float64(), "avg"), name: (pa.int64(), "sum")})
    table, lake = scene.table(schema), scene.lake()
    for how in KINDS.values():
        with refused(lake, words, SchemaError):
            scene.tier(table, lake, states=states, **how)
    assert not Path(lake).exists()
    table.rename_column(name, "other")
    scene.tier(table, lake, states=states)
    check_copy(table, lake)


def test_a_name_within_a_struct_is_refused_too(scene: TieringScene) -> None:
    kind = pa.list_(pa.struct([("x y", pa.int64())]))
    table, lake = scene.table(schema_of(deep=(kind, "last_value"))), scene.lake()
    with refused(lake, "column 'deep': 'x y' has ' ' in it", SchemaError):
        scene.tier(table, lake)


def test_a_name_that_comes_while_a_job_runs_ends_it_at_once(scene: TieringScene) -> None:
    table, lake = filled(scene), scene.lake()

    def alter(_: Round) -> None:
        if "c d" not in table.schema.names:
            table.add_column("c d", "BIGINT", "sum")

    with pytest.raises(SchemaError, match="'c d' has ' ' in it"):
        scene.tier(table, lake, once=False, attempts=50, interval_s=0, report=alter)
    assert scene.leases(table) == []


# --- What is at the path --------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_path_with_other_files_is_refused(scene: TieringScene, kind: str) -> None:
    table, lake = filled(scene), scene.lake()
    Path(lake).mkdir()
    Path(lake, "notes.txt").write_text("mine")
    Path(lake, "plan.txt").write_text("mine")
    for more in ({}, {"begin_again": True}):
        with refused(lake, "is not empty, and has no copy of a table: it has notes.txt and 1 more"):
            scene.tier(table, lake, **KINDS[kind], **more)


def test_a_delta_table_of_somebody_else_is_refused(scene: TieringScene) -> None:
    table, lake = filled(scene), scene.lake()
    write_deltalake(lake, pa.table({"k": [1]}))
    words = "has a Delta table that no tiering job has made: choose another path, or move it away"
    for more in ({}, {"begin_again": True}, {"layout": "rewrite"}):
        with refused(lake, words):
            scene.tier(table, lake, **more)
    with refused(lake, "has a lake of the format delta: say so, if it is a copy of this table"):
        scene.tier(table, lake, format="parquet")
    with pytest.raises(LakeRefused, match="no tiering job has made"):
        tb.tiering.find(lake)


@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_of_another_table_or_of_one_dropped_since_is_refused_and_can_be_replaced(
    scene: TieringScene, kind: str
) -> None:
    table, lake, how = filled(scene), scene.lake(), KINDS[kind]
    scene.tier(table, lake, **how)
    other = filled(scene)
    with refused(lake, f"has a copy of table {table.name}. Choose another path, or have the copy"):
        scene.tier(other, lake, **how)
    scene.client.drop_table(table.name)
    again = scene.client.create_table(table.name, schema_of(z=(pa.string(), "last_value")))
    with again.writer(owner_id="w", columns=["z"]) as writer:
        write(writer, {"k": [1, 7], "z": ["x", "y"]})
    words = f"has a copy of another table {table.name}: it was dropped, and created anew"
    with refused(lake, words):
        scene.tier(again, lake, **how)
    scene.tier(again, lake, begin_again=True, **how)
    assert check_copy(again, lake).num_rows == 2
    with again.writer(owner_id="w", columns=["z"]) as writer:
        write(writer, {"k": [1, 9], "z": ["z", "z"]})
    scene.tier(again, lake, **how)
    assert check_copy(again, lake).num_rows == 3


def test_another_format_or_layout_than_the_copy_has_is_refused(scene: TieringScene) -> None:
    table, delta, parquet = filled(scene), scene.lake(), scene.lake()
    scene.tier(table, delta)
    scene.tier(table, parquet, format="parquet")
    with refused(delta, "has the layout vectors, and stays so: leave the option", InvalidInput):
        scene.tier(table, delta, layout="rewrite")
    with refused(delta, "has a lake of the format delta: say so"):
        scene.tier(table, delta, format="parquet")
    with refused(parquet, "has a lake of the format parquet: say so"):
        scene.tier(table, parquet)


def test_what_cannot_be_is_refused_before_anything_is_done(
    scene: TieringScene, tmp_path: Path
) -> None:
    table, lake = filled(scene), scene.lake()
    for options, words in (
        ({"format": "detla"}, "a lake of the format 'detla'; did you mean 'delta'?"),
        ({"format": "iceberg"}, "there are delta and parquet"),
        ({"layout": "vector"}, "a layout 'vector'; did you mean 'vectors'?"),
        ({"format": "parquet", "layout": "vectors"}, "the format parquet has no deletion vectors"),
        ({"intervall_s": 5}, "tiering has no option 'intervall_s'; did you mean 'interval_s'?"),
        ({"interval_s": -1}, "interval_s is -1; it is a number of seconds, 0 or more"),
        ({"interval_s": float("inf")}, "interval_s is inf"),
        ({"retention_s": float("nan")}, "retention_s is nan; it is a number of seconds, 0 or more"),
        ({"retention_s": float("inf")}, "retention_s is inf"),
        ({"lease_s": 0}, "lease_s is 0; a lease lasts from 2 s"),
        ({"lease_s": 1e9}, "a lease lasts from"),
        ({"lease_s": float("nan")}, "a lease lasts from"),
        ({"lag_target_s": 0}, "lag_target_s is 0; it is more than 0"),
        ({"attempts": 0}, "attempts is 0; it is 1 or more"),
        ({"storage_settings": {"region": "x"}}, "is a directory and takes no settings"),
    ):
        with refused(lake, words, InvalidInput):
            scene.tier(table, lake, **options)
    with pytest.raises(InvalidInput, match="where to"):
        scene.tier(table, "")
    with pytest.raises(UnknownTable, match="nobody"):
        scene.tier("nobody", lake)
    with pytest.raises(InvalidInput, match="of which cluster"):
        tb.tiering.run(scene.spark, table.name, lake)
    file = tmp_path / "file"
    file.write_text("")
    for how in KINDS.values():
        with pytest.raises(StorageUnavailable, match="Not a directory"):
            scene.tier(table, str(file / "lake"), **how)
    with pytest.raises(InvalidInput, match="has no copy of a table: make one by `tallybook tier`"):
        tb.tiering.find(lake)
    assert not Path(lake).exists()
    assert scene.leases(table) == []


# --- Altered from outside -------------------------------------------------------------------------


def append(lake: str, rows: pa.Table) -> None:
    write_deltalake(lake, rows, mode="append")


def overwrite(lake: str, rows: pa.Table) -> None:
    write_deltalake(lake, rows.slice(0, 1), mode="overwrite")


def widen(lake: str, rows: pa.Table) -> None:
    DeltaTable(lake).alter.add_columns([Field("extra", PrimitiveType("string"))])


def compact(lake: str, rows: pa.Table) -> None:
    append(lake, rows)
    DeltaTable(lake).optimize.compact()


@pytest.mark.parametrize("alter", [append, overwrite, widen, compact])
def test_a_copy_that_was_altered_from_outside_is_refused_and_can_be_made_anew(
    scene: TieringScene, alter: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Once, and not tried again and again; also with a checkpoint after it."""
    table, lake = filled(scene), scene.lake()
    scene.tier(table, lake, layout="rewrite")
    alter(lake, DeltaTable(lake).to_pyarrow_table())
    words = "was altered by somebody else since the last round (version 0): version 1: "
    for _ in range(2):
        with refused(lake, words):
            scene.tier(table, lake, layout="rewrite", attempts=50)
        with pytest.raises(LakeRefused, match=r"have the copy made anew \(begin_again"):
            tb.tiering.find(lake)
        DeltaTable(lake).create_checkpoint()
        words = "was altered by somebody else"
    assert tb.tiering.find(lake, version=0).rows == 3
    assert caplog.text == ""
    scene.tier(table, lake, layout="rewrite", begin_again=True)
    check_copy(table, lake)
    with table.writer(owner_id="w", columns=["a", "b"]) as writer:
        write(writer, {"k": [1, 4], "a": [1, 1], "b": [1, 1]})
    scene.tier(table, lake, layout="rewrite")
    assert check_copy(table, lake).num_rows == 4


def test_a_table_with_deletion_vectors_that_was_altered_can_be_made_anew(
    scene: TieringScene,
) -> None:
    table, lake = filled(scene), scene.lake()
    scene.tier(table, lake)
    log = Path(lake, "_delta_log")
    about = {"path": "x.parquet", "partitionValues": {}, "size": 1, "modificationTime": 1}
    foreign = {"add": {**about, "dataChange": True}}
    (log / f"{1:020}.json").write_text(json.dumps(foreign))
    with refused(lake, "version 1: by somebody who has not said more"):
        scene.tier(table, lake)
    scene.tier(table, lake, begin_again=True)
    check_copy(table, lake)


def test_who_only_looks_after_a_copy_does_not_disturb(scene: TieringScene) -> None:
    table, lake = filled(scene), scene.lake()
    scene.tier(table, lake)
    for number in range(3):
        delta = DeltaTable(lake)
        delta.vacuum(retention_hours=0, dry_run=False, enforce_retention_duration=False)
        assert DeltaTable(lake).version() > delta.version() - 1
        if number == 1:
            DeltaTable(lake).create_checkpoint()
        check_copy(table, lake)
        with table.writer(owner_id="w", columns=["a", "b"]) as writer:
            write(writer, {"k": [1, 4 + number], "a": [1, 1], "b": [1, 1]})
        scene.tier(table, lake)
        assert check_copy(table, lake).num_rows == 4 + number


def test_a_copy_whose_files_are_gone_says_so(scene: TieringScene) -> None:
    table, lake = filled(scene), scene.lake()
    scene.tier(table, lake)
    with table.writer(owner_id="w", columns=["a", "b"]) as writer:
        write(writer, {"k": [1, 2], "a": [1, 1], "b": [1, 1]})
        scene.tier(table, lake)
        for one in Path(lake).glob("deletion_vector_*"):
            one.unlink()
        with pytest.raises(tb.errors.CorruptLake, match=r"says which rows of .* are deleted"):
            scene.tier(table, lake)
        scene.tier(table, lake, begin_again=True)
        check_copy(table, lake)
        for one in Path(lake).glob("*.parquet"):
            one.unlink()
        write(writer, {"k": [1, 2, 3], "a": [1, 1, 1], "b": [1, 1, 1]})
        with pytest.raises(tb.errors.CorruptLake, match="is gone, though the copy needs it"):
            scene.tier(table, lake, attempts=50)
        scene.tier(table, lake, begin_again=True)
        check_copy(table, lake)


# --- Leases ---------------------------------------------------------------------------------------


def test_a_lease_is_held_while_a_job_runs_and_not_after_it(scene: TieringScene) -> None:
    table, lake = filled(scene), scene.lake()
    held: list[list[str]] = []
    scene.tier(table, lake, report=lambda _: held.append(scene.leases(table)))
    [[lease]] = held
    assert lease.startswith("tiering-")
    assert scene.leases(table) == []

    def fail() -> None:
        held.append(scene.leases(table))
        raise OSError("no such luck")

    with table.writer(owner_id="w", columns=["a", "b"]) as writer:
        write(writer, NUMBERS)
    with arm("tier.planned", fail), pytest.raises(OSError, match="luck"):
        scene.tier(table, lake)
    assert len(held[-1]) == 1
    assert scene.leases(table) == []
    scene.tier(table, lake, hold_s=60)
    [kept] = scene.leases(table)
    with table.writer(owner_id="w", columns=["a", "b"]) as writer:
        write(writer, NUMBERS)
    with arm("tier.planned", lambda: held.append(scene.leases(table))):
        scene.tier(table, lake)
    assert kept in held[-1], "what a former run has left is held, until it is not needed"
    assert scene.leases(table) == []


def test_a_round_that_fails_is_tried_again_and_counted(
    scene: TieringScene, caplog: pytest.LogCaptureFixture
) -> None:
    table, lake = filled(scene), scene.lake()
    fails = iter([True, True])

    def fail() -> None:
        if next(fails, False):
            raise OSError("no such luck")

    with arm("tier.gathered", fail):
        done = scene.tier(table, lake, attempts=3)
    assert done.failed == 2
    assert "2 failed attempts" in str(done)
    assert caplog.text.count(f"a round of table {table.name} failed: no such luck") == 2
    check_copy(table, lake)
    assert scene.leases(table) == []
    left = objects(lake) - {Path(one).name for one in tb.tiering.find(lake).files}
    assert left == set(), "what the failed attempts have left"


def test_a_job_goes_on_until_it_is_stopped_and_keeps_what_the_next_round_needs(
    scene: TieringScene,
) -> None:
    table, lake = filled(scene), scene.lake()
    rounds: list[Any] = []
    options = tb.tiering.TieringOptions(table=table.name, to=lake, interval_s=0.2)
    job = tb.tiering.TieringJob(scene.spark, scene.client, options, rounds.append)
    thread = threading.Thread(target=job.run)
    thread.start()
    try:
        for number in range(3):
            wait_until(lambda: bool(rounds) and rounds[-1].lag.batches == 0, "a round")
            with table.writer(owner_id="w", columns=["a", "b"]) as writer:
                write(writer, {"k": [number], "a": [1], "b": [1]})
            table.snapshot()
        wait_until(lambda: tb.tiering.find(lake).cut.batches == table.cut().batches, "all batches")
    finally:
        job.stop()
        thread.join(180)
    assert not thread.is_alive()
    check_copy(table, lake)
    assert scene.leases(table) == []


def test_a_job_whose_table_is_dropped_ends(scene: TieringScene) -> None:
    table, lake = filled(scene), scene.lake()

    def drop(_: Round) -> None:
        if table.name in scene.client.list_tables():
            scene.client.drop_table(table.name)

    with pytest.raises(UnknownTable, match="it was dropped"):
        scene.tier(table, lake, once=False, attempts=50, interval_s=0, report=drop)


# --- S3 -------------------------------------------------------------------------------------------


def test_a_copy_may_be_in_an_object_store(scene: TieringScene) -> None:
    with s3_server() as s3:
        table = filled(scene)
        settings = {**s3.settings}
        del settings["retry_config"]  # Polars has other words for it.
        lake = f"{s3.create_bucket()}/lake/of/mine"
        expected: dict[int, list[str]] = {}
        with table.writer(owner_id="w", columns=["a", "b"]) as writer:
            for number in range(12):
                scene.tier(table, lake, storage_settings=settings)
                if number in (1, 2, 3, 11):  # The last one comes after a checkpoint of Delta's log.
                    copy = tb.tiering.find(lake, storage_settings=settings)
                    expected[copy.version] = shown(check_copy(table, lake, settings))
                write(writer, {"k": [1, number], "a": [1, 1], "b": [1, 1]})
        log = tb.tiering.find(lake, storage_settings=settings)._lake.storage.child("_delta_log")
        assert [one for one in log.names() if one.endswith(".checkpoint.parquet")]
        given = {
            f"lake.{name}": str(value)
            for name, value in settings.items()
            if not isinstance(value, dict)
        }
        given["lake.allow_http"] = "true"
        assert shown(scene.union(table, lake, **given)) == shown(table.to_arrow())
        assert shown(scene.version(lake, 3, **given)) == expected[3]
        wrong = {**settings, "access_key_id": "hush-hush", "endpoint": "http://127.0.0.1:1"}
        with pytest.raises(StorageUnavailable) as failed:
            scene.tier(table, lake, storage_settings=wrong)
        assert "hush" not in str(failed.value)


# --- The command ----------------------------------------------------------------------------------


def command(scene: TieringScene, *words: str) -> tuple[list[str], dict[str, str]]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "SPARK_LOCAL_IP": "127.0.0.1"}
    environment["TALLYBOOK_ZOOKEEPER"] = scene.local.address
    return [sys.executable, "-m", "tallybook", "tier", *words], environment


def run(scene: TieringScene, *words: str) -> subprocess.CompletedProcess[str]:
    words_of, environment = command(scene, *words)
    return subprocess.run(
        words_of, capture_output=True, text=True, timeout=180, check=False, env=environment
    )


def test_the_command_refuses_in_one_line(scene: TieringScene, tmp_path: Path) -> None:
    table, lake = filled(scene), scene.lake()
    for words, code, said in (
        (("nobody", "--to", lake), 1, "nobody"),
        ((table.name, "--to", lake, "--lease", "0.001"), 1, "a lease lasts from"),
        ((table.name, "--to", lake, "--storage", "region"), 1, "write NAME=VALUE"),
        ((table.name, "--to", lake, "--interval", "inf"), 1, "interval_s is inf"),
        (
            (table.name, "--to", lake, "--format", "parquet", "--layout", "vectors"),
            1,
            "no deletion",
        ),
        ((table.name,), 2, "--to"),
        ((table.name, "--to", lake, "--metrics-port", "99999"), 2, "99999"),
    ):
        found = run(scene, *words)
        assert found.returncode == code, found.stderr
        lines = found.stderr.strip().splitlines()
        assert said in (lines[-1] if code == 1 else found.stderr), found.stderr
        if code == 1:
            assert len(lines) == 1
            assert lines[0].startswith("tallybook tier: ")
    assert not Path(lake).exists()


def test_the_command_makes_a_copy_once_or_until_a_signal(
    scene: TieringScene, tmp_path: Path
) -> None:
    table, lake = filled(scene), scene.lake()
    words, environment = command(
        scene,
        *(table.name, "--to", lake, "--master", "local[1]"),
        *("--interval", "0.2", "--metrics-port", "0"),
    )
    with (
        open(tmp_path / "errors", "w+") as errors,
        subprocess.Popen(
            words, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment
        ) as process,
    ):
        try:
            assert process.stdout is not None
            first = process.stdout.readline()
            assert first.startswith("metrics at http://127.0.0.1:"), first
            lines = (line for line in process.stdout if line.startswith("round"))
            assert "round 0: copied all rows: 3 rows" in next(lines)
            with table.writer(owner_id="w", columns=["a", "b"]) as writer:
                write(writer, {"k": [1, 9], "a": [1, 1], "b": [1, 1]})
            assert "round 1: applied what changed: 2 rows" in next(lines)
            with urllib.request.urlopen(first.split()[-1], timeout=180) as answer:
                metrics = answer.read().decode()
            for line in (
                "lake_rounds_total",
                "lake_rows",
                "lake_lag_seconds",
                "lake_round_seconds",
            ):
                assert line in metrics, metrics
            assert scene.leases(table)
            process.send_signal(signal.SIGINT)
            told = process.stdout.read()
            assert process.wait(180) == 0
            assert "2 rounds in" in told
        finally:
            process.kill()
        errors.seek(0)
        assert "Traceback" not in errors.read()
    assert scene.leases(table) == []
    check_copy(table, lake)
