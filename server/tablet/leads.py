"""The nodes of leads that a session has, or may have: also of buckets that it never opened.

A bucket is taken before it is opened, and may be dropped in between; and what was taken is not
known if the answer was lost. Nobody else may give such a node up, so it is remembered from before
it is asked for until it is known to be gone, or another's.
"""

import threading
from collections.abc import Collection, Mapping, Sequence

from foundation.ids import LeadKey
from locks.cluster.leaders import Leaders
from locks.cluster.servers import Server


class Leads:
    """Takes and gives up leads for one session of one server. Safe for threads."""

    def __init__(self, leaders: Leaders, server: Server) -> None:
        self._leaders = leaders
        self._server = server
        self._lock = threading.Lock()
        self._possible: set[LeadKey] = set()

    @property
    def session(self) -> str:
        """The name of the session."""
        return self._server.name

    def possible(self) -> Collection[LeadKey]:
        """Return the buckets whose nodes are ours, or may be."""
        with self._lock:
            return frozenset(self._possible)

    def take(self, keys: Sequence[LeadKey]) -> list[LeadKey]:
        """Return those of the buckets that are ours now; as `Leaders.take`."""
        with self._lock:
            self._possible.update(keys)
        taken = self._leaders.take(self._server, keys)
        self._forget(set(keys).difference(taken))
        return taken

    def give_up(self, keys: Collection[LeadKey]) -> None:
        """Give up those of the buckets that are ours."""
        self._leaders.give_up(self._server, sorted(keys))
        self._forget(keys)

    def holders(self, keys: Sequence[LeadKey]) -> Mapping[LeadKey, str]:
        """Return the session names of those that have a leader; as `Leaders.holders`."""
        return self._leaders.holders(keys)

    def has(self, key: LeadKey) -> bool:
        """Whether the node is ours, from a plain read."""
        return self._leaders.leader_of(key) == self._server.name

    def _forget(self, keys: Collection[LeadKey]) -> None:
        with self._lock:
            self._possible.difference_update(keys)
