"""`tallybook doctor`: tries all that a cluster needs, from this machine; says what to do."""

from pathlib import Path
from typing import Annotated

import typer

from tallybook.commands.checks import Finding, Health, fine
from tallybook.commands.cluster_checks import check_cluster
from tallybook.commands.machine_checks import check_machine
from tallybook.commands.output import print_json, print_line, print_table
from tallybook.commands.reaching import ADDRESS, Json, told
from tallybook.connecting import Reach, find_reach, known_address

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
    """Look for what is wrong, and say what to do: on this machine and in a cluster.

    Java, versions, ports, disk space; ZooKeeper reachable and writable, a chroot that has a
    cluster, servers that answer, clocks, a log store that has put-if-absent. Exit code 1 if
    something is wrong.
    """
    with told(context.command_path):
        findings = check_machine(ports=port or [], views=views or [])
        reach = _reach(zookeeper, token_file, tls_root, deadline)
        if reach is None:
            findings.append(fine("cluster", "no address was given, so none was looked at"))
        else:
            findings += check_cluster(reach)
    if json:
        print_json([one.document() for one in findings])
    else:
        _print(findings)
    if any(one.health is Health.WRONG for one in findings):
        raise typer.Exit(1)


def _reach(
    address: str | None, token_file: Path | None, tls_root: Path | None, deadline_s: float
) -> Reach | None:
    """Return how to reach the cluster; None if nothing says where one is."""
    if known_address(address) is None:
        return None
    return find_reach(
        address,
        how="--zookeeper",
        token_file=token_file,
        tls_root=tls_root,
        deadline_s=deadline_s,
    )


def _print(findings: list[Finding]) -> None:
    print_table(
        ("WHAT", "", "FOUND"), [(one.what, one.health.value, one.found) for one in findings]
    )
    for one in findings:
        if one.advice:
            print_line(f"{one.what}: {one.advice}", _STYLES[one.health])
