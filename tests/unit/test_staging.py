"""Large puts that wait on a server's disk: what comes back is what has arrived."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from foundation.errors import StagedPutLost, Unavailable
from foundation.ids import BucketId, Token
from locks.column_locks.column_lock import ColumnLock
from locks.column_locks.locks import DEFAULT_TTL_MS
from locks.coordinator import Coordinator
from locks.store.memory import MemoryCoordination
from merge_engine.bucket.segment import AggMode
from merge_engine.storage.scratch import Scratch
from recovery.leader.fenced_writers import Writer
from server.protocol.puts import PutChunk
from server.tablet.staging import StagedPut, Staging, is_needed
from tests.support.coordinators import DEFINITION

KEY = BucketId(0, 1)
ROWS = [pa.record_batch({"k": [1, 2], "a": [10, 20]}), pa.record_batch({"k": [3], "a": [30]})]


def request(**fields: Any) -> PutChunk:
    usual: dict[str, Any] = {
        "table_id": 1,
        "schema_version": 1,
        "mode": AggMode.ACCUMULATE,
        "owner": "me",
        "token": Token(1, 0),
        "writer": Writer("me", 1),
        "put_id": "p",
        "chunk": 0,
    }
    return PutChunk(**{**usual, **fields})


@pytest.fixture
def staged(tmp_path: Path) -> StagedPut:
    made = StagedPut(request(), ROWS[0].schema, Scratch(tmp_path).file())
    for number, rows in enumerate(ROWS):
        made.add(number, [(KEY, number, rows.num_rows, rows.serialize())])
    return made


def test_parts_come_back_as_they_arrived(staged: StagedPut) -> None:
    with staged.at(KEY):
        assert [staged.part(KEY, number) for number in range(2)] == ROWS
    staged.close()


def test_a_part_that_the_disk_has_damaged_is_not_written(staged: StagedPut) -> None:
    first = staged.buckets[KEY].parts[0]
    with Path(staged._file.path).open("r+b") as file:
        whole = file.read()
        for at in range(first.size):
            file.seek(at)
            file.write(bytes([whole[at] ^ 1]))
            file.flush()
            with staged.at(KEY), pytest.raises(StagedPutLost, match="part 0 of bucket 0/1 was dam"):
                staged.part(KEY, 0)
            file.seek(at)
            file.write(whole[at : at + 1])
        file.flush()
    with staged.at(KEY):
        assert staged.part(KEY, 0) == ROWS[0]
    staged.close()


# --- How long one is kept -----------------------------------------------------------------------

TTL_S = 120.0


class Uploads:
    """The uploads of a server whose clock and ZooKeeper are in memory."""

    def __init__(self, scratch: Scratch) -> None:
        self.memory = MemoryCoordination()
        self.coordinator = Coordinator(self.memory.connect())
        self.table = self.coordinator.tables.create("t", DEFINITION)
        self.now_s = 0.0
        self.away = False
        self.staging = Staging(
            scratch, ttl_s=TTL_S, is_needed=self._is_needed, clock_s=lambda: self.now_s
        )

    def _is_needed(self, put: PutChunk) -> bool:
        if self.away:
            raise Unavailable("ZooKeeper does not answer")
        return is_needed(put, self.coordinator)

    def acquire(self) -> ColumnLock:
        """Return a lock that is ready."""
        lock = self.coordinator.locks.acquire(self.table, "me", ["orders"])
        lock.ready({}, ())
        return lock

    def upload(self, **fields: Any) -> None:
        put = request(table_id=self.table.table_id, **fields)
        self.staging.begin(put, ROWS[0].schema, 0)

    def after_a_pause(self) -> int:
        """Return how many are kept when nobody has asked for them in a long time."""
        self.now_s += TTL_S + 1
        self.staging.reap()
        return len(self.staging)


@pytest.fixture
def uploads(tmp_path: Path) -> Iterator[Uploads]:
    made = Uploads(Scratch(tmp_path))
    yield made
    made.staging.shutdown()


def test_an_upload_is_kept_while_its_writer_waits_for_more_rows(uploads: Uploads) -> None:
    lock = uploads.acquire()
    uploads.upload()
    for _ in range(5):
        uploads.memory.advance(60_000)
        lock.renew()
        assert uploads.after_a_pause() == 1
    lock.commit(0, {}, ())
    assert uploads.after_a_pause() == 0, "its batch is committed"


def test_an_upload_goes_with_the_epoch_of_its_writer(uploads: Uploads) -> None:
    uploads.acquire()
    uploads.upload()
    uploads.acquire()
    assert uploads.after_a_pause() == 0, "there is a later epoch"
    uploads.upload(writer=Writer("me", 2), token=Token(2, 0))
    assert uploads.after_a_pause() == 1
    uploads.memory.advance(DEFAULT_TTL_MS + 1)
    assert uploads.after_a_pause() == 0, "the lock has expired"
    uploads.acquire().release()
    uploads.upload(writer=Writer("me", 3), token=Token(3, 0))
    assert uploads.after_a_pause() == 0, "the lock was released"
    uploads.upload(writer=Writer("nobody", 1), owner="nobody")
    assert uploads.after_a_pause() == 0, "there is no such lock"


def test_the_upload_of_a_debt_is_kept_until_it_is_paid(uploads: Uploads) -> None:
    lock = uploads.coordinator.locks.acquire(uploads.table, "me", ["orders"])
    uploads.upload(owner="debtor", token=Token(7, 3))
    assert uploads.after_a_pause() == 1
    lock.ready({}, ())
    assert uploads.after_a_pause() == 0


def test_an_upload_goes_with_its_table_and_not_with_zookeeper(uploads: Uploads) -> None:
    lock = uploads.acquire()
    uploads.upload()
    uploads.away = True
    assert uploads.after_a_pause() == 1
    uploads.away = False
    lock.release()
    uploads.coordinator.drop_table(uploads.table)
    assert uploads.after_a_pause() == 0
