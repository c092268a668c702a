"""Freed memory is kept, unless whoever runs the process has said otherwise."""

import ctypes

import pytest

from foundation import allocator


class Library:
    """A C library that only remembers what it is told."""

    def __init__(self) -> None:
        self.told: dict[int, int] = {}

    def mallopt(self, option: int, value: int) -> int:
        self.told[option] = value
        return 1


def told(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    library = Library()
    monkeypatch.setattr(ctypes, "CDLL", lambda _: library)
    allocator.keep_freed_memory.__wrapped__()
    return library.told


def test_the_library_is_told_to_keep_what_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in allocator._SAYS_OTHERWISE:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("MALLOC_ARENA_MAX", raising=False)
    assert told(monkeypatch) == {-1: 64 << 20, -3: 32 << 20, -8: 2}
    monkeypatch.setenv("MALLOC_ARENA_MAX", "4")
    assert told(monkeypatch) == {-1: 64 << 20, -3: 32 << 20}


@pytest.mark.parametrize("name", ["MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"])
def test_the_environment_goes_first(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "1")
    assert told(monkeypatch) == {}


def test_another_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_such(_: object) -> None:
        raise OSError

    monkeypatch.setattr(ctypes, "CDLL", none_such)
    allocator.keep_freed_memory.__wrapped__()
