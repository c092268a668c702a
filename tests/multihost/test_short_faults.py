"""Five faults on one bed: a selection of a few minutes. `test_hosts` has the others."""

from pathlib import Path

import pytest

from tests.multihost.bed import running_bed
from tests.multihost.faults import SHORT
from tests.multihost.trying import try_in_time
from tests.multihost.verdict import pass_verdict

pytestmark = pytest.mark.hosts


def test_clients_see_whole_batches_and_go_on_in_time_whatever_fails_between_hosts(
    tmp_path: Path, subtests: pytest.Subtests
) -> None:
    """One test, so that one bed serves all of them, wherever tests are run."""
    with running_bed(tmp_path / "bed") as bed:
        for name in SHORT:
            with subtests.test(name):
                try_in_time(bed, name)
        pass_verdict(bed)
