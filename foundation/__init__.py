"""What all packages share, and what imports none of them.

errors    the root of everything that Tallybook raises on purpose
forks     what must not be touched in a process that was forked
"""

from foundation.errors import TallybookError, UsedAfterFork

__all__ = ["TallybookError", "UsedAfterFork"]
