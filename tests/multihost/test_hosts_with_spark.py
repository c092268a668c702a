"""Faults on a bed with Spark, whose sinks write by both routes: `make test-hosts`."""

from collections.abc import Iterator

import pytest

from tests.multihost.bed import Bed, running_bed
from tests.multihost.budgets import expected_with_spark
from tests.multihost.faults import WITH_SPARK
from tests.multihost.trying import try_in_time
from tests.multihost.verdict import pass_verdict

pytestmark = [pytest.mark.hosts, pytest.mark.spark]


@pytest.fixture(scope="module")
def bed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bed]:
    """Run a bed; after the last fault, the table is what was acknowledged, and nothing is left."""
    with running_bed(tmp_path_factory.mktemp("bed") / "bed", with_spark=True) as running:
        yield running
        pass_verdict(running)


@pytest.mark.parametrize("name", WITH_SPARK)
def test_sinks_count_every_batch_once_and_go_on_in_time_after(name: str, bed: Bed) -> None:
    bed.settle()
    try_in_time(bed, name, expected_with_spark(name))
