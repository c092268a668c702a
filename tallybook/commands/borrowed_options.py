"""Options that another program of ours declares by argparse, as those of a command.

`python -m server` and `tallybook serve` have the same options: they are written down once, there.
"""

import argparse
import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

_TYPES: Mapping[Any, Any] = {int: int, float: float, Path: Path, None: str}


def borrowed(parser: argparse.ArgumentParser, *, optional: Sequence[str] = ()) -> list[Any]:
    """Return a parameter per option of the parser; `optional`: those that need not be given."""
    return [
        _parameter(action, required=action.required and action.dest not in optional)
        for action in _actions(parser)
    ]


def words_of(parser: argparse.ArgumentParser, given: Mapping[str, Any]) -> list[str]:
    """Return the words of a command line that says what was given, and nothing else."""
    words: list[str] = []
    for action in _actions(parser):
        value = given[action.dest]
        if value is None or value is False:
            continue
        [option, *_] = action.option_strings
        # In one word: a value may begin with a dash.
        words.append(option if value is True else f"{option}={value}")
    return words


def _actions(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    return [one for one in parser._actions if not isinstance(one, argparse._HelpAction)]


def _parameter(action: argparse.Action, *, required: bool) -> inspect.Parameter:
    is_flag = action.nargs == 0
    kind = bool if is_flag else _TYPES[action.type]
    shown = str(action.default) if action.default not in (None, False) else False
    option = typer.Option(*action.option_strings, help=action.help, show_default=shown)
    default: Any = False if is_flag else None
    return inspect.Parameter(
        action.dest,
        inspect.Parameter.KEYWORD_ONLY,
        annotation=Annotated[kind if required or is_flag else kind | None, option],
        default=inspect.Parameter.empty if required else default,
    )
