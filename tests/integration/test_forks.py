"""Processes that fork after using Tallybook: children are told at once, parents go on."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from server.launch.local_cluster import LocalCluster

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with LocalCluster(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster.address


def run(how: str, where: str) -> list[str]:
    command = [sys.executable, "-m", "tests.integration.forking", how, where]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, timeout=180, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_child_of_a_client_that_does_nothing_ends_in_its_own_way(address: str) -> None:
    assert run("nothing", address) == ["child 3", "parent [{'k': 1, 's': 12}]"]


@pytest.mark.parametrize("how", ["read", "write", "again"])
def test_a_child_that_uses_a_client_is_told_so_at_once(address: str, how: str) -> None:
    assert run(how, address) == [
        "UsedAfterFork True",
        "child 3",
        "parent [{'k': 1, 's': 12}]",
    ]


def test_a_child_of_an_embedded_table_ends_in_its_own_way(tmp_path: Path) -> None:
    assert run("nothing", str(tmp_path / "table")) == ["child 3", "parent [{'k': 1, 's': 12}]"]


@pytest.mark.parametrize("how", ["read", "write", "again"])
def test_a_child_that_uses_an_embedded_table_is_told_so_at_once(tmp_path: Path, how: str) -> None:
    assert run(how, str(tmp_path / "table")) == [
        "UsedAfterFork True",
        "child 3",
        "parent [{'k': 1, 's': 12}]",
    ]


def test_a_child_does_not_end_the_cluster_of_its_parent(tmp_path: Path) -> None:
    program = f"""
import os, sys
import tallybook as tb
with tb.LocalCluster({str(tmp_path)!r}) as local:
    child = os.fork()
    if child == 0:
        sys.exit(3)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), [s.alive for s in local.servers])
    with local.connect() as cluster:
        print(cluster.list_tables())
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=180,
        check=False,
    )
    assert done.stdout.splitlines() == ["3 [True]", "[]"], done.stderr
