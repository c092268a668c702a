"""RocksDB without us: the least that reading rows and writing them back can cost."""

import time
from pathlib import Path
from typing import Any, cast

import numpy as np
from rocksdict import Rdict, WriteBatch

from merge_engine.bucket.bucket import Bucket
from merge_engine.bucket.options import BucketOptions, write_options
from merge_engine.bucket.results import BucketResult
from merge_engine.encoding.stored_rows import StoredRows


class BareDatabase:
    """A database with the options of a bucket's view, used from Python in the fastest way known.

    Given the rows of every put of a bucket, it goes through the same states as the bucket's own.
    """

    def __init__(self, directory: Path) -> None:
        options = BucketOptions()
        self._database = Rdict(str(directory), options.to_options(options.to_cache()))
        self._write_options = write_options()

    def read(self, keys: list[bytes]) -> list[bytes | None]:
        """Multi-get."""
        return cast(list[bytes | None], self._database.get(cast(list[Any], keys)))

    def write(self, keys: list[bytes], values: list[bytes]) -> None:
        """Write the rows in one write batch, without WAL; wait outside while RocksDB stalls."""
        while True:
            # A batch is used up also by a write that fails.
            batch = WriteBatch(raw_mode=True)
            put = batch.put
            for key, value in zip(keys, values, strict=True):
                put(key, value)
            try:
                self._database.write(batch, self._write_options)
                return
            except Exception as exc:
                if "Write stall" not in str(exc):
                    raise
            time.sleep(0.005)

    def read_and_write(self, keys: list[bytes], values: list[bytes]) -> None:
        """Do what a merge on write cannot do without."""
        self.read(keys)
        self.write(keys, values)

    def flush(self) -> None:
        """Write the memtable to disk."""
        self._database.flush()

    def close(self) -> None:
        """Release the directory."""
        self._database.close()


def stored_rows(bucket: Bucket, result: BucketResult) -> tuple[list[bytes], list[bytes]]:
    """Return the rows that a put of all columns left in the view, in key order, from the log."""
    (segment,) = bucket.read_log(result.base_offset, result.end_offset)
    history = bucket.history
    changes = [segment.changes[column.id] for column in history.current.value_columns]
    keys = [segment.keys[column.id] for column in history.current.key_columns]
    touched = np.stack([change.touched_after for change in changes], axis=1)
    rows = StoredRows(touched, [change.after for change in changes])
    return history.row_keys(history.key_codec.encode(keys)), history.encode(rows)
