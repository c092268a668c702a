"""Where the reads of a table stand, as tables in one process and on servers decide it alike."""

from abc import ABC, abstractmethod
from collections.abc import Callable

from recovery.reader.cut import Cut
from recovery.reader.isolation import Isolation


class Standing(ABC):
    """A table, as far as it can say where it stands."""

    @abstractmethod
    def cut(self) -> Cut:
        """Return where the table stands now."""

    @abstractmethod
    def _check_cut(self, cut: Cut) -> Cut:
        """Return a cut of this table; InvalidInput if it is of another one."""

    @abstractmethod
    def _earliest(self) -> Cut:
        """Return a cut that has nothing of what the logs have."""

    def _stand(
        self, isolation: str, at: Cut | str | None, take: Callable[[], Cut] | None = None
    ) -> Cut | None:
        """Return where a read stands: at the cut that it is given, or at one that is taken now.

        None: each bucket as it is. `take`: takes the cut, if `cut` does more than is needed.
        """
        committed = Isolation.of(isolation) is Isolation.COMMITTED
        if at is not None:
            return self._check_cut(Cut.of(at))
        return (take or self.cut)() if committed else None

    def _span(self, since: Cut | str | None, until: Cut | str | None) -> tuple[Cut, Cut]:
        """Return the cuts between which changes are read: from the earliest, up to now."""
        last = self.cut() if until is None else self._check_cut(Cut.of(until))
        return self._earliest() if since is None else self._check_cut(Cut.of(since)), last
