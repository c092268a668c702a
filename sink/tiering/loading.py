"""What there is in a lake when a job looks at it: a copy of its table to go on with, or nothing."""

from foundation.errors import InvalidInput, LakeRefused
from server.protocol.definitions import ClusterTable
from sink.lake.fields import LakeFields, check_names, lake_fields
from sink.lake.opening import Lake, check_empty, load_unaltered
from sink.lake.state import LakeState, Mark
from sink.tiering.options import TieringOptions


def load_copy(
    lake: Lake, table: ClusterTable, options: TieringOptions, *, begin_again: bool
) -> LakeState | None:
    """Return the copy of a table; None if there is nothing yet. Nothing is changed by that.

    LakeRefused if what is there is no copy of this table to go on with, or to replace if it is to
    begin again. SchemaError for a column that a lake cannot have.
    """
    check_fields(lake, lake_fields(table.schema, states=options.states))
    state = lake.log.load(to_replace=True) if begin_again else load_unaltered(lake)
    if state is None:
        check_empty(lake)
        return None
    if not begin_again:
        _check_table(lake, state.mark, table)
    if options.layout is not None and state.mark.layout is not options.chosen_layout():
        raise InvalidInput(
            f"the copy at {lake.place.location} has the layout {state.mark.layout.value}, and "
            "stays so: leave the option, or choose another path"
        )
    return state


def check_fields(lake: Lake, fields: LakeFields) -> None:
    """SchemaError for a column that a lake cannot have, by its name."""
    check_names(fields)
    lake.log.check(fields.arrow)


def _check_table(lake: Lake, mark: Mark, table: ClusterTable) -> None:
    if mark.table == table.uid:
        return
    what = f"table {mark.name}"
    if mark.name == table.name:
        what = f"another table {mark.name}: it was dropped, and created anew"
    raise LakeRefused(
        f"{lake.place.location} has a copy of {what}. Choose another path, or have the copy of "
        "this table put in its place (begin_again)"
    )
