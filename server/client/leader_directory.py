"""Where the buckets are: a guess that is mostly right, and ZooKeeper for when it is not."""

import threading
from collections.abc import Callable, Iterable, Sequence

from foundation.errors import ServerUnavailable
from foundation.ids import LeadKey
from locks.cluster.placement import place
from locks.cluster.servers import Members
from locks.coordinator import Coordinator
from server.client.asking import ask


class LeaderDirectory:
    """The addresses of the servers that lead buckets. Safe for threads.

    The guess is the placement that the servers themselves strive for. A server that does not lead
    says so, and then the bucket's leader node is asked: a hand-over may be under way.
    """

    def __init__(self, coordinator: Callable[[], Coordinator]) -> None:
        self._coordinator = coordinator
        self._lock = threading.Lock()
        self._addresses: tuple[str, ...] | None = None
        # By table, partition and its number of buckets: to compare all addresses for each of ten
        # thousand buckets would take longer than the calls themselves.
        self._placed: dict[tuple[int, int, int], tuple[str, ...]] = {}
        self._found: dict[LeadKey, str] = {}
        self._doubted: set[LeadKey] = set()

    def address_of(self, key: LeadKey, buckets: int) -> str:
        """Return where the bucket probably is; `buckets`: how many its partition has."""
        with self._lock:
            doubted = list(self._doubted) if key in self._doubted else []
        if doubted:
            self.refresh(doubted)
        with self._lock:
            found, addresses = self._found.get(key), self._addresses
        if found is not None:
            return found
        if addresses is None:
            addresses = self.refresh()
        if not addresses:
            raise ServerUnavailable("no tablet server is running; start one")
        return self._place(key, buckets, addresses)[key.bucket.number]

    def _place(self, key: LeadKey, buckets: int, addresses: tuple[str, ...]) -> tuple[str, ...]:
        which = (key.table_id, key.bucket.partition, buckets)
        with self._lock:
            kept = self._placed if self._addresses is addresses else {}
        if which not in kept:
            kept[which] = place(key.table_id, key.bucket.partition, buckets, addresses)
        return kept[which]

    def doubt(self, keys: Iterable[LeadKey]) -> None:
        """Look again before the next call to these: for whoever gave one up and does not wait."""
        with self._lock:
            self._doubted.update(keys)

    def refresh(self, refused: Iterable[LeadKey] = ()) -> tuple[str, ...]:
        """Look again who is there, and who leads the buckets that were refused."""
        keys = list(refused)
        members, found = ask(self._coordinator, lambda coordinator: _look(coordinator, keys))
        addresses = tuple(sorted({server.address for server in members.candidates}))
        live = {server.address for server in members.live}
        with self._lock:
            self._addresses, self._placed = addresses, {}
            # What was found is kept while its server lives; what was refused is not.
            kept = {key: at for key, at in self._found.items() if at in live}
            for key in keys:
                kept.pop(key, None)
            self._found = {**kept, **found}
            self._doubted.difference_update(keys)
        return addresses


def _look(coordinator: Coordinator, keys: Sequence[LeadKey]) -> tuple[Members, dict[LeadKey, str]]:
    """Return the servers that are there, and the addresses of the leaders of these buckets."""
    members = coordinator.servers.members()
    addresses = {server.name: server.address for server in members.live}
    leaders = coordinator.leaders.holders(keys)
    return members, {key: addresses[name] for key, name in leaders.items() if name in addresses}
