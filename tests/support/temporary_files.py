"""Where tests keep their files: in memory, where there is enough of it.

No test can tell whether a disk has what was synced to it: processes are killed, not machines. So
syncing would only take time.
"""

import os
import shutil
import tempfile
from contextlib import suppress

_IN_MEMORY = "/dev/shm"
_ENOUGH = 8 << 30


def in_memory() -> None:
    """Have this process, and all that it starts, keep temporary files there, unless told where."""
    with suppress(OSError):
        if "TMPDIR" not in os.environ and shutil.disk_usage(_IN_MEMORY).free >= _ENOUGH:
            os.environ["TMPDIR"] = tempfile.tempdir = _IN_MEMORY
