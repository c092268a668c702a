"""The command line: `tallybook serve`, `status`, `drain`, `locks` and `tier`.

Here are the options; what the commands do is elsewhere.
"""

import argparse
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from foundation.errors import TallybookError
from foundation.stop_signals import StopSignals
from locks.store.zookeeper import CREDENTIALS_VARIABLE
from server.__main__ import main as serve_here
from server.__main__ import parser as server_parser
from server.client.connections import Connections
from server.launch.logs import configure
from server.protocol.environment import ADDRESS_VARIABLE, TOKEN_VARIABLE
from tallybook import drain_command, locks_command, tier_command
from tallybook.connecting import Reach, find_reach
from tallybook.text_tables import aligned

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
_LOCKS = """\
List who has which columns of which table, release a lock in its owner's place, or forget an
owner."""
_LIST = """\
List the owners of a table, or of all tables: the columns that each has or last had, whether its
lock keeps others out (times in UTC), its epoch, the last batch that it committed (by its own
count), and what it has yet to pay."""
_RELEASE = """\
Free the columns that an owner holds. What it has not committed is undone, or rolled forward if it
was promised; what it has committed stays, and so does its count of batches: the same job may come
back and go on after it. A lock that is live is refused, for its job may be running."""
_FORGET = """\
Forget an owner that holds nothing, and with it the number of its last committed batch: as if it
had never been. Whatever it is sent from then on counts, also what it has counted before."""
_ADDRESS = "ZooKeeper's: host:port[,host:port...][/chroot]"
# Stands for --views where Spark's own directory will do.
_NO_VIEWS = "\0"
_LOOK_S = 0.2
_LONGEST_DEADLINE_S = 24 * 3600.0
_ERRORS = (TallybookError, OSError)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    no_views = [f"--views={_NO_VIEWS}"] if "--on-spark" in words else []
    arguments = _parser().parse_args([*words[:1], *no_views, *words[1:]])
    if arguments.command == "status":
        return _status(arguments)
    if arguments.command == "drain":
        return _drain(arguments)
    if arguments.command == "locks":
        return _locks(arguments)
    if arguments.command == "tier":
        return _tier(arguments)
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
        parents=[_reach_options(deadline_s=10.0)],
        allow_abbrev=False,
        help="list the servers of a cluster and their buckets",
        description="List the servers of a cluster and the buckets that they lead.",
        epilog=_SECRETS,
    )
    status.add_argument(
        "address", nargs="?", help=f"{_ADDRESS}; or the variable {ADDRESS_VARIABLE}"
    )
    drain = commands.add_parser(
        "drain",
        parents=[_reach_options(deadline_s=120.0)],
        allow_abbrev=False,
        help="have a server hand its buckets over, and end",
        description=drain_command.DESCRIPTION,
        epilog=_SECRETS,
    )
    drain.add_argument("address", help="the server's, host:port, as `tallybook status` shows it")
    locks = commands.add_parser(
        "locks",
        allow_abbrev=False,
        help="list column locks, release one, forget an owner",
        description=_LOCKS,
    )
    _add_locks_commands(locks)
    tier = commands.add_parser(
        "tier",
        parents=[_reach_options(deadline_s=30.0), _zookeeper_option()],
        allow_abbrev=False,
        help="keep a copy of a table in a lake",
        description=tier_command.DESCRIPTION,
        epilog=_SECRETS,
    )
    tier_command.add_options(tier)
    return options


def _zookeeper_option() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    options.add_argument(
        "--zookeeper",
        dest="address",
        metavar="ADDRESS",
        help=f"{_ADDRESS}; or the variable {ADDRESS_VARIABLE}",
    )
    return options


def _add_locks_commands(locks: argparse.ArgumentParser) -> None:
    actions = locks.add_subparsers(dest="action", required=True, metavar="ACTION")

    def add(name: str, does: str, description: str, deadline_s: float) -> argparse.ArgumentParser:
        action: argparse.ArgumentParser = actions.add_parser(
            name,
            parents=[_reach_options(deadline_s), _zookeeper_option()],
            allow_abbrev=False,
            help=does,
            description=description,
            epilog=_SECRETS,
        )
        return action

    listing = add("list", "who has which columns", _LIST, 10.0)
    listing.add_argument("table", nargs="?", metavar="TABLE", help="of this table only")
    # Servers may be gone, and their buckets' next leaders not yet there.
    releasing = add("release", "free an owner's columns", _RELEASE, 30.0)
    forgetting = add("forget", "forget an owner that holds nothing", _FORGET, 10.0)
    for action in (releasing, forgetting):
        action.add_argument("table", metavar="TABLE")
        action.add_argument("owner", metavar="OWNER", help="as `tallybook locks list` shows it")
    releasing.add_argument(
        "--force",
        action="store_true",
        help="even if the lock is live; a job that still runs is stopped for good by that",
    )


def _reach_options(deadline_s: float) -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    options.add_argument("--token-file", type=Path, help=f"or the variable {TOKEN_VARIABLE}")
    options.add_argument("--tls-root", type=Path, help="whom to trust, for servers with TLS")
    options.add_argument(
        "--deadline",
        type=_seconds,
        default=deadline_s,
        help=f"how many seconds to wait for an answer; {deadline_s:g}",
    )
    return options


def _seconds(text: str) -> float:
    with suppress(ValueError):
        if 0 < float(text) <= _LONGEST_DEADLINE_S:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds, more than 0, up to a day")


def _spark_options() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    spark = options.add_argument_group("on Spark")
    spark.add_argument("--on-spark", action="store_true", help="run servers on Spark's executors")
    spark.add_argument("--servers", type=int, default=1, metavar="N", help="how many; 1")
    spark.add_argument("--master", metavar="URL", help="unless spark-submit or its files say so")
    return options


def _serve_on_spark(arguments: argparse.Namespace, of_server: Sequence[str]) -> int:
    from server.launch.on_spark import ServersOnSpark, plan  # noqa: PLC0415

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
    stop = StopSignals()  # PySpark has its own idea of SIGINT.
    with ServersOnSpark(spark.sparkContext, assignments) as servers:
        asked = False
        while not asked and not servers.wait(0):
            asked = stop.wait(_LOOK_S)
    spark.stop()
    if not asked:
        print("the Spark application has ended, and the servers with it", file=sys.stderr)
        return 1
    return 0


def _status(arguments: argparse.Namespace) -> int:
    def lines() -> list[str]:
        with _reach(arguments, "the first argument").connect() as cluster:
            return status_lines(cluster.status())

    where = arguments.address or os.environ.get(ADDRESS_VARIABLE) or "a cluster"
    return _print(lines, f"no status of {where}")


def _drain(arguments: argparse.Namespace) -> int:
    def lines() -> list[str]:
        connections = Connections(_reach(arguments, "the first argument").credentials())
        with closing(connections):
            address, deadline_s = arguments.address, arguments.deadline
            return [drain_command.drain(connections, address, deadline_s=deadline_s)]

    return _print(lines, f"tallybook drain {arguments.address}")


def _locks(arguments: argparse.Namespace) -> int:
    def lines() -> list[str]:
        with _reach(arguments, "--zookeeper").connect() as cluster:
            if arguments.action == "list":
                return locks_command.list_lines(cluster, arguments.table)
            if arguments.action == "forget":
                return [locks_command.forget(cluster, arguments.table, arguments.owner)]
            released = locks_command.release(
                cluster,
                arguments.table,
                arguments.owner,
                force=arguments.force,
                deadline_s=arguments.deadline,
            )
            return [str(released)]

    with _telling():
        return _print(lines, f"tallybook locks {arguments.action}")


def _tier(arguments: argparse.Namespace) -> int:
    def lines() -> list[str]:
        options = tier_command.options_of(arguments)
        with _reach(arguments, "--zookeeper").connect() as cluster:
            return [tier_command.tier(cluster, options, arguments)]

    return _print(lines, f"tallybook tier {arguments.table}")


@contextmanager
def _telling() -> Iterator[None]:
    """Show what a writer says: an undo of many millions of rows takes minutes."""
    log, handler = logging.getLogger("recovery"), logging.StreamHandler()
    before = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(before)


def _reach(arguments: argparse.Namespace, how: str) -> Reach:
    return find_reach(
        arguments.address,
        how=how,
        token_file=arguments.token_file,
        tls_root=arguments.tls_root,
        deadline_s=arguments.deadline,
    )


def _print(lines: Callable[[], list[str]], what: str) -> int:
    """Print the lines, or the error that comes in their place: one line, too."""
    try:
        print("\n".join(lines()))
    except _ERRORS as exc:
        print(f"{what}: {' '.join(str(exc).split())}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{what}: interrupted", file=sys.stderr)
        return 130
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
    return [*aligned(rows), *problems]


def _unopened_cells(bucket: dict[str, Any]) -> tuple[str, ...]:
    return (bucket["table"], bucket["bucket"], "-", "-", "(cannot be opened: see below)")


def _bucket_cells(bucket: dict[str, Any]) -> tuple[str, ...]:
    log = f"{bucket['start_offset']}..{bucket['end_offset']}"
    owners = ", ".join(map(str, bucket["owners"])) or "-"
    return (bucket["table"], bucket["bucket"], str(bucket["term"]), log, owners)
