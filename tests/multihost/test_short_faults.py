"""Five faults on one bed, a selection of a few minutes: all is right, and goes on afterwards.

How long anybody waits is not judged here, where other tests run beside it: `test_hosts` does that.
"""

from pathlib import Path

import pytest

from tests.multihost.bed import running_bed
from tests.multihost.budgets import BUDGETS
from tests.multihost.faults import SHORT
from tests.multihost.parts import SESSION_S
from tests.multihost.trying import try_fault
from tests.multihost.verdict import pass_verdict

# Until others lead what the victim led, on a machine that is not too busy.
_LASTS_S = SESSION_S + 3


def test_clients_see_whole_batches_and_go_on_whatever_fails_between_hosts(
    tmp_path: Path, subtests: pytest.Subtests
) -> None:
    """One test, so that one bed serves all of them, wherever tests are run."""
    with running_bed(tmp_path / "bed") as bed:
        for name in SHORT:
            with subtests.test(name):
                try_fault(bed, name, lasts_s=min(_LASTS_S, BUDGETS[name].lasts_s))
        pass_verdict(bed)
