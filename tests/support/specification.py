"""The executable specification, which is a script in the documentation, as a module."""

import importlib.util
from pathlib import Path
from types import ModuleType

PATH = Path(__file__).parents[2] / "docs" / "spec" / "protocol.py"


def load() -> ModuleType:
    """Return it, new each time: which rule is switched off is a variable of the module."""
    found = importlib.util.spec_from_file_location("protocol", PATH)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module
