"""Things that go wrong on purpose: creates of a storage, and an interrupt for failpoints."""

from collections.abc import Callable
from pathlib import Path

from foundation.errors import AlreadyExists, StorageFull, StorageUnavailable, UnknownOutcome
from merge_engine.storage.objects import LocalStorage

Create = Callable[[LocalStorage, str, bytes], None]


class FaultyStorage(LocalStorage):
    """A storage whose next creates go wrong in ways that are given one by one."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.faults: list[Create] = []
        self.late: list[tuple[str, bytes]] = []

    def create(self, name: str, data: bytes) -> None:
        if self.faults:
            self.faults.pop(0)(self, name, data)
        else:
            super().create(name, data)

    def deliver_late(self) -> None:
        """Let the requests that were on their way arrive now."""
        for name, data in self.late:
            try:
                super().create(name, data)
            except AlreadyExists:
                continue
        self.late = []


def done_but_unknown(storage: LocalStorage, name: str, data: bytes) -> None:
    LocalStorage.create(storage, name, data)
    raise UnknownOutcome(f"{name}: the connection broke")


def not_done_and_unknown(storage: LocalStorage, name: str, data: bytes) -> None:
    raise UnknownOutcome(f"{name}: the connection broke")


def still_on_its_way(storage: LocalStorage, name: str, data: bytes) -> None:
    assert isinstance(storage, FaultyStorage)
    storage.late.append((name, data))
    raise UnknownOutcome(f"{name}: timed out")


def sent_twice(storage: LocalStorage, name: str, data: bytes) -> None:
    """The store's client sent the request again after it had been applied."""
    LocalStorage.create(storage, name, data)
    LocalStorage.create(storage, name, data)


def no_room(storage: LocalStorage, name: str, data: bytes) -> None:
    raise StorageFull(f"{name}: no room")


def unreachable(storage: LocalStorage, name: str, data: bytes) -> None:
    raise StorageUnavailable(f"{name}: unreachable")


def interrupt() -> None:
    raise KeyboardInterrupt
