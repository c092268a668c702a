"""Rows that are tried and not written: what a put of several parts would leave, above the view."""

import shutil
import uuid
from collections.abc import Sequence
from pathlib import Path

from rocksdict import Options, WriteBatch

from merge_engine.bucket.database import Database
from merge_engine.bucket.options import write_options


class Overlay:
    """Encoded rows by key, in a RocksDB of its own that goes with `close`."""

    def __init__(self, directory: Path) -> None:
        """`directory`: below which it is made."""
        self._path = directory / f"overlay-{uuid.uuid4().hex}"
        self._database = Database(self._path, Options(raw_mode=True))
        self._write_options = write_options()
        self._write_options.no_slowdown = False

    def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """Return the rows that were put here; an empty one: there is no row any more."""
        return self._database.get(list(keys))

    def set(self, keys: Sequence[bytes], values: Sequence[bytes]) -> None:
        """Put rows above those that there are; an empty value is no row."""
        batch = WriteBatch(raw_mode=True)
        for key, value in zip(keys, values, strict=True):
            batch.put(key, value)
        self._database.write(batch, self._write_options)

    def close(self) -> None:
        """Forget all of it. Closing twice is fine."""
        self._database.close()
        shutil.rmtree(self._path, ignore_errors=True)
