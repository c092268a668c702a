"""The command line: `tallybook serve`, `tallybook status`."""

import argparse
import os
import signal
import sys
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from locks import CoordinationError
from locks.zookeeper import CREDENTIALS_VARIABLE
from merge_engine import TallybookError
from server.__main__ import main as serve_here
from server.__main__ import parser as server_parser
from server.client import connect
from server.config import TOKEN_VARIABLE, credentials_from
from server.logs import configure

_SERVE = """\
Run a tablet server here until SIGTERM or SIGINT; or, with --on-spark, several of them as a
long-running Spark application."""
_SECRETS = f"""\
Secrets are taken from the environment: {TOKEN_VARIABLE}, the token that calls to servers have to
show, and {CREDENTIALS_VARIABLE} (user:password), which closes the catalogue to others."""
_ON_SPARK_NOTES = """
On Spark, --views may be left out, --port is chosen, and --host auto means the address by which a
machine reaches ZooKeeper. Variables of the object store (AWS_*, GOOGLE_*, AZURE_*) go to the
servers. They run this Python, unless PYSPARK_PYTHON or spark.pyspark.python says otherwise."""
# Stands for --views where Spark's own directory will do.
_NO_VIEWS = "\0"
_LOOK_S = 0.2


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    no_views = [f"--views={_NO_VIEWS}"] if "--on-spark" in words else []
    arguments = _parser().parse_args([*words[:1], *no_views, *words[1:]])
    if arguments.command == "status":
        return _status(arguments)
    _, of_server = _spark_options().parse_known_args(words[1:])
    if arguments.on_spark:
        return _serve_on_spark(arguments, of_server)
    return serve_here(of_server)


def _parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(
        prog="tallybook", description="Aggregate tables that merge on write.", allow_abbrev=False
    )
    commands = options.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser(
        "serve",
        parents=[server_parser(), _spark_options()],
        conflict_handler="resolve",  # Both this and its parent have --help.
        allow_abbrev=False,
        help="run a tablet server, or several on Spark",
        description=_SERVE,
        epilog=_SECRETS + _ON_SPARK_NOTES,
    )
    status = commands.add_parser(
        "status",
        allow_abbrev=False,
        help="list the servers of a cluster and their buckets",
        description="List the servers of a cluster and the buckets that they lead.",
        epilog=_SECRETS,
    )
    status.add_argument("address", help="ZooKeeper's: host:port[,host:port...][/chroot]")
    status.add_argument("--token-file", type=Path, help=f"or the variable {TOKEN_VARIABLE}")
    status.add_argument("--tls-root", type=Path, help="whom to trust, for servers with TLS")
    status.add_argument("--deadline", type=float, default=10.0, help="seconds")
    return options


def _spark_options() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    spark = options.add_argument_group("on Spark")
    spark.add_argument("--on-spark", action="store_true", help="run servers on Spark's executors")
    spark.add_argument("--servers", type=int, default=1, metavar="N", help="how many; 1")
    spark.add_argument("--master", metavar="URL", help="unless spark-submit or its files say so")
    return options


def _serve_on_spark(arguments: argparse.Namespace, of_server: Sequence[str]) -> int:
    from server.on_spark import ServersOnSpark, plan  # noqa: PLC0415

    configure(arguments.log_level.upper())
    try:
        assignments = plan(
            servers=arguments.servers,
            zookeeper=arguments.zookeeper,
            logs=arguments.logs,
            views=None if str(arguments.views) == _NO_VIEWS else arguments.views,
            options=of_server,
        )
    except (TallybookError, OSError) as exc:
        print(f"the servers did not start: {exc}", file=sys.stderr)
        return 1
    from pyspark.sql import SparkSession  # noqa: PLC0415

    builder = SparkSession.builder.appName("tallybook servers")
    if arguments.master is not None:
        builder = builder.master(arguments.master)
    spark = builder.getOrCreate()
    asked_to_stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):  # PySpark has its own idea of SIGINT.
        signal.signal(number, lambda *_: asked_to_stop.set())
    with ServersOnSpark(spark.sparkContext, assignments) as servers:
        while not asked_to_stop.is_set() and not servers.wait(0):
            asked_to_stop.wait(_LOOK_S)
    spark.stop()
    if not asked_to_stop.is_set():
        print("the Spark application has ended, and the servers with it", file=sys.stderr)
        return 1
    return 0


def _status(arguments: argparse.Namespace) -> int:
    token = os.environ.get(TOKEN_VARIABLE)
    try:
        if arguments.token_file is not None:
            token = arguments.token_file.read_text().strip()
        with connect(
            arguments.address,
            token=token or None,
            tls_root=arguments.tls_root,
            credentials=credentials_from(os.environ),
            deadline_s=arguments.deadline,
            attempt_s=arguments.deadline,
        ) as cluster:
            servers = cluster.status()
    except (TallybookError, CoordinationError, OSError) as exc:
        print(f"no status of {arguments.address}: {exc}", file=sys.stderr)
        return 1
    print("\n".join(status_lines(servers)))
    return 0


def status_lines(servers: Iterable[dict[str, Any]]) -> list[str]:
    """Return a table: one line per server, with its buckets below it; then what is wrong."""
    rows: list[tuple[str, ...]] = [
        ("SERVER", "PID", "UP", "TABLE", "BUCKET", "TERM", "LOG", "OWNERS")
    ]
    problems: list[str] = []
    for server in servers:
        if "error" in server:
            rows.append((server["address"], *["-"] * 6, f"({server['error']})"))
            continue
        who = (server["address"], str(server["pid"]), f"{server['uptime_s']:.0f} s")
        problems += [f"! {who[0]}: {what}: {why}" for what, why in server["problems"].items()]
        found = [*map(_bucket_cells, server["buckets"]), *map(_unopened_cells, server["unopened"])]
        for cells in found or [("-",) * 5]:
            rows.append((*who, *cells))
            who = ("", "", "")
    *widths, _ = (max(map(len, column)) for column in zip(*rows, strict=True))
    lines = ["  ".join([*map(str.ljust, row, widths), row[-1]]).rstrip() for row in rows]
    return [*lines, *problems]


def _unopened_cells(bucket: dict[str, Any]) -> tuple[str, ...]:
    return (bucket["table"], bucket["bucket"], "-", "-", "(cannot be opened: see below)")


def _bucket_cells(bucket: dict[str, Any]) -> tuple[str, ...]:
    log = f"{bucket['start_offset']}..{bucket['end_offset']}"
    owners = ", ".join(map(str, bucket["owners"])) or "-"
    return (bucket["table"], bucket["bucket"], str(bucket["term"]), log, owners)
