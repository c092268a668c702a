"""The changes of a table, replayed over what it was before them."""

from collections.abc import Mapping

from foundation.ids import BucketId
from merge_engine.encoding.stored_rows import finish
from merge_engine.merging.batch import value_function
from recovery.embedded.table import Table
from tests.property.models import model_fold, same
from tests.property.table_model import Cells, Visible


def replay(table: Table, base: Cells, base_offsets: Mapping[BucketId, int]) -> Visible:
    """Return what the table was at these offsets, with all changes since; check each of them."""
    columns = table.schema.value_columns
    cells: Visible = {
        key: {
            column.id: same(model_fold(value_function(column), row[column.id]))
            for column in columns
            if column.id in row
        }
        for key, row in base.items()
    }
    for bucket_id in table.bucket_ids():
        start = base_offsets.get(bucket_id, 0)
        _check_records(table, bucket_id, start, cells)
        _apply_states(table, bucket_id, start, cells)
    nothing = {column.id: same(None) for column in columns}
    return {key: {**nothing, **row} for key, row in cells.items() if row}


def _apply_states(table: Table, bucket_id: BucketId, start: int, cells: Visible) -> None:
    """Apply the log to the cells, and check that each change begins where they are."""
    columns = {column.id: column for column in table.schema.value_columns}
    for segment in table.bucket(bucket_id).read_log(start):
        arrays = [segment.keys[c.id].to_pylist() for c in table.schema.key_columns if segment.keys]
        for column_id, change in segment.changes.items():
            if column_id not in columns:
                continue
            column = columns[column_id]
            before = finish(column, change.touched_before, change.before).to_pylist()
            after = finish(column, change.touched_after, change.after).to_pylist()
            for at, key in enumerate(zip(*arrays, strict=True)):
                row = cells.setdefault(key, {})
                assert (column_id in row) == change.touched_before[at]
                assert row.pop(column_id, same(None)) == same(before[at])
                if change.touched_after[at]:
                    row[column_id] = same(after[at])


def _check_records(table: Table, bucket_id: BucketId, start: int, cells: Visible) -> None:
    """Check that each record begins where the one before it left off."""
    by_name = {column.name: column.id for column in table.schema.value_columns}
    names = [column.name for column in table.schema.key_columns]
    values = {key: dict(row) for key, row in cells.items()}
    last = start - 1
    for batch in table.changelog(bucket_id, start):
        for record in batch.to_pylist():
            row = values.setdefault((record[names[0]], record[names[1]]), {})
            of = record["_changed_columns"]
            images = {by_name[name]: same(record[name]) for name in of}
            known = {column: row.get(column, same(None)) for column in images}
            kind = record["_change_type"]
            offset = record["_log_offset"]
            assert offset == last if kind == "update_postimage" else offset > last
            last = offset
            if kind == "insert":
                assert known == dict.fromkeys(images, same(None))
            elif kind != "update_postimage":
                assert images == known
            if kind in ("insert", "update_postimage"):
                row.update(images)
            elif kind == "delete":
                for column in images:
                    row.pop(column, None)
            unwritten = {*by_name} - {*of}
            assert all(record[name] is None for name in unwritten)
