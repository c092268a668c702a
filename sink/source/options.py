"""What a reader of Spark can be told: the options of the data source, as Spark has them, as text.

Names are those of Spark's own sources: the case does not matter.
"""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from foundation.errors import InvalidInput
from foundation.suggestions import did_you_mean
from recovery.reader.cut import Cut
from recovery.reader.isolation import Isolation
from server.client.cluster import Recipe
from server.protocol.environment import (
    TLS_CERTIFICATE_VARIABLE,
    TLS_KEY_VARIABLE,
    credentials_from,
    find_address,
    token_from,
)
from sink.lake.opening import Place
from sink.options import parse_duration_ms

FULL, EARLIEST, LATEST = "full", "earliest", "latest"
CHANGES, UPSERTS = "changes", "upserts"
_MODES = (CHANGES, UPSERTS)
_STORAGE, _LAKE = "storage.", "lake."
_OF_STREAMS = ("start", "mode", "maxRowsPerTrigger", "leaseDuration")
# All options, with what they are unless they are given.
OPTIONS: Mapping[str, str | None] = {
    **dict.fromkeys(("table", "zookeeper", "token", "tlsRoot", "tlsCertificate", "tlsKey")),
    **dict.fromkeys(("zookeeperUser", "zookeeperPassword")),
    "deadline": "30 s",
    **dict.fromkeys(("columns", "keys")),
    "isolation": Isolation.COMMITTED.value,
    **dict.fromkeys(("at", "lease", "lake", "lakeVersion")),
    "pushFilters": "false",
    "start": None,
    "mode": CHANGES,
    "maxRowsPerTrigger": None,
    "leaseDuration": "24 h",
}
# What Spark adds by itself.
_OF_SPARK = frozenset({"path", "checkpointlocation"})
# What it adds when a table of its own catalog is created.
_OF_CATALOG = frozenset({"provider", "option.table"})
_NO_CATALOG = (
    "CREATE TABLE cannot be used: Spark keeps no options for sources in Python. Say CREATE "
    "TEMPORARY VIEW name USING tallybook OPTIONS (...)"
)


@dataclass(frozen=True, kw_only=True)
class ReaderOptions:
    """`start`: None for a batch. `lease`: one that the caller holds or, of a stream, its own.

    `keys`: by column, the only values that are wanted. `push_filters`: see
    `data_source.FilteredRows`. `lake`: where a copy of the table is, which is read as far as it
    goes.
    """

    table: str
    recipe: Recipe
    columns: tuple[str, ...] | None = None
    isolation: Isolation = Isolation.COMMITTED
    at: Cut | None = None
    lease: str | None = None
    keys: Mapping[str, Sequence[Any]] | None = None
    push_filters: bool = False
    start: str | None = None
    mode: str = CHANGES
    max_rows: int | None = None
    lease_duration_ms: int = 24 * 3_600_000
    lake: Place | None = None

    @classmethod
    def of(
        cls, options: Mapping[str, str], environment: Mapping[str, str] | None = None
    ) -> "ReaderOptions":
        """Return what the options say, and the environment where they say nothing."""
        environment = os.environ if environment is None else environment
        given = {name.casefold(): value for name, value in options.items()}
        _check_names(given)
        get = {name: given.get(name.casefold(), default) for name, default in OPTIONS.items()}
        if not get["table"]:
            hint = "" if given else f". In SQL, {_NO_CATALOG}"
            raise InvalidInput(f'which table? Say .option("table", "..."){hint}')
        at = get["at"]
        start = get["start"]
        misplaced = tuple(name for name in _OF_STREAMS if name.casefold() in given)
        if start is None and misplaced:
            raise InvalidInput(
                f"{_listed(misplaced)}: only for streams, which say where they start: "
                f'.option("start", "{FULL}"), "{EARLIEST}", "{LATEST}", or a cut'
            )
        start = None if start is None else _start(start)
        if start is not None and (at is not None or "isolation" in given):
            raise InvalidInput(
                "a stream has committed changes from `start` on: leave `at` and `isolation`"
            )
        if start is not None and get["keys"] is not None:
            raise InvalidInput("a stream has the changes of all keys: leave `keys`")
        if get["keys"] is not None and get["lease"] is not None:
            raise InvalidInput("`keys` are looked up at the leaders: leave `lease`")
        if get["lake"] is not None:
            _check_lake(get, given)
        return cls(
            table=get["table"],
            recipe=_recipe(get, given, environment),
            columns=_columns(get["columns"]),
            isolation=Isolation.of(get["isolation"] or ""),
            at=None if at is None else Cut.of(at),
            lease=get["lease"],
            keys=_keys(get["keys"]),
            push_filters=_flag("pushFilters", get["pushFilters"]),
            start=start,
            mode=_mode(get["mode"]),
            max_rows=_count("maxRowsPerTrigger", get["maxRowsPerTrigger"]),
            lease_duration_ms=parse_duration_ms("leaseDuration", get["leaseDuration"] or ""),
            lake=None if get["lake"] is None else _place(get["lake"], given),
        )


def _check_names(given: Mapping[str, str]) -> None:
    if not _OF_CATALOG.isdisjoint(given):
        raise InvalidInput(_NO_CATALOG)
    known = {name.casefold() for name in OPTIONS}
    for name in given:
        if name not in known and name not in _OF_SPARK and not name.startswith((_STORAGE, _LAKE)):
            near = did_you_mean(name, OPTIONS) or f"; there are {', '.join(OPTIONS)}"
            raise InvalidInput(f"there is no option '{name}'{near}")


def _recipe(
    get: Mapping[str, str | None], given: Mapping[str, str], environment: Mapping[str, str]
) -> Recipe:
    user, password = get["zookeeperUser"], get["zookeeperPassword"]
    if password and not user:
        raise InvalidInput("whose password? Give `zookeeperUser` with `zookeeperPassword`")
    deadline_s = parse_duration_ms("deadline", get["deadline"] or "") / 1000
    shown = environment if get["tlsRoot"] else {}
    return Recipe.of(
        find_address(get["zookeeper"], '.option("zookeeper", "host:2181")', environment),
        token=get["token"] or token_from(environment),
        tls_root=get["tlsRoot"],
        tls_certificate=get["tlsCertificate"] or shown.get(TLS_CERTIFICATE_VARIABLE),
        tls_key=get["tlsKey"] or shown.get(TLS_KEY_VARIABLE),
        credentials=(user, password or "") if user else credentials_from(environment),
        deadline_s=deadline_s,
        attempt_s=min(10.0, deadline_s),
        storage_settings=_settings(_STORAGE, given),
    )


def _settings(prefix: str, given: Mapping[str, str]) -> dict[str, Any]:
    return {
        name.removeprefix(prefix): value for name, value in given.items() if name.startswith(prefix)
    }


def _place(location: str, given: Mapping[str, str]) -> Place:
    return Place.of(location, _settings(_LAKE, given))


def _check_lake(get: Mapping[str, str | None], given: Mapping[str, str]) -> None:
    for name in ("keys", "lease", "start"):
        if get[name] is not None:
            raise InvalidInput(f"a read with a copy in a lake is of all rows: leave `{name}`")
    if "isolation" in given and Isolation.of(get["isolation"] or "") is not Isolation.COMMITTED:
        raise InvalidInput("a read with a copy in a lake stands at a cut: leave `isolation`")


@dataclass(frozen=True, kw_only=True)
class VersionOptions:
    """A version of a copy in a lake, to be read as it was; no cluster is needed."""

    lake: Place
    version: int
    columns: tuple[str, ...] | None
    table: str | None = None

    @classmethod
    def of(cls, options: Mapping[str, str]) -> "VersionOptions | None":
        """Return what options say; None if they do not ask for a version."""
        given = {name.casefold(): value for name, value in options.items()}
        if "lakeversion" not in given:
            return None
        _check_names(given)
        unneeded = tuple(
            name
            for name in OPTIONS
            if name.casefold() in given and name not in ("lake", "lakeVersion", "columns", "table")
        )
        if "lake" not in given or unneeded:
            what = f"leave {_listed(unneeded)}" if unneeded else "say where: `lake`"
            raise InvalidInput(f"a version of a copy (`lakeVersion`) is read as it was: {what}")
        version = given["lakeversion"]
        if not version.isdecimal():
            raise InvalidInput(f"`lakeVersion` is a number of the lake's own, not {version!r}")
        return cls(
            lake=_place(given["lake"], given),
            version=int(version),
            columns=_columns(given.get("columns")),
            table=given.get("table"),
        )


def _columns(text: str | None) -> tuple[str, ...] | None:
    """Return the names: separated by commas or, if one of them has one, as a JSON list."""
    if text is None:
        return None
    if text.lstrip().startswith("["):
        try:
            names = json.loads(text)
        except ValueError as exc:
            raise InvalidInput(f"`columns` begins as a JSON list, and is none: {exc}") from exc
        if not all(isinstance(name, str) for name in names):
            raise InvalidInput("`columns` is a JSON list of names")
        return tuple(names)
    return tuple(name.strip() for name in text.split(",") if name.strip())


def keys_text(keys: Mapping[str, Iterable[Any]]) -> str:
    """Return the option `keys` for values as Python has them, also in arrays of NumPy and Arrow."""
    if not isinstance(keys, Mapping) or not all(map(_is_list, keys.values())):
        raise InvalidInput(
            f'`keys` has a list of values per column: {{"k": [1, 2]}}; it is not {keys!r}'
        )
    listed = {name: list(map(_plain, values)) for name, values in keys.items()}
    return json.dumps(listed, default=str)


def _is_list(values: object) -> bool:
    return isinstance(values, Iterable) and not isinstance(values, str | bytes | Mapping)


def _plain(value: Any) -> Any:
    """Return a scalar of NumPy or Arrow as Python's own."""
    for name in ("as_py", "item"):
        if callable(convert := getattr(value, name, None)):
            return convert()
    return value


def _keys(text: str | None) -> dict[str, list[Any]] | None:
    if text is None:
        return None
    try:
        keys = json.loads(text)
    except ValueError as exc:
        raise InvalidInput(f"`keys` is no JSON: {exc}") from exc
    if not isinstance(keys, dict) or not all(isinstance(one, list) for one in keys.values()):
        raise InvalidInput(
            f'`keys` is a JSON object with a list of values per column: {{"k": [1, 2]}}, not {text}'
        )
    return keys


def _start(text: str) -> str:
    """Return where a stream starts: a word, or a cut as it was given."""
    word = text.casefold()
    if word in (FULL, EARLIEST, LATEST):
        return word
    try:
        return str(Cut.of(text))
    except InvalidInput as exc:
        raise InvalidInput(
            f'`start` is "{FULL}", "{EARLIEST}", "{LATEST}", or a cut; and {exc}'
        ) from exc


def _mode(text: str | None) -> str:
    mode = (text or "").casefold()
    if mode not in _MODES:
        raise InvalidInput(f"`mode` is {_listed(_MODES)}, not {text!r}")
    return mode


def _flag(name: str, text: str | None) -> bool:
    flags = {"true": True, "false": False}
    flag = flags.get((text or "").casefold())
    if flag is None:
        raise InvalidInput(f"`{name}` is true or false, not {text!r}")
    return flag


def _count(name: str, text: str | None) -> int | None:
    if text is None:
        return None
    # Spark counts rows in 64 bits.
    if not (text.isascii() and text.isdecimal() and len(text) < 19 and int(text) > 0):
        raise InvalidInput(f"`{name}` is a number of rows, not {text!r}")
    return int(text)


def _listed(names: tuple[str, ...]) -> str:
    return " or ".join(f"`{name}`" for name in names)
