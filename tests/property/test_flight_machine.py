"""The table machine once more, with everything that it writes and reads going over Flight.

An undo is many calls there, each of one segment.
"""

import os
from typing import cast

from hypothesis import HealthCheck, settings

from recovery.embedded.table import Table
from tests.property.test_table_machine import TableMachine
from tests.property.through_flight import ThroughFlight

EXAMPLES = int(os.environ.get("TALLYBOOK_EXAMPLES", "4"))


class FlightMachine(TableMachine):
    """The same rules and the same model."""

    def open(self) -> None:
        super().open()
        self.table = cast(Table, ThroughFlight(self.table, undo_s=0.0))


TestFlightMachine = FlightMachine.TestCase
TestFlightMachine.settings = settings(
    max_examples=EXAMPLES,
    stateful_step_count=25,
    deadline=None,
    print_blob=True,
    suppress_health_check=list(HealthCheck),
)
