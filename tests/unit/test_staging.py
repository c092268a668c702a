"""Large puts that wait on a server's disk: what comes back is what has arrived."""

from pathlib import Path

import pyarrow as pa
import pytest

from foundation.errors import StagedPutLost
from foundation.ids import BucketId, Token
from merge_engine.bucket.segment import AggMode
from merge_engine.storage.scratch import Scratch
from recovery.leader.fenced_writers import Writer
from server.protocol.puts import PutChunk
from server.tablet.staging import StagedPut

KEY = BucketId(0, 1)
ROWS = [pa.record_batch({"k": [1, 2], "a": [10, 20]}), pa.record_batch({"k": [3], "a": [30]})]


@pytest.fixture
def staged(tmp_path: Path) -> StagedPut:
    request = PutChunk(
        table_id=1,
        schema_version=1,
        mode=AggMode.ACCUMULATE,
        owner="me",
        token=Token(1, 0),
        writer=Writer("me", 1),
        put_id="p",
        chunk=0,
    )
    made = StagedPut(request, ROWS[0].schema, Scratch(tmp_path).file())
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
