"""A Delta table on a local disk, by delta-rs: MERGE of batches that were folded before.

The table is loaded in the order of its keys, so that row groups have narrow ranges of them.
"""

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa

from benchmarks.peers.peer import NotInstalled, Work, folded


class Delta:
    """A Delta table, which is opened anew for each batch, as a foreachBatch would."""

    def __init__(self, directory: Path, _: Work | None = None) -> None:
        try:
            import deltalake  # noqa: PLC0415
        except ImportError as exc:
            raise NotInstalled(
                "deltalake is not installed (pip install 'tallybook[bench]')"
            ) from exc
        self._deltalake = deltalake
        self._path = str(directory)

    def load(self, events: Iterator[pa.RecordBatch]) -> None:
        """Write all rows as one append."""
        rows = pa.concat_tables(folded(batch) for batch in events).sort_by("key")
        self._deltalake.write_deltalake(self._path, rows, mode="append")

    def upsert(self, events: pa.RecordBatch) -> None:
        """Fold a batch, and merge it."""
        self.merge(folded(events))

    def merge(self, rows: pa.Table) -> None:
        """Merge rows of which each has a key of its own."""
        (
            self._deltalake.DeltaTable(self._path)
            .merge(rows, "t.key = s.key", source_alias="s", target_alias="t")
            .when_matched_update(
                {
                    "total": "t.total + s.total",
                    "highest": "greatest(t.highest, s.highest)",
                    "events": "t.events + s.events",
                }
            )
            .when_not_matched_insert_all()
            .execute()
        )

    def settle(self) -> None:
        """delta-rs puts nothing off to the background."""

    def read(self, keys: pa.Array) -> pa.Table:
        """Join the rows with the keys."""
        rows = self._deltalake.DeltaTable(self._path).to_pyarrow_table()
        return rows.join(pa.table({"key": keys}), "key", join_type="left semi")

    def close(self) -> None:
        """It is but files."""
