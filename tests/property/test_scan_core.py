"""Committed scans of a bucket, and of its checkpoints, against what was committed.

The owners and the bucket are those of `test_isolation`. Scans are opened at any time, also in the
middle of batches that are undone later, and read later, after more was written, undone and cleaned.
Each must show what the batches committed by then had made of the table at its offset; and continued
with the committed changes from there on, it must arrive at the final table.
"""

from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from foundation.errors import Closed, CutTooOld
from merge_engine.bucket.view_meta import read_checkpoint
from recovery.reader.bucket_scan import BucketScan, open_scan, open_snapshot_scan
from tests.conftest import rows_of
from tests.property.test_isolation import (
    EXAMPLES,
    IDS,
    SUMS,
    Action,
    Cells,
    IsolationMachine,
    Work,
    actions,
)

MEANWHILE = st.lists(actions(), max_size=4)


@dataclass
class Opened:
    """A scan, and what it must show; `of_bucket`: it ends with the bucket that is open."""

    scan: BucketScan
    expected: Cells
    of_bucket: bool


class ScanMachine(IsolationMachine):
    """The same owners and readers, and scans that stay open."""

    then: list[Work]

    def __init__(self) -> None:
        super().__init__()
        self.opened: list[Opened] = []
        self.checkpoints = 0

    @rule(meanwhile=st.lists(actions(), max_size=4))
    def open_committed(self, meanwhile: list[Action]) -> None:
        self.take_cut()
        for action in meanwhile:
            self.do(action)
        cut, expected, _ = self.cuts[-1]
        self.opened.append(Opened(open_scan(self.bucket, cut), expected, True))

    @rule()
    def open_latest(self) -> None:
        expected = {
            (key, name): value
            for key, row in rows_of(self.bucket).items()
            for name, value in zip(IDS, row, strict=True)
            if value is not None
        }
        scan = open_scan(self.bucket, None)
        assert scan.offset == self.bucket.end_offset
        assert cells_of(scan, 2, None) == expected
        scan.close()

    @precondition(lambda self: self.checkpoints < 3)
    @rule(before=MEANWHILE, after=MEANWHILE, older=st.integers(0, 3))
    def open_checkpoint(self, before: list[Action], after: list[Action], older: int) -> None:
        """At a cut of before it was made, or of some time after that."""
        self.take_cut()
        for action in before:
            self.do(action)
        self.checkpoints += 1
        directory = self.directory / f"checkpoint {self.checkpoints}"
        self.bucket.checkpoint(directory)
        assert read_checkpoint(directory).applied == self.bucket.end_offset
        for action in after:
            self.do(action)
            self.take_cut()
        cut, expected, _ = self.cuts[-1 - older % len(self.cuts)]
        try:
            scan = open_snapshot_scan(
                directory, cut, storage=self.buckets.storage(), history=self.bucket.history
            )
        except CutTooOld:
            assert self.is_lost(cut)
        else:
            self.opened.append(Opened(scan, expected, False))

    @precondition(lambda self: self.opened)
    @rule(data=st.data(), batch_rows=st.integers(1, 5), close=st.booleans())
    def read(self, data: st.DataObject, batch_rows: int, close: bool) -> None:
        at = data.draw(st.integers(0, len(self.opened) - 1))
        again_behind = data.draw(st.none() | st.integers(0, 3))
        opened = self.opened[at]
        self.check(opened, batch_rows, again_behind)
        if close:
            opened.scan.close()
            del self.opened[at]

    def check(self, opened: Opened, batch_rows: int, again_behind: int | None = None) -> None:
        assert cells_of(opened.scan, batch_rows, again_behind) == opened.expected

    @rule()
    def reopen(self) -> None:
        super().reopen()
        for ended in (opened for opened in self.opened if opened.of_bucket):
            with pytest.raises(Closed):
                cells_of(ended.scan, 3, None)
        self.opened = [opened for opened in self.opened if not opened.of_bucket]

    def check_the_end(self) -> None:
        for opened in self.opened:
            self.check(opened, 3)
        super().check_the_end()

    def teardown(self) -> None:
        try:
            super().teardown()
        finally:
            for opened in self.opened:
                opened.scan.close()


def cells_of(scan: BucketScan, batch_rows: int, again_behind: int | None) -> Cells:
    """Read a scan; broken off after this many batches, if told so, and taken up again."""
    found: list[dict[str, Any]] = []
    after = None
    batches = scan.batches(SUMS.value_columns, batch_rows=batch_rows)
    for number, part in enumerate(batches):
        found += part.data.to_pylist()
        after = part.last_key
        if number == again_behind:
            break
    if again_behind is not None:
        for part in scan.batches(SUMS.value_columns, after=after, batch_rows=batch_rows):
            found += part.data.to_pylist()
    keys = [row["k"] for row in found]
    assert keys == sorted(set(keys)), "in key order, each once"
    cells = {(row["k"], name): row[name] for row in found for name in IDS if row[name] is not None}
    assert {key for key, _ in cells} == set(keys), "a row without values"
    return cells


TestScanMachine = ScanMachine.TestCase
TestScanMachine.settings = settings(
    max_examples=max(EXAMPLES // 2, 1),
    stateful_step_count=25,
    deadline=None,
    print_blob=True,
    suppress_health_check=list(HealthCheck),
)
