"""Every fault of the table, with and without Spark, each time on one bed: `make test-hosts`."""

from collections.abc import Iterator

import pytest

from tests.multihost.bed import Bed, running_bed
from tests.multihost.budgets import EXPECTED, NOT_YET, BudgetExceeded
from tests.multihost.faults import FAULTS, WITH_SPARK
from tests.multihost.trying import try_fault
from tests.multihost.verdict import pass_verdict

pytestmark = pytest.mark.hosts


@pytest.fixture(scope="module")
def bed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bed]:
    """Run a bed; after the last fault, the table is what was acknowledged, and nothing is left."""
    with running_bed(tmp_path_factory.mktemp("bed") / "bed") as running:
        yield running
        pass_verdict(running)


@pytest.fixture(scope="module")
def bed_with_spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bed]:
    """The same with sinks, by both routes."""
    with running_bed(tmp_path_factory.mktemp("bed") / "bed", with_spark=True) as running:
        yield running
        pass_verdict(running)


@pytest.mark.parametrize("name", [name for name in FAULTS if name != "executor killed"])
def test_clients_see_whole_batches_and_go_on_in_time_after(name: str, bed: Bed) -> None:
    check(bed, name)


@pytest.mark.spark
@pytest.mark.parametrize("name", WITH_SPARK)
def test_sinks_count_every_batch_once_and_go_on_in_time_after(
    name: str, bed_with_spark: Bed
) -> None:
    check(bed_with_spark, name)


def check(bed: Bed, name: str) -> None:
    """Try a fault; to be late for it is what is expected of some."""
    bed.settle()
    try:
        try_fault(bed, name)
    except BudgetExceeded as exc:
        if name not in EXPECTED:
            raise
        pytest.xfail(f"{NOT_YET}: {exc}")
