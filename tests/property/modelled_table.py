"""A table beside its model: what the rules of the table machine are made of.

The model keeps, per key and column, every raw input that the column's state stands for; a column
without an entry is untouched, and a key without columns does not exist. What a reader should see
is `model_fold` of these inputs.
"""

import shutil
import tempfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from unittest import mock

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize

from foundation.ids import BucketId
from merge_engine.bucket.options import BucketOptions
from merge_engine.bucket.results import PutResult
from merge_engine.bucket.segment import AggMode
from merge_engine.schema.schema import Column, Schema
from recovery.embedded.table import Table
from tests.property.table_model import (
    INITIAL_OWNERS,
    KEY_NAMES,
    OPERATION,
    Cells,
    Crash,
    Owner,
    Put,
    abandon,
    bucket_options,
    build_schema,
    folded_put,
    merged,
    only,
    raw_put,
    raw_rows,
    visible,
)


class ModelledTable(RuleBasedStateMachine):
    """Two owners, one table and what it should hold; what happens to it is left to subclasses."""

    table: Table

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp(prefix="tallybook-machine-"))
        self.views = self.directory / "view"
        self.cells: Cells = {}
        self.owners = {name: Owner() for name in INITIAL_OWNERS}
        self.stranger = Owner()
        self.owner_of: dict[int, str] = {}
        self.has_dropped = False
        self.ends: dict[BucketId, int] = {}
        # Where the changelog is read from, and what the table was there.
        self.base: Cells = {}
        self.base_offsets: dict[BucketId, int] = {}
        # Copies of views, as RocksDB would find them after a power cut, with their offsets.
        self.checkpoints: dict[BucketId, tuple[Path, int]] = {}
        self.names = 0

    @initialize(
        buckets=st.integers(1, 3),
        partitioned=st.booleans(),
        options=st.lists(bucket_options(), min_size=1, max_size=3),
    )
    def create(self, buckets: int, partitioned: bool, options: list[BucketOptions]) -> None:
        self.buckets = buckets
        self.partitioned = partitioned
        self.options = options
        schema = build_schema(partitioned=partitioned)
        for owner, names in INITIAL_OWNERS.items():
            self.owner_of |= {schema.column(name).id: owner for name in names}
        assert len(self.owner_of) == len(schema.value_columns)
        table = Table.create(self.directory / "table", schema, buckets=buckets)
        table.close()
        self.open()

    def open(self) -> None:
        # Other limits than the last time: what was in memory then may reach RocksDB while it is
        # replayed now, or the other way round.
        self.options.append(self.options.pop(0))
        # One bucket after the other, so that a failpoint meets the same one every time.
        with mock.patch("os.cpu_count", return_value=1):
            self.table = Table.open(
                self.directory / "table", view_directory=self.views, options=self.options[-1]
            )

    def teardown(self) -> None:
        if hasattr(self, "table"):
            self.table.close()
        shutil.rmtree(self.directory)

    @property
    def schema(self) -> Schema:
        return self.table.schema

    def columns_of(self, owner: str) -> list[Column]:
        return [c for c in self.schema.value_columns if self.owner_of[c.id] == owner]

    def ids_of(self, owner: str) -> set[int]:
        return {column.id for column in self.columns_of(owner)}

    # --- Drawing --------------------------------------------------------------------------------

    def draw_owner(self, data: st.DataObject) -> str:
        return data.draw(st.sampled_from(sorted(self.owners)))

    def draw_put(self, data: st.DataObject, owner: str) -> Put:
        mine = st.sampled_from(self.columns_of(owner))
        columns = data.draw(st.lists(mine, min_size=1, max_size=4, unique_by=lambda c: c.id))
        rows = data.draw(raw_rows(columns))
        mode = data.draw(st.sampled_from([AggMode.ACCUMULATE, *AggMode]))
        if mode is AggMode.ACCUMULATE:
            operations = any(row.deletes for row in rows) or data.draw(st.booleans())
            return raw_put(self.schema, columns, rows, operations=operations)
        cuts = data.draw(st.lists(st.integers(0, len(rows)), max_size=2).map(sorted))
        bounds = [0, *cuts, len(rows)]
        chunks = [rows[start:stop] for start, stop in pairwise(bounds)]
        return folded_put(self.schema, columns, chunks, mode)

    # --- Writing --------------------------------------------------------------------------------

    def send(self, owner: str, put: Put) -> PutResult:
        written = {column.name for column in put.columns}
        unwritten = set(self.schema.names).intersection(put.data.column_names) - written
        names_columns = put.names_columns or len(unwritten) > len(KEY_NAMES)
        return self.table.put(
            put.data,
            columns=[column.name for column in put.columns] if names_columns else None,
            mode=put.mode,
            operation_column=OPERATION if OPERATION in put.data.column_names else None,
            owner=owner,
            token=self.owners.get(owner, self.stranger).token,
        )

    def next_batch(self, owner: str, put: Put) -> None:
        self.owners[owner].batch += 1
        self.owners[owner].last = put

    def put_once(self, data: st.DataObject) -> None:
        owner = self.draw_owner(data)
        put = self.draw_put(data, owner)
        self.next_batch(owner, put)
        result = self.send(owner, put)
        assert result.rows == put.data.num_rows
        assert not any(bucket.repeated for bucket in result.buckets.values())
        after = put.apply_to(self.cells)
        changed = {
            key
            for key in {**after, **self.cells}
            if visible({key: after.get(key, {})}, self.schema)
            != visible({key: self.cells.get(key, {})}, self.schema)
        }
        assert result.changed >= len(changed)
        self.cells = after

    def write_something(self, data: st.DataObject) -> None:
        """Put up to twice: what comes next should meet rows, in memory, on disk and in the log."""
        for _ in range(data.draw(st.integers(0, 2))):
            self.put_once(data)

    # --- Commit and undo ------------------------------------------------------------------------

    def commit_of(self, owner: str) -> None:
        self.owners[owner].committed = only(self.cells, self.ids_of(owner))
        self.owners[owner].offsets = self.table.end_offsets()

    def undo_of(self, owner: str, columns: Sequence[Column]) -> Cells:
        """Undo, without looking at the model; return what the cells are afterwards."""
        ids = {column.id for column in columns}
        others = set(self.owner_of) - ids
        offsets = self.owners[owner].offsets
        self.table.undo(
            owner,
            [column.name for column in columns],
            {bucket_id: offsets.get(bucket_id, 0) for bucket_id in self.table.bucket_ids()},
        )
        return merged(only(self.cells, others), only(self.owners[owner].committed, ids))

    # --- Crashing -------------------------------------------------------------------------------

    def crash(self, data: st.DataObject) -> None:
        """Die, lose what was not on disk, and come back."""
        abandon(self.table)
        for bucket_id, (path, offset) in sorted(self.checkpoints.items()):
            place = self.table.path(bucket_id)
            view = self.views / place
            log = self.directory / "table" / "log" / place
            starts = [int(mark.stem) for mark in log.glob("*.start")]
            if offset >= max(starts, default=0) and data.draw(st.booleans()):
                shutil.rmtree(view)
                shutil.copytree(path, view)
        self.open()

    def recover(self, data: st.DataObject, error: Exception) -> None:
        """Go on after a failure: with a new handle if it was a crash."""
        if isinstance(error, Crash):
            self.crash(data)
