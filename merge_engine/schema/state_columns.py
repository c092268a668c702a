"""The states of columns, as columns that readers can ask for beside the finished ones.

A finished value is the end: two averages cannot be merged. Their states can, elsewhere and later;
what is merged with `AggMode.MERGE_STATE` reads as if all rows had been written there.
"""

from dataclasses import replace

from foundation.errors import SchemaError
from merge_engine.aggregates.states import StateOf
from merge_engine.schema.schema import Column


def has_own_state(column: Column) -> bool:
    """Whether a state is something else than the value that is read.

    Where it is not, the value can be merged as it is, and a column of states would say the same
    again. A key column has no state.
    """
    function = column.function
    return function is not None and function.state_type != function.result_type


def state_column(column: Column) -> Column:
    """Return a column that reads as the states of this one, null where it was never written.

    It has the same id, so it can stand wherever columns to be read are given, beside the column or
    without it. A state that is null, of a column that has seen nothing but nulls, looks the same
    as one that is not there.
    """
    if column.function is None:
        raise SchemaError(f"column '{column.name}' is part of the key and has no state")
    states = StateOf(column.function)
    return replace(column, name=f"{column.name}_state", type=states.result_type, function=states)
