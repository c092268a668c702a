"""Tables of a cluster by their names: created once, renamed, emptied, described."""

from collections.abc import Iterator
from datetime import timedelta

import pytest

import tallybook as tb
from foundation.errors import InvalidInput, LockHeld, TableExists, TallybookError, UnknownTable
from tests.conftest import SUMS
from tests.support.day_tables import DATED, DAYS


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tb.LocalCluster]:
    with tb.LocalCluster(tmp_path_factory.mktemp("names")) as running:
        yield running


@pytest.fixture(scope="module")
def cluster(local: tb.LocalCluster) -> Iterator[tb.Cluster]:
    with local.connect() as client:
        yield client


def total(table: tb.AnyTable) -> int:
    return sum(table.to_arrow(["a"])["a"].to_pylist())


def test_a_table_is_created_once_and_what_differs_is_told(cluster: tb.Cluster) -> None:
    first = cluster.create_table("once", SUMS, buckets=2, if_not_exists=True)
    again = cluster.create_table("once", SUMS, buckets=2, if_not_exists=True)
    assert again.table_id == first.table_id
    with pytest.raises(TableExists, match="it has 2 buckets, not 3; it has column locks"):
        cluster.create_table("once", SUMS, buckets=3, column_locks=False, if_not_exists=True)
    with pytest.raises(TableExists, match=r"it has a column 'b', which is not wanted; it has no"):
        cluster.create_table("once", DAYS, buckets=2, if_not_exists=True)
    with pytest.raises(TableExists):
        cluster.create_table("once", SUMS, buckets=2)
    for wrong in ({"buckets": "x"}, {"buckets": True}, {"options": {"uid": "mine"}}):
        with pytest.raises(InvalidInput):
            cluster.create_table("twice", SUMS, **wrong)


def test_tables_describe_themselves(cluster: tb.Cluster) -> None:
    table = cluster.create_table("described", DAYS, buckets=2, column_locks=False)
    table.put({"day": "mon", "k": 1, "a": 1})
    found = table.describe()
    assert isinstance(found, tb.TableDescription)
    assert (found.partitions, found.buckets, found.column_locks) == (1, 2, False)
    assert [one for one in cluster.tables() if one.name == "described"] == [found]
    assert "in each of 1 partition, without column locks" in str(found)
    assert "a    BIGINT  sum" in str(found)
    assert "<td>sum</td>" in found._repr_html_()
    assert "described" in repr(table)


def test_a_retention_is_an_option_of_the_table(cluster: tb.Cluster) -> None:
    table = cluster.create_table("kept", DATED, buckets=1, retention="30d")
    assert table.describe().options == {"retention": "30 days"}
    again = cluster.create_table("kept", DATED, buckets=1, retention="30 days", if_not_exists=True)
    again.set_retention(timedelta(days=7))
    assert "retention=7 days" in str(table.describe())
    with pytest.raises(TableExists, match="option retention is '7 days', not '30 days'"):
        cluster.create_table("kept", DATED, buckets=1, retention="30 days", if_not_exists=True)
    table.truncate()
    assert table.describe().options == {"retention": "7 days"}
    table.set_retention(None)
    assert again.table_id != table.table_id
    assert cluster.table("kept").describe().options == {}
    for wrong in ("soon", "-1 days", 7):
        with pytest.raises(InvalidInput, match="duration"):
            table.set_retention(wrong)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="this table is partitioned by day STRING"):
        cluster.create_table("texts", DAYS, retention="30 days")


def test_a_renamed_table_goes_on_for_whoever_has_it_open(
    local: tb.LocalCluster, cluster: tb.Cluster
) -> None:
    table = cluster.create_table("before", SUMS, buckets=2)
    with table.writer(owner_id="etl", columns=["a"]) as writer:
        writer.write(0, {"k": [1, 2], "a": [1, 2]})
        renamed = cluster.rename_table("before", "after")
        writer.write(1, {"k": [1, 2], "a": [1, 2]})
    assert (renamed.name, renamed.table_id) == ("after", table.table_id)
    with pytest.raises(UnknownTable):
        cluster.table("before")
    other = cluster.create_table("before", SUMS, buckets=2, column_locks=False)
    assert total(other) == 0
    for server in local.servers:  # Whoever opens it anew finds the same files.
        server.stop()
        server.start()
    local.wait_until_joined()
    assert total(cluster.table("after")) == total(table) == 6
    with pytest.raises(TableExists):
        cluster.rename_table("after", "before")
    cluster.table("after").add_column("c", "BIGINT", "sum")
    assert cluster.table("after").schema.names[-1] == "c"
    cluster.drop_table("before")
    assert cluster.rename_table("after", "before").name == "before"
    assert total(cluster.table("before")) == 6
    cluster.drop_table("before")
    assert "before" not in cluster.list_tables()


def test_a_truncated_table_is_another_one_of_the_same_name(cluster: tb.Cluster) -> None:
    table = cluster.create_table("emptied", SUMS, buckets=2)
    former = cluster.table("emptied")
    writer = table.writer(owner_id="etl", columns=["a"]).start()
    writer.write(0, {"k": [1], "a": [5]})
    cut = former.cut()
    with pytest.raises(LockHeld):
        table.truncate()
    assert total(table) == 5
    table.truncate(force=True)
    assert table.table_id != former.table_id
    assert table.definition.uid != former.definition.uid
    assert total(table) == total(cluster.table("emptied")) == 0
    with pytest.raises(TallybookError):
        writer.write(1, {"k": [1], "a": [5]})
    writer.close()
    with pytest.raises(InvalidInput):
        table.lookup({"k": 1}, at=cut)
    with pytest.raises(UnknownTable):
        former.describe()
    with table.writer(owner_id="etl", columns=["a"]) as anew:
        anew.write(0, {"k": [1], "a": [7]})
    assert total(table) == 7


def test_a_truncated_table_has_no_partitions_left(cluster: tb.Cluster) -> None:
    table = cluster.create_table("days", DAYS, buckets=1, column_locks=False)
    table.put({"day": ["mon", "tue"], "k": [1, 1], "a": [1, 2]})
    table.truncate()
    assert table.partitions().num_rows == 0
    table.put({"day": "mon", "k": 1, "a": 9})
    assert total(table) == 9
