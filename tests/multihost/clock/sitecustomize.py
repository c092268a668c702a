"""Python's wall clock, moved: what a host's programs find before any other module.

Without root nobody moves a host's clock, and a time namespace has only the others. So the programs
of tablet servers have this directory on their path, and read how far their clock is wrong from the
file that TALLYBOOK_BED_CLOCK names. Java, RocksDB and the client of the object store are not moved.
"""

import mmap
import os
import struct
import time

OFFSET = struct.Struct("<q")
_path = os.environ.get("TALLYBOOK_BED_CLOCK")

if _path is not None:
    with open(_path, "rb") as _file:
        _offset = mmap.mmap(_file.fileno(), OFFSET.size, access=mmap.ACCESS_READ)
    _time, _time_ns = time.time, time.time_ns

    def _moved_ns() -> int:
        seconds: int = OFFSET.unpack_from(_offset)[0]
        return _time_ns() + seconds * 1_000_000_000

    def _moved() -> float:
        return _time() + float(OFFSET.unpack_from(_offset)[0])

    time.time, time.time_ns = _moved, _moved_ns
