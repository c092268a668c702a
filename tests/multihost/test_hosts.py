"""Every fault of the table, on one bed: `make test-hosts`."""

from collections.abc import Iterator

import pytest

from tests.multihost.bed import Bed, running_bed
from tests.multihost.budgets import EXPECTED
from tests.multihost.faults import FAULTS, OF_SPARK
from tests.multihost.trying import try_in_time
from tests.multihost.verdict import pass_verdict

pytestmark = pytest.mark.hosts


@pytest.fixture(scope="module")
def bed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bed]:
    """Run a bed; after the last fault, the table is what was acknowledged, and nothing is left."""
    with running_bed(tmp_path_factory.mktemp("bed") / "bed") as running:
        yield running
        pass_verdict(running)


@pytest.mark.parametrize("name", [name for name in FAULTS if name not in OF_SPARK])
def test_clients_see_whole_batches_and_go_on_in_time_after(name: str, bed: Bed) -> None:
    bed.settle()
    try_in_time(bed, name, EXPECTED.get(name))
