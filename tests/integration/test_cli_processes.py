"""Commands that run until they are told to end: real processes, and real signals."""

import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from server.client.cluster import connect


@contextmanager
def running(*words: str, **variables: str) -> Iterator["subprocess.Popen[str]"]:
    """Run a command for the duration of the block."""
    command = [sys.executable, "-m", "tallybook", *words]
    environment = {**os.environ, **variables}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def said(process: "subprocess.Popen[str]", beginning: str) -> str:
    """Return the rest of the next line that begins so."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.strip().startswith(beginning):
            return line.strip().removeprefix(beginning).strip()
    raise AssertionError(f"it never said {beginning!r}")


def test_a_local_cluster_says_how_to_connect_shows_its_page_and_ends_with_ctrl_c(
    tmp_path: Path,
) -> None:
    with running("local", str(tmp_path / "data")) as local:
        address = said(local, "in a shell      export TALLYBOOK_ZOOKEEPER=")
        url = said(local, "status page")
        with connect(address) as cluster:
            assert [server["pid"] for server in cluster.status()]
        with urllib.request.urlopen(f"{url}overview.json", timeout=30) as answer:
            assert json.load(answer)["cluster"] == address
        second = subprocess.run(
            [sys.executable, "-m", "tallybook", "local", str(tmp_path / "data")],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert second.returncode == 1
        assert second.stderr.startswith("tallybook local: another cluster runs in ")
        taken = subprocess.run(
            [
                *(sys.executable, "-m", "tallybook", "local", str(tmp_path / "other")),
                *("--port", address.partition(":")[2]),
            ],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert taken.returncode == 1
        assert f"somebody else listens on {address}: stop that" in taken.stderr
        with running("page", "--port", "0", TALLYBOOK_ZOOKEEPER=address) as page:
            other = said(page, f"the status page of {address} is at").partition(",")[0]
            with urllib.request.urlopen(other, timeout=30) as answer:
                assert b"<html" in answer.read()
            page.send_signal(signal.SIGINT)
            assert page.wait(30) == 0
        local.send_signal(signal.SIGINT)
        said(local, "the cluster has stopped; its data stay")
        assert local.wait(60) == 0
