"""The entry point of the command `tallybook`: it loads the command line, and then runs it.

Loading takes about a second. Whoever presses Ctrl-C meanwhile gets the same short end as later, not
a traceback through the imports. So this module imports nothing of ours; the package `tallybook`
begins by importing nearly everything.
"""

import sys
from importlib import import_module

INTERRUPTED = 130


def main() -> int:
    """Run the command that this process was started for, and return its exit code."""
    try:
        command_line = import_module("tallybook.cli")
        return int(command_line.main())
    except KeyboardInterrupt:
        print("tallybook: interrupted", file=sys.stderr)
        return INTERRUPTED
