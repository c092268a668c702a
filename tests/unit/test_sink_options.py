"""The Spark sink before any Spark: options, and what they are called."""

import pickle
from typing import Any

import pytest

from foundation.errors import InvalidInput
from sink.aggregate_sink import AggregateSink
from sink.options import parse_duration_ms


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"recovery": "redoo"}, r"recovery is 'undo' or 'redo', not 'redoo'"),
        ({"route": "driverr"}, r"not 'driverr'.*'driver'"),
        ({"bad_rows": "drop"}, "bad_rows is 'fail' or 'quarantine'"),
        ({"bad_rows": "quarantine"}, "quarantine_path"),
        ({"recovery": "redo"}, "redo_location"),
        ({"owner": "etl"}, r"no setting 'owner'.*owner_id"),
        ({"options": {"client.column-lock.owner": "x"}}, r"unknown option.*owner-id"),
        ({"options": {"client.column-lock.ttl": "soon"}}, r"'soon' is no duration"),
        ({"columns": "orders"}, "list of column names"),
        ({"owner_id": "write:orders"}, "those of tb.write"),
    ],
)
def test_a_wrong_option_is_an_error_that_names_it(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        AggregateSink("127.0.0.1:1", "t", **{"columns": ["a"], **settings})


def test_spark_connect_is_refused_without_an_owner_id() -> None:
    sink = AggregateSink("127.0.0.1:1", "t", columns=["a"], check=False)
    with pytest.raises(InvalidInput, match="Spark Connect"):
        pickle.dumps(sink)


@pytest.mark.parametrize(
    ("text", "milliseconds"),
    [("10 min", 600_000), ("30s", 30_000), ("250 ms", 250), ("2 h", 7_200_000), ("5000", 5_000)],
)
def test_durations_have_units(text: str, milliseconds: int) -> None:
    assert parse_duration_ms("client.column-lock.ttl", text) == milliseconds
