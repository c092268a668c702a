"""Commands that reach a cluster: the options that say which one, and what becomes of errors.

A function is made a command by `cluster_command`. It takes a `Reach` first and then what is its
own; the options for the former are added, the same for all commands. An error is one line on
standard error and exit code 1.
"""

import functools
import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer

from foundation.command_line import INTERRUPTED
from foundation.errors import TallybookError
from locks.store.zookeeper import CREDENTIALS_VARIABLE
from server.client.cluster import Cluster
from server.protocol.environment import ADDRESS_VARIABLE, TOKEN_VARIABLE
from tallybook.commands.output import complain
from tallybook.connecting import Reach, find_reach

ADDRESS = f"ZooKeeper's: host:port[,host:port...][/chroot]; or the variable {ADDRESS_VARIABLE}"
SECRETS = (
    f"Secrets are taken from the environment: {TOKEN_VARIABLE}, the token that calls to servers "
    f"have to show, and {CREDENTIALS_VARIABLE} (user:password), which closes the catalogue to "
    "others."
)
_PANEL = "The cluster"
_LONGEST_DEADLINE_S = 24 * 3600.0

Json: TypeAlias = Annotated[bool, typer.Option("--json", help="for programs")]
Yes: TypeAlias = Annotated[bool, typer.Option("--yes", help="do not ask")]
TableName: TypeAlias = Annotated[str, typer.Argument(metavar="TABLE", show_default=False)]
Isolation: TypeAlias = Annotated[
    str,
    typer.Option(help="`latest`: all that was written; `committed`: whole batches", metavar="NAME"),
]


def cluster_command(
    app: typer.Typer,
    name: str,
    *,
    deadline_s: float = 10.0,
    argument: str | None = None,
    required: bool = False,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return what makes a function a command.

    `argument`: the address may be the first argument as well, and this is its help. `required`: it
    has to be that, as an address that is not ZooKeeper's is found nowhere else.
    """

    def register(function: Callable[..., None]) -> Callable[..., None]:
        _, *own = inspect.signature(function, eval_str=True).parameters.values()
        options = _reach_options(deadline_s, argument, required=required)

        @functools.wraps(function)
        def run(context: typer.Context, **given: Any) -> None:
            with told(context.command_path):
                reach = find_reach(
                    _address(given.pop("address", None), given.pop("zookeeper", None)),
                    how="--zookeeper",
                    token_file=given.pop("token_file"),
                    tls_root=given.pop("tls_root"),
                    deadline_s=given.pop("deadline"),
                )
                function(reach, **given)

        context = inspect.Parameter(
            "context", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context
        )
        parameters = [*own, *options]
        set_signature(run, [context, *(one.replace(kind=one.KEYWORD_ONLY) for one in parameters)])
        app.command(name, epilog=SECRETS)(run)
        return function

    return register


def _address(argument: str | None, option: str | None) -> str | None:
    if argument and option and argument != option:
        raise typer.BadParameter(f"which one: {argument}, or --zookeeper {option}?")
    return argument or option


@contextmanager
def told(what: str) -> Iterator[None]:
    """Tell errors in one line that begins with what was to be done, and end the command."""
    try:
        yield
    except (TallybookError, OSError) as exc:
        if isinstance(exc, BrokenPipeError):
            raise
        complain(f"{what}: {_reason(exc)}")
        raise typer.Exit(1) from exc
    except KeyboardInterrupt:
        complain(f"{what}: interrupted")
        raise typer.Exit(INTERRUPTED) from None


def _reason(exc: Exception) -> str:
    """Return what went wrong, of a file without its number, which tells nobody anything."""
    if isinstance(exc, OSError) and exc.strerror and exc.filename is not None:
        return f"{exc.filename}: {exc.strerror}"
    return str(exc)


@contextmanager
def connected(reach: Reach) -> Iterator[Cluster]:
    """Connect for the duration of the block."""
    with reach.connect() as cluster:
        yield cluster


@contextmanager
def telling(logger: str) -> Iterator[None]:
    """Show what is logged on standard error: some work takes minutes."""
    log, handler = logging.getLogger(logger), logging.StreamHandler()
    before = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(before)


def _reach_options(
    deadline_s: float, argument: str | None, *, required: bool
) -> list[inspect.Parameter]:
    first: Any = typer.Argument(metavar="ADDRESS", help=argument, show_default=False)
    where: Any = typer.Option(
        "--zookeeper", metavar="ADDRESS", help=ADDRESS, rich_help_panel=_PANEL
    )
    addresses = [_parameter("zookeeper", Annotated[str | None, where], None)]
    if required:
        addresses = [_parameter("address", Annotated[str, first], inspect.Parameter.empty)]
    elif argument is not None:
        addresses.append(_parameter("address", Annotated[str | None, first], None))
    token = typer.Option(help=f"or the variable {TOKEN_VARIABLE}", rich_help_panel=_PANEL)
    tls = typer.Option(help="whom to trust, for servers with TLS", rich_help_panel=_PANEL)
    deadline = typer.Option(
        help="how many seconds to wait for an answer", callback=_seconds, rich_help_panel=_PANEL
    )
    return [
        *addresses,
        _parameter("token_file", Annotated[Path | None, token], None),
        _parameter("tls_root", Annotated[Path | None, tls], None),
        _parameter("deadline", Annotated[float, deadline], deadline_s),
    ]


def _parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default
    )


def set_signature(function: Any, parameters: list[inspect.Parameter]) -> None:
    """Let Typer see these parameters; it asks in both places."""
    function.__signature__ = inspect.Signature(parameters)
    function.__annotations__ = {one.name: one.annotation for one in parameters}


def _seconds(given: float) -> float:
    if not 0 < given <= _LONGEST_DEADLINE_S:
        raise typer.BadParameter(f"{given:g} is no number of seconds, more than 0, up to a day")
    return given
