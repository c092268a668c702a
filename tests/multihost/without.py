"""Starts a program with one rule of the specification switched off: what must then be noticed.

    python -m tests.multihost.without RULE MODULE [ARGUMENT ...]

The rules are those of `docs/spec/protocol.py`, and are switched off as the machines do it
(`tests/property/rules_switched_off.py`): nothing of the program itself knows of this.
"""

import runpy
import sys

import pytest

from tests.property import rules_switched_off


def main(rule: str, module: str, *arguments: str) -> None:
    """Run the module as a program."""
    getattr(rules_switched_off, f"without_{rule}")(pytest.MonkeyPatch())
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
