"""Objects that are read one after the other, the next of them before they are asked for.

An object store answers after a round trip, and has as many answers at a time as one asks for. Who
has read more is read ahead for further: whoever stops after the first has asked for one in vain.
"""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import islice

from merge_engine.storage.objects import ObjectStorage, is_remote

AT_ONCE = 16
GENTLY = 4
"""For who is in no hurry, while others need the store to work."""
# What may lie here and wait, besides those that are under way: objects may be large.
_MOST_BYTES = 32 << 20

Read = Callable[[str], bytes]
"""Reads the object of this name."""


@contextmanager
def reading_ahead(
    storage: ObjectStorage, names: Iterable[str], *, at_once: int = AT_ONCE
) -> Iterator[Read]:
    """Yield what reads these objects, which are asked for in this order; others, too.

    At the end of the block nothing is under way any more. On a local disk it is a read like others.
    """
    if not is_remote(storage):
        yield storage.read
        return
    pool = ThreadPoolExecutor(at_once, thread_name_prefix="tallybook-ahead")
    try:
        yield _ReadAhead(storage, names, pool, at_once).read
    finally:
        pool.shutdown(cancel_futures=True)


class _ReadAhead:
    """Reads objects of a storage. For one thread."""

    def __init__(
        self, storage: ObjectStorage, names: Iterable[str], pool: ThreadPoolExecutor, most: int
    ) -> None:
        self._storage = storage
        self._left = iter(names)
        self._pool = pool
        self._begun: dict[str, Future[bytes]] = {}
        self._ahead = 1
        self._most = most

    def read(self, name: str) -> bytes:
        """Return the object; what is wrong with it is raised now, not before."""
        self._begin()
        future = self._begun.pop(name, None)
        data = self._storage.read(name) if future is None else future.result()
        self._ahead = min(2 * self._ahead, self._most)
        return data

    def _begin(self) -> None:
        """Begin to read more, unless there is much that waits."""
        done = [one for one in self._begun.values() if one.done()]
        ready = [one for one in done if one.exception() is None]
        if sum(len(one.result()) for one in ready) >= _MOST_BYTES:
            return
        # What is gone, for it was rolled up meanwhile, is perhaps never asked for, and not waited
        # for.
        begun = len(self._begun) - len(done) + len(ready)
        for name in islice(self._left, max(0, self._ahead - begun)):
            self._begun[name] = self._pool.submit(self._storage.read, name)
