"""Which buckets the tasks of a tiering job have: each once, and tasks take about as long."""

from hypothesis import given
from hypothesis import strategies as st

from foundation.ids import BucketId
from sink.source.grouping import MOST_TASKS, balanced

BUCKETS = st.builds(BucketId, st.integers(0, 20), st.integers(0, 20))
SIZES = st.one_of(st.just(0), st.integers(0, 100), st.integers(0, 10**6))


@given(st.dictionaries(BUCKETS, SIZES, max_size=25), st.integers(1, 16))
def test_each_bucket_has_one_task_and_tasks_are_balanced(
    sizes: dict[BucketId, int], at_once: int
) -> None:
    groups = balanced(list(sizes), sizes, at_once)
    assert sorted(bucket for group in groups for bucket in group) == sorted(sizes)
    assert all(group == tuple(sorted(group)) for group in groups)
    assert all(groups), "a task has nothing to do"
    total = sum(sizes.values())
    assert len(groups) == min(len(sizes), max(at_once, -(-total // 250_000)))
    # Whoever has most has no more than the others, and one bucket.
    loads = [sum(sizes[bucket] for bucket in group) for group in groups]
    if loads:
        assert max(loads) - min(loads) <= max(sizes.values())
        empty = [len(group) for group, load in zip(groups, loads, strict=True) if not load]
        assert not empty or max(empty) - min(empty) <= 1


def test_very_many_buckets_do_not_make_very_many_tasks() -> None:
    buckets = [BucketId(0, number) for number in range(3 * MOST_TASKS)]
    groups = balanced(buckets, dict.fromkeys(buckets, 250_000), 4)
    assert [len(group) for group in groups] == [3] * MOST_TASKS


def test_a_large_bucket_does_not_wait_for_small_ones() -> None:
    sizes = {BucketId(0, number): size for number, size in enumerate([1, 1, 1, 1, 100])}
    assert balanced(list(sizes), sizes, 2) == [
        (BucketId(0, 4),),
        (BucketId(0, 0), BucketId(0, 1), BucketId(0, 2), BucketId(0, 3)),
    ]
