"""How a batch read is made of tasks, without any cluster: a table that only knows its buckets."""

from collections.abc import Collection, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from foundation.errors import InvalidInput
from foundation.ids import BucketId
from locks.encoding.offsets import Offsets
from merge_engine.merging.routing import Route, partition_key
from merge_engine.schema.schema import Schema
from recovery.reader.cut import Cut
from recovery.reader.isolation import Isolation
from server.client.cluster import Recipe
from server.protocol.reads import LogEnds
from sink.source.grouping import MOST_TASKS, grouped
from sink.source.planning import RowsPlan, plan_rows
from sink.source.tasks import ReadKeys, ReadRows, TableTask
from tests.conftest import SUMS
from tests.support.day_tables import DAYS

RECIPE = Recipe.of("zk:1")


class KnownBuckets:
    """A table as far as a plan asks for it. `partitions`: their ids, by the value of `day`."""

    def __init__(self, schema: Schema, buckets: int, partitions: Mapping[str, int] | None = None):
        self.schema = schema
        self.buckets = buckets
        self.ids = {b"": 0}
        if partitions is not None:
            self.ids = {partition_key(schema, {"day": day}): n for day, n in partitions.items()}
        self.definition = SimpleNamespace(check_cut=lambda cut: cut)
        self.caller = SimpleNamespace(
            bucket_ids=self._bucket_ids, find_all=self._find_all, ask=self._ask
        )
        self.caller.table = SimpleNamespace(table_id=1, schema=schema)
        self.sizes: Mapping[BucketId, int] = {}
        self.cuts_taken = 0
        self.held: Sequence[BucketId] = ()

    def bucket_ids(self) -> list[BucketId]:
        return [BucketId(one, n) for one in self.ids.values() for n in range(self.buckets)]

    def cut(self) -> Cut:
        self.cuts_taken += 1
        return Cut(table="t", epoch=1, time_ms=self.cuts_taken, ends=self.ends())

    def ends(self) -> Offsets:
        return Offsets(dict.fromkeys(self.bucket_ids(), 7))

    def borrow_lease(self, lease_id: str) -> Any:
        assert lease_id == "held"
        return SimpleNamespace(snapshots=dict.fromkeys(self.held, 1))

    def _ask(self, call: LogEnds) -> list[Any]:
        known = [bucket for bucket in call.buckets if bucket in self.sizes]
        return [(known, SimpleNamespace(rows=[self.sizes[bucket] for bucket in known]))]

    def _bucket_ids(self, cut: Cut | None, keys: Collection[bytes] | None = None) -> list[BucketId]:
        """Buckets are only listed for a cut that was taken before."""
        assert cut is None or cut.time_ms in (self.cuts_taken, 99)
        there = {one for key, one in self.ids.items() if keys is None or key in keys}
        return [bucket for bucket in self.bucket_ids() if bucket.partition in there]

    def _find_all(self, targets: Sequence[Route], cut: Cut | None) -> list[tuple[BucketId, Route]]:
        assert cut is None or cut.time_ms in (self.cuts_taken, 99)
        return [
            (BucketId(self.ids[one.partition_key], one.bucket), one)
            for one in targets
            if one.partition_key in self.ids
        ]


def planned(table: KnownBuckets, **plan: Any) -> list[TableTask]:
    plan.setdefault("columns", ["k", "a"])
    return plan_rows(table, RECIPE, RowsPlan(**plan))  # type: ignore[arg-type]


def buckets_of(tasks: Sequence[TableTask]) -> list[BucketId]:
    rows = [task for task in tasks if isinstance(task, ReadRows)]
    assert len(rows) == len(tasks)
    return [bucket for task in rows for bucket in task.buckets]


# --- Buckets ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("buckets", "tasks", "largest"),
    [
        (0, 0, 0),
        (1, 1, 1),
        (1_000, 1_000, 1),
        (1_001, 501, 2),
        (9_999, 1_000, 10),
        (10**5, 1_000, 100),
    ],
)
def test_there_is_a_task_per_bucket_until_there_are_very_many(
    buckets: int, tasks: int, largest: int
) -> None:
    ids = [BucketId(0, number) for number in range(buckets)]
    groups = grouped(ids, {})
    assert len(groups) == tasks <= MOST_TASKS
    assert max(map(len, groups), default=0) == largest
    assert [bucket for group in groups for bucket in group] == ids


def test_small_buckets_are_read_together() -> None:
    table = KnownBuckets(SUMS, 8)
    rows = [100_000, 100_000, 100_000, 900_000, 1, 1, 249_998, 1]
    table.sizes = dict(zip(table.bucket_ids(), rows, strict=True))
    tasks = planned(table)
    assert [len(task.buckets) for task in tasks] == [2, 1, 1, 3, 1]  # type: ignore[attr-defined]
    assert buckets_of(tasks) == table.bucket_ids()


def test_all_tasks_stand_at_one_cut_and_carry_what_it_says_of_their_buckets() -> None:
    table = KnownBuckets(SUMS, 1_500)
    tasks = planned(table)
    assert table.cuts_taken == 1
    assert buckets_of(tasks) == table.bucket_ids()
    for task in tasks:
        assert isinstance(task, ReadRows)
        assert task.cut is not None
        assert task.cut.ends == Offsets(dict.fromkeys(task.buckets, 7))
        assert task.cut.time_ms == 1


def test_only_value_columns_are_asked_for_since_the_key_comes_with_them() -> None:
    for columns, asked in ((["b", "k"], ("b",)), (["k"], ()), (["a", "b"], ("a", "b"))):
        [task] = planned(KnownBuckets(SUMS, 1), columns=columns)
        assert task.wanted.columns == asked


# --- Where it stands ------------------------------------------------------------------------------


def test_no_cut_is_taken_for_what_is_latest_or_where_one_is_given() -> None:
    table = KnownBuckets(SUMS, 2)
    assert [task.cut for task in planned(table, isolation=Isolation.LATEST)] == [None, None]  # type: ignore[attr-defined]
    given = Cut(table="t", epoch=3, time_ms=99)
    assert [task.cut.time_ms for task in planned(table, at=given)] == [99, 99]  # type: ignore[attr-defined]
    assert table.cuts_taken == 0


def test_a_cut_and_latest_rows_exclude_each_other() -> None:
    given = Cut(table="t", epoch=3, time_ms=99)
    with pytest.raises(InvalidInput, match="leave `isolation`, or `at`"):
        planned(KnownBuckets(SUMS, 2), at=given, isolation=Isolation.LATEST)


# --- Filters ------------------------------------------------------------------------------------


def test_keys_are_looked_up_in_one_task() -> None:
    [task] = planned(KnownBuckets(SUMS, 2_000), allowed={"k": [3, 1]})
    assert isinstance(task, ReadKeys)
    assert task.keys.to_pylist() == [{"k": 3}, {"k": 1}]
    assert task.cut is not None


def test_filters_that_nothing_passes_need_no_task() -> None:
    assert planned(KnownBuckets(SUMS, 3), allowed={"k": []}) == []
    assert planned(KnownBuckets(DAYS, 3, {"mon": 5}), allowed={"k": []}) == []
    assert planned(KnownBuckets(DAYS, 3, {"mon": 5}), allowed={"day": ["never"]}) == []


def test_a_filter_by_partition_reads_the_buckets_of_these_alone() -> None:
    table = KnownBuckets(DAYS, 3, {"mon": 5, "tue": 6, "wed": 8})
    tasks = planned(table, allowed={"day": ["wed", "mon", "sun"]})
    assert buckets_of(tasks) == [BucketId(one, n) for one in (5, 8) for n in range(3)]


def test_filters_on_what_is_aggregated_change_no_plan() -> None:
    table = KnownBuckets(SUMS, 3)
    assert buckets_of(planned(table, allowed={"a": [1]})) == table.bucket_ids()


def test_what_a_lease_does_not_hold_is_read_from_the_leaders_at_the_same_cut() -> None:
    """A partition may have come since the lease, and the cut is later than that."""
    table = KnownBuckets(DAYS, 4, {"mon": 5, "tue": 6})
    table.held = [BucketId(5, n) for n in range(4)] + [BucketId(6, 0)]
    tasks = planned(table, lease="held")
    assert sorted(buckets_of(tasks)) == table.bucket_ids()
    assert [task.lease for task in tasks] == ["held"] * 5 + [None] * 3  # type: ignore[attr-defined]
    assert table.cuts_taken == 1


def test_a_lease_is_read_in_the_buckets_that_can_have_the_keys() -> None:
    table = KnownBuckets(DAYS, 4, {"mon": 5, "tue": 6})
    table.held = table.bucket_ids()
    tuesday = [BucketId(6, number) for number in range(4)]
    assert buckets_of(planned(table, lease="held", allowed={"day": ["tue"]})) == tuesday
    one_key = buckets_of(planned(table, lease="held", allowed={"day": ["mon"], "k": [1]}))
    assert len(one_key) == 1
    assert one_key[0].partition == 5
    assert planned(table, lease="held", allowed={"day": ["sun"], "k": [1]}) == []
    assert planned(table, lease="held", allowed={"k": []}) == []
