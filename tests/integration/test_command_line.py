"""The command line, as a process."""

import os
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from foundation import command_line
from locks.store.embedded_zookeeper import EmbeddedZooKeeper
from server.client.cluster import connect
from tests.conftest import SUMS
from tests.support.zookeeper_server import chroot, wait_until, zookeeper_server

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def zookeeper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedZooKeeper]:
    with zookeeper_server(tmp_path_factory.mktemp("command_line")) as server:
        yield server


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "tallybook", *words]


def tallybook(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    ours = {name: value for name, value in os.environ.items() if not name.startswith("TALLYBOOK_")}
    environment = {**ours, "COLUMNS": "80", **variables}
    return subprocess.run(
        command(*words), capture_output=True, text=True, timeout=180, check=False, env=environment
    )


def test_a_server_serves_shows_its_status_and_stops_when_asked(
    zookeeper: EmbeddedZooKeeper, tmp_path: Path
) -> None:
    address = chroot(zookeeper)
    options = ("--zookeeper", address, "--logs", f"{tmp_path}/logs", "--views", f"{tmp_path}/views")
    with (
        open(tmp_path / "server.log", "wb") as log,
        subprocess.Popen(command("serve", *options), stderr=log) as server,
    ):
        try:
            with connect(address, patience_s=30) as cluster:
                table = cluster.create_table("clicks", SUMS, buckets=2, column_locks=False)
                table.put({"k": [1, 2], "a": [3, 4], "b": [5, 6]})
                assert table.lookup({"k": [2]}, ["a"]).to_pylist() == [{"k": 2, "a": 4}]
                [status] = cluster.status()
            shown = tallybook("status", address)
            assert shown.returncode == 0, shown.stderr
            head, first, second, _, tables, _ = shown.stdout.splitlines()
            assert tables.startswith("TABLE ")
            assert head.split() == [
                "SERVER",
                "PID",
                "UP",
                "TABLE",
                "BUCKET",
                "TERM",
                "LOG",
                "OWNERS",
            ]
            assert first.split()[:2] == [status["address"], str(server.pid)]
            assert "clicks" in first
            assert "clicks" in second
            server.send_signal(signal.SIGTERM)
            assert server.wait(180) == 0
        finally:
            server.kill()
    with connect(address) as cluster:
        wait_until(lambda: not cluster.status(), "the server has left the cluster")


@pytest.mark.parametrize("where", [(), ("--on-spark",)])
def test_an_open_server_without_a_token_is_refused_in_one_line(
    tmp_path: Path, where: tuple[str, ...]
) -> None:
    options = ("--zookeeper", "127.0.0.1:1", "--logs", f"{tmp_path}/l", "--views", f"{tmp_path}/v")
    refused = tallybook("serve", *where, *options, "--host", "0.0.0.0")
    assert refused.returncode == 1
    [line] = refused.stderr.splitlines()
    assert "give it a token" in line


@pytest.mark.parametrize("where", [(), ("--on-spark",)])
def test_a_token_beside_an_open_zookeeper_is_refused_in_one_line(
    tmp_path: Path, where: tuple[str, ...]
) -> None:
    options = ("--zookeeper", "127.0.0.1:1", "--logs", f"{tmp_path}/l", "--views", f"{tmp_path}/v")
    refused = tallybook("serve", *where, *options, TALLYBOOK_TOKEN="open-sesame")
    assert refused.returncode == 1
    [line] = refused.stderr.splitlines()
    assert "ZooKeeper at 127.0.0.1:1 is open to everybody" in line
    assert "--allow-open-zookeeper" in line
    assert "sesame" not in line


def test_help_names_the_options_and_where_secrets_go() -> None:
    shown = tallybook("serve", "--help")
    assert shown.returncode == 0
    assert "Usage: tallybook serve " in shown.stdout
    for word in ("--zookeeper", "--on-spark", "--servers", "TALLYBOOK_TOKEN", "--allow-open"):
        assert word in shown.stdout


def test_options_that_are_missing_are_named(tmp_path: Path) -> None:
    refused = tallybook("serve", "--zookeeper", "127.0.0.1:1")
    assert refused.returncode == 2
    assert "Missing option '--logs'" in refused.stderr
    nowhere = tallybook("serve", "--logs", str(tmp_path), "--views", str(tmp_path / "views"))
    assert nowhere.returncode == 2
    assert "needs --zookeeper, or the variable TALLYBOOK_ZOOKEEPER" in " ".join(
        nowhere.stderr.replace("│", " ").split()
    )


@pytest.mark.parametrize("how", ["tallybook serve", "tallybook serve --on-spark", "server"])
def test_servers_take_the_address_from_the_environment(tmp_path: Path, how: str) -> None:
    places = ("--logs", f"{tmp_path}/l", "--views", f"{tmp_path}/v")
    variables = {"TALLYBOOK_ZOOKEEPER": "127.0.0.1:1/here", "TALLYBOOK_TOKEN": "open-sesame"}
    refused = subprocess.run(
        [sys.executable, "-m", *how.split(), *places],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
        env={**os.environ, **variables},
    )
    assert refused.returncode == 1
    assert "ZooKeeper at 127.0.0.1:1/here is open to everybody" in refused.stderr


def test_a_wrong_java_home_is_named_where_spark_is_started(tmp_path: Path) -> None:
    refused = tallybook(
        *("serve", "--on-spark", "--zookeeper", "127.0.0.1:1", "--logs", f"{tmp_path}/l"),
        JAVA_HOME=str(tmp_path),
    )
    assert refused.returncode == 1
    said = refused.stderr.splitlines()[-1]
    assert said.startswith("the servers did not start: Spark needs Java 17 or newer")
    assert f"JAVA_HOME is {tmp_path}, where there is no bin/java" in said


def test_a_cluster_that_is_not_there_has_no_status() -> None:
    refused = tallybook("status", "127.0.0.1:1", "--deadline", "0.2")
    assert refused.returncode == 1
    assert "tallybook status: no ZooKeeper at 127.0.0.1:1" in refused.stderr


def test_the_installed_command_is_this_one() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    entry = EntryPoint("tallybook", scripts["tallybook"], "console_scripts")
    assert entry.load() is command_line.main


def test_ctrl_c_while_the_command_is_loaded_is_one_line_too() -> None:
    """The interrupt comes in the middle of the imports, for certain: one of them sends it."""
    program = """
import os, signal, sys
from foundation import command_line

class Interrupter:
    def find_spec(self, name, path=None, target=None):
        if name == "rich":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupter())
sys.exit(command_line.main())
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False
    )
    assert (ended.returncode, ended.stderr) == (130, "tallybook: interrupted\n")
