"""Calls that go on for about a second, and are made again for what is left."""

from collections.abc import Callable, Mapping
from typing import TypeVar

from foundation.ids import BucketId

Work = TypeVar("Work")
Result = TypeVar("Result")


def until_done(
    work: Mapping[BucketId, Work],
    step: Callable[[Mapping[BucketId, Work]], Mapping[BucketId, Result]],
    rest_of: Callable[[Work, Result], Work | None],
    add: Callable[[Result, Result], Result] = lambda _, later: later,
) -> dict[BucketId, Result]:
    """Return the results of all buckets, after as many steps as it takes.

    `step`: makes one call for what is left. `rest_of`: what a bucket's result leaves to be done;
    None: it is done. `add`: makes one result of a bucket's former ones and the next.
    """
    rest, results = dict(work), dict[BucketId, Result]()
    while rest:
        answers = step(rest)
        for key, answer in answers.items():
            results[key] = add(results[key], answer) if key in results else answer
        left = {key: rest_of(rest[key], answer) for key, answer in answers.items()}
        rest = {key: one for key, one in left.items() if one is not None}
    return results
