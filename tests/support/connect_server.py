"""A Spark Connect server for tests, in a process of its own, and a session with it.

The client runs in the tests' process, beside classic sessions of others: it is made without the
environment variables that would turn those into clients, too.
"""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.support.spark_session import needs_java, quiet_spark

_STOP_S = 60


class ConnectServer:
    """A server that is being started; `session` waits for it."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    @contextmanager
    def session(self) -> Iterator[Any]:
        """Connect to the server."""
        from pyspark.sql.connect.session import SparkSession  # noqa: PLC0415

        assert self._process.stdout is not None
        port = int(self._process.stdout.readline())
        session = SparkSession.builder.remote(f"sc://127.0.0.1:{port}").create()
        try:
            yield session
        finally:
            session.stop()


@contextmanager
def connect_server(master: str = "local[2]") -> Iterator[ConnectServer]:
    """Start a server, which is there a while later; it ends at the end."""
    needs_java()
    for package in ("grpc", "grpc_status", "google.rpc"):
        pytest.importorskip(package, reason="Spark Connect needs pip install 'tallybook[connect]'")
    command = [sys.executable, "-m", "tests.support.connect_server", master]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield ConnectServer(process)
        finally:
            assert process.stdin is not None
            process.stdin.close()
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()


def _serve(master: str) -> None:
    """Run a server until standard input ends; its port is told on standard output."""
    with quiet_spark(
        master,
        spark_plugins="org.apache.spark.sql.connect.SparkConnectPlugin",
        spark_connect_grpc_binding_address="127.0.0.1",
        spark_connect_grpc_binding_port=0,
    ) as spark:
        services = spark._jvm.org.apache.spark.sql.connect.service
        service = getattr(getattr(services, "SparkConnectService$"), "MODULE$")
        print(service.localPort(), flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    _serve(sys.argv[1])
