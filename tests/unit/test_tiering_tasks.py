"""Tasks of tiering on files that should not be: no cluster, no Spark."""

from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pytest

from foundation.errors import CorruptLake
from foundation.ids import BucketId
from recovery.reader.cut import Cut
from sink.lake.opening import Place
from sink.source.schemas import CHANGE_TYPE, UPSERT
from sink.tiering.tasks import ApplyChanges, StepWork
from tests.conftest import SUMS

BUCKET = BucketId(0, 0)


def test_a_copy_that_has_a_key_twice_is_corrupt(tmp_path: Path) -> None:
    nobody, place = cast(Any, None), Place.of(str(tmp_path))
    work = StepWork(wanted=nobody, schema=SUMS, states=False, place=place, step=1)
    rows = pa.table({"k": [1, 2], "a": [1, 1], "b": [1, 1]})
    files = []
    for _ in range(2):
        writer = work.writer(BUCKET)
        writer.add(rows)
        files += writer.close()
    changed = rows.append_column(CHANGE_TYPE, pa.array([UPSERT] * 2)).to_batches()
    cut = Cut(table="t", epoch=None, time_ms=0)

    def task(count: int) -> ApplyChanges:
        return ApplyChanges(
            work=work,
            buckets=(BUCKET,),
            since=cut,
            until=cut,
            files=tuple(files[:count]),
            rewrite=False,
        )

    done = task(1)._apply(BUCKET, changed)
    assert (done.upserts, [one.live for one in done.added]) == (2, [2])
    with pytest.raises(CorruptLake, match=r"of 2 keys .* has 4: some are there twice"):
        task(2)._apply(BUCKET, changed)
