"""What a server tries with the log store before it joins, and what it says when that fails."""

import logging
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from foundation.errors import InvalidInput, StorageUnavailable
from merge_engine.storage.environment import store_variables
from merge_engine.storage.objects import LocalStorage
from server.tablet.log_store import check_log_store
from tests.support.faulty_storage import (
    Create,
    FaultyStorage,
    no_room,
    not_done_and_unknown,
    sent_twice,
    unreachable,
)


class Store(FaultyStorage):
    """One that gives its children what goes wrong with it."""

    def child(self, path: str) -> FaultyStorage:
        below = type(self)(self._directory / path)
        below.faults = self.faults
        return below


def files(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*") if path.is_file()]


def test_a_store_that_creates_once_and_reads_back_is_good_and_left_as_it_was(
    tmp_path: Path,
) -> None:
    for _ in range(2):
        check_log_store(LocalStorage(tmp_path), str(tmp_path))
    assert files(tmp_path) == []
    assert LocalStorage(tmp_path).names() == []


@pytest.mark.parametrize("fault", [unreachable, not_done_and_unknown, no_room])
def test_a_store_that_takes_no_object_is_named(tmp_path: Path, fault: Create) -> None:
    store = Store(tmp_path)
    store.faults.append(fault)
    with pytest.raises(StorageUnavailable) as refused:
        check_log_store(store, "/shared/logs")
    words = "the log store at /shared/logs cannot be used: creating an object failed: "
    assert str(refused.value).startswith(words)
    store.faults.append(fault)
    with pytest.raises(StorageUnavailable) as again:
        check_log_store(store, "/shared/logs")
    assert str(again.value) == str(refused.value), "so that it is said once"


def test_a_create_that_was_sent_twice_was_still_ours(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.faults.append(sent_twice)
    check_log_store(store, "/shared/logs")
    assert files(tmp_path) == []


class Overwriting(Store):
    """Does not know put-if-absent, as some stores that speak S3 do not."""

    def create(self, name: str, data: bytes) -> None:
        self.delete([name])
        super().create(name, data)


def test_a_store_that_creates_twice_keeps_no_two_leaders_apart(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput) as refused:
        check_log_store(Overwriting(tmp_path), "s3://bucket/logs")
    assert "the log store at s3://bucket/logs cannot be used" in str(refused.value)
    assert "created an object that was there already" in str(refused.value)
    assert files(tmp_path) == []


class Forgetful(Store):
    """Gives back other bytes."""

    def read(self, name: str) -> bytes:
        return super().read(name)[:-1]


def test_a_store_that_gives_other_bytes_back_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StorageUnavailable, match="reading it back failed: it has other bytes"):
        check_log_store(Forgetful(tmp_path), "/shared/logs")
    assert files(tmp_path) == []


def test_a_store_that_does_not_answer_is_given_up(tmp_path: Path) -> None:
    goes_on = threading.Event()
    store = Store(tmp_path)

    def hang(storage: LocalStorage, name: str, data: bytes) -> None:
        goes_on.wait(180)

    store.faults.append(hang)
    with pytest.raises(
        StorageUnavailable, match=r"creating an object failed: no answer within 0\.05 s"
    ):
        check_log_store(store, "/shared/logs", deadline_s=0.05)
    goes_on.set()


class Undeletable(Store):
    """Keeps what it has."""

    def delete(self, names: Sequence[str]) -> None:
        raise StorageUnavailable(f"{len(names)} objects are kept for a year")


def test_a_probe_that_stays_is_a_warning_and_in_nobodys_way(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The same as one of a server that was killed right there."""
    for _ in range(2):
        check_log_store(Undeletable(tmp_path), "/shared/logs")
    [warning, _] = [one for one in caplog.records if one.levelno == logging.WARNING]
    assert "objects are kept for a year" in warning.getMessage()
    assert len(files(tmp_path)) == 2
    assert LocalStorage(tmp_path).names() == []
    check_log_store(LocalStorage(tmp_path), "/shared/logs")


def test_the_error_says_which_variables_are_looked_at_and_shows_no_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in store_variables():
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "id-4711")
    store = Store(tmp_path)
    store.faults += [unreachable] * 4
    said = {}
    for location in ("s3://bucket/logs", "gs://bucket/logs", "az://container/logs", "/logs"):
        with pytest.raises(StorageUnavailable) as refused:
            check_log_store(store, location)
        said[location] = str(refused.value)
    assert "AWS_SECRET_ACCESS_KEY" in said["s3://bucket/logs"]
    assert "of these there are: AWS_ACCESS_KEY_ID" in said["s3://bucket/logs"]
    assert "id-4711" not in said["s3://bucket/logs"]
    assert "GOOGLE_SERVICE_ACCOUNT" in said["gs://bucket/logs"]
    assert "of these there are: none" in said["gs://bucket/logs"]
    assert "AZURE_STORAGE_ACCOUNT_NAME" in said["az://container/logs"]
    assert "_" not in said["/logs"], "a directory needs no variables"
