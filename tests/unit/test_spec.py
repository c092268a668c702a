"""The executable specification of the protocol: it holds, and each of its rules is needed."""

import pytest

from tests.support.specification import load

# Few histories need these rules: not far from here there is one. `make spec` looks from 0 on.
FIRST = {"current": 31_800, "term": 21_600}


def run(seeds: range, broken: str = "") -> None:
    """Run these histories, with one rule switched off if it is named."""
    protocol = load()
    vars(protocol)["BREAK"] = broken
    for seed in seeds:
        protocol.World(seed).run()


def test_every_invariant_holds() -> None:
    run(range(1_000))


@pytest.mark.parametrize("rule", load().RULES)
def test_a_rule_that_is_switched_off_is_caught(rule: str) -> None:
    with pytest.raises(AssertionError):
        run(range(FIRST.get(rule, 0), 100_000), broken=rule)
