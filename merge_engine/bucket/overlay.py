"""Rows that are tried and not written: what a put of several parts would leave, above the view."""

import shutil
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import cast

from rocksdict import Options, Rdict, WriteBatch

from foundation import forks
from merge_engine.bucket.options import write_options
from merge_engine.bucket.rocksdb_errors import translated
from merge_engine.bucket.view import LIBRARY


class Overlay:
    """Encoded rows by key, in a RocksDB of its own that goes with `close`."""

    def __init__(self, directory: Path) -> None:
        """`directory`: below which it is made."""
        self._path = directory / f"overlay-{uuid.uuid4().hex}"
        directory.mkdir(parents=True, exist_ok=True)
        forks.use(LIBRARY)
        with translated(self._path):
            self._database: Rdict | None = Rdict(str(self._path), Options(raw_mode=True))
        self._write_options = write_options()
        self._write_options.no_slowdown = False

    def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """Return the rows that were put here; an empty one: there is no row any more."""
        assert self._database is not None, "this overlay was closed"
        with translated(self._path):
            return cast(list[bytes | None], self._database.get(list(keys)))

    def set(self, keys: Sequence[bytes], values: Sequence[bytes]) -> None:
        """Put rows above those that there are; an empty value is no row."""
        assert self._database is not None, "this overlay was closed"
        batch = WriteBatch(raw_mode=True)
        for key, value in zip(keys, values, strict=True):
            batch.put(key, value)
        with translated(self._path):
            self._database.write(batch, self._write_options)

    def close(self) -> None:
        """Forget all of it. Closing twice is fine."""
        database, self._database = self._database, None
        if database is not None:
            database.close()
            shutil.rmtree(self._path, ignore_errors=True)
