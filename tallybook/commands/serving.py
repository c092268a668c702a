"""`tallybook serve`, `local`, `drain` and `page`: what runs until it is told to end."""

import inspect
import os
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any

import typer

from foundation.errors import InvalidInput, ServerNotStarted, TallybookError
from foundation.stop_signals import StopSignals
from server.__main__ import main as serve_here
from server.__main__ import parser as server_parser
from server.client.connections import Connections
from server.launch.local_cluster import LocalCluster
from server.launch.logs import configure
from server.page.of_cluster import page_of_cluster
from server.protocol.environment import ADDRESS_VARIABLE
from tallybook.commands.borrowed_options import borrowed, words_of
from tallybook.commands.draining import drain as drain_server
from tallybook.commands.output import complain, print_line
from tallybook.commands.reaching import (
    SECRETS,
    cluster_command,
    set_signature,
    told,
)
from tallybook.commands.starting_spark import start_spark
from tallybook.connecting import Reach

_SERVE = """\
Run a tablet server here until SIGTERM or SIGINT; or, with --on-spark, several of them as a
long-running Spark application."""
_ON_SPARK_NOTES = """
On Spark, --views may be left out, --port is chosen, and --host auto means the address by which a
machine reaches ZooKeeper. Variables of the object store (AWS_*, GOOGLE_*, AZURE_*) go to the
servers. They run this Python, unless PYSPARK_PYTHON or spark.pyspark.python says otherwise."""
_LOOK_S = 0.2


def add_commands(app: typer.Typer) -> None:
    """Add the commands to the application."""
    panel = "On Spark"
    on_spark = typer.Option(
        "--on-spark", help="run servers on Spark's executors", rich_help_panel=panel
    )
    servers = typer.Option(help="how many", metavar="N", rich_help_panel=panel)
    master = typer.Option(
        metavar="URL", help="unless spark-submit or its files say so", rich_help_panel=panel
    )
    kind = inspect.Parameter.KEYWORD_ONLY
    own = [
        inspect.Parameter("on_spark", kind, annotation=Annotated[bool, on_spark], default=False),
        inspect.Parameter("servers", kind, annotation=Annotated[int, servers], default=1),
        inspect.Parameter("master", kind, annotation=Annotated[str | None, master], default=None),
    ]
    parser = server_parser()

    def serve(*, on_spark: bool, servers: int, master: str | None, **given: Any) -> None:
        given["zookeeper"] = given["zookeeper"] or os.environ.get(ADDRESS_VARIABLE)
        if not given["zookeeper"]:
            raise typer.BadParameter(
                f"a server needs --zookeeper, or the variable {ADDRESS_VARIABLE}"
            )
        words = words_of(parser, given)
        if on_spark:
            raise typer.Exit(_serve_on_spark(servers, master, given, words))
        if given["views"] is None:
            raise typer.BadParameter("a server needs --views, a directory of its own")
        raise typer.Exit(serve_here(words))

    set_signature(serve, [*borrowed(parser, optional=("zookeeper", "views")), *own])
    app.command("serve", help=_SERVE, epilog=SECRETS + _ON_SPARK_NOTES)(serve)
    app.command("local")(local)
    where = "the server's, host:port, as `tallybook status` shows it"
    cluster_command(app, "drain", deadline_s=120.0, argument=where, required=True)(drain)
    cluster_command(app, "page", deadline_s=10.0)(page)


def local(
    context: typer.Context,
    *,
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="where all its data is")],
    servers: Annotated[int, typer.Option(min=1, help="how many; one per core")] = 1,
    port: Annotated[
        int, typer.Option(help="ZooKeeper's; 0: the one that it had in DIR, or any that is free")
    ] = 0,
    page_port: Annotated[int, typer.Option(help="of the status page; 0: any that is free")] = 0,
) -> None:
    """Run a cluster on this machine until Ctrl-C: ZooKeeper, tablet servers and a status page.

    Everything is below DIR, and is there again when it is started again. A process of the cluster
    that ends by itself is started again.
    """
    with told(context.command_path):
        stop = StopSignals()
        with LocalCluster(directory, servers=servers, port=port or None) as cluster:
            shown = page_of_cluster(cluster.connect, port=page_port)
            with closing(shown):
                print(f"a cluster of {servers} in {directory.resolve()}, until Ctrl-C")
                print(f'  in Python       tb.connect("{cluster.address}")')
                print(f"  in a shell      export TALLYBOOK_ZOOKEEPER={cluster.address}")
                print(f"  status page     {shown.url}", flush=True)
                while not stop.wait(_LOOK_S):
                    for line in cluster.revive():
                        complain(f"{context.command_path}: {line}")
        print("the cluster has stopped; its data stay", flush=True)


def drain(reach: Reach) -> None:
    """Have a server hand its buckets over to the others, one by one, while it serves, and end.

    The others warm up for a bucket before they ask for it, so writers and readers hardly notice.
    Where there are no others it ends at once; what nobody has taken within its own
    --drain-deadline, it closes. Started again, it gets its buckets back, the same way. To restart a
    cluster, do that with one server after the other.
    """
    with closing(Connections(reach.credentials())) as connections:
        print_line(drain_server(connections, reach.address, deadline_s=reach.deadline_s))


def page(
    reach: Reach,
    *,
    port: Annotated[int, typer.Option(help="0: any that is free")] = 8080,
    host: Annotated[str, typer.Option(help="other than loopback needs a token")] = "127.0.0.1",
    tls_certificate: Annotated[Path | None, typer.Option(help="to speak TLS")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="that of the certificate")] = None,
) -> None:
    """Show the status page of a cluster until Ctrl-C, as a process of its own.

    The page asks for the token that the servers want, if they want one.
    """
    token = reach.credentials().token
    if (tls_certificate is None) != (tls_key is None):
        raise InvalidInput("--tls-certificate and --tls-key go together")
    tls = None
    if tls_certificate is not None and tls_key is not None:
        tls = tls_certificate, tls_key
    stop = StopSignals()
    with reach.connect():  # That it can be reached is found out now, not when somebody looks.
        pass
    shown = page_of_cluster(reach.connect, host=host, port=port, token=token, tls=tls)
    with closing(shown):
        print(f"the status page of {reach.address} is at {shown.url}, until Ctrl-C", flush=True)
        while not stop.wait(_LOOK_S):
            pass


def _serve_on_spark(
    servers: int, master: str | None, given: dict[str, Any], of_server: Sequence[str]
) -> int:
    from server.launch.on_spark import ServersOnSpark, plan  # noqa: PLC0415

    configure((given["log_level"] or "INFO").upper())
    try:
        assignments = plan(
            servers=servers,
            zookeeper=given["zookeeper"],
            logs=given["logs"],
            views=given["views"],
            options=of_server,
        )
    except (TallybookError, OSError) as exc:
        print(f"the servers did not start: {exc}", file=sys.stderr)
        return 1
    try:
        spark = start_spark({"spark.app.name": "tallybook servers"}, master)
    except ServerNotStarted as exc:
        print(f"the servers did not start: {exc}", file=sys.stderr)
        return 1
    stop = StopSignals()  # PySpark has its own idea of SIGINT.
    with ServersOnSpark(spark.sparkContext, assignments) as running:
        asked = False
        while not asked and not running.wait(0):
            asked = stop.wait(_LOOK_S)
    spark.stop()
    if not asked:
        print("the Spark application has ended, and the servers with it", file=sys.stderr)
        return 1
    return 0
