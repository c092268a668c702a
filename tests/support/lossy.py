"""Coordinators whose transactions, or the answers, get lost: in memory and before ZooKeeper."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import pytest

from foundation.errors import UnknownOutcome
from locks.coordinator import Coordinator
from locks.store.base import Conflict, Operation
from locks.store.embedded_zookeeper import EmbeddedZooKeeper
from locks.store.memory import MemoryCoordination, MemoryStore
from tests.support.zookeeper_proxy import Proxy
from tests.support.zookeeper_server import chroot, session

LOSSES = [["request"], ["answer"], ["answer", "request"], ["request", "answer", "answer"]]


class LossyStore(MemoryStore):
    """Loses the next transactions, as a Proxy does: their "request", or their "answer".

    A "late" one is answered by nothing, too, and applied before the next look at the store.
    """

    def __init__(self, memory: MemoryCoordination) -> None:
        super().__init__(memory, memory.connect().session)
        self._losses: list[str] = []
        self._late: Sequence[Operation] = []
        self.lost: list[str] = []
        self.after_a_loss: Callable[[], object] = lambda: None

    def lose(self, *losses: str) -> None:
        self._losses = list(losses)
        self.lost = []

    def transact(self, operations: Sequence[Operation]) -> None:
        self._settle()
        if not self._losses:
            super().transact(operations)
            return
        self.lost.append(self._losses.pop(0))
        if self.lost[-1] == "answer":
            super().transact(operations)
        elif self.lost[-1] == "late":
            self._late = operations
        self.after_a_loss()
        raise UnknownOutcome("no answer")

    def sync(self) -> None:
        self._settle()
        super().sync()

    def _settle(self) -> None:
        late, self._late = self._late, []
        with suppress(Conflict):
            super().transact(late)


@dataclass
class Lossy:
    """A coordinator that is told what to lose, and another that loses nothing."""

    coordinator: Coordinator
    other: Coordinator
    losing: LossyStore | Proxy

    def without_answers(self, losses: list[str], call: Callable[[], object]) -> None:
        """Call; nothing is sent again after it took effect, so the losses after that remain."""
        self.losing.lose(*losses)
        call()
        expected = losses[: losses.index("answer") + 1] if "answer" in losses else losses
        assert self.losing.lost == expected
        self.losing.lose()


@pytest.fixture(params=["memory", "zookeeper"])
def lossy(request: pytest.FixtureRequest) -> Iterator[Lossy]:
    if request.param == "memory":
        memory = MemoryCoordination()
        store = LossyStore(memory)
        yield Lossy(Coordinator(store), Coordinator(memory.connect()), store)
        return
    zookeeper: EmbeddedZooKeeper = request.getfixturevalue("zookeeper")
    root = chroot(zookeeper)
    with (
        Proxy(zookeeper) as proxy,
        session(proxy.address + root.removeprefix(zookeeper.address)) as ours,
        session(root) as theirs,
    ):
        yield Lossy(Coordinator(ours), Coordinator(theirs), proxy)
