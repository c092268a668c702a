"""The command that keeps a copy of a table in a lake: its options, and a job until a signal."""

import argparse
import logging
import os
import sys
import threading
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from typing import Any

from foundation.errors import InvalidInput
from foundation.stop_signals import StopSignals
from server.client.cluster import Cluster
from server.tablet.metrics_endpoint import MetricsEndpoint
from sink.lake.opening import DELTA, FORMATS, open_lake
from sink.lake.state import Layout
from sink.tiering.job import TieringJob
from sink.tiering.loading import load_copy
from sink.tiering.options import TieringOptions
from sink.tiering.progress import Round, RoundKind, Underway

DESCRIPTION = """\
Keep a copy of a table in a lake, where every tool can read it: as a Delta table, or as plain
Parquet files. All rows are copied first, from snapshots; then, round after round, what has changed.
Each round is one commit, at one cut of the table: readers of the copy see whole batches. A job that
was killed goes on where it was. SIGTERM or SIGINT ends it."""
_LOOK_S = 0.2


def add_options(options: argparse.ArgumentParser) -> None:
    """Add what the command takes besides how to reach the cluster."""
    options.add_argument("table", metavar="TABLE")
    options.add_argument(
        "--to",
        required=True,
        metavar="PATH",
        help="a directory, or a URL, with this copy and nothing else",
    )
    options.add_argument("--format", choices=FORMATS, default=DELTA, help=f"of the copy; {DELTA}")
    options.add_argument(
        "--layout",
        choices=[one.value for one in Layout],
        help="what is done about rows that changed: vectors marks them as deleted where they were "
        "(deletion vectors, which readers must know); rewrite writes the files anew that had them. "
        "vectors for delta, rewrite for parquet",
    )
    options.add_argument(
        "--states",
        action="store_true",
        help="with columns for the states of averages, sketches and bitmaps, which can be merged "
        "further",
    )
    _add_times(options)
    options.add_argument(
        "--begin-again",
        action="store_true",
        help="make the copy anew, in the place of what is there",
    )
    options.add_argument(
        "--storage",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a setting of the lake's object store, as obstore takes it; or its variables (AWS_*, "
        "GOOGLE_*, AZURE_*)",
    )
    options.add_argument(
        "--metrics-port", type=_port, metavar="PORT", help="serve metrics on 127.0.0.1; 0: any port"
    )
    options.add_argument("--master", metavar="URL", help="unless spark-submit or its files say so")


def _add_times(options: argparse.ArgumentParser) -> None:
    """Add how often, and for how long: all in seconds."""
    options.add_argument("--once", action="store_true", help="one round, and done")
    options.add_argument(
        "--interval", type=float, default=60.0, metavar="S", help="seconds from round to round; 60"
    )
    options.add_argument(
        "--lag-target",
        type=float,
        metavar="S",
        help="while the copy is so many seconds behind, rounds follow one another without a pause, "
        "and files are not compacted",
    )
    options.add_argument(
        "--retention",
        type=float,
        default=7 * 24 * 3600.0,
        metavar="S",
        help="for so many seconds, earlier versions can be read; 604800",
    )
    options.add_argument(
        "--lease",
        type=float,
        default=3600.0,
        metavar="S",
        help="for so many seconds, the log that the next round needs is held after the job has "
        "died; 3600",
    )
    options.add_argument(
        "--hold",
        type=float,
        default=0.0,
        metavar="S",
        help="the same after it has ended in good order; 0: not at all, which leaves what the "
        "servers keep by themselves",
    )


def options_of(arguments: argparse.Namespace) -> TieringOptions:
    """Return what the command line says; InvalidInput if it cannot be."""
    return TieringOptions(
        table=arguments.table,
        to=arguments.to,
        format=arguments.format,
        layout=arguments.layout,
        states=arguments.states,
        once=arguments.once,
        interval_s=arguments.interval,
        lag_target_s=arguments.lag_target,
        retention_s=arguments.retention,
        lease_s=arguments.lease,
        hold_s=arguments.hold,
        begin_again=arguments.begin_again,
        storage_settings=_settings(arguments.storage),
    )


def tier(cluster: Cluster, options: TieringOptions, arguments: argparse.Namespace) -> str:
    """Run the job until it is done, or a signal arrives; return what it has done."""
    from pyspark.sql import SparkSession  # noqa: PLC0415

    # Before Spark starts, which takes a while: what is refused is refused at once.
    table, lake = cluster.table(options.table), open_lake(options.place, options.format)
    load_copy(lake, table.definition, options, begin_again=options.begin_again)
    logging.basicConfig(format="%(levelname)s: %(message)s")  # Warnings, on standard error.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # Tasks need what is installed here.
    builder = SparkSession.builder.appName(f"tallybook tier {options.table}")
    builder = builder.config("spark.ui.showConsoleProgress", "false")
    if arguments.master is not None:
        builder = builder.master(arguments.master)
    with ExitStack() as stack:
        spark = builder.getOrCreate()
        stack.callback(spark.stop)
        spark.sparkContext.setLogLevel("ERROR")
        stop = StopSignals()  # PySpark has its own idea of SIGINT.
        job = TieringJob(spark, cluster, options, _print)
        if arguments.metrics_port is not None:
            endpoint = MetricsEndpoint(job.metrics, host="127.0.0.1", port=arguments.metrics_port)
            stack.callback(endpoint.close)
            print(f"metrics at http://{endpoint.address}/metrics", flush=True)
        running = _Running(job)
        while not running.ended.is_set():
            if stop.wait(_LOOK_S):
                job.stop(at_once=True)
                running.ended.wait()
        return running.result()


class _Running:
    """A job on a thread of its own: signals are for the main one."""

    def __init__(self, job: TieringJob) -> None:
        self.ended = threading.Event()
        self._error: BaseException | None = None
        self._summary = ""
        self._job = job
        threading.Thread(target=self._run, name="tallybook-tier", daemon=True).start()

    def _run(self) -> None:
        try:
            self._summary = str(self._job.run())
        except BaseException as exc:
            self._error = exc
        finally:
            self.ended.set()

    def result(self) -> str:
        """Return what was done, or raise what it ended with."""
        if self._error is not None:
            raise self._error
        return self._summary


def _print(done: Round | Underway) -> None:
    if not isinstance(done, Round) or done.kind is not RoundKind.NOTHING:
        print(done, flush=True)


def _port(text: str) -> int:
    with suppress(ValueError):
        if 0 <= int(text) < 1 << 16:
            return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is no port: a number from 0 to 65535")


def _settings(texts: list[str]) -> Mapping[str, Any]:
    settings = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not name or not equals:
            raise InvalidInput(f"--storage {text}: write NAME=VALUE")
        settings[name] = value
    return settings
