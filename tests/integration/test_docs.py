"""The documentation is true: its code runs, its options exist, its links lead somewhere."""

import dataclasses
import inspect
import re
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest

from foundation import errors
from server.__main__ import parser
from server.launch.local_cluster import LocalCluster
from sink.aggregate_sink import AggregateSink
from sink.options import OWNER_ID, TTL, SinkOptions
from sink.source.options import OPTIONS
from sink.tiering.options import TieringOptions
from tallybook import cli
from tallybook.commands import tier
from tallybook.connecting import Reach, connect
from tests.support.documented import (
    NAMES,
    ROOT,
    World,
    all_options,
    check_command,
    options_of,
    page,
    values_in,
)
from tests.support.spark_session import quiet_spark

# What has the form of an option, and is one of another program.
_FOREIGN = {"--preload", "--supervise", "--ulimit"}
REQUIRED = ["--zookeeper", "z", "--logs", "l", "--views", "v"]
_OPTION = r"(?<![\w-])--[a-z][a-z-]*"


@pytest.fixture(scope="module")
def world(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[World]:
    directory = tmp_path_factory.mktemp("docs")
    with LocalCluster(directory, servers=2) as local:
        yield World(local, directory, lambda: request.getfixturevalue("spark"))


@pytest.fixture(scope="module")
def spark() -> Iterator[Any]:
    with quiet_spark("local[2]") as session:
        yield session


@pytest.mark.spark
@pytest.mark.parametrize("name", [name for name in NAMES if page(name).runs])
def test_the_code_of_a_page_runs_and_prints_what_the_page_says(name: str, world: World) -> None:
    world.run(page(name))


# --- Commands and options -------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_commands_and_options_in_the_text_exist(name: str) -> None:
    known = all_options() | _FOREIGN
    for line, code in page(name).codes():
        words = code.replace("...", "").split()
        if words[0] in ("tallybook", "make") and re.match("[a-z-]", "".join(words[1:2])):
            check_command(words)
        unknown = set(re.findall(_OPTION, code)) - known
        assert not unknown, f"{name}:{line}: there is no option {unknown}"


def test_every_option_of_a_server_is_documented() -> None:
    said = {
        option
        for name in NAMES
        for text in (
            *(code for _, code in page(name).codes()),
            *(block.text for block in page(name).blocks if block.kind == "sh"),
        )
        for option in re.findall(_OPTION, text)
        if name.startswith("docs/")
    }
    assert set(options_of("serve")) - said - {"--help"} == set()


def test_options_in_tables_have_the_defaults_that_servers_have() -> None:
    seen = set()
    for name in NAMES:
        for row in (row for table in page(name).tables() for row in table if "default" in row):
            first = next(iter(row.values()))
            options = re.findall(r"`(--[a-z-]+)`", first)
            if options:
                defaults = [parser().get_default(o[2:].replace("-", "_")) for o in options]
                assert (name, options, values_in(row["default"])) == (name, options, defaults)
                seen.update(options)
    assert {"--scanner-ttl", "--max-puts", "--snapshot-interval", "--host"} <= seen


def test_the_table_of_settings_has_every_option_of_a_server_and_of_a_client() -> None:
    settings = page("docs/operating.md")
    told = [re.findall(r"`(--[a-z-]+)`", row["option"]) for row in settings.table("option")]
    of_a_process = {f"--{name.replace('_', '-')}" for name in vars(parser().parse_args(REQUIRED))}
    assert [len(options) for options in told] == [1] * len(told)
    assert sorted(option for [option] in told) == sorted(of_a_process)
    arguments = inspect.signature(connect).parameters
    assert {
        row["argument"].strip("`"): values_in(row["default"]) for row in settings.table("argument")
    } == {name: [one.default] for name, one in arguments.items() if name != "address"}


def test_the_options_of_a_sink_are_those_that_it_takes() -> None:
    rows = {}
    configured = set()
    for row in page("docs/sink.md").table("argument"):
        argument, *others = re.findall(r"`([^`]+)`", row["argument"])
        rows[argument] = row["default"]
        configured.update(others)
    assert configured == {OWNER_ID, TTL}
    defaults = {
        one.name: one.default if one.default is not dataclasses.MISSING else {}
        for one in dataclasses.fields(SinkOptions)
    }
    arguments = inspect.signature(AggregateSink).parameters
    defaults |= {name: arguments[name].default for name in ("connection", "options")}
    assert {
        name: values_in(cell, milliseconds=name.endswith("_ms")) for name, cell in rows.items()
    } == {name: [default] for name, default in defaults.items()}


def test_the_options_of_tiering_are_those_that_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    told, options = {}, set()
    for row in page("docs/tiering.md").table("argument of `tb.tiering.run`"):
        [argument], option = (re.findall(r"`([^`]+)`", cell) for cell in [*row.values()][:2])
        told[argument] = values_in(row["default"]) if row["default"] else []
        options.update(option)
    assert told == {
        one.name: [] if one.default is one.default_factory else [_default(one)]
        for one in dataclasses.fields(TieringOptions)
    }
    # How a cluster is reached, and what is the command's own, is told below the table.
    others = {"--zookeeper", "--token-file", "--tls-root", "--deadline", "--metrics-port"}
    assert options - {"TABLE"} | others | {"--master", "--help"} == set(options_of("tier"))
    monkeypatch.setattr(tier, "run", lambda _, options, **__: given.append(options))
    given: list[TieringOptions] = []
    monkeypatch.setattr(Reach, "connect", lambda *_, **__: nullcontext())
    words = ["tier", "accounts", "--to", "lake", "--zookeeper", "127.0.0.1:1"]
    assert cli.main(words) == 0
    assert given == [TieringOptions(table="accounts", to="lake")], "both have the same defaults"


def _default(field: dataclasses.Field[Any]) -> Any:
    made = field.default_factory
    return field.default if made is dataclasses.MISSING else made()


def test_the_options_of_spark_readers_are_those_that_they_take() -> None:
    told: dict[str, str | None] = {}
    for table in page("docs/spark-readers.md").tables():
        for row in table if "option" in table[0] else ():
            default = row["default"].strip("`")
            names = re.findall(r"`([^`]+)`", row["option"])
            told |= dict.fromkeys(names, None if default == "none" else default)
    assert told.pop("storage.*") is told.pop("lake.*") is None
    # Those of streams are named among all, and have their own table.
    assert told == dict(OPTIONS)


def test_the_errors_that_troubleshooting_goes_by_are_errors() -> None:
    named = {
        code
        for table in page("docs/troubleshooting.md").tables()
        for row in table
        for code in re.findall(r"`([A-Z][a-z]+(?:[A-Z][a-z]+)+)`", row["you see"])
    }
    assert {"LockHeld", "CutTooOld"} <= named
    assert named - {"InterruptedException"} <= set(vars(errors))


# --- Links ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_links_lead_somewhere(name: str) -> None:
    for line, target in page(name).links():
        if re.match(r"https?://", target):
            continue
        path, _, anchor = target.partition("#")
        there = (ROOT / name).parent / path if path else ROOT / name
        assert there.exists(), f"{name}:{line}: there is no {target}"
        if anchor:
            anchors = page(str(there.resolve().relative_to(ROOT))).anchors()
            assert anchor in anchors, f"{name}:{line}: there is no heading for {target}"
