"""A log's storage in memory whose creates go wrong in ways that are given one by one."""

import io
from collections.abc import Sequence
from typing import BinaryIO

from foundation.errors import AlreadyExists, MissingObject, StorageUnavailable, UnknownOutcome


class MemoryLog:
    """An ObjectStorage; its children share its objects, under their path, and its faults.

    `faults` of the next creates: "answer" (done, and unknown), "request" (not done, and unknown),
    "late" (unknown, and done by `deliver_late` if the name is free then), "refused".
    """

    def __init__(self, prefix: str = "") -> None:
        self._prefix = prefix
        self.objects: dict[str, bytes] = {}
        self.faults: list[str] = []
        self.late: list[tuple[str, bytes]] = []

    def create(self, name: str, data: bytes) -> None:
        name = self._prefix + name
        fault = self.faults.pop(0) if self.faults else None
        if fault == "refused":
            raise StorageUnavailable(f"{name}: unreachable")
        if fault == "late":
            self.late.append((name, data))
        if fault not in ("late", "request"):
            if name in self.objects:
                raise AlreadyExists(f"{name} exists already")
            self.objects[name] = data
        if fault is not None:
            raise UnknownOutcome(f"{name}: no answer")

    def deliver_late(self) -> None:
        """Let the requests that were on their way arrive now."""
        late, self.late = self.late, []
        for name, data in late:
            self.objects.setdefault(name, data)

    def read(self, name: str) -> bytes:
        name = self._prefix + name
        if name not in self.objects:
            raise MissingObject(f"{name} does not exist")
        return self.objects[name]

    def open(self, name: str) -> BinaryIO:
        return io.BytesIO(self.read(name))

    def names(self) -> list[str]:
        own = [name for name in self.objects if name.startswith(self._prefix)]
        return sorted(name.removeprefix(self._prefix) for name in own)

    def sizes(self) -> dict[str, int]:
        return {name: len(self.read(name)) for name in self.names()}

    def delete(self, names: Sequence[str]) -> None:
        for name in names:
            self.objects.pop(self._prefix + name, None)

    def remove_empty(self, path: str) -> None:
        """Nothing: names are all there is."""

    def child(self, path: str) -> "MemoryLog":
        below = MemoryLog(f"{self._prefix}{path}/")
        below.objects, below.faults, below.late = self.objects, self.faults, self.late
        return below
