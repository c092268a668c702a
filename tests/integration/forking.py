"""A process that uses Tallybook and then forks: `forking.py HOW WHERE`; prints what came of it.

HOW is what the child does. The parent prints the child's exit status, then what it reads itself.
"""

import os
import signal
import sys
from contextlib import ExitStack
from typing import Any

import tallybook as tb

SCHEMA = (
    tb.SchemaBuilder()
    .column("k", "BIGINT")
    .agg_column("s", "BIGINT", "sum")
    .primary_key("k")
    .build()
)
# What a child that hangs is ended by.
_DEADLINE_S = 20


def main(how: str, where: str) -> None:
    """Open a table of a cluster (its address), or an embedded one (a directory), and fork."""
    with ExitStack() as stack:
        table: Any
        if ":" in where:
            cluster = stack.enter_context(tb.connect(where))
            table = cluster.create_table(f"forked-{how}", SCHEMA, column_locks=False)
        else:
            table = stack.enter_context(tb.Table.create(where, SCHEMA))
        table.put({"k": [1], "s": [5]})
        rows = iter(table.scan())  # Something is under way.
        next(rows)
        child = os.fork()
        if child == 0:
            signal.alarm(_DEADLINE_S)
            act(how, where, table)
            sys.exit(3)  # Through all the blocks, as a worker of a web server does.
        print("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        table.put({"k": [1], "s": [7]})
        print("parent", table.lookup({"k": [1]}).to_pylist())


def act(how: str, where: str, table: Any) -> None:
    """Do what the child does."""
    try:
        if how == "read":
            table.lookup({"k": [1]})
        elif how == "write":
            table.put({"k": [1], "s": [100]})
        elif how == "again" and ":" in where:
            tb.connect(where)
        elif how == "again":
            tb.Table.open(where).lookup({"k": [1]})
    except tb.TallybookError as exc:
        print(type(exc).__name__, "spawn" in str(exc), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
