"""What readers of Spark can be told, before there is any Spark: options, and what is wrong."""

from typing import Any

import pytest

from foundation.errors import InvalidInput
from recovery.reader.cut import Cut
from recovery.reader.isolation import Isolation
from sink.source.options import ReaderOptions

CUT = str(Cut(table="t-1", epoch=7, time_ms=1_000))


def options_of(**given: str) -> ReaderOptions:
    named = {name.replace("__", "."): value for name, value in given.items()}
    return ReaderOptions.of({"table": "orders", "zookeeper": "zk:1", **named}, {})


def test_a_batch_reads_what_is_committed_now_unless_told_otherwise() -> None:
    given = options_of()
    assert (given.table, given.recipe.address) == ("orders", "zk:1")
    assert (given.columns, given.isolation, given.at, given.lease) == (
        *(None, Isolation.COMMITTED, None, None),
    )
    assert given.start is None
    assert not given.push_filters


def test_the_case_of_names_does_not_matter() -> None:
    given = ReaderOptions.of({"TABLE": "orders", "ZooKeeper": "zk:1", "PUSHFILTERS": "TRUE"}, {})
    assert given.table == "orders"
    assert given.push_filters


@pytest.mark.parametrize(
    ("text", "columns"),
    [
        ("k", ("k",)),
        (" b , a,k", ("b", "a", "k")),
        ('["a, b", "c"]', ("a, b", "c")),
        (' ["[x]"]', ("[x]",)),
        ("", ()),
    ],
)
def test_columns_are_a_list_with_commas_or_in_json(text: str, columns: tuple[str, ...]) -> None:
    assert options_of(columns=text).columns == columns


def test_the_environment_says_what_the_options_do_not() -> None:
    environment = {
        "TALLYBOOK_ZOOKEEPER": "env:1",
        "TALLYBOOK_TOKEN": "env-token",
        "TALLYBOOK_ZOOKEEPER_CREDENTIALS": "env-user:env-password",
    }
    by_environment = ReaderOptions.of({"table": "orders"}, environment).recipe
    assert by_environment.address == "env:1"
    assert by_environment.settings["server_credentials"].token == "env-token"
    assert by_environment.settings["credentials"] == ("env-user", "env-password")
    own = {"zookeeper": "zk:1", "token": "own", "zookeeperUser": "me", "zookeeperPassword": "mine"}
    by_options = ReaderOptions.of({"table": "orders", **own}, environment).recipe
    assert by_options.address == "zk:1"
    assert by_options.settings["server_credentials"].token == "own"
    assert by_options.settings["credentials"] == ("me", "mine")


def test_settings_of_the_object_store_and_deadlines_reach_the_connection() -> None:
    settings = options_of(storage__region="eu", deadline="2 s").recipe.settings
    assert settings["storage_settings"] == {"region": "eu"}
    assert (settings["deadline_s"], settings["attempt_s"]) == (2.0, 2.0)
    assert options_of(deadline="5 min").recipe.settings["attempt_s"] == 10.0


def test_what_spark_adds_by_itself_is_passed_over() -> None:
    assert options_of(path="/somewhere", checkpointLocation="/there").table == "orders"


def test_a_cut_is_read_where_it_is_given() -> None:
    assert str(options_of(at=CUT).at) == CUT
    assert options_of(start=CUT).start == CUT


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"table": ""}, r"which table\? Say \.option\(\"table\", \"\.\.\.\"\)$"),
        ({"zookeeper": ""}, "ZooKeeper's address is missing.*TALLYBOOK_ZOOKEEPER"),
        ({"colums": "k"}, "no option 'colums'; did you mean 'columns'"),
        ({"warehouse": "k"}, "no option 'warehouse'; there are table, zookeeper, token"),
        ({"columns": '["a"'}, "begins as a JSON list, and is none"),
        ({"columns": '["a", 1]'}, "JSON list of names"),
        ({"isolation": "dirty"}, "'committed' or 'latest', not 'dirty'"),
        ({"at": "yesterday"}, r"'yesterday' is no cut.*str\(table\.cut\(\)\)"),
        ({"at": CUT[:-3]}, "no cut, or it was cut short"),
        ({"deadline": "soon"}, "deadline = 'soon' is no duration"),
        ({"pushFilters": "maybe"}, "`pushFilters` is true or false, not 'maybe'"),
        ({"zookeeperPassword": "hush"}, "Give `zookeeperUser` with `zookeeperPassword`"),
        ({"mode": "upserts"}, "^`mode`: only for streams, which say where they start"),
        ({"maxRowsPerTrigger": "5"}, "^`maxRowsPerTrigger`: only for streams"),
        ({"start": "full", "mode": "all"}, "`mode` is `changes` or `upserts`, not 'all'"),
        ({"start": "full", "maxRowsPerTrigger": "0"}, "`maxRowsPerTrigger` is a number of rows"),
        ({"start": "full", "at": CUT}, "leave `at` and `isolation`"),
        ({"start": "full", "isolation": "latest"}, "leave `at` and `isolation`"),
        ({"start": "monday"}, "'monday' is no cut"),
        ({"provider": "tallybook"}, "CREATE TABLE cannot be used.*CREATE TEMPORARY VIEW"),
    ],
)
def test_a_wrong_option_is_an_error_that_says_what_to_write(
    given: dict[str, str], words: str
) -> None:
    with pytest.raises(InvalidInput, match=words) as refused:
        options_of(**given)
    assert "hush" not in str(refused.value)


def test_a_table_of_sparks_own_catalog_has_no_options() -> None:
    with pytest.raises(InvalidInput, match=r"which table.*In SQL, CREATE TABLE cannot be used"):
        ReaderOptions.of({}, {})


def test_secrets_are_not_in_what_is_shown() -> None:
    secrets: dict[str, Any] = {"token": "hush-1", "zookeeperPassword": "hush-2"}
    given = options_of(zookeeperUser="me", storage__secret_access_key="hush-3", **secrets)
    assert "hush" not in repr(given)
    assert "hush" not in str(given.recipe)
