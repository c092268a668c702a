"""The embedded table against a dictionary: puts, deletes, undo, crashes, retention, evolution.

`modelled_table.py` has the table and its model. `TALLYBOOK_EXAMPLES` makes a longer run.
"""

import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from foundation.errors import Deposed, InvalidKey, Overflow
from foundation.ids import BucketId
from merge_engine.bucket.bucket import Bucket
from merge_engine.bucket.segment import AggMode, encode_segment
from merge_engine.merging.batch import value_function
from merge_engine.merging.hashing import bucket_of
from merge_engine.schema.schema import Column
from tests.property.changelog_replay import replay
from tests.property.modelled_table import ModelledTable
from tests.property.models import input_type_of, same
from tests.property.table_model import (
    ADDABLE,
    ALL_KEYS,
    FAILED,
    WRITING,
    Cells,
    Crash,
    Failure,
    Key,
    ModelRow,
    Put,
    abandon,
    as_visible,
    failures,
    key_arrays,
    keys,
    named,
    only,
    visible,
)

EXAMPLES = int(os.environ.get("TALLYBOOK_EXAMPLES", "7"))


def stored_rows(bucket: Bucket) -> int:
    """Return how many rows are in RocksDB, whatever a reader sees of them."""
    rows = bucket.pin().rows
    try:
        return sum(len(keys) for keys, _ in rows.batches(None, 100))
    finally:
        rows.close()


class TableMachine(ModelledTable):
    """Everything that may happen to a table."""

    # --- Writing --------------------------------------------------------------------------------

    @rule(data=st.data(), count=st.integers(1, 4))
    def put(self, data: st.DataObject, count: int) -> None:
        for _ in range(count):
            self.put_once(data)

    @rule(data=st.data())
    def put_fails(self, data: st.DataObject) -> None:
        """Whatever fails: each bucket has all of the put or nothing, and sending it again heals."""
        self.write_something(data)
        owner = self.draw_owner(data)
        put = self.draw_put(data, owner)
        self.next_batch(owner, put)
        after = put.apply_to(self.cells)
        for attempt in range(3):
            failure = data.draw(failures(*WRITING))
            try:
                with failure.armed():
                    self.send(owner, put)
            except FAILED as error:
                self.recover(data, error)
                self.check_half_way(after)
            else:
                self.cells = after
                return
            if attempt == 0 and data.draw(st.booleans()):
                self.owners[owner].last = None
                self.owners[owner].epoch += 1
                self.cells = self.undo_of(owner, self.columns_of(owner))
                return
        self.send(owner, put)
        self.cells = after

    def check_half_way(self, after: Cells) -> None:
        seen = as_visible(self.table.to_arrow(), self.schema)
        old, new = visible(self.cells, self.schema), visible(after, self.schema)
        assert set(seen) <= {*old, *new}
        for group in self.groups(sorted({*old, *new})).values():
            found, before, behind = (
                {key: rows[key] for key in group if key in rows} for rows in (seen, old, new)
            )
            assert found in (before, behind)

    def groups(self, of: Sequence[Key]) -> dict[tuple[str, int], list[Key]]:
        """Return the keys by bucket: within one, a put happens as a whole."""
        found: dict[tuple[str, int], list[Key]] = {}
        if of:
            numbers = bucket_of(list(key_arrays(self.schema, of).values()), self.buckets)
            for key, number in zip(of, numbers.tolist(), strict=True):
                found.setdefault((key[0] if self.partitioned else "", number), []).append(key)
        return found

    @rule(data=st.data(), crashes=st.integers(0, 2))
    def put_again_with_its_token(self, data: st.DataObject, crashes: int) -> None:
        self.write_something(data)
        for _ in range(crashes):
            self.crash(data)
            self.lookups_show_what_the_model_says()
        for name, owner in self.owners.items():
            if owner.last is not None:
                results = self.send(name, owner.last).buckets.values()
                # A put that changed nothing is not in the log: a crash forgets its token.
                assert all(result.repeated or result.changed == 0 for result in results)

    @rule(data=st.data())
    def delete(self, data: st.DataObject) -> None:
        owner = self.draw_owner(data)
        columns = self.columns_of(owner)
        if data.draw(st.booleans()):
            columns = columns[:1]
        rows = [ModelRow(key, True, {}) for key in data.draw(st.lists(keys(), max_size=4))]
        keyed = pa.table(key_arrays(self.schema, [row.key for row in rows]))
        put = Put(keyed, tuple(columns), AggMode.REPLACE, rows)
        self.owners[owner].batch += 1
        self.owners[owner].last = None
        self.table.delete(
            put.data,
            columns=[column.name for column in columns],
            owner=owner,
            token=self.owners[owner].token,
        )
        self.cells = put.apply_to(self.cells)

    @rule(data=st.data(), key=keys())
    def a_bad_put_changes_nothing_in_any_bucket(self, data: st.DataObject, key: Key) -> None:
        name, day = (column.name for column in reversed(self.schema.key_columns))
        revenue = next((c for c in self.columns_of("orders") if c.id == 2), None)
        ends = self.table.end_offsets()
        if revenue is None:
            column = self.columns_of("orders")[0]
            nothing = pa.nulls(1, input_type_of(value_function(column)))
            with pytest.raises(InvalidKey):
                self.table.put(
                    {name: pa.nulls(1, pa.int64()), day: ["mo"], column.name: nothing},
                    columns=[column.name],
                )
        else:
            of = [*data.draw(st.lists(keys(), max_size=5)), key, key]
            amounts = [1] * (len(of) - 2) + [2**62, 2**62]
            batch = pa.table({**key_arrays(self.schema, of), revenue.name: amounts})
            with pytest.raises(Overflow, match=f"{revenue.name}.*{key[1]}"):
                self.table.put(batch, owner="orders")
        now = self.table.end_offsets()
        assert all(now[bucket_id] == end for bucket_id, end in ends.items())

    # --- Commit and undo ------------------------------------------------------------------------

    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        self.commit_of(self.draw_owner(data))

    @rule(data=st.data())
    def a_stranger_writes_after_a_commit(self, data: st.DataObject) -> None:
        """An undo of the owner leaves what others have written into its columns since."""
        owner = self.draw_owner(data)
        self.commit_of(owner)
        put = self.draw_put(data, owner)
        self.stranger.batch += 1
        self.send("stranger", put)
        self.cells = put.apply_to(self.cells)
        self.owners[owner].committed = only(self.cells, self.ids_of(owner))
        self.owners[owner].last = None

    @rule(data=st.data(), repeat=st.booleans())
    def undo(self, data: st.DataObject, repeat: bool) -> None:
        self.write_something(data)
        owner = self.draw_owner(data)
        columns = self.columns_of(owner)
        if data.draw(st.integers(0, 3)) == 0:
            columns = columns[1:]
        self.owners[owner].last = None
        self.owners[owner].epoch += 1
        self.cells = self.undo_of(owner, columns)
        if repeat:
            ends = self.table.end_offsets()
            self.undo_of(owner, columns)
            assert self.table.end_offsets() == ends

    @rule(data=st.data())
    def undo_fails(self, data: st.DataObject) -> None:
        """An undo that failed half-way has not touched the other owner, and is repeated."""
        self.write_something(data)
        owner = self.draw_owner(data)
        columns = self.columns_of(owner)
        self.owners[owner].last = None
        self.owners[owner].epoch += 1
        failure = data.draw(failures("undo", *WRITING))
        try:
            with failure.armed():
                self.cells = self.undo_of(owner, columns)
        except FAILED as error:
            self.recover(data, error)
            others = set(self.owner_of) - self.ids_of(owner)
            expected = visible(only(self.cells, others), self.schema)
            seen = as_visible(self.table.to_arrow(), self.schema)
            for key, row in expected.items():
                assert {column: seen[key][column] for column in others & set(row)} == {
                    column: row[column] for column in others & set(row)
                }
            self.cells = self.undo_of(owner, columns)

    # --- Reading --------------------------------------------------------------------------------

    @rule(wanted=st.lists(keys(), max_size=6), data=st.data())
    def lookup(self, wanted: list[Key], data: st.DataObject) -> None:
        chosen = data.draw(st.lists(st.sampled_from(self.schema.value_columns), unique=True))
        names = [column.name for column in self.schema.key_columns]
        batch = pa.table(key_arrays(self.schema, wanted))
        found = self.table.lookup(batch, [column.name for column in chosen] or None)
        expected = visible(self.cells, self.schema)
        assert found.num_rows == len(wanted)
        for key, row in zip(wanted, found.to_pylist(), strict=True):
            assert (row.pop(names[0]), row.pop(names[1])) == key
            values = expected.get(key, {})
            columns = chosen or self.schema.value_columns
            assert {c.id: same(row.pop(c.name)) for c in columns} == {
                c.id: values.get(c.id, same(None)) for c in columns
            }
            assert row == {}

    @rule(data=st.data())
    def read_the_changelog(self, data: st.DataObject) -> None:
        """What the table was, and the changes since, give what it is: values and touched bits."""
        self.write_something(data)
        replayed = replay(self.table, self.base, self.base_offsets)
        assert replayed == as_visible(self.table.to_arrow(), self.schema)

    # --- Closing, crashing, cleaning ------------------------------------------------------------

    @rule(data=st.data())
    def reopen(self, data: st.DataObject) -> None:
        self.write_something(data)
        self.table.close()
        self.open()

    @rule(data=st.data())
    def crash_between_calls(self, data: st.DataObject) -> None:
        self.write_something(data)
        self.crash(data)

    @rule(data=st.data())
    def crash_while_opening(self, data: st.DataObject) -> None:
        self.write_something(data)
        failure = data.draw(failures("storage", "view"))
        self.crash(data)
        try:
            with failure.armed():
                self.table.to_arrow()
        except FAILED as error:
            self.recover(data, error)

    @rule(data=st.data())
    def remember_the_views_as_they_are_on_disk(self, data: st.DataObject) -> None:
        self.write_something(data)
        for bucket_id in self.table.bucket_ids():
            view = self.table.bucket(bucket_id)._view
            self.names += 1
            path = self.directory / f"checkpoint-{self.names}"
            view._database.checkpoint(path)
            self.checkpoints[bucket_id] = (path, view._behind.written)

    def is_log_whole(self) -> bool:
        ids = self.table.bucket_ids()
        return all(self.table.bucket(bucket_id).start_offset == 0 for bucket_id in ids)

    @precondition(lambda self: self.is_log_whole())
    @rule(data=st.data())
    def rebuild_the_views_from_the_log(self, data: st.DataObject) -> None:
        self.write_something(data)
        self.table.close()
        shutil.rmtree(self.views, ignore_errors=True)
        self.open()

    @precondition(lambda self: self.cells and self.is_log_whole())
    @rule(data=st.data())
    def another_process_takes_the_lead(self, data: st.DataObject) -> None:
        old, key = self.table, data.draw(st.sampled_from(sorted(self.cells)))
        old.to_arrow()
        self.names += 1
        self.views = self.directory / f"view-{self.names}"
        self.checkpoints = {}
        self.open()
        self.table.to_arrow()
        if data.draw(st.booleans()):
            self.clean(data=data)  # Not even then is the name free that the old leader needs.
        with pytest.raises(Deposed):
            old.delete(pa.table(key_arrays(self.schema, [key])))
        abandon(old)

    @rule(data=st.data())
    def clean(self, data: st.DataObject) -> None:
        """Drop the log that no undo needs; killed half-way, the next call finishes it."""
        self.write_something(data)
        if data.draw(st.booleans()):
            for owner in self.owners:
                self.commit_of(owner)
        self.base, self.base_offsets = self.cells, self.table.end_offsets()
        more = data.draw(st.integers(0, 2))
        keep_from = {bucket_id: max(end - more, 0) for bucket_id, end in self.needed().items()}
        starts = {bucket_id: self.table.bucket(bucket_id).start_offset for bucket_id in keep_from}
        failure = data.draw(st.none() | failures("clean", "storage", "view"))
        if failure is not None:
            try:
                with failure.armed():
                    self.table.clean(keep_from=keep_from)
            except FAILED as error:
                self.recover(data, error)
        self.table.clean(keep_from=keep_from)
        for bucket_id, offset in keep_from.items():
            start = self.table.bucket(bucket_id).start_offset
            assert starts[bucket_id] <= start <= max(starts[bucket_id], offset)

    @rule(data=st.data())
    def roll_up(self, data: st.DataObject) -> None:
        """Roll the log up, also what an undo needs; killed half-way, the next call finishes it."""
        self.write_something(data)
        before = self.logged()
        failure = data.draw(st.none() | failures("roll_up", "storage"))
        try:
            with nullcontext() if failure is None else failure.armed():
                self.roll_all_up()
        except FAILED as error:
            self.recover(data, error)
        if data.draw(st.booleans()):
            self.roll_all_up()
        found = self.logged()
        assert all(found[bucket_id].items() >= log.items() for bucket_id, log in before.items())

    def logged(self) -> dict[BucketId, dict[int, bytes]]:
        """Return all segments by bucket and base: more leaders may come, nothing else changes."""
        found = {}
        for bucket_id in self.table.bucket_ids():
            bucket = self.table.bucket(bucket_id)
            segments = bucket.read_log(bucket.start_offset)
            found[bucket_id] = {one.header.base_offset: encode_segment(one) for one in segments}
        return found

    def roll_all_up(self) -> None:
        for bucket_id in self.table.bucket_ids():
            bucket = self.table.bucket(bucket_id)
            while bucket.roll_up(bucket.end_offset):
                pass

    def needed(self) -> dict[BucketId, int]:
        return {
            bucket_id: min(owner.offsets.get(bucket_id, 0) for owner in self.owners.values())
            for bucket_id in self.table.bucket_ids()
        }

    # --- Schema and partitions ------------------------------------------------------------------

    @rule(data=st.data(), crashes=st.booleans())
    def evolve(self, data: st.DataObject, crashes: bool) -> None:
        """Add, drop or rename a column; killed within, it has happened or it has not."""
        self.write_something(data)
        self.names += 1
        owner = self.draw_owner(data)
        change, target = self.draw_evolution(data, owner)
        old = self.schema
        failure = Failure(data.draw(st.sampled_from(named("storage"))), 1 if crashes else 99, Crash)
        try:
            with failure.armed():
                change()
        except Crash:
            self.crash(data)
            if self.schema == old:
                return
        assert self.schema.version == old.version + 1
        for column in set(self.schema.value_columns) - set(old.value_columns):
            self.owner_of.setdefault(column.id, owner)
        if self.schema.names[: len(old.names)] == old.names:
            return
        for each in self.owners.values():
            each.last = None
        if target is not None:
            self.has_dropped = True
            kept = set(self.owner_of) - {target.id}
            self.cells, self.base = only(self.cells, kept), only(self.base, kept)
            for each in self.owners.values():
                each.committed = only(each.committed, kept)

    def draw_evolution(
        self, data: st.DataObject, owner: str
    ) -> tuple[Callable[[], None], Column | None]:
        """Return the call, and the column that it drops, if it does."""
        kind = data.draw(st.sampled_from(["add", "drop", "rename"]))
        new = f"column_{self.names}"
        mine = self.columns_of(owner)
        if kind == "rename":
            column = data.draw(st.sampled_from([*mine, *self.schema.key_columns]))
            return partial(self.table.rename_column, column.name, new), None
        if kind == "drop" and len(mine) > 2:
            column = data.draw(st.sampled_from(mine))
            return partial(self.table.drop_column, column.name), column
        kind_of, function, parameters = data.draw(st.sampled_from(ADDABLE))
        return partial(self.table.add_column, new, kind_of, function, **parameters), None

    @precondition(lambda self: self.partitioned)
    @rule(day=st.sampled_from(["mo", "tu"]))
    def drop_partition(self, day: str) -> None:
        column = self.schema.partition_columns[0].name
        if day not in self.table.partitions().column(column).to_pylist():
            return
        self.table.drop_partition(**{column: day})
        for owner in self.owners.values():
            owner.committed = {k: row for k, row in owner.committed.items() if k[0] != day}
            owner.last = None
        self.cells = {key: row for key, row in self.cells.items() if key[0] != day}
        self.base = {key: row for key, row in self.base.items() if key[0] != day}
        there = {bucket_id.partition for bucket_id in self.table.bucket_ids()}
        self.checkpoints = {b: c for b, c in self.checkpoints.items() if b.partition in there}

    # --- What holds at any time -----------------------------------------------------------------

    @rule(data=st.data())
    def scan(self, data: st.DataObject) -> None:
        """Not after every step: a scan writes to RocksDB what is only in memory."""
        self.write_something(data)
        assert as_visible(self.table.to_arrow(), self.schema) == visible(self.cells, self.schema)
        if not self.has_dropped:  # Else rows may be left of which only dropped columns were there.
            buckets = [self.table.bucket(bucket_id) for bucket_id in self.table.bucket_ids()]
            assert sum(map(stored_rows, buckets)) == len(self.cells)

    @invariant()
    def lookups_show_what_the_model_says(self) -> None:
        if hasattr(self, "table"):
            found = self.table.lookup(pa.table(key_arrays(self.schema, ALL_KEYS)))
            nothing = {column.id: same(None) for column in self.schema.value_columns}
            expected = visible(self.cells, self.schema)
            assert as_visible(found, self.schema) == {
                key: expected.get(key, nothing) for key in ALL_KEYS
            }

    @invariant()
    def log_ends_never_fall(self) -> None:
        if hasattr(self, "table"):
            now = self.table.end_offsets()
            assert all(now[b] >= end for b, end in self.ends.items() if b in now)
            self.ends |= now


TestTableMachine = TableMachine.TestCase
TestTableMachine.settings = settings(
    max_examples=EXAMPLES,
    stateful_step_count=25,
    deadline=None,
    print_blob=True,
    suppress_health_check=list(HealthCheck),
)
