"""Functions and parameters of columns from flat options, as Flink and Spark SQL users write them.

    fields.<column>.agg = <function>
    fields.<column>.<function>.<parameter> = <value>

Keys are matched without regard to case, since Spark hands them over in lower case. Columns may have
dots in their names: the longest column name that leaves a well-formed rest is meant.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from foundation.errors import SchemaError
from foundation.suggestions import did_you_mean

_PREFIX = "fields."
_FUNCTION = "agg"


@dataclass(frozen=True, kw_only=True)
class FunctionParameter:
    """One `fields.<column>.<function>.<parameter> = <value>`; `key` is the option as written."""

    key: str
    function: str
    name: str
    value: str


@dataclass(kw_only=True)
class ColumnOptions:
    """What the options say about one column; the function is None if they do not say."""

    function: str | None = None
    parameters: list[FunctionParameter] = field(default_factory=list)


def read_column_options(
    options: Mapping[str, str], columns: Sequence[str]
) -> dict[str, ColumnOptions]:
    """Return the options by column, for the columns that have any.

    SchemaError for an option of another form and for one of a column that is not there.
    """
    by_column: dict[str, ColumnOptions] = {}
    for key, value in options.items():
        column, rest = _split(key, columns)
        column_options = by_column.setdefault(column, ColumnOptions())
        if rest.casefold() == _FUNCTION:
            column_options.function = value
        else:
            function, name = rest.split(".")
            column_options.parameters.append(
                FunctionParameter(key=key, function=function, name=name.casefold(), value=value)
            )
    return by_column


def _split(key: str, columns: Iterable[str]) -> tuple[str, str]:
    """Return the column that an option is for, and what follows the column's name."""
    if not key.casefold().startswith(_PREFIX):
        raise _unknown_option(key)
    path = key[len(_PREFIX) :]
    candidates = sorted(
        (column for column in columns if path.casefold().startswith(f"{column.casefold()}.")),
        key=len,
        reverse=True,
    )
    for column in candidates:
        rest = path[len(column) + 1 :]
        if _is_well_formed(rest):
            return column, rest
    if candidates:
        raise _unknown_option(key)
    name = path.rsplit(".", 1 if path.casefold().endswith(f".{_FUNCTION}") else 2)[0]
    raise SchemaError(
        f"option '{key}' is for a column '{name}', which is not declared"
        f"{did_you_mean(name, columns)}"
    )


def _is_well_formed(rest: str) -> bool:
    parts = rest.split(".")
    return rest.casefold() == _FUNCTION or (len(parts) == 2 and all(parts))


def _unknown_option(key: str) -> SchemaError:
    return SchemaError(
        f"unknown option '{key}'; options are fields.<column>.agg and"
        " fields.<column>.<function>.<parameter>"
    )
