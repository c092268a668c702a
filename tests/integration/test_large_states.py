"""Keys whose stored states are, together, more than one Arrow column holds: 2 GiB, here 8 MiB.

Rows that wait in memory to be written are far less than that, and so is what a scan reads at a
time, as in life.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pyarrow as pa
import pytest

import tallybook as tb
from foundation.errors import ColumnTooLarge
from locks.store.embedded_zookeeper import EmbeddedZooKeeper
from merge_engine.bucket.options import BucketOptions
from merge_engine.encoding import ragged
from server.tablet.config import ServerConfig
from server.tablet.tablet_server import TabletServer
from tests.support.zookeeper_server import chroot, zookeeper_server

SCHEMA = (
    tb.SchemaBuilder()
    .column("k", "BIGINT")
    .agg_column("v", "ARRAY<BINARY>", "array_agg")
    .agg_column("n", "BIGINT", "count")
    .primary_key("k")
    .build()
)
KEYS = 2_000
HOLDS = 8 << 20
STATE = b"x" * 10_000
OPTIONS = BucketOptions(working_set_bytes=1 << 20, behind_max_bytes=1 << 20)

Create = Callable[[], tb.AnyTable]


@pytest.fixture(scope="module")
def zookeeper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedZooKeeper]:
    with zookeeper_server(tmp_path_factory.mktemp("states")) as running:
        yield running


@pytest.fixture(params=["embedded", "servers"])
def table(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tb.AnyTable]:
    """Return a table whose states are, together, more than twice what a column holds."""
    with ExitStack() as stack:
        if request.param == "embedded":
            table: tb.AnyTable = stack.enter_context(
                tb.Table.create(tmp_path / "t", SCHEMA, buckets=1, options=OPTIONS)
            )
        else:
            address = chroot(request.getfixturevalue("zookeeper"))
            config = ServerConfig(
                zookeeper=address,
                logs=str(tmp_path / "logs"),
                views=tmp_path / "views",
                options=OPTIONS,
            )
            stack.enter_context(TabletServer(config))
            client = stack.enter_context(tb.connect(address))
            table = client.create_table("t", SCHEMA, buckets=1)
        with table.writer(owner_id="etl", columns=["v", "n"]) as writer:
            for batch, first in enumerate(range(0, KEYS, 50)):
                keys = list(range(first, first + 50))
                writer.write(batch, {"k": keys, "v": [STATE] * 50, "n": [1] * 50})
        monkeypatch.setattr(ragged, "_LARGEST_OFFSET", HOLDS)
        yield table


def rows(keys: int = KEYS) -> pa.Table:
    return pa.table({"k": list(range(keys)), "v": [b"y"] * keys, "n": [1] * keys})


@pytest.mark.parametrize("redo", [False, True])
def test_a_batch_whose_stored_rows_are_too_large_is_written_in_parts(
    table: tb.AnyTable, tmp_path: Path, *, redo: bool
) -> None:
    """Its writer starts over with smaller parts, until they fit; and keeps to these."""
    more = {"redo": tb.RedoLog.open(str(tmp_path / "redo"))} if redo else {}
    with table.writer(owner_id="etl", columns=["v", "n"], **more) as writer:
        batch = writer.next_batch()
        assert writer.write(batch, tb.Rows(data=rows()))
        starts = writer.progress.starts
        assert starts > 1
        assert writer.write(batch + 1, tb.Rows(data=rows()))
        assert writer.progress.starts == starts
    found = table.lookup({"k": list(range(KEYS))}, isolation="committed")
    assert found["n"].to_pylist() == [3] * KEYS
    assert found["v"].to_pylist() == [[STATE, b"y", b"y"]] * KEYS


def test_look_ups_and_scans_of_too_large_rows_are_split(table: tb.AnyTable) -> None:
    keys = list(range(KEYS - 1, -1, -1))
    for isolation in ("latest", "committed"):
        found = table.lookup({"k": [*keys, KEYS]}, ["n", "v"], isolation=isolation, found=True)
        assert found["k"].to_pylist() == [*keys, KEYS]
        assert found["v"].to_pylist() == [*([[STATE]] * KEYS), None]
        assert found["_found"].to_pylist() == [*([True] * KEYS), False]
    assert table.lookup({"k": keys}, ["n"])["n"].to_pylist() == [1] * KEYS
    assert table.to_arrow().num_rows == KEYS


def test_a_row_that_no_column_holds_is_an_error_that_says_what_to_do(table: tb.AnyTable) -> None:
    large = pa.table({"k": [1], "v": [b"z" * HOLDS], "n": [1]})
    with table.writer(owner_id="etl", columns=["v", "n"]) as writer:
        batch = writer.next_batch()
        with pytest.raises(ColumnTooLarge, match="send fewer rows"):
            writer.write(batch, tb.Rows(data=large))
        assert writer.write(batch, tb.Rows(data=rows(10)))
    assert table.lookup({"k": [1]})["v"].to_pylist() == [[STATE, b"y"]]
