"""What tests of all kinds share: Hypothesis profiles, buckets and tables in a temporary directory.

Nothing is started here: no server, no Spark, no ZooKeeper.
"""

import gc
import os
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import kazoo.protocol.connection
import kazoo.retry
import pyarrow as pa
import pytest
from hypothesis import Phase, settings

from merge_engine.bucket.bucket import Bucket
from merge_engine.bucket.log import wall_clock_ms
from merge_engine.bucket.options import BucketOptions
from merge_engine.bucket.results import UndoResult
from merge_engine.bucket.undo import UndoRange
from merge_engine.encoding.stored_rows import SchemaHistory
from merge_engine.schema.builder import SchemaBuilder
from merge_engine.schema.schema import Schema
from merge_engine.storage.objects import LocalStorage, ObjectStorage
from merge_engine.working_set.memory import Memory
from recovery.embedded.table import Table
from tests.support.examples import examples
from tests.support.java_classes import be_fast
from tests.support.temporary_files import in_memory

# Models and worlds assert, too: let pytest say what was compared, as it does in tests. Here, before
# anything imports them.
pytest.register_assert_rewrite(
    "tests.property.changelog_replay",
    "tests.property.lock_model",
    "tests.property.lock_world",
    "tests.property.modelled_table",
    "tests.support.writer_model",
    "tests.support.writer_world",
)

be_fast()
in_memory()

# Hypothesis watches the module `random`, and takes a client of ZooKeeper that reconnects beside an
# example, in a thread that another test left to end, for a strategy that is not reproducible.
own_dice: Any = random.Random()
kazoo.retry.random = kazoo.protocol.connection.random = own_dice

# No explanations: below Python 3.12 they trace every line, and a failure takes an hour to be told.
settings.register_profile(
    "default",
    max_examples=examples(40, per=4),
    deadline=None,
    print_blob=True,
    phases=set(Phase) - {Phase.explain},
)
# The same examples each time: what is new is found by `make test` and `make test-fault`.
settings.register_profile("ci", settings.get_profile("default"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "default")


def pytest_collection_finish() -> None:
    """Let the collector of garbage leave thousands of tests alone: they stay to the end."""
    gc.collect()
    gc.freeze()


def schema_of(**columns: tuple[pa.DataType, str]) -> Schema:
    """Return a schema with the key `k`, a bigint, and these value columns: type and function."""
    builder = SchemaBuilder().column("k", pa.int64()).primary_key("k")
    for name, (data_type, function) in columns.items():
        builder.agg_column(name, data_type, function)
    return builder.build()


SUMS = schema_of(a=(pa.int64(), "sum"), b=(pa.int64(), "sum"))


def batch(**columns: Any) -> pa.RecordBatch:
    """Return a record batch of these columns; lists of Python values or Arrow arrays."""
    return pa.RecordBatch.from_pydict(columns)


def rows_of(source: Bucket | Table) -> dict[int, tuple[Any, ...]]:
    """Return everything that a scan shows: key -> values, in the order of the schema."""
    found: dict[int, tuple[Any, ...]] = {}
    for part in source.scan():
        for row in part.to_pylist():
            key, *values = row.values()
            assert key not in found, f"the scan shows key {key} twice"
            found[key] = tuple(values)
    return found


def undo(
    bucket: Bucket,
    debtor: str,
    columns: Sequence[str],
    from_offset: int,
    *,
    until: int | None = None,
    **how: Any,
) -> UndoResult:
    """Undo in a bucket, by the names of columns: buckets go by ids."""
    ids = [column.id for column in bucket.history.current.values(columns)]
    return bucket.undo(debtor, ids, UndoRange(from_offset, until), **how)


def pay(
    bucket: Bucket, debtor: str, columns: Sequence[str], from_offset: int, **how: Any
) -> UndoResult:
    """Undo what a lock's holder has not committed."""
    return undo(bucket, debtor, columns, from_offset, locked=True, **how)


class BucketFactory:
    """Opens buckets in a directory: `<name>/log` and `<name>/view`; closes them at the end."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._opened: list[Bucket] = []

    def __call__(
        self,
        schema: Schema | Sequence[Schema] = SUMS,
        *,
        name: str = "bucket",
        storage: ObjectStorage | None = None,
        view: str = "view",
        identity: str = "test",
        options: BucketOptions | None = None,
        memory: Memory | None = None,
        clock_ms: Callable[[], int] = wall_clock_ms,
        later: Sequence[Schema] = (),
    ) -> Bucket:
        """Open a bucket; the same name again is the same bucket. Several schemas: a history.

        `later`: what there is to learn when the definition is read again.
        """
        bucket = Bucket(
            self.storage(name) if storage is None else storage,
            self.view_path(name, view),
            SchemaHistory([schema] if isinstance(schema, Schema) else schema),
            identity=identity,
            options=options,
            memory=memory,
            clock_ms=clock_ms,
            read_schemas=(lambda: SchemaHistory(later)) if later else None,
        )
        self._opened.append(bucket)
        return bucket

    def storage(self, name: str = "bucket") -> LocalStorage:
        """Return where the log of this bucket is."""
        return LocalStorage(self.log_path(name))

    def log_path(self, name: str = "bucket") -> Path:
        """Return the directory of the bucket's log."""
        return self.directory / name / "log"

    def view_path(self, name: str = "bucket", view: str = "view") -> Path:
        """Return the directory of the bucket's RocksDB."""
        return self.directory / name / view

    def crash(self, name: str = "bucket", *, into: str) -> str:
        """Copy the files of a bucket, open as it is: what a crash would leave. Return the copy."""
        shutil.copytree(self.directory / name, self.directory / into)
        return into

    def close(self) -> None:
        """Close all that was opened."""
        for bucket in self._opened:
            bucket.close()


@pytest.fixture
def bucket_factory(tmp_path: Path) -> Iterator[BucketFactory]:
    """Open buckets below this test's directory."""
    factory = BucketFactory(tmp_path)
    yield factory
    factory.close()


@pytest.fixture
def bucket(bucket_factory: BucketFactory) -> Bucket:
    """Return an empty bucket: key `k`, sums `a` and `b`."""
    return bucket_factory(SUMS)


@pytest.fixture
def table(tmp_path: Path) -> Iterator[Table]:
    """Return an empty table of four buckets: key `k`, sums `a` and `b`."""
    with Table.create(tmp_path / "table", SUMS, buckets=4) as created:
        yield created
