"""Which buckets a task of Spark's reads: small ones go together."""

from collections.abc import Mapping, Sequence
from heapq import heappop, heappush

from foundation.ids import BucketId

# There are not more tasks than that: with more buckets, a task reads several.
MOST_TASKS = 1_000
# Spark takes some 50 ms for a task in Python, in which this many rows can be read.
_ROWS_A_TASK = 250_000


def grouped(
    buckets: Sequence[BucketId], sizes: Mapping[BucketId, int]
) -> list[tuple[BucketId, ...]]:
    """Return the buckets of each task: small ones together, and more if there are very many.

    `sizes`: about how many rows each has; one that is not known is not small.
    """
    most = -(-len(buckets) // MOST_TASKS)
    groups: list[list[BucketId]] = []
    rows = 0
    for bucket in buckets:
        size = sizes.get(bucket, _ROWS_A_TASK)
        if not groups or (rows + size > _ROWS_A_TASK and len(groups[-1]) >= most):
            groups.append([])
            rows = 0
        groups[-1].append(bucket)
        rows += size
    return list(map(tuple, groups))


def balanced(
    buckets: Sequence[BucketId], sizes: Mapping[BucketId, int], at_once: int
) -> list[tuple[BucketId, ...]]:
    """Return the buckets of each task, where tasks take about as long as each other.

    As many tasks as run at once, or more if these would have too much to do.
    """
    total = sum(sizes[bucket] for bucket in buckets)
    count = min(len(buckets), MOST_TASKS, max(at_once, -(-total // _ROWS_A_TASK)))
    groups: list[list[BucketId]] = [[] for _ in range(count)]
    loads = [(0, 0, number) for number in range(count)]
    for bucket in sorted(buckets, key=lambda one: (-sizes[one], one)):
        load, has, number = heappop(loads)
        groups[number].append(bucket)
        heappush(loads, (load + sizes[bucket], has + 1, number))
    return [tuple(sorted(group)) for group in groups]
