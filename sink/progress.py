"""What a sink has done, per batch and in all."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from recovery.writer.table_writer import TableWriter


@dataclass
class BatchProgress:
    """One batch: rows in, keys after folding, milliseconds per step, what was undone before it.

    `offsets`: of each partition and bucket, where the log ends with this batch.
    """

    batch: int
    route: str = ""
    skipped: bool = False
    rows: int = 0
    refused: int = 0
    keys: int = 0
    bytes: int = 0
    undone_keys: int = 0
    milliseconds: dict[str, float] = field(default_factory=dict)
    offsets: dict[str, int] = field(default_factory=dict)

    @contextmanager
    def timed(self, step: str) -> Iterator[None]:
        """Measure a step."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.milliseconds[step] = round((time.perf_counter() - began) * 1000, 1)

    def finish(self, writer: TableWriter, seconds: float, undone_before: int) -> None:
        """Take over what the writer knows of the batch."""
        steps = {} if self.skipped else writer.progress.seconds
        for step, spent in {**steps, "total": seconds}.items():
            self.milliseconds[step] = round(spent * 1000, 1)
        self.undone_keys = writer.progress.undone_keys - undone_before
        self.offsets = {f"{key}": offset for key, offset in writer.offsets.items()}


@dataclass
class SinkStatus:
    """The last batch, and the totals since the sink was made."""

    batches: int = 0
    skipped: int = 0
    rows: int = 0
    refused: int = 0
    last: BatchProgress | None = None

    def add(self, progress: BatchProgress) -> None:
        """Count a batch."""
        self.batches += 1
        self.skipped += progress.skipped
        self.rows += progress.rows
        self.refused += progress.refused
        self.last = progress

    def to_dict(self, writer: TableWriter | None) -> dict[str, Any]:
        """Return everything, with where the writer is."""
        status = asdict(self)
        if writer is not None:
            status |= {
                "owner": writer.owner,
                "state": writer.state.value,
                "epoch": writer.epoch,
                "committed_batch": writer.batch,
                "undone_keys": writer.progress.undone_keys,
                "starts": writer.progress.starts,
            }
        return status
