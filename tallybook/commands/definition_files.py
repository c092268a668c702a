"""Tables as files describe them: JSON, or a statement of SQL's DDL.

JSON has the words of the API:

    {"columns": [{"name": "k", "type": "BIGINT"},
                 {"name": "n", "type": "BIGINT", "function": "sum", "parameters": {}}],
     "primary_key": ["k"], "partitioned_by": [], "buckets": 4, "column_locks": true, "options": {}}

DDL is what Flink and Spark users write; functions are options, as
`merge_engine.schema.connector_options` reads them, beside `buckets` and `column_locks`:

    CREATE TABLE [IF NOT EXISTS] name (
        k BIGINT, n BIGINT, PRIMARY KEY (k)
    ) [PARTITIONED BY (...)] [WITH ('fields.n.agg' = 'sum', 'buckets' = '8')]
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from foundation.errors import InvalidInput
from foundation.suggestions import did_you_mean
from merge_engine.schema.builder import SchemaBuilder
from merge_engine.schema.ddl import read_columns
from merge_engine.schema.schema import Schema
from server.protocol.definitions import RETENTION

_OF_TABLE = (
    "name",
    "columns",
    "primary_key",
    "partitioned_by",
    "buckets",
    "column_locks",
    "options",
)
_OF_COLUMN = ("name", "type", "function", "parameters", "nullable")
_QUOTED = r"`(?:[^`]|``)+`|'(?:[^']|'')*'|\"[^\"]*\""
_STATEMENT = re.compile(r"CREATE\s+TABLE\s+(IF\s+NOT\s+EXISTS\s+)?([\w.-]+|`[^`]+`)\s*", re.I)
# What is in quotes is no comment, so quotes are looked for first. A quote may be left open.
_COMMENT = re.compile(rf"{_QUOTED}|--[^\n]*|/\*.*?\*/", re.S)
_KEY = re.compile(r"PRIMARY\s+KEY\s*\((.*)\)(\s+NOT\s+ENFORCED)?", re.I | re.S)
_CLAUSE = re.compile(r"\s*(PARTITIONED\s+BY|WITH|OPTIONS|TBLPROPERTIES)\s*", re.I)
_OPTION = re.compile(r"\s*'((?:[^']|'')*)'\s*=\s*'((?:[^']|'')*)'\s*")
_FIELDS = "fields."
# Options may be anything, for others to read; but not what is meant for one of these.
_KNOWN_OPTIONS = ("buckets", "column_locks", RETENTION)


@dataclass(frozen=True, kw_only=True)
class DescribedTable:
    """What a file says of a table; what it does not say is None."""

    schema: Schema
    name: str | None = None
    buckets: int | None = None
    column_locks: bool | None = None
    if_not_exists: bool = False
    options: Mapping[str, str] = field(default_factory=dict)


def read_definition(path: Path) -> DescribedTable:
    """Return what a file describes; InvalidInput or SchemaError if it is neither, or wrong."""
    try:
        text = path.read_text()
    except UnicodeDecodeError as exc:
        raise InvalidInput(f"{path} has no text in it: {exc}") from exc
    return from_json(text) if text.lstrip().startswith("{") else from_ddl(text)


def from_json(text: str) -> DescribedTable:
    """Return the table of a JSON document."""
    try:
        document = json.loads(text)
    except ValueError as exc:
        raise InvalidInput(f"this is not JSON: {exc}") from exc
    _check_names(document, _OF_TABLE, "a table")
    builder = SchemaBuilder()
    for column in _listed(document, "columns"):
        if not isinstance(column, dict):
            raise InvalidInput(f"a column is an object with a name and a type, not {column!r}")
        _check_names(column, _OF_COLUMN, f"column {column.get('name')!r}")
        _add_column(builder, column)
    builder.primary_key(*_listed(document, "primary_key"))
    if document.get("partitioned_by"):
        builder.partitioned_by(*_listed(document, "partitioned_by"))
    return _described(
        builder,
        name=document.get("name"),
        options={str(k): _text(v) for k, v in document.get("options", {}).items()},
        buckets=document.get("buckets"),
        column_locks=document.get("column_locks"),
    )


def _add_column(builder: SchemaBuilder, column: Mapping[str, Any]) -> None:
    for word in ("name", "type"):
        if not isinstance(column.get(word), str):
            raise InvalidInput(f"a column has a {word}, which is a text: {dict(column)}")
    if "function" not in column:
        builder.column(column["name"], column["type"])
        return
    parameters = column.get("parameters", {})
    builder.agg_column(column["name"], column["type"], column["function"], **parameters)


def from_ddl(text: str) -> DescribedTable:
    """Return the table of a CREATE TABLE statement."""
    text = _COMMENT.sub(_without_comment, text).strip().rstrip(";").rstrip()
    begun = _STATEMENT.match(text)
    if begun is None:
        raise InvalidInput(
            "this is neither JSON nor DDL: it begins with neither { nor CREATE TABLE"
        )
    inside, rest = _parenthesis(text[begun.end() :])
    columns, key = [], []
    for part in _split(inside):
        found = _KEY.fullmatch(part.strip())
        if found is None:
            columns.append(part)
        else:
            key = _names(found[1])
    builder = SchemaBuilder()
    for column in read_columns(", ".join(columns)):
        # SQL's primary key is never null, whether that is said or not.
        nullable = column.nullable and column.name not in key
        builder.column(column.name, column.type, nullable=nullable)
    if key:
        builder.primary_key(*key)
    options: dict[str, str] = {}
    while rest.strip():
        clause = _CLAUSE.match(rest)
        if clause is None:
            raise InvalidInput(f"cannot read {rest.strip()!r}: PARTITIONED BY or WITH may follow")
        inside, rest = _parenthesis(rest[clause.end() :])
        if clause[1].upper().startswith("PARTITIONED"):
            builder.partitioned_by(*_names(inside))
        else:
            options |= dict(map(_option, _split(inside)))
    return _described(
        builder,
        name=begun[2].strip("`"),
        options=options,
        buckets=options.pop("buckets", None),
        column_locks=options.pop("column_locks", None),
        if_not_exists=begun[1] is not None,
    )


def _without_comment(found: re.Match[str]) -> str:
    return " " if found[0].startswith(("--", "/*")) else found[0]


def _described(
    builder: SchemaBuilder,
    *,
    name: Any,
    options: Mapping[str, str],
    buckets: Any,
    column_locks: Any,
    if_not_exists: bool = False,
) -> DescribedTable:
    builder.options({k: v for k, v in options.items() if k.casefold().startswith(_FIELDS)})
    if (buckets is not None and not str(buckets).isascii()) or not str(buckets or 1).isdigit():
        raise InvalidInput(f"buckets is a number, not {buckets!r}")
    if column_locks is not None and str(column_locks).lower() not in ("true", "false"):
        raise InvalidInput(f"column_locks is true or false, not {column_locks!r}")
    others = {k: v for k, v in options.items() if not k.casefold().startswith(_FIELDS)}
    for option in others:
        ours = option == RETENTION or "." in option
        hint = "" if ours else did_you_mean(option, _KNOWN_OPTIONS)
        if hint:
            raise InvalidInput(f"no table has the option {option!r}{hint}")
    return DescribedTable(
        schema=builder.build(),
        name=name,
        buckets=None if buckets is None else int(buckets),
        column_locks=None if column_locks is None else str(column_locks).lower() == "true",
        if_not_exists=if_not_exists,
        options=others,
    )


def _parenthesis(text: str) -> tuple[str, str]:
    """Return what is in the parentheses that the text begins with, and what follows them."""
    if not text.startswith("("):
        raise InvalidInput(f"'(' was expected, not {text[:20]!r}")
    depth = 0
    for at, token in _tokens(text):
        depth += (token == "(") - (token == ")")
        if depth == 0:
            return text[1:at], text[at + 1 :]
    raise InvalidInput("a ')' is missing at the end")


def _split(text: str) -> list[str]:
    """Return the parts between commas that are in no parentheses, angle brackets or quotes."""
    depth, parts, since = 0, [], 0
    for at, token in _tokens(text):
        depth += (token in "(<") - (token in ")>")
        if token == "," and not depth:
            parts.append(text[since:at])
            since = at + 1
    return [*parts, text[since:]]


def _tokens(text: str) -> Iterator[tuple[int, str]]:
    """Yield the punctuation that is in no quotes, with its place."""
    for found in re.finditer(rf"{_QUOTED}|[(),<>]", text):
        if found[0] in "(),<>":
            yield found.start(), found[0]


def _names(text: str) -> list[str]:
    return [name.strip().strip("`").replace("``", "`") for name in _split(text)]


def _option(text: str) -> tuple[str, str]:
    found = _OPTION.fullmatch(text)
    if found is None:
        raise InvalidInput(f"cannot read the option {text.strip()!r}: write 'name' = 'value'")
    key, value = (one.replace("''", "'") for one in found.groups())
    return key, value


def _listed(document: Mapping[str, Any], name: str) -> list[Any]:
    found = document.get(name)
    if not isinstance(found, list):
        raise InvalidInput(f"a table has a list of {name}")
    return found


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _check_names(document: Mapping[str, Any], known: tuple[str, ...], what: str) -> None:
    for name in document:
        if name not in known:
            hint = did_you_mean(name, known) or f"; there are {', '.join(known)}"
            raise InvalidInput(f"{what} has no {name!r}{hint}")
