"""`tallybook tier`: keeps a copy of a table in a lake; its options, and a job until a signal."""

import logging
import os
import sys
import threading
from collections.abc import Iterable, Mapping
from contextlib import ExitStack, suppress
from typing import Annotated, Any

import typer

from foundation.errors import InvalidInput
from foundation.stop_signals import StopSignals
from server.client.cluster import Cluster
from server.tablet.metrics_endpoint import MetricsEndpoint
from sink.lake.opening import DELTA, FORMATS, open_lake
from sink.tiering.job import TieringJob
from sink.tiering.loading import load_copy
from sink.tiering.options import TieringOptions
from sink.tiering.progress import Round, RoundKind, Underway
from tallybook.commands.reaching import TableName, cluster_command, connected
from tallybook.commands.starting_spark import start_spark
from tallybook.connecting import Reach

_LOOK_S = 0.2
_TIMES = "Times, in seconds"


def add_commands(app: typer.Typer) -> None:
    """Add `tier` to the application."""
    cluster_command(app, "tier", deadline_s=30.0)(tier)


def _port(given: str | None) -> int | None:
    if given is None:
        return None
    with suppress(ValueError):
        if 0 <= int(given) < 1 << 16:
            return int(given)
    raise typer.BadParameter(f"{given!r} is no port: a number from 0 to 65535")


def tier(
    reach: Reach,
    *,
    table: TableName,
    to: Annotated[
        str,
        typer.Option(metavar="PATH", help="a directory, or a URL, with this copy and nothing else"),
    ],
    format: Annotated[str, typer.Option(help=f"of the copy: {', '.join(FORMATS)}")] = DELTA,  # noqa: A002
    layout: Annotated[
        str | None,
        typer.Option(
            help="what is done about rows that changed: vectors marks them as deleted where they "
            "were (deletion vectors, which readers must know); rewrite writes the files anew that "
            "had them. vectors for delta, rewrite for parquet"
        ),
    ] = None,
    states: Annotated[
        bool,
        typer.Option(
            "--states",
            help="with columns for the states of averages, sketches and bitmaps, which can be "
            "merged further",
        ),
    ] = False,
    once: Annotated[
        bool, typer.Option("--once", help="one round, and done", rich_help_panel=_TIMES)
    ] = False,
    interval: Annotated[
        float, typer.Option(metavar="S", help="from round to round", rich_help_panel=_TIMES)
    ] = 60.0,
    lag_target: Annotated[
        float | None,
        typer.Option(
            metavar="S",
            help="while the copy is so far behind, rounds follow one another without a pause, and "
            "files are not compacted",
            rich_help_panel=_TIMES,
        ),
    ] = None,
    retention: Annotated[
        float,
        typer.Option(
            metavar="S", help="for so long, earlier versions can be read", rich_help_panel=_TIMES
        ),
    ] = 7 * 24 * 3600.0,
    lease: Annotated[
        float,
        typer.Option(
            metavar="S",
            help="for so long, the log that the next round needs is held after the job has died",
            rich_help_panel=_TIMES,
        ),
    ] = 3600.0,
    hold: Annotated[
        float,
        typer.Option(
            metavar="S",
            help="the same after it has ended in good order; 0: not at all, which leaves what the "
            "servers keep by themselves",
            rich_help_panel=_TIMES,
        ),
    ] = 0.0,
    begin_again: Annotated[
        bool,
        typer.Option("--begin-again", help="make the copy anew, in the place of what is there"),
    ] = False,
    storage: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="a setting of the lake's object store, as obstore takes it; or its variables "
            "(AWS_*, GOOGLE_*, AZURE_*)",
        ),
    ] = None,
    metrics_port: Annotated[
        str | None,
        typer.Option(
            metavar="PORT", help="serve metrics on 127.0.0.1; 0: any port", callback=_port
        ),
    ] = None,
    master: Annotated[
        str | None, typer.Option(metavar="URL", help="unless spark-submit or its files say so")
    ] = None,
) -> None:
    """Keep a copy of a table in a lake, where every tool can read it.

    As a Delta table, or as plain Parquet files. All rows are copied first, from snapshots; then,
    round after round, what has changed. Each round is one commit, at one cut of the table: readers
    of the copy see whole batches. A job that was killed goes on where it was. SIGTERM or SIGINT
    ends it.
    """
    options = TieringOptions(
        table=table,
        to=to,
        format=format,
        layout=layout,
        states=states,
        once=once,
        interval_s=interval,
        lag_target_s=lag_target,
        retention_s=retention,
        lease_s=lease,
        hold_s=hold,
        begin_again=begin_again,
        storage_settings=_settings(storage or ()),
    )
    port = None if metrics_port is None else int(metrics_port)
    with connected(reach) as cluster:
        print(run(cluster, options, master=master, metrics_port=port))


def run(
    cluster: Cluster, options: TieringOptions, *, master: str | None, metrics_port: int | None
) -> str:
    """Run the job until it is done, or a signal arrives; return what it has done."""
    # Before Spark starts, which takes a while: what is refused is refused at once.
    table, lake = cluster.table(options.table), open_lake(options.place, options.format)
    load_copy(lake, table.definition, options, begin_again=options.begin_again)
    logging.basicConfig(format="%(levelname)s: %(message)s")  # Warnings, on standard error.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # Tasks need what is installed here.
    settings = {
        "spark.app.name": f"tallybook tier {options.table}",
        "spark.ui.showConsoleProgress": "false",
    }
    with ExitStack() as stack:
        spark = start_spark(settings, master)
        stack.callback(spark.stop)
        spark.sparkContext.setLogLevel("ERROR")
        stop = StopSignals()  # PySpark has its own idea of SIGINT.
        job = TieringJob(spark, cluster, options, _print)
        if metrics_port is not None:
            endpoint = MetricsEndpoint(job.metrics, host="127.0.0.1", port=metrics_port)
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


def _settings(texts: Iterable[str]) -> Mapping[str, Any]:
    settings = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not name or not equals:
            raise InvalidInput(f"--storage {text}: write NAME=VALUE")
        settings[name] = value
    return settings
