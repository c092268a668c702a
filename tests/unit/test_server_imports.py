"""A server process starts without what it has no use for."""

import subprocess
import sys

CODE = """
import sys
import numpy as np
import pyarrow as pa
from server.__main__ import _NoPandas

sys.meta_path.insert(0, _NoPandas())
for given in ([1, None], ["a"], np.arange(3)):
    assert len(pa.array(given)) == len(given)
assert pa.table({"a": [1]}).to_pylist() == [{"a": 1}]
assert "pandas" not in sys.modules, "pyarrow has found it"
"""


def test_pyarrow_does_without_pandas_where_a_server_says_so() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE], capture_output=True, text=True, check=False, timeout=180
    )
    assert done.returncode == 0, done.stderr
