"""A short campaign of random faults, with all clients; `make chaos` has longer ones."""

from pathlib import Path

import pytest

from tests.multihost.bed import running_bed
from tests.multihost.campaign import Campaign, settings_of
from tests.multihost.hunts import hunt
from tests.multihost.verdict import pass_verdict

pytestmark = [pytest.mark.hosts, pytest.mark.spark]

SEED = 16


def test_under_random_faults_all_that_is_read_is_right_and_nothing_is_left(tmp_path: Path) -> None:
    with running_bed(tmp_path / "bed", **settings_of(SEED), follow=print) as bed:
        Campaign(bed, SEED).run(40)
        pass_verdict(bed)


def test_a_campaign_notices_that_a_rule_is_broken() -> None:
    """That expired owners' work is undone by whoever takes their columns."""
    assert hunt("debt", 60, SEED).startswith("found")
