"""The Python that Spark runs tasks of ours with: one that has our packages."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from foundation.errors import InvalidInput
from server.launch.on_spark import executors_python

_MISSING = re.compile(r"ModuleNotFoundError: No module named '([^']+)'")


def use_this_python(spark: Any) -> None:
    """Have a Spark of this machine run its tasks with the Python that runs here.

    Told nothing, Spark takes any `python3` on the PATH: not that of an environment that is used
    without being activated, which would not know our packages. On a cluster the executors may not
    have this Python at its path: there, PYSPARK_PYTHON is for the user to set. Call this before the
    tasks are planned: Spark notes their Python then.
    """
    context = getattr(spark, "_sc", None)  # Of Spark Connect there is none.
    if context is not None and context.master.startswith("local"):
        context.pythonExec = executors_python(context)


@contextmanager
def packages_required() -> Iterator[None]:
    """Say which Python to give to Spark, if tasks in the block had one without our packages."""
    try:
        yield
    except Exception as exc:
        if missing := _MISSING.search(str(exc)):
            raise InvalidInput(
                f"the Python of Spark's executors has no package {missing[1]!r}: install Tallybook "
                "there, or set PYSPARK_PYTHON to a Python that has it, and start Spark again"
            ) from exc
        raise
