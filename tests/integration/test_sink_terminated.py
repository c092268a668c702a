"""A driver that is told to end by SIGTERM, as Kubernetes and systemd do it, releases its lock."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from server.client.cluster import Cluster
from server.client.remote_table import RemoteTable
from server.launch.local_cluster import LocalCluster
from tests.conftest import SUMS
from tests.support.sinks import KEYS, counted, ones, stored, write_file
from tests.support.spark_session import needs_java
from tests.support.zookeeper_server import wait_until

pytestmark = pytest.mark.spark

END_S = 60.0

_DRIVER = """
import signal, sys, time
from pathlib import Path
from pyspark.sql import SparkSession
import tallybook as tb
from foundation.failpoints import arm

directory, address, table, how = sys.argv[1:]
builder = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false")
spark = builder.config("spark.driver.host", "127.0.0.1").getOrCreate()

def told(*_):
    print("the application is told", flush=True)
    sys.exit(7)

def in_flight():
    Path(directory, "in-flight").touch()
    while not Path(directory, "go-on").exists():
        time.sleep(0.01)

if how == "own handler":
    signal.signal(signal.SIGTERM, told)
sink = tb.AggregateSink(address, table, columns=["a", "b"], owner_id="etl")
if how == "script":
    frame = spark.read.parquet(f"{directory}/in")
    sink(frame, 0)
    with arm("writer.put", in_flight):
        sink(frame, 1)
stream = spark.readStream.schema("k BIGINT, a BIGINT, b BIGINT").parquet(f"{directory}/in")
writing = stream.writeStream.foreachBatch(sink).option("checkpointLocation", f"{directory}/chk")
if how == "in flight":
    with arm("writer.put", in_flight):
        writing.start().awaitTermination()
query = writing.start()
query.processAllAvailable()
Path(directory, "committed").touch()
query.awaitTermination()
"""


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    needs_java()
    with LocalCluster(tmp_path_factory.mktemp("terminated"), servers=1) as running:
        yield running


@pytest.fixture(scope="module")
def client(local: LocalCluster) -> Iterator[Cluster]:
    with local.connect() as connected:
        yield connected


@contextmanager
def driver(
    local: LocalCluster, table: RemoteTable, directory: Path, how: str
) -> Iterator[subprocess.Popen[str]]:
    """Run a driver in a process group of its own, with its JVM."""
    write_file(directory / "in", 0, ones())
    with subprocess.Popen(
        [sys.executable, "-c", _DRIVER, str(directory), local.address, table.name, how],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):  # All of it has ended.
                os.killpg(process.pid, signal.SIGKILL)


def until(process: subprocess.Popen[str], path: Path) -> None:
    def there() -> bool:
        assert process.poll() is None, process.stdout and process.stdout.read()
        return path.exists()

    wait_until(there, f"the driver has made {path.name}")


def record_of(client: Cluster, table: RemoteTable) -> Any:
    record = client.coordinator.locks.record(table.definition.table, "etl")
    assert record is not None
    return record


@pytest.mark.parametrize("whole_group", [False, True])
def test_a_driver_that_is_terminated_releases_its_lock(
    local: LocalCluster, client: Cluster, tmp_path: Path, whole_group: bool
) -> None:
    table = client.create_table(f"ends_{whole_group}", SUMS, buckets=2)
    with driver(local, table, tmp_path, "streams") as process:
        until(process, tmp_path / "committed")
        assert record_of(client, table).held
        if whole_group:  # Its JVM is told at the same time.
            os.killpg(process.pid, signal.SIGTERM)
        else:
            process.terminate()
        assert process.wait(END_S) == -signal.SIGTERM, "the signal ends it, as it would have"
    record = record_of(client, table)
    assert (record.held, record.batch) == (False, 0)
    assert stored(table, KEYS) == counted(1)


def test_a_batch_that_is_under_way_comes_to_its_end_before_the_lock_is_released(
    local: LocalCluster, client: Cluster, tmp_path: Path
) -> None:
    table = client.create_table("in_flight", SUMS, buckets=2)
    with driver(local, table, tmp_path, "in flight") as process:
        until(process, tmp_path / "in-flight")
        process.terminate()
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(1.0)
        record = record_of(client, table)
        assert (record.held, record.abandoned, record.batch) == (True, False, -1)
        (tmp_path / "go-on").touch()
        assert process.wait(END_S) == -signal.SIGTERM
    record = record_of(client, table)
    assert (record.held, record.batch) == (False, 0)
    assert stored(table, KEYS) == counted(1)


def test_a_batch_of_a_script_is_broken_off_and_its_lock_abandoned(
    local: LocalCluster, client: Cluster, tmp_path: Path
) -> None:
    table = client.create_table("script", SUMS, buckets=2)
    with driver(local, table, tmp_path, "script") as process:
        until(process, tmp_path / "in-flight")
        process.terminate()
        assert process.wait(END_S) == -signal.SIGTERM
    record = record_of(client, table)
    assert (record.held, record.abandoned, record.batch) == (True, True, 0)
    with table.writer(owner_id="heir", columns=["a", "b"], handover=True):
        assert stored(table, KEYS) == counted(1), "what was not committed is undone"


def test_an_application_that_handles_the_signal_itself_is_left_alone(
    local: LocalCluster, client: Cluster, tmp_path: Path
) -> None:
    table = client.create_table("own_handler", SUMS, buckets=2)
    with driver(local, table, tmp_path, "own handler") as process:
        until(process, tmp_path / "committed")
        process.terminate()
        assert process.wait(END_S) == 7
        assert process.stdout is not None
        assert "the application is told" in process.stdout.read()
    assert not record_of(client, table).held
