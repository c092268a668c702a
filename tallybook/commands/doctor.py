"""`tallybook doctor`: tries all that a cluster needs, from this machine; says what to do."""

import os
from pathlib import Path
from typing import Annotated

import typer

from server.protocol.environment import ADDRESS_VARIABLE, find_address
from tallybook.commands.checks import Finding, Health
from tallybook.commands.cluster_checks import check_cluster
from tallybook.commands.machine_checks import check_machine
from tallybook.commands.output import print_json, print_line, print_table
from tallybook.commands.reaching import ADDRESS, Json, told
from tallybook.connecting import Reach

_STYLES = {Health.FINE: "", Health.WARNING: "yellow", Health.WRONG: "red"}


def add_commands(app: typer.Typer) -> None:
    """Add `doctor` to the application."""
    app.command("doctor")(doctor)


def doctor(
    context: typer.Context,
    *,
    zookeeper: Annotated[str | None, typer.Option(metavar="ADDRESS", help=ADDRESS)] = None,
    token_file: Annotated[Path | None, typer.Option(help="or the variable TALLYBOOK_TOKEN")] = None,
    tls_root: Annotated[Path | None, typer.Option(help="for servers with TLS")] = None,
    deadline: Annotated[float, typer.Option(min=0.1, help="seconds that each step may take")] = 10,
    port: Annotated[
        list[int] | None, typer.Option(help="a server is to listen here: is it free? Repeatable")
    ] = None,
    views: Annotated[
        list[Path] | None, typer.Option(help="of a server here: is there room? Repeatable")
    ] = None,
    json: Json = False,
) -> None:
    """Look for what is wrong, and say what to do: this machine and, if there is an address, a cluster.

    Java, versions, ports, disk space; ZooKeeper reachable and writable, a chroot that has a
    cluster, servers that answer, clocks, a log store that has put-if-absent. Exit code 1 if
    something is wrong.
    """
    with told(context.command_path):
        findings = check_machine(ports=port or [], views=views or [])
        if zookeeper or os.environ.get(ADDRESS_VARIABLE):
            reach = Reach(
                address=find_address(zookeeper, "--zookeeper", os.environ),
                token_file=token_file,
                tls_root=tls_root,
                deadline_s=deadline,
            )
            findings += check_cluster(reach)
    if json:
        print_json([one.document() for one in findings])
    else:
        _print(findings)
    if any(one.health is Health.WRONG for one in findings):
        raise typer.Exit(1)


def _print(findings: list[Finding]) -> None:
    print_table(
        ("WHAT", "", "FOUND"), [(one.what, one.health.value, one.found) for one in findings]
    )
    for one in findings:
        if one.advice:
            print_line(f"{one.what}: {one.advice}", _STYLES[one.health])
