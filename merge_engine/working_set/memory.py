"""One budget of memory for all working sets of a process."""

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol
from weakref import WeakKeyDictionary, WeakSet

# So many blocks, of all working sets together, fill the budget.
_BLOCKS = 8


class Member(Protocol):
    """A working set, as the budget sees it."""

    last_used: int

    @property
    def nbytes(self) -> int:
        """How much memory it takes."""

    @property
    def retiring_bytes(self) -> int:
        """How much of it goes as soon as it is written elsewhere."""

    def drop_retired(self, *, by_holder: bool) -> None:
        """Drop what can go by now, unless somebody else is busy there."""

    def retire(self, *, by_holder: bool) -> int:
        """Let the oldest go, unless somebody else is busy; return how many bytes that will be."""


class Memory:
    """Lets go of what was not used for the longest time, when there is too much. Thread-safe."""

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.block_bytes = max(budget_bytes // _BLOCKS, 1)
        self._members: WeakSet[Member] = WeakSet()
        # How much each of them had, when it was used last, that does not go by itself; and of all
        # together. A server has thousands of them, and one is used at a time. Of one that is gone
        # without a word the sum has too much, until all are counted anew.
        self._kept: WeakKeyDictionary[Member, int] = WeakKeyDictionary()
        self._kept_bytes = 0
        self._retiring: WeakSet[Member] = WeakSet()
        self._lock = threading.Lock()
        self._ticks = itertools.count(1)
        # Writes behind what the working sets have changed.
        self.background = ThreadPoolExecutor(1, thread_name_prefix="tallybook-behind")

    def join(self, member: Member) -> None:
        """Count a working set in, until it leaves or is gone."""
        with self._lock:
            self._members.add(member)

    def leave(self, member: Member) -> None:
        """Count a working set no more."""
        with self._lock:
            self._members.discard(member)
            self._retiring.discard(member)
            self._kept_bytes -= self._kept.pop(member, 0)

    @property
    def used_bytes(self) -> int:
        """How much memory the working sets take."""
        with self._lock:
            return sum(member.nbytes for member in self._members)

    def used(self, member: Member) -> None:
        """Note that a working set was used, by its holder, who is done with it.

        Then let go of others, or of its own, if need be.
        """
        member.last_used = next(self._ticks)
        with self._lock:
            retiring = list(self._retiring)
        for one in retiring:
            one.drop_retired(by_holder=one is member)
        with self._lock:
            for one in {member, *retiring}:
                self._count(one)
            is_too_much = self._kept_bytes > self._most_bytes
        if is_too_much:
            self._make_room(member)

    @property
    def _most_bytes(self) -> int:
        """One block less than there may be: what retires is still there for a moment."""
        return self.budget_bytes - self.block_bytes

    def _make_room(self, holder: Member) -> None:
        """Count all of them anew, and let the oldest go as long as there is too much."""
        with self._lock:
            members = sorted(self._members, key=lambda one: one.last_used)
        over = sum(one.nbytes - one.retiring_bytes for one in members) - self._most_bytes
        for one in members:
            while over > 0 and (freed := one.retire(by_holder=one is holder)):
                over -= freed
        with self._lock:
            self._kept, self._kept_bytes = WeakKeyDictionary(), 0
            for one in self._members:
                self._count(one)

    def _count(self, member: Member) -> None:
        """Know how much a member has by now, unless it has left; while the lock is held."""
        if member not in self._members:
            return
        kept = member.nbytes - member.retiring_bytes
        self._kept_bytes += kept - self._kept.get(member, 0)
        self._kept[member] = kept
        if member.retiring_bytes:
            self._retiring.add(member)
        else:
            self._retiring.discard(member)
